"""How long a training step takes on a machine, predicted by group of operations; and the run that it is a step of.

    python -m nanochat_fp4.step_time --gpu rtx5090 --depth 20 --methods clover,fp8      # tokens/s, hours, a day
    python -m nanochat_fp4.step_time --compare linear.json train.json                   # with what benchmarks measured

Linear layers are roofline.layer_steps, of which our kernels have a band. For the rest of a step:

    attention    7 products of 2 * keys * width for each token and layer, at ATTENTION_SHARE of the BF16 rate
    glue         GLUE bytes for each token, layer and unit of width: norms, residuals, rotary, ReLU^2, both passes
    loss         LOGIT bytes for each token and entry of the vocabulary, and the head's three products in BF16
    weights      for each micro-batch: the cast of the FP32 weights to BF16, and the gradients' accumulation in FP32
    optimizer    Muon's Newton-Schulz steps, and UPDATE bytes a parameter, once a step

GLUE is that of our own BF16 step on an H200 (d26, 780.7 ms for 65,536 tokens, docs/results/bench_train.json of d3bf343)
less what the other lines say; the fork that was measured on a Blackwell has about as many (blackwell.py).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.nvfp4.methods import METHOD_TABLE, get_recipe
from nanochat_fp4.roofline import (
    LAYER_SETS,
    MACHINES,
    Machine,
    Step,
    gemm_step,
    is_predictable,
    layer_steps,
    machine_of,
    predicted_ms,
)

SEQUENCE, VOCABULARY = 2048, 65536
GLUE = 168.0  # bytes
LOGIT = 20.0
CAST, ACCUMULATE = 6.0, 10.0  # bytes a weight: read FP32, write BF16; read BF16, read and write FP32
UPDATE = 30.0
ATTENTION_SHARE = 0.6
NEWTON_SCHULZ = 5  # iterations of Muon, of three products each
SHORT_WINDOW = 4  # of the layers of a pattern SSSL, three look at a quarter of the sequence
DEFAULT_METHODS = ("bf16", "fp8", "nvidia", "tetrajet_v2", "clover", "clover_search")


@dataclass(frozen=True)
class Shape:
    """A nanochat of this depth: its width, parameters of the blocks and of the head."""

    depth: int
    vocabulary: int = VOCABULARY

    @property
    def width(self) -> int:
        return 64 * self.depth

    @property
    def block_weights(self) -> int:
        return 12 * self.width**2 * self.depth

    @property
    def head_weights(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.block_weights + 2 * self.head_weights

    def layers(self, fused: bool = True) -> tuple[tuple[int, int], ...]:
        """(in_features, out_features) of a block's linear layers, q, k and v as one or as three."""
        w = self.width
        return (*(((w, 3 * w),) if fused else ((w, w),) * 3), (w, w), (w, 4 * w), (4 * w, w))


def mean_keys(sequence: int, windowed: bool, share: int = SHORT_WINDOW) -> float:
    """How many keys a query looks at, over all layers and positions: causal, and three layers of four with a window."""
    window = sequence / share
    short = window - window**2 / (2 * sequence)
    return (3 * short + sequence / 2) / 4 if windowed else sequence / 2


def attention_step(shape: Shape, tokens: float, keys: float) -> Step:
    return Step("attention", 0.0, bf16_flops=14 * keys * shape.width * shape.depth * tokens / ATTENTION_SHARE)


def optimizer_step(shape: Shape, processes: int = 1) -> Step:
    """Muon is sharded over the processes."""
    w = shape.width
    small, large = 3 * 2 * w**3, 2 * (2 * w * w * 4 * w) + 2 * w**3
    flops = NEWTON_SCHULZ * (4 * small + 2 * large) * shape.depth / processes
    return Step("optimizer", UPDATE * (shape.block_weights + shape.head_weights), bf16_flops=flops)


def groups(
    shape: Shape,
    method: str,
    machine: Machine,
    *,
    micro_batch: int,
    total_batch: int,
    windowed: bool = False,
    processes: int = 1,
) -> dict[str, list[Step]]:
    """The kernels of an optimizer step on one of the processes, by group. micro_batch, total_batch: in tokens."""
    recipe = get_recipe(method)
    share = total_batch / processes
    count = share / micro_batch
    native = machine.fp4 is not None and recipe.quantizes
    weights = shape.block_weights + shape.head_weights
    blocks = [
        step for k, n in shape.layers() for step in layer_steps(recipe, micro_batch, k, n, backward=True, native=native)
    ]
    m, k, n = micro_batch, shape.width, shape.vocabulary
    head = [gemm_step("head", *dims, False, False, False) for dims in ((m, n, k), (m, k, n), (n, k, m))]
    keys = mean_keys(SEQUENCE, windowed)
    return {
        "linear layers": [step for _ in range(shape.depth) for step in blocks] * round(count),
        "head": head * round(count),
        "attention": [attention_step(shape, share, keys)],
        "glue": [Step("glue", GLUE * shape.width * shape.depth * share)],
        "loss": [Step("loss", LOGIT * shape.vocabulary * share)],
        "weights": [Step("weights", (CAST + ACCUMULATE) * weights * count)],
        "optimizer": [optimizer_step(shape, processes)],
    }


def step_ms(*args, band: str = "", **kwargs) -> float:
    """Milliseconds of an optimizer step: of `groups`, whose arguments it takes; band: of roofline.predicted_ms."""
    machine = args[2]
    times: dict[Step, float] = {}
    total = 0.0
    for steps in groups(*args, **kwargs).values():
        for step in steps:
            if step not in times:
                times[step] = predicted_ms(step, machine, band)
            total += times[step]
    return total


