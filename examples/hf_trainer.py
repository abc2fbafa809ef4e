"""transformers' Trainer: nf.convert before it, and a callback for methods that change in the course of a run.

Needs transformers and accelerate: pip install 'nanochat_fp4[examples]'
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import nanochat_fp4 as nf


class Phases(TrainerCallback):
    """clover_late changes at 70% of the steps, so it needs the run's progress."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        nf.set_progress(model, state.global_step / state.max_steps)


def main(folder: str = "trained", method: str = "clover_late", steps: int = 20) -> list[float]:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = nf.convert(LlamaForCausalLM(config), method)
    rows = torch.randint(128, (16, 32))  # put your own data set here
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=1, report_to=[],
        gradient_checkpointing=True, use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=[Phases()])
    trainer.train()
    trainer.save_model()  # the names and tensors of the unconverted model: from_pretrained reads it
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
