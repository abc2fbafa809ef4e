# pyright: strict
"""Every public name in its documented form. test_public_api.py runs this script, and the type checkers read it."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import nanochat_fp4 as nf


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def records() -> nf.Recipe:
    mine = nf.Recipe(
        "mine",
        output=nf.Gemm(nf.Operand("rtn"), nf.Operand(nf.ROUNDINGS["four_over_six"])),
        grad_input=nf.Gemm(nf.Operand("sr"), nf.Operand()),
        grad_weight=nf.Gemm(a=nf.Operand(rounding="sr"), b=nf.Operand("rtn", raw=True)),
        summary="an example",
    )
    names: tuple[str, ...] = nf.METHODS
    nf.register(mine)
    assert nf.get_recipe("quartet2").name == "clover" and "clover" in names
    return mine


def numerics() -> torch.Tensor:
    x = torch.randn(4, 128)
    row: nf.Rounding = nf.Rounding(grid_max=5.0, stochastic=True)
    t: nf.NVFP4Tensor = nf.quantize(nf.quantize(x, row).dequantize(), "ms_eden", seed=1)
    error: torch.Tensor = t.dequantize(torch.float32) - nf.rotate(x, 1)
    layer = nf.QuantLinear(128, 64, bias=True, method="nvidia", dtype=torch.float32)
    y: torch.Tensor = layer(x)
    return error.square().mean() + y.square().mean()


def language_model() -> nn.Sequential:
    layers = {"embed": nn.Embedding(16, 32), "block": nn.Linear(32, 32), "lm_head": nn.Linear(32, 16, bias=False)}
    return nf.convert(nn.Sequential(OrderedDict(layers)), verbose=False).requires_grad_(False)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(method: str | nf.Recipe, steps: int = 2) -> nn.Sequential:
    model: nn.Sequential = nf.convert(build(), method, skip=["1"] if steps < 0 else (), backward=True, verbose=False)
    optimizer = make_optimizer(model)
    micro_batches = [torch.randn(8, 32) for _ in range(2)]
    for step in range(steps):
        changed: bool = nf.set_progress(model, step / steps)
        with nf.quantize_weights_once(model), nf.accumulate_gradients(model):
            for x in micro_batches:
                loss: torch.Tensor = (model(x) - x).square().mean()
                torch.autograd.backward([loss])
        optimizer.step()
        optimizer.zero_grad()
        print(changed)
    with torch.no_grad(), nf.full_precision(model), nf.per_token_scale(model):
        print(model(micro_batches[0]).shape)
    return model


def load(folder: str | Path) -> nn.Sequential:
    notes: list[str] = nf.save_quantized(build(), folder, dtype=torch.float32)
    print(*notes)
    return nf.load_quantized(build(), folder)


def many_gpus(model: nn.Module) -> list[str]:
    styles = {"0": nf.ColwiseParallel(), "2": nf.RowwiseParallel(sequence_parallel=False)}
    print(sorted(styles))
    return nf.gather_codes(model, raw_dtype=torch.bfloat16)


if __name__ == "__main__":
    print(nf.__version__, nf.backend(), numerics() > 0)
    train("clover")
    train(records())
