"""Measures whether the mean of many MS-EDEN draws approaches the operand, for the operands around ReLU^2."""

from typing import Any

import torch

from lab.study.context import Context, Outcome, trained_model
from lab.study.sweep_results import data_name
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4.hadamard import RHT_DIM, rotate
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

GROUPS = 100  # The number of groups of RHT_DIM numbers of an operand, drawn at random from all blocks.
# Three operands with many zeros and few large numbers, which one rotation does not mix, and for comparison one without
# zeros.
OPERANDS = ("grad_output of c_fc", "grad_output^T of c_fc", "input^T of c_proj", "input^T of c_fc")


def operands_of_the_mlps(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns for each of OPERANDS, from one pass over x and y, GROUPS groups of numbers along the contraction
    dimension, float32 (GROUPS, RHT_DIM)."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in OPERANDS}

    def take(name: str, matrix: torch.Tensor) -> None:
        groups = matrix.detach().float().cpu().reshape(-1, RHT_DIM)
        seen[name].append(groups[groups.abs().amax(-1) > 0])

    def of_c_fc(module, inputs, output) -> None:
        take("input^T of c_fc", inputs[0].flatten(0, -2).T)

        def gradient(g: torch.Tensor) -> None:
            take("grad_output of c_fc", g.flatten(0, -2))
            take("grad_output^T of c_fc", g.flatten(0, -2).T)

        output.register_hook(gradient)

    hooks = []
    for block in model.transformer.h:
        hooks.append(block.mlp.c_fc.register_forward_hook(of_c_fc))
        hooks.append(
            block.mlp.c_proj.register_forward_pre_hook(
                lambda module, inputs: take("input^T of c_proj", inputs[0].flatten(0, -2).T)
            )
        )
    try:
        model(x, y).backward()
    finally:
        for hook in hooks:
            hook.remove()
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, parts in seen.items():
        groups = torch.cat(parts)
        result[name] = groups[torch.randperm(len(groups), generator=generator)[:GROUPS]]
    return result


def averages(groups: torch.Tensor, draws: list[int]) -> dict[str, Any]:
    """Quantizes groups many times. Returns {"error": the error of one draw, "bias": bias^2 over this error, "errors":
    {B: the error of the mean of B draws}}. Errors are relative squares.

    bias^2 is estimated by the product of the errors of the means of two independent halves, which is free of noise.
    """
    halves = [torch.zeros(groups.shape, dtype=torch.float64) for _ in range(2)]
    square, whole, errors = 0.0, float(groups.double().square().sum()), {}
    for seed in range(draws[-1]):
        rotation = rotate(torch.eye(RHT_DIM), seed)
        drawn = quantize_reference(groups, Quantization(ROUNDINGS["ms_eden"], seed=seed, rht_dim=RHT_DIM))
        error = (drawn.dequantize() @ rotation.T).double() - groups
        halves[seed % 2] += error
        square += float(error.square().sum())
        if seed + 1 in draws:
            errors[seed + 1] = float(((halves[0] + halves[1]) / (seed + 1)).square().sum()) / whole
    a, b = (half / (draws[-1] // 2) for half in halves)
    one = square / draws[-1]
    return {"error": one / whole, "bias": float((a * b).sum()) / one, "errors": errors}


def averaging(context: Context) -> Outcome:
    """Makes the table of the errors and biases of MS-EDEN around ReLU^2."""
    most = context.args.draws or (64 if context.quick else 10_000)
    draws = sorted({*(b for b in (2**i for i in range(14)) if b < most), most})
    header = ["operand", "zeros", "error of one draw", "bias^2 over it", f"error of the mean of {most}"]
    context.chosen_columns(header)
    found: dict[str, dict] = {}
    operands: dict[str, torch.Tensor] = {}
    where = ""
    for name in OPERANDS:

        def compute(name: str = name) -> dict[str, Any]:
            nonlocal where
            if not operands:
                (model, x, y), tag, data = trained_model(context, "d8")
                operands.update(operands_of_the_mlps(model, x, y))
                where = f"{tag}, data {data_name(data)}, 4 validation sequences"
            zeros = float((operands[name] == 0).float().mean())
            return averages(operands[name], draws) | {"zeros": zeros, "measured_on": where}

        settings = {"operand": name, "rotations": 1, "draws": draws} | context.trained_on()
        found[name] = context.piece("averaging", settings, compute)
        where = found[name]["measured_on"]
    rows = []
    for name, r in found.items():
        last = {int(b): e for b, e in r["errors"].items()}[most]
        rows.append([name, f"{100 * r['zeros']:.0f}%", f"{r['error']:.2e}", f"{r['bias']:+.1e}", f"{last:.1e}"])

    def plot(axes: Any) -> None:
        for color, (name, r) in zip(plots.COLORS, found.items()):
            points = {int(b): e for b, e in r["errors"].items()}
            axes.loglog(*zip(*points.items()), color=color, label=name)
        first = max(r["error"] for r in found.values())
        axes.loglog([1, most], [first, first / most], "k:", label="1/B")
        axes.set_xlabel("draws averaged, B")
        axes.set_ylabel("relative square error")

    notes = [
        f"{GROUPS} groups of {RHT_DIM} numbers of each operand; bias^2 by the product of two halves' means, so around "
        "zero it has either sign",
    ]
    title = "The mean of B draws of MS-EDEN around ReLU^2"
    return Outcome(title, header, rows, notes, {"operands": found}, plot, where)
