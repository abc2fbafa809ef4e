"""Table 1: quadratic error of every rounding, and whether it is unbiased."""

import torch

import nanochat_fp4 as nf
from lab.study.reproduce_common import Context, Outcome
from nanochat_fp4.nvfp4.quantizers import get_rounding, mean_squared_error, quantize_reference

# rounding: (MSE over N(0, 1) in 1e-3, unbiased); the paper's Table 1. Rows that it does not have: None.
TABLE_1 = {
    "rtn": (9.0, False),
    "four_over_six": (7.6, False),
    "rtn_16x16": (12.4, False),
    "four_over_six_16x16": (12.4, False),
    "sr": (23.5, True),
    "sr_four_over_six": (17.5, False),
    "ms_eden": (9.8, True),
}


def unbiasedness_gain(rounding: str, draws: int) -> float:
    """How many times better the mean of `draws` products of two quantized operands (24 x 128) is than one: `draws`
    itself without a bias, up to some scatter; a bias is where it stops growing."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(24, 128, generator=generator) for _ in range(2))
    spec, target = get_rounding(rounding), a.double() @ b.double().T
    total, single = torch.zeros_like(target), 0.0
    for seed in range(draws):
        kw = {"seed": seed, "rht_dim": 128 if spec.ms_eden else 0}
        qa, qb = (quantize_reference(v, spec, stream=i, **kw).dequantize().double() for i, v in enumerate((a, b)))
        product = qa @ qb.T
        total += product
        single += float((product - target).square().sum()) / draws
    return single / float((total / draws - target).square().sum())


def table1(context: Context) -> Outcome:
    samples = context.args.samples or (1 << 19 if context.quick else 1 << 22)
    draws = context.args.draws or (128 if context.quick else 1024)
    rows, numbers = [], {}
    names = [n for n in nf.ROUNDINGS if n not in ("scale_search", "ms_eden_search")]  # names for one of the others
    for name in names:
        settings = {"rounding": name, "samples": samples, "draws": draws, "seed": 1}
        value = context.piece(
            "table1",
            settings,
            lambda name=name: {
                "mse": 1e3 * mean_squared_error(name, samples=samples, seed=1),
                "gain": unbiasedness_gain(name, draws),
            },
        )
        mse, unbiased = TABLE_1.get(name, (None, None))
        off = f"{100 * (value['mse'] / mse - 1):+.1f}%" if mse else "-"
        said = "-" if unbiased is None else "yes" if unbiased else "no"
        rows.append([name, mse or "-", round(value["mse"], 2), off, said, round(value["gain"])])
        numbers[name] = value

    def plot(axes) -> None:
        at = range(len(names))
        axes.bar([i - 0.2 for i in at], [TABLE_1.get(n, (0,))[0] for n in names], 0.4, label="paper")
        axes.bar([i + 0.2 for i in at], [numbers[n]["mse"] for n in names], 0.4, label="here")
        axes.set_xticks(list(at), names, rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("MSE over N(0, 1), 1e-3")

    return Outcome(
        "Table 1: quadratic error over N(0, 1), 1e-3, and unbiasedness",
        ["rounding", "paper", "here", "off", "unbiased (paper)", f"gain of {draws} draws"],
        rows,
        [f"gain: the mean of {draws} products is so many times better than one product; {draws} without a bias"],
        numbers,
        plot,
        f"{samples:,} samples, seed 1",
    )
