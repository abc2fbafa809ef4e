"""LoRA with peft on weights that are 4-bit codes alone, 0.56 bytes each, and the adapter merged into the codes.

Needs peft, transformers and accelerate: pip install 'nanochat_fp4[examples]'
"""

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import nanochat_fp4 as nf


def load(config: LlamaConfig, folder: str) -> LlamaForCausalLM:
    with init_empty_weights():
        return nf.load_quantized(nf.convert(LlamaForCausalLM(config)), folder, codes=True)


def main(folder: str = "packed", steps: int = 20) -> dict[str, float]:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    # Put a checkpoint in compressed-tensors' or modelopt's NVFP4 here: yours, or one from a hub.
    nf.save_quantized(nf.convert(LlamaForCausalLM(config)), folder, overwrite=True)
    model = get_peft_model(load(config, folder), LoraConfig(r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.randint(128, (8, 32))  # put your own data here
    for _ in range(steps):
        (loss := model(input_ids=rows, labels=rows).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(f"{folder}/adapter")  # the adapter alone
    wanted, errors = model(rows).logits, nf.merge_adapter(model)  # peft's own merge finds no weights to add to
    nf.save_quantized(merged := model.unload(), f"{folder}/merged", overwrite=True)
    off = (merged(rows).logits - wanted).norm() / wanted.norm()
    print(f"loss {loss:.3f}; merging moved a weight by up to {max(errors.values()):.3f}, the logits by {off:.3f}")
    return errors | {"loss": loss.item(), "logits": off.item()}


if __name__ == "__main__":
    main()
