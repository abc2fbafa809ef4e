"""Tables 1 and 2, and beyond the paper the operands of a trained model: rounding errors and traffic, without sweeps."""

import fnmatch

import torch

import nanochat_fp4 as nf
from lab.measure import traffic
from lab.study import sweep_runs
from lab.study.reproduce_common import Context, Outcome, trained_model
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


# (bits read, bits written, mma.m16n8k16 per group) of each kernel; the paper's Table 2.
TABLE_2 = {"naive": ("4.5 + 4.5", "0 + 4.5", 2), "post hoc": ("4.5 + 1", "5 + 0.5", 1)}


def table2(context: Context) -> Outcome:
    counted = context.piece("table2", {"rows": traffic.ROWS, "columns": traffic.COLUMNS}, traffic.measure)
    rows, totals = [], {}
    for alignment, launches in counted.items():
        kernels = [
            (traffic.of_operand(launch["read"]), traffic.of_operand(launch["written"]), launch["rotations"])
            for launch in launches
        ]
        kernels = [k for k in kernels if k[0] + k[1] > 0]
        read, written, rotations = zip(*kernels)
        paper_read, paper_written, paper_rotations = TABLE_2[alignment]
        totals[alignment] = sum(read) + sum(written)
        rows += [
            [alignment, "bits read per element", paper_read, " + ".join(f"{v:g}" for v in read)],
            [alignment, "bits written per element", paper_written, " + ".join(f"{v:g}" for v in written)],
            [alignment, "rotations per element", paper_rotations, f"{sum(rotations):g}"],
        ]
    saving = 1 - totals["post hoc"] / totals["naive"]
    rows.append(["saving", "of all traffic", "about 20%", f"{100 * saving:.1f}%"])
    notes = [
        "counted while the kernels run in Triton's interpreter; a rotation is what the paper counts as one "
        "mma.m16n8k16 per group of 16 values",
        "0.25 bits more than the paper's in each post hoc kernel: EDEN's S, an FP32 number for 128 values, is written "
        "by the first kernel and read by the second",
    ]

    def plot(axes) -> None:
        kinds = ("read", "written")
        for i, alignment in enumerate(counted):
            bottom = 0.0
            for j, kind in enumerate(kinds):
                bits = sum(traffic.of_operand(launch[kind]) for launch in counted[alignment])
                axes.bar(i, bits, 0.5, bottom=bottom, color=f"C{j}", label=kind if i == 0 else None)
                bottom += bits
        axes.set_xticks(range(len(counted)), list(counted))
        axes.set_ylabel("bits moved per element")

    title = "Table 2: memory traffic and rotations of MS-EDEN requantization"
    numbers = {"launches": counted, "bits": totals, "saving": saving}
    return Outcome(title, ["alignment", "what", "paper", "here"], rows, notes, numbers, plot, "exact counts")


def operand_statistics(x: torch.Tensor) -> dict[str, float]:
    """What could make an operand (R, K) hard to quantize along K.

    error: of 4/6, relative square; kurtosis: 3 for a Gaussian; peak: largest magnitude over rms; top channels: share of
    the energy in the 1% of the columns that have most; rank: exp(entropy of the spectrum's shares) over its length.
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
        hooks = []
        for name, layer in model.named_modules():
            for kind, pattern in sweep_runs.LAYER_KINDS.items():
                if fnmatch.fnmatchcase(name, pattern):

                    def keep(layer, inputs, output, seen=seen[kind]):
                        seen.setdefault("input", []).append(operand_statistics(inputs[0]))
                        seen.setdefault("weight", []).append(operand_statistics(layer.weight))
                        if output.requires_grad:
                            output.register_hook(
                                lambda e, seen=seen: seen.setdefault("grad_output", []).append(operand_statistics(e))
                            )

                    hooks.append(layer.register_forward_hook(keep))
        model(x, y).backward()
        for hook in hooks:
            hook.remove()
        mean = {
            kind: {o: {k: sum(s[k] for s in many) / len(many) for k in many[0]} for o, many in found.items()}
            for kind, found in seen.items()
        }
        return {"operands": mean, "measured_on": f"{tag}, data {data}, a batch of 4 validation sequences"}

    settings = {"sizes": context.args.sizes, "extra": context.args.extra, "tokens": context.args.tokens}
    settings |= {"data_dir": context.args.data_dir}
    value = context.piece("operands", settings | {"ratio": context.args.ratio, "quick": context.quick}, compute)
    names = ["error", "kurtosis", "peak", "top channels", "rank"]
    found = [(kind, o, s) for kind, by_operand in value["operands"].items() for o, s in by_operand.items()]
    rows = [[kind, o, *(f"{s[n]:.3g}" for n in names)] for kind, o, s in found]

    def plot(axes) -> None:
        axes.bar(range(len(found)), [s["error"] for _, _, s in found])
        axes.set_xticks(range(len(found)), [f"{k} {o}" for k, o, _ in found], rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("relative square error of 4/6")

    notes = [
        "means over the layers of a kind, of a model trained in bf16",
        "error: of 4/6, relative square; kurtosis: 3 for a Gaussian; peak: largest magnitude over rms; top channels: "
        "share of the energy in the 1% largest columns; rank: exp(entropy of the spectrum) over its length",
    ]
    title = "What the operands look like"
    return Outcome(title, ["layers", "operand", *names], rows, notes, value, plot, value["measured_on"])
