"""Time of the linear layers of the paper's Table 6, forward and forward+backward, against BF16 in the same run.

    python -m scripts.bench_linear                                      # 800M, 3B, 7B; the training methods
    python -m scripts.bench_linear --models 3B --methods clover --graph
    python -m scripts.bench_linear --roofline rtx5090                   # a prediction; needs no GPU

The baseline is nn.Linear with FP32 weights under BF16 autocast, as nanochat trains; every method runs under the same
autocast on the same tensors. A number is the sum over a model's four layers of the median time of a call; the methods
take turns in several rounds, so that clocks and temperature favour none. --graph times replays of CUDA graphs, of both
sides: the GPU's work without the host's.

Nothing is timed before its result was compared: with the reference (nanochat_fp4.doctor), and, on the very tensors that
are timed, with BF16.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import UserError, run_main
from nanochat_fp4.doctor import layer_problem, relative_square_error
from nanochat_fp4.nvfp4.recipes import METHOD_TABLE, get_recipe
from scripts import bench_common as common

METHODS = ("clover", "clover_search", "nvidia", "tetrajet_v2")
PASSES = ("forward", "forward+backward")
# Relative square errors against BF16: rounding of two operands in the forward pass (0.02), of four in a gradient.
FORWARD_LIMIT, GRADIENT_LIMIT = 0.05, 0.15


class Layer:
    """One linear layer with its input and grad_output, ready to be called again and again."""

    def __init__(self, method: str, in_features: int, out_features: int, weight, x, e):
        if method == "bf16":
            self.linear = torch.nn.Linear(in_features, out_features, bias=False, device="meta")
        else:
            self.linear = nf.QuantLinear(in_features, out_features, method=method, device="meta")
        self.linear.weight = torch.nn.Parameter(weight)
        self.x, self.e = x, e

    def output(self) -> torch.Tensor:
        with torch.autocast(self.x.device.type, torch.bfloat16):
            return self.linear(self.x)

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.output()

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        y = self.output()
        return (y.detach(), *torch.autograd.grad(y, (self.x, self.linear.weight), self.e))


def graphed(function: Callable[[], object]) -> Callable[[], None]:
    """The function as replays of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def medians(functions: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median milliseconds of each function's calls; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name in functions:
        functions[name]()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, function in functions.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 2)]
            for i in range(calls + 1):  # the first one finds the caches of another method
                events[i].record()
                function()
            events[calls + 1].record()
            torch.cuda.synchronize()
            times[name] += [events[i].elapsed_time(events[i + 1]) for i in range(1, calls + 1)]
    return {name: statistics.median(values) for name, values in times.items()}


def wrong(label: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> str | None:
    """Why the results of a method, next to those of BF16, are no quantized results; or None."""
    for name, g, w in zip(("output", "grad_input", "grad_weight"), got, want):
        error = relative_square_error(g, w)
        limit = FORWARD_LIMIT if name == "output" else GRADIENT_LIMIT
        if not error < limit:  # NaN included
            return f"{label}: {name} is off BF16 by a relative square error of {error:.1e}, expected below {limit}"
    return None


def measure(models: list[str], methods: list[str], tokens: int, modes: list[str], rounds: int, calls: int):
    """(records, problems): one record for each model, mode, pass and method that is right."""
    device = common.need_cuda("bench_linear")
    problems = {m: p for m in methods if (p := layer_problem(device, m))}
    records = []
    for model in models:
        total: dict[tuple[str, str, str], float] = {}
        for layer_name, (k, n) in common.LAYER_SETS[model].items():
            torch.manual_seed(0)
            weight = torch.randn(n, k, device=device) * k**-0.5
            x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16).requires_grad_()
            e = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
            layers = {m: Layer(m, k, n, weight, x, e) for m in methods if m not in problems}
            want = layers["bf16"].forward_backward() if "bf16" in layers else None
            for method in list(layers):
                problem = want and wrong(f"{method}, {model} {layer_name}", layers[method].forward_backward(), want)
                if problem:
                    problems[method] = problem
                    del layers[method]
            del want
            for mode in modes:
                for which, run in zip(PASSES, ("forward", "forward_backward")):
                    functions = {m: getattr(layer, run) for m, layer in layers.items()}
                    if mode == "graph":
                        functions = {m: graphed(f) for m, f in functions.items()}
                    for method, ms in medians(functions, rounds, calls).items():
                        total[mode, which, method] = total.get((mode, which, method), 0.0) + ms
                    del functions
            del layers, weight, x, e
            torch.cuda.empty_cache()
        flops = sum(2.0 * tokens * k * n for k, n in common.LAYER_SETS[model].values())
        for (mode, which, method), ms in total.items():
            if method in problems:
                continue
            baseline = total.get((mode, which, "bf16"))
            work = flops * (1 if which == "forward" else 3)
            records.append(
                {
                    "model": model, "mode": mode, "pass": which, "method": method, "ms": ms,
                    "ratio": ms / baseline if baseline else None, "tflops": work / ms / 1e9,
                }
            )  # fmt: skip
    return records, list(problems.values())


