"""
Times the published emulation of Quartet II beside this project's, on the linear layers of the paper's Table 6.

    git clone https://github.com/IST-DASLab/Quartet-II
    python dev/compare_quartet2.py Quartet-II

Forward and backward under BF16 autocast with FP32 weights, Hadamard dimension 128, 4/6 on, with exact and with delayed
amax; BF16 and clover are those of scripts.bench_linear, and so is the way of timing: each in a steady state of its own,
eagerly, since the published code draws its seeds on the host. Its results, too, are compared with BF16's first.

Only its `schemes` are imported: the package around them wants fast_hadamard_transform and transformers. Where scipy is
missing, the one function that they take from it (`hadamard`) is put in its place.
"""

import argparse
import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from nanochat_fp4 import roofline  # noqa: E402
from nanochat_fp4.common import UserError, one_line, run_main  # noqa: E402
from scripts import bench_common as common  # noqa: E402
from scripts import bench_linear  # noqa: E402

PACKAGES = ("models", "models.quantization", "models.quantization.quantizers", "models.quantization.schemes")
SCHEME = "models.quantization.schemes.quartet_2"
HADAMARD_DIM = 128
ROWS = 8  # of the batch: the published layer wants (batch, sequence, features)


def hadamard(n: int):
    """scipy.linalg.hadamard: Sylvester's matrix (n, n) of 1 and -1."""
    h = torch.ones(1, 1, dtype=torch.int64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h.numpy()


def load(checkout: Path) -> types.ModuleType:
    """The module of the scheme, imported without the packages around it. Raises UserError."""
    source = checkout / "src"
    path = source.joinpath(*SCHEME.split(".")).with_suffix(".py")
    if not path.is_file():
        raise UserError(f"{checkout} is no checkout of IST-DASLab/Quartet-II: there is no {path}")
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(source.joinpath(*name.split(".")))]
        sys.modules[name] = package
    if importlib.util.find_spec("scipy") is None:
        sys.modules["scipy"], sys.modules["scipy.linalg"] = types.ModuleType("scipy"), types.ModuleType("scipy.linalg")
        sys.modules["scipy.linalg"].hadamard = hadamard
    try:
        module = importlib.import_module(SCHEME)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {one_line(error)}") from None
    if not hasattr(module, "Quartet_II_Linear"):
        raise UserError(f"{path} has no Quartet_II_Linear; it is another revision than the one this was written for")
    return module


class Published(bench_linear.Layer):
    """A published layer on the tensors of one of ours. Its backward pass, too, must run under autocast."""

    def __init__(self, module: types.ModuleType, ours: bench_linear.Layer, delayed_amax: bool):
        n, k = ours.linear.weight.shape
        options = {"hadamard_dim": HADAMARD_DIM, "delayed_amax": delayed_amax, "four_over_six": True}
        self.linear = module.Quartet_II_Linear(k, n, bias=False, device="meta", **options)
        self.linear.weight = ours.linear.weight
        self.x = ours.x.detach().unflatten(0, (ROWS, -1)).requires_grad_()
        self.e = ours.e.unflatten(0, (ROWS, -1))

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        with torch.autocast(self.x.device.type, torch.bfloat16):
            y = self.linear(self.x)
            grad_x, grad_w = torch.autograd.grad(y, (self.x, self.linear.weight), self.e)
        return y.detach().flatten(0, 1), grad_x.flatten(0, 1), grad_w


def compare(checkout: Path, model: str, seconds: float) -> tuple[list[dict], list[str]]:
    """(a record {name, ms, ratio to BF16, times clover, ...} of each contender that is right, the others' problems)."""
    device = common.need_cuda("compare_quartet2")
    module = load(checkout)
    # The published functions are compiled for each shape; beyond the limit they would silently run uncompiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    problems: dict[str, str] = {}
    layers = bench_linear.layers_of(model, ["bf16", "clover"], roofline.TOKENS, device, problems)
    for name, delayed in (("published, exact amax", False), ("published, delayed amax", True)):
        layers[name] = [Published(module, ours, delayed) for ours in layers["bf16"]]
        for ours, theirs in zip(layers["bf16"], layers[name]):
            for _ in range(2):  # the delayed amax is that of the call before
                got = theirs.forward_backward()
            problem = bench_linear.wrong(f"{name}, {model}", got, ours.forward_backward())
            if problem:
                problems[name] = problem
    if problems.keys() & {"bf16", "clover"}:
        return [], list(problems.values())
    layers = {name: ls for name, ls in layers.items() if name not in problems}
    functions = {n: functools.partial(bench_linear.call, [x.forward_backward for x in ls]) for n, ls in layers.items()}
    found = bench_linear.steady(functions, seconds)
    bf16, clover = found["bf16"]["ms"], found["clover"]["ms"]
    records = [{"name": n, **r, "ratio": r["ms"] / bf16, "times_clover": r["ms"] / clover} for n, r in found.items()]
    return records, list(problems.values())


def show(records: list[dict]) -> str:
    rows = [
        [
            r["name"], r["ms"], r["ratio"], r["times_clover"], f"{r['spread']:.1%}",
            "-" if r["mhz"] is None else round(r["mhz"]), "-" if r["watts"] is None else round(r["watts"]),
        ]
        for r in records
    ]  # fmt: skip
    return common.table(["", "ms", "x BF16", "x clover", "spread", "SM MHz", "W"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of https://github.com/IST-DASLab/Quartet-II")
    parser.add_argument("--model", default="3B", choices=common.LAYER_SETS, help="whose layers, of Table 6")
    parser.add_argument("--seconds", type=float, default=1.0, help="to warm up, and to time, in each of two visits")
    args = parser.parse_args()
    records, problems = compare(args.checkout, args.model, args.seconds)
    what = f"{torch.cuda.get_device_name()}, {args.model}, {roofline.TOKENS} tokens, forward + backward"
    print(f"{what}\n{show(records)}")
    if problems:
        raise UserError(f"not timed, because the result is wrong: {'; '.join(problems)}")


if __name__ == "__main__":
    run_main(main)
