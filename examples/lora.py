"""Trains LoRA adapters with peft on a base model that computes in 4 bits. The adapters stay in high precision, and
convert prints that it left them alone.

The example needs peft and transformers: pip install -e '.[examples]'
"""

try:
    import nanochat_fp4 as nf  # It comes first, so that another package that is missing is one line.
except ModuleNotFoundError as e:
    message = "error: nanochat_fp4 is not installed in this Python; type pip install -e . in its checkout first"
    raise (SystemExit(message) if e.name == "nanochat_fp4" else e) from None
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    nf.convert(model, "clover")  # Frozen weights need no wgrad. dgrad takes 4-bit operands, as the forward pass does.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.randint(128, (8, 32))  # Put your own data here.
    losses = []
    for _ in range(steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; trained: {model.get_nb_trainable_parameters()[0]:,} parameters")
    return losses


if __name__ == "__main__":
    nf.cli.ArgumentParser(description=__doc__).parse_args()  # It takes no flags.
    main()
