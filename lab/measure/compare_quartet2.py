"""
Times the published emulation of Quartet II beside this project's, on the linear layers of the paper's Table 6.

    git clone https://github.com/IST-DASLab/Quartet-II
    python -m lab.measure.compare_quartet2 Quartet-II

Forward and backward under BF16 autocast with FP32 weights, Hadamard dimension 128, 4/6 on, with exact and with delayed
amax; BF16 and clover are those of bench_linear.py, and so is the way of timing: each in a steady state of its own,
visited twice, eagerly, since the published code draws its seeds on the host. Its results, too, are compared with BF16's
first.

The published functions are compiled by torch.compile, piece by piece. With exact amax one piece of the backward pass is
resumed in the middle of `weight_fp4.T.reshape(-1, Quartet_II_fn.hadamard_matrix.size(0))` and guarded by the identity
of the method `reshape` of that tensor, which dies with the call: it is traced again in every call of every layer, until
PyTorch's recompile limit (8) is reached. From then on it runs uncompiled. The published training script leaves the
limit as it is, and so does this one: each visit starts as in a fresh process, and is timed when a few calls in a row
have traced nothing.

Only its `schemes` are imported: the package around them wants fast_hadamard_transform and transformers. Where scipy is
missing, the one function that they take from it (`hadamard`) is put in its place.
"""

import argparse
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

from lab.measure import bench_common as common
from lab.measure import bench_linear
from lab.predict.blackwell import LAYER_SETS
from nanochat_fp4 import step_time
from nanochat_fp4.console import table
from nanochat_fp4.errors import UserError, one_line, run_main

PACKAGES = ("models", "models.quantization", "models.quantization.quantizers", "models.quantization.schemes")
SCHEME = "models.quantization.schemes.quartet_2"
HADAMARD_DIM = 128
SETTLED, PATIENCE = 3, 40  # calls in a row that trace nothing before a visit is timed, and how many are tried
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
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source.joinpath(*name.split(".")))]
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


def settles(function: Callable[[], object]) -> bool:
    """Calls the function, as a fresh process does, until Dynamo traces nothing any more. False if it never stops."""
    torch._dynamo.reset()
    frames, quiet = torch._dynamo.utils.counters["frames"], 0
    for _ in range(PATIENCE):
        before = frames["total"]
        function()
        quiet = quiet + 1 if frames["total"] == before else 0
        if quiet == SETTLED:
            return True
    return False


def compare(checkout: Path, model: str, seconds: float) -> tuple[list[dict], list[str]]:
    """(a record {name, ms, ratio to BF16, times clover, ...} of each contender that is right, the others' problems)."""
    device = common.need_cuda("compare_quartet2")
    module = load(checkout)
    problems: dict[str, str] = {}
    layers = bench_linear.layers_of(model, ["bf16", "clover"], step_time.TOKENS, device, problems)
    for name, delayed in (("published, exact amax", False), ("published, delayed amax", True)):
        torch._dynamo.reset()
        layers[name] = [Published(module, ours, delayed) for ours in layers["bf16"]]
        for ours, theirs in zip(layers["bf16"], layers[name]):
            for _ in range(2):  # the delayed amax is that of the call before
                got = theirs.forward_backward()
            problem = bench_linear.wrong(f"{name}, {model}", got, ours.forward_backward())
            if problem:
                problems[name] = problem
    if problems.keys() & {"bf16", "clover"}:
        return [], list(problems.values())
    functions = {
        name: functools.partial(bench_linear.call, [x.forward_backward for x in of])
        for name, of in layers.items()
        if name not in problems
    }
    settled = dict.fromkeys(functions, True)

    def settle(name: str, function: Callable[[], object]) -> None:
        settled[name] &= settles(function)

    found = common.steady(functions, seconds, settle)
    bf16, clover = found["bf16"]["ms"], found["clover"]["ms"]
    return [
        {"name": name, **r, "ratio": r["ms"] / bf16, "times_clover": r["ms"] / clover, "settled": settled[name]}
        for name, r in found.items()
    ], list(problems.values())


def show(records: list[dict]) -> str:
    rows = [
        [
            r["name"], r["ms"], r["ratio"], r["times_clover"], f"{r['spread']:.1%}", common.cell(r["mhz"], "{:.0f}"),
            common.cell(r["watts"], "{:.0f}"),
        ]
        for r in records
    ]  # fmt: skip
    never = [f"{r['name']}: torch.compile never stops tracing: tracing is timed" for r in records if not r["settled"]]
    return "\n".join([table(["", "ms", "x BF16", "x clover", "spread", "SM MHz", "W"], rows), *never])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkout", type=Path, help="of https://github.com/IST-DASLab/Quartet-II")
    parser.add_argument("--model", default="3B", choices=LAYER_SETS, help="whose layers, of Table 6")
    parser.add_argument("--seconds", type=float, default=1.0, help="to warm up, and to time, in each of two visits")
    args = parser.parse_args(argv)
    records, problems = compare(args.checkout, args.model, args.seconds)
    what = f"{torch.cuda.get_device_name()}, {args.model}, {step_time.TOKENS} tokens, forward + backward"
    print(f"{what}; torch {torch.__version__}\n{show(records)}")
    if problems:
        raise UserError(f"not timed, because the result is wrong: {'; '.join(problems)}")


if __name__ == "__main__":
    run_main(main)
