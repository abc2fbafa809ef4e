"""A plain training loop for any method. Clover does not need set_progress and quantize_weights_once. From a checkout:
python -m examples.plain_loop
"""

try:
    import nanochat_fp4 as nf  # It comes first, so that another package that is missing is one line.
except ModuleNotFoundError as e:
    message = "error: nanochat_fp4 is not installed in this Python; type pip install -e . in its checkout first"
    raise (SystemExit(message) if e.name == "nanochat_fp4" else e) from None
import torch
from torch import nn


def main(method: str = "clover_fp8_forward", steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50))
    # Convert before torch.compile and the optimizer. skip="3" names the output head, which must not be quantized.
    nf.convert(model, method, skip="3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(50, (2, 2, 8, 33))  # Steps of two micro-batches. Put your own data here.
    losses = []
    for step in range(steps):
        batch = tokens[step % len(tokens)]
        nf.set_progress(model, step / steps)  # Methods that change in the course of a run need this call.
        with nf.quantize_weights_once(model):  # The weights are quantized once for all micro-batches of the step.
            for rows in batch:
                loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                (loss / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad(), nf.full_precision(model.eval()):  # This evaluates the same weights in BF16.
        bf16 = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        print(f"{method}: {losses[0]:.3f} -> {losses[-1]:.3f}; BF16 {bf16:.3f}")
    return losses


if __name__ == "__main__":
    nf.cli.ArgumentParser(description=__doc__).parse_args()  # It takes no flags.
    main()
