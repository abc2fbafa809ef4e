"""Distillation (QAD): a finished model is converted, and learns to answer as it did in full precision.

Logits are compared in pieces, so none stand whole. From a checkout: python -m examples.distill
"""

import copy
from collections import OrderedDict

import torch
from torch import nn

import nanochat_fp4 as nf


def build() -> nn.Module:
    layers = {"embed": nn.Embedding(50, 64)}
    for i in range(4):
        layers[f"block{i}"] = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
    layers["lm_head"] = nn.Linear(64, 50, bias=False)  # stays in full precision
    return nn.Sequential(OrderedDict(layers))


def main(method: str = "clover", steps: int = 40) -> list[float]:
    torch.manual_seed(0)
    teacher = build().eval()  # put your own model here, trained
    model = nf.convert(copy.deepcopy(teacher), method, backward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(steps):
        loss = nf.distillation_loss(model, teacher, torch.randint(50, (16, 32)))  # nats a token; put your own data here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"distance to the teacher: {losses[0]:.4f} -> {losses[-1]:.4f} nats a token")
    return losses


if __name__ == "__main__":
    main()
