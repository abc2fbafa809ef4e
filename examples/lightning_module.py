"""Trains with Lightning. __init__ converts the model, and a hook tells methods that change over time where the run is.

The example needs lightning: pip install -e '.[examples]'
"""

try:
    import nanochat_fp4 as nf  # It comes first, so that another package that is missing is one line.
except ModuleNotFoundError as e:
    message = "error: nanochat_fp4 is not installed in this Python; type pip install -e . in its checkout first"
    raise (SystemExit(message) if e.name == "nanochat_fp4" else e) from None
import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self, method: str):
        super().__init__()
        layers = [nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 50)]
        self.model = nf.convert(nn.Sequential(*layers), method, skip="4")  # "4" is the name of the output head.
        self.losses = []

    def on_train_batch_start(self, batch, batch_idx):
        nf.set_progress(self.model, self.global_step / self.trainer.max_steps)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(method: str = "nvidia_full", steps: int = 20) -> list[float]:
    module = Module(method)
    trainer = lightning.Trainer(max_steps=steps, logger=False, enable_checkpointing=False)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randint(50, (32, 33)), batch_size=8))
    return module.losses


if __name__ == "__main__":
    nf.cli.ArgumentParser(description=__doc__).parse_args()  # It takes no flags.
    main()
