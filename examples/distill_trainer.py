"""Distillation (QAD) with transformers' Trainer: the teacher is the same model, as it was before nf.convert.

Needs transformers and accelerate: pip install 'nanochat_fp4[examples]'
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import nanochat_fp4 as nf


class Distillation(Trainer):
    def __init__(self, *args, teacher: torch.nn.Module, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()
        self.model_accepts_loss_kwargs = False  # the loss is a mean of its micro-batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        targets = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)  # negative: do not count
        return nf.distillation_loss(model, self.teacher, inputs["input_ids"], targets)


def main(folder: str = "distilled", method: str = "clover", steps: int = 20) -> list[float]:
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, initializer_range=0.2)  # fmt: skip
    teacher = LlamaForCausalLM(config)  # put your own model here: LlamaForCausalLM.from_pretrained(...)
    model = nf.convert(copy.deepcopy(teacher), method, backward=False)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(128, (64, 32))]  # put your own data set here
    gpu = torch.cuda.is_available()
    args = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3, report_to=[],
                             logging_steps=1, use_cpu=not gpu, bf16=gpu, save_strategy="no")  # fmt: skip
    (trainer := Distillation(model, args, train_dataset=data, teacher=teacher)).train()
    nf.save_quantized(model, f"{folder}/nvfp4", overwrite=True)  # for transformers and vLLM, to the bit
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