def predict(machine: common.Machine, models: list[str], methods: list[str], tokens: int) -> list[dict]:
    """The same records from byte, instruction and FLOP counts alone."""
    records = []
    for model in models:
        for which in PASSES:
            times = {}
            for method in methods:
                recipe = get_recipe(method)
                native = machine.fp4 is not None and recipe.quantizes
                steps = [
                    step
                    for k, n in common.LAYER_SETS[model].values()
                    for step in common.layer_steps(
                        recipe, tokens, k, n, backward=which != "forward", native=native
                    )
                ]  # fmt: skip
                times[method] = sum(common.predicted_ms(step, machine) for step in steps)
            flops = sum(2.0 * tokens * k * n for k, n in common.LAYER_SETS[model].values())
            for method, ms in times.items():
                work = flops * (1 if which == "forward" else 3)
                ratio = ms / times["bf16"] if "bf16" in times else None
                records.append(
                    {
                        "model": model, "mode": "predicted", "pass": which, "method": method, "ms": ms,
                        "ratio": ratio, "tflops": work / ms / 1e9,
                    }
                )  # fmt: skip
    return records


def show(records: list[dict]) -> str:
    header = ["model", "mode", "pass", "method", "ms", "x BF16", "TFLOP/s"]
    rows = [
        [r["model"], r["mode"], r["pass"], r["method"], r["ms"], r["ratio"] or float("nan"), round(r["tflops"])]
        for r in sorted(records, key=lambda r: (r["mode"], r["pass"]))
    ]
    return common.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="800M,3B,7B", help=f"of {', '.join(common.LAYER_SETS)}")
    parser.add_argument("--methods", default=",".join(METHODS), help="of nf.METHODS, or all; bf16 is always there")
    parser.add_argument("--tokens", type=int, default=common.TOKENS, help="rows of the input")
    parser.add_argument("--graph", action="store_true", help="also time CUDA graph replays")
    parser.add_argument("--rounds", type=int, default=4, help="times that the methods take turns")
    parser.add_argument("--calls", type=int, default=5, help="timed calls of a method in a round")
    common.add_common_arguments(parser)
    args = parser.parse_args()
    models = [m for m in args.models.split(",") if m]
    if not models or not set(models) <= set(common.LAYER_SETS):
        raise UserError(f"--models is {args.models!r}, expected some of {', '.join(common.LAYER_SETS)}, with commas")
    if min(args.tokens, args.rounds, args.calls) < 1:
        raise UserError("--tokens, --rounds and --calls must be at least 1")
    names = METHOD_TABLE if args.methods == "all" else [get_recipe(m).name for m in args.methods.split(",") if m]
    methods = ["bf16", *[m for m in dict.fromkeys(names) if m != "bf16"]]

    settings = {"models": models, "methods": methods, "tokens": args.tokens, "rounds": args.rounds, "calls": args.calls}
    problems: list[str] = []
    if args.roofline:
        machine = common.MACHINES[args.roofline]
        settings["prediction_for"] = common.describe(machine)
        gemm = "native NVFP4 GEMM" if machine.fp4 else "emulated: decode to BF16, BF16 GEMM"
        print(f"PREDICTION for {machine.name}, not a measurement: {gemm}; {machine.source}")
        records = predict(machine, models, methods, args.tokens)
    else:
        common.need_cuda("bench_linear")
        print(f"{torch.cuda.get_device_name()}; {nf.backend()}; {args.tokens} tokens")
        modes = ["eager", "graph"] if args.graph else ["eager"]
        records, problems = measure(models, methods, args.tokens, modes, args.rounds, args.calls)
    print(show(records))
    name = f"bench_linear_{args.roofline}_predicted" if args.roofline else "bench_linear"
    print(f"written to {common.write_json(name, args.json, settings, records)}")
    if problems:
        raise UserError(f"not timed, because the result is wrong: {'; '.join(problems)}")


if __name__ == "__main__":
    run_main(main)
