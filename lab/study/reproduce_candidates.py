"""Candidates for a weight whose rounding is not learned, before any training: their errors as references.

`candidates`: roundings of a weight. A weight could learn the error of the mean over steps, not the rest.
`inputs`: what a layer's inputs would give, of a small trained model.
"""

from dataclasses import replace

import torch

import nanochat_fp4 as nf
from lab.study.reproduce_common import Context, Outcome, trained_model
from nanochat_fp4.nvfp4.feedback import feedback_factor, products_of_rows, round_with_feedback
from nanochat_fp4.nvfp4.hadamard import RHT_DIM, rotation_matrix
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import SEARCH_3, SEARCH_8, Rounding, get_rounding, quantize_reference

DRAWS = 32
SEARCH_16 = (*SEARCH_8, 19 / 16, 21 / 16, 23 / 16, 25 / 16, 29 / 32, 31 / 32, 33 / 32, 27 / 16)
RIDGE = 0.01  # in units of the mean square of the inputs


def roundings() -> dict[str, Rounding]:
    dithered = get_recipe("clover_dithered_weight").output.b.rounding
    named = {
        name: get_rounding(name) for name in ("four_over_six", "scale_search_6", "sr", "ms_eden", "ms_eden_search")
    }
    for tau in (1.1, 1.2, 1.5):
        for candidates in (SEARCH_3, SEARCH_8, SEARCH_16):
            label = f"drawn among {len(candidates)}, tau {tau:g}"
            named[label] = replace(dithered, candidates=candidates, tolerance=tau)
    return named


def errors(rounding: Rounding, x: torch.Tensor) -> dict[str, float]:
    """Mean squares over x: of one rounding's error, and of the error of the mean over draws, without their scatter."""
    total, single = torch.zeros_like(x, dtype=torch.float64), 0.0
    draws = DRAWS if rounding.random else 1
    for seed in range(draws):
        t = quantize_reference(x, rounding, seed=seed, rht_dim=RHT_DIM if rounding.ms_eden else 0)
        q = (t.decoded * t.tensor_scale).double()
        if rounding.ms_eden:  # turned back: the rotation's matrix over sqrt(128) is orthogonal
            back = rotation_matrix(seed).T.double() / RHT_DIM**0.5
            q = (q.unflatten(-1, (-1, RHT_DIM)) @ back).flatten(-2)
        single += float((q - x).square().mean()) / draws
        total += q / draws
    of_mean = float((total - x).square().mean())
    return {"mse": single, "of_mean": of_mean if draws == 1 else (draws * of_mean - single) / (draws - 1)}


def candidates(context: Context) -> Outcome:
    samples = context.args.samples or (1 << 14 if context.quick else 1 << 17)
    x = torch.randn(samples // 1024, 1024, generator=torch.Generator().manual_seed(1))
    rows, numbers = [], {}
    for label, rounding in roundings().items():
        settings = {"rounding": str(rounding), "samples": samples, "draws": DRAWS}
        found = context.piece("candidates", settings, lambda rounding=rounding: errors(rounding, x))
        rows.append([label, *(f"{1e3 * abs(found[k]):.2f}" for k in ("mse", "of_mean"))])
        numbers[label] = found
    return Outcome(
        "Candidates for the weight's rounding: errors over N(0, 1), 1e-3",
        ["rounding", "mean square", f"of the mean over {DRAWS} draws"],
        rows,
        ["ms_eden: of a tensor that is turned by new signs each draw, and turned back"],
        numbers,
        measured_on=f"{samples:,} samples, seed 1",
    )


def of_inputs(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Shares of x's energy, and errors of the output on rows of x that no rounding has seen, over the output's energy.

    x (T, K) of a layer, whose first three quarters are looked at. Errors are those of 4/6 of both operands; with the
    weight rounded for the inputs (feedback); and with the weight first made the best one for rounded inputs.
    """
    x, weight = x.detach().float().reshape(-1, x.shape[-1]), weight.detach().float()
    seen, unseen = x.split([len(x) * 3 // 4, len(x) - len(x) * 3 // 4])
    search = get_rounding("scale_search_6")

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return nf.quantize(rows, "four_over_six").dequantize()

    def error(q: torch.Tensor) -> float:
        wanted = unseen @ weight.T
        return float((rounded(unseen) @ q.T - wanted).square().sum() / wanted.square().sum())

    def feedback(w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return round_with_feedback(w[None], [feedback_factor(products_of_rows(rows))], search)[0].dequantize()

    codes = rounded(seen)
    ridge = RIDGE * seen.square().mean() * len(seen) * torch.eye(x.shape[1])
    best = torch.linalg.solve(products_of_rows(codes) + ridge, (codes.T @ seen + ridge) @ weight.T).T
    return {
        "mean": float(seen.mean(0).square().sum() / seen.square().sum() * len(seen)),
        "four_over_six": error(rounded(weight)),
        "feedback": error(feedback(weight, seen)),
        "input_aware": error(feedback(best, codes)),
    }


def inputs(context: Context) -> Outcome:
    def compute() -> dict:
        (model, x, y), tag, data = trained_model(context, "d8", rows=64)
        found: dict[str, dict[str, float]] = {}
        layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".h." in n}
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, args, name=name: found.update({name: of_inputs(args[0], layer.weight)})
            )
            for name, layer in layers.items()
        ]
        with torch.no_grad():
            model(x, y)
        for hook in hooks:
            hook.remove()
        return {"layers": found, "measured_on": f"{tag}, data {data}, a batch of 64 validation sequences"}

    value = context.piece("inputs", context.trained_on(), compute)
    rows = [
        [
            name,
            f"{100 * of['mean']:.1f}%",
            *(f"{1e3 * of[k]:.2f}" for k in ("four_over_six", "feedback", "input_aware")),
        ]
        + [f"{100 * (of['input_aware'] / of['feedback'] - 1):+.1f}%"]
        for name, of in value["layers"].items()
    ]
    notes = [
        "channel means: |mean of x|^2 over the mean of |x|^2; below 5% they are not worth a product of their own",
        "errors of the output in 1e-3 of its energy, on a quarter of the rows that no rounding has seen",
        "input-aware: feedback of the weight that is best for the rounded input; go if it takes 10% off",
    ]
    header = ["layer", "channel means", "4/6", "feedback", "input-aware", "over feedback"]
    return Outcome("What a layer's inputs would give", header, rows, notes, value, measured_on=value["measured_on"])
