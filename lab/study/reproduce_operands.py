"""Beyond the paper: what the operands of a trained model look like, and how hard they are to quantize."""

import fnmatch

import torch

import nanochat_fp4 as nf
from lab.study import sweep_runs
from lab.study.reproduce_common import Context, Outcome, trained_model


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
