"""Tables 1 and 2, and beyond the paper the operands of a trained model: rounding errors and traffic, without sweeps."""

import fnmatch
from functools import partial

import torch

import nanochat_fp4 as nf
from lab.measure import traffic
from lab.study import sweep_runs
from lab.study.reproduce_common import Context, Outcome, trained_model
from nanochat_fp4.nvfp4.hadamard import RHT_DIM, rotation_matrix
from nanochat_fp4.nvfp4.quantizers import Rounding, get_rounding, mean_squared_error, quantize_reference

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

        def compute(name=name) -> dict[str, float]:
            mse = 1e3 * mean_squared_error(name, samples=samples, seed=1)
            return {"mse": mse, "gain": unbiasedness_gain(name, draws)}

        value = context.piece("table1", {"rounding": name, "samples": samples, "draws": draws, "seed": 1}, compute)
        mse, unbiased = TABLE_1.get(name, (None, None))
        off = f"{100 * (value['mse'] / mse - 1):+.1f}%" if mse else "-"
        said = "-" if unbiased is None else "yes" if unbiased else "no"
        rows.append([name, mse or "-", round(value["mse"], 2), off, said, round(value["gain"])])
        numbers[name] = value

    title = "Table 1: quadratic error over N(0, 1), 1e-3, and unbiasedness"
    header = ["rounding", "paper", "here", "off", "unbiased (paper)", f"gain of {draws} draws"]
    notes = [f"gain: the mean of {draws} products is so many times better than one product; {draws} without a bias"]
    return Outcome(title, header, rows, notes, numbers, measured_on=f"{samples:,} samples, seed 1")


# (bits read, bits written, mma.m16n8k16 per group) of each kernel; the paper's Table 2.
TABLE_2 = {"naive": ("4.5 + 4.5", "0 + 4.5", 2), "post hoc": ("4.5 + 1", "5 + 0.5", 1)}


def table2(context: Context) -> Outcome:
    counted = context.piece("table2", {"rows": traffic.ROWS, "columns": traffic.COLUMNS}, traffic.measure)
    rows, totals = [], {}
    for alignment, launches in counted.items():
        of_operand = traffic.of_operand
        kernels = [(of_operand(k["read"]), of_operand(k["written"]), k["rotations"]) for k in launches]
        read, written, rotations = zip(*[k for k in kernels if k[0] + k[1] > 0])
        totals[alignment] = sum(read) + sum(written)
        here = [" + ".join(f"{v:g}" for v in bits) for bits in (read, written)] + [f"{sum(rotations):g}"]
        what = ("bits read per element", "bits written per element", "rotations per element")
        rows += [[alignment, *row] for row in zip(what, TABLE_2[alignment], here)]
    saving = 1 - totals["post hoc"] / totals["naive"]
    rows.append(["saving", "of all traffic", "about 20%", f"{100 * saving:.1f}%"])
    notes = [
        "counted while the kernels run in Triton's interpreter; a rotation is what the paper counts as one "
        "mma.m16n8k16 per group of 16 values",
        "0.25 bits more than the paper's in each post hoc kernel: EDEN's S, an FP32 number for 128 values, is written "
        "by the first kernel and read by the second",
    ]

    title = "Table 2: memory traffic and rotations of MS-EDEN requantization"
    numbers = {"launches": counted, "bits": totals, "saving": saving}
    return Outcome(title, ["alignment", "what", "paper", "here"], rows, notes, numbers, measured_on="exact counts")


def operand_statistics(x: torch.Tensor) -> dict[str, float]:
    """What could make an operand (R, K) hard to quantize along K.

    error:        of 4/6, relative square
    kurtosis:     3 for a Gaussian
    peak:         largest magnitude over rms
    top channels: share of the energy in the 1% of the columns that have most
    rank:         exp(entropy of the spectrum's shares) over its length
    """
    x = x.detach().float().reshape(-1, x.shape[-1])
    energy = x.square()
    columns = energy.sum(0).sort(descending=True).values
    shares = torch.linalg.svdvals(x[:4096]).square()
    shares = shares / shares.sum()
    q = nf.quantize(x, "four_over_six").dequantize()
    return {
        "error": float((q - x).square().sum() / energy.sum()),
        "kurtosis": float(energy.square().mean() / energy.mean().square()),
        "peak": float(x.abs().max() / energy.mean().sqrt()),
        "top channels": float(columns[: max(1, len(columns) // 100)].sum() / columns.sum()),
        "rank": float(torch.special.entr(shares).sum().exp() / len(shares)),
    }


def operands(context: Context) -> Outcome:
    def compute() -> dict:
        (model, x, y), tag, data = trained_model(context, "d8")
        seen: dict[str, dict[str, list]] = {kind: {} for kind in sweep_runs.LAYER_KINDS}

        def look(kind: str, operand: str, tensor: torch.Tensor) -> None:
            seen[kind].setdefault(operand, []).append(operand_statistics(tensor))

        def keep(kind: str, layer: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            look(kind, "input", inputs[0])
            look(kind, "weight", layer.weight)
            if output.requires_grad:
                output.register_hook(partial(look, kind, "grad_output"))

        hooks = [
            layer.register_forward_hook(partial(keep, kind))
            for name, layer in model.named_modules()
            for kind, pattern in sweep_runs.LAYER_KINDS.items()
            if fnmatch.fnmatchcase(name, pattern)
        ]
        model(x, y).backward()
        for hook in hooks:
            hook.remove()
        mean = {
            kind: {o: {k: sum(s[k] for s in many) / len(many) for k in many[0]} for o, many in found.items()}
            for kind, found in seen.items()
        }
        return {"operands": mean, "measured_on": f"{tag}, data {data}, a batch of 4 validation sequences"}

    value = context.piece("operands", context.trained_on(), compute)
    names = ["error", "kurtosis", "peak", "top channels", "rank"]
    found = [(kind, o, s) for kind, by_operand in value["operands"].items() for o, s in by_operand.items()]
    rows = [[kind, o, *(f"{s[n]:.3g}" for n in names)] for kind, o, s in found]
    notes = [
        "means over the layers of a kind, of a model trained in bf16",
        "error: of 4/6, relative square",
        "kurtosis: 3 for a Gaussian",
        "peak: largest magnitude over rms",
        "top channels: share of the energy in the 1% largest columns",
        "rank: exp(entropy of the spectrum) over its length",
    ]
    title = "What the operands look like"
    return Outcome(title, ["layers", "operand", *names], rows, notes, value, measured_on=value["measured_on"])


# ----------------------------------------------------------------------------------------------------------------------
# Roundings of a weight, and the error of their mean, before any training

DRAWS = 32
CANDIDATES = ("four_over_six", "scale_search_6", "sr", "ms_eden", "ms_eden_search")


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
    for label in CANDIDATES:
        rounding = get_rounding(label)
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