def tokens_per_second(shape: Shape, method: str, machine: Machine, *, micro_batch: int, **kwargs) -> dict[str, float]:
    """{"": expected, "best": ..., "worst": ...}, of all processes."""
    total = kwargs.setdefault("total_batch", 524288)
    return {
        band: total * 1e3 / step_ms(shape, method, machine, micro_batch=micro_batch, band=band, **kwargs)
        for band in ("", "best", "worst")
    }


def estimate(machine: Machine, depth: int, method: str, tokens: float, micro_batch: int, windowed: bool = False) -> str:
    """One line: how fast a run would be, how long it takes, and what fits in a day. A prediction, and labelled so."""
    shape = Shape(depth)
    speed = tokens_per_second(shape, method, machine, micro_batch=micro_batch, windowed=windowed)
    low, high = sorted((speed["best"], speed["worst"]))

    def hours(rate: float) -> float:
        return tokens / rate / 3600

    band = f" ({hours(high):.3g} to {hours(low):.3g})" if high > 1.01 * low else ""
    day = speed[""] * 86400
    return (
        f"{machine.name}, d{depth}, {method}: {speed['']:,.0f} tokens/s predicted, {hours(speed['']):.3g} hours{band} "
        f"for {tokens / 1e9:.3g}B tokens; a day has {day / 1e9:.3g}B, {day / shape.parameters:.1f} per parameter"
    )


# ----------------------------------------------------------------------------------------------------------------------
# What was measured


def comparison(paths: list[str]) -> list[list[object]]:
    """[what, predicted, measured, off by] for each number of the JSONs of bench_linear and bench_train that the model
    knows. Raises UserError for a file that is not theirs or a GPU without numbers."""
    rows: list[list[object]] = []
    for path in paths:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            gpu, records = content["environment"]["gpu"], content["records"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(
                f"{path} is no JSON of bench_linear or bench_train ({e}); make one with dev/measure.sh"
            ) from e
        machine = machine_of(gpu or "")
        if machine is None:
            known = ", ".join(m.name for m in MACHINES.values())
            raise UserError(f"{path} was measured on {gpu}, of which nothing is predicted; there is: {known}")
        for r in records:
            row = _predicted(content["benchmark"], content["settings"], r, machine)
            if row:
                what, predicted, measured, unit = row
                off = f"{100 * (predicted / measured - 1):+.0f}%"
                rows.append([what, f"{predicted:,.4g} {unit}", f"{measured:,.4g} {unit}", off])
    return rows


def _predicted(benchmark: str, settings: dict, r: dict, machine: Machine) -> tuple[str, float, float, str] | None:
    """(what, predicted, measured, unit) of a benchmark's record, None for one that is not predicted."""
    method = r.get("method")
    if r.get("problem") or not (method == "bf16" or (method in METHOD_TABLE and is_predictable(method))):
        return None
    if benchmark == "bench_linear" and r["mode"] == "graph":
        recipe, backward = get_recipe(method), r["pass"] != "forward"
        native = machine.fp4 is not None and recipe.quantizes
        steps = [
            step
            for k, n in LAYER_SETS[r["model"]].values()
            for step in layer_steps(recipe, settings["tokens"], k, n, backward=backward, native=native)
        ]
        what = f"{r['model']}, {r['pass']}, {method}"
        return what, sum(predicted_ms(s, machine) for s in steps), r["ms"], "ms"
    if benchmark == "bench_train" and r.get("recompute") == "none":
        tokens = r["micro_batch"] * settings["seq_len"]
        speed = tokens_per_second(
            Shape(r["depth"], settings["vocab_size"]),
            method,
            machine,
            micro_batch=tokens,
            total_batch=settings["total_batch_size"],
            windowed="S" in settings["window_pattern"],
        )[""]
        return f"d{r['depth']}, micro-batch {r['micro_batch']}, {method}", speed, r["tokens_per_second"], "tokens/s"
    return None


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", default="", help=f"{', '.join(MACHINES)}, or a GPU's name (default: this machine's)")
    add("--depth", type=int, default=20, help="of a nanochat")
    add("--methods", default=",".join(DEFAULT_METHODS))
    add("--tokens", type=float, default=0.0, help="of the run (default: --ratio)")
    add("--ratio", type=float, default=20.0, help="tokens for each parameter")
    add("--micro-batch", type=int, default=8192, help="tokens of a micro-batch")
    add("--windowed", action="store_true", help="a window pattern SSSL, by a kernel that skips what it leaves out")
    add("--compare", nargs="+", metavar="JSON", help="of bench_linear and bench_train: predicted, measured, off by")
    args = parser.parse_args(argv)
    if args.compare:
        print(table(["", "predicted", "measured", "off by"], comparison(args.compare)))
        return
    if args.depth < 1 or args.micro_batch < 1 or args.tokens < 0 or args.ratio <= 0:
        raise UserError("--depth and --micro-batch must be at least 1, --tokens and --ratio positive")
    gpu = args.gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    machine = MACHINES.get(gpu) or machine_of(gpu)
    if machine is None:
        raise UserError(f"--gpu: nothing is predicted for {gpu or 'a CPU'}; use one of: {', '.join(MACHINES)}")
    for method in args.methods.split(","):
        if method != "bf16" and not is_predictable(method):
            print(f"{machine.name}, d{args.depth}, {method}: not predicted (its kernels are not counted)")
            continue
        tokens = args.tokens or args.ratio * Shape(args.depth).parameters
        print(estimate(machine, args.depth, method, tokens, args.micro_batch, args.windowed))


if __name__ == "__main__":
    run_main(main)
