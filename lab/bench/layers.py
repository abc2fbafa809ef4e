"""Times the linear layers of the paper's Table 6, forward and forward+backward, beside BF16 in the same run.

    python -m lab.bench layers                                              # 800M, 3B, 7B; the training methods
    python -m lab.bench layers --models 3B --methods clover --passes forward+backward --eager
    python -m lab.bench layers --models tiny --tokens 256 --seconds 0.01 --eager        # a trial, also on a CPU

The baseline is nn.Linear with FP32 weights under BF16 autocast, as nanochat trains. Every method runs under the same
autocast on the same tensors. A call computes all four layers of a model, one after the other. It is a CUDA graph, which
times the GPU's work without the host's, or with --eager it is launched from the host.

At its power limit a GPU lowers its clock, and how far depends on what it computes. Each method is therefore timed in a
steady state of its own, as in a training run. Calls warm up for --seconds, and as many are timed. This happens twice,
in opposite orders of the methods. "ms" is the median of all timed calls, and "spread" is the distance of the medians of
both visits. MHz, W and the limits of the clock were sampled by NVML while the calls ran.

A method is timed only after its results were compared with the reference (nanochat_fp4.doctor) and, on the tensors
that are timed, with BF16. The JSON is written whenever there are new numbers.
"""

import functools
from collections.abc import Callable

import torch

import nanochat_fp4 as nf
from lab.bench import common
from nanochat_fp4.cli import UserError
from nanochat_fp4.doctor import layer_problem
from nanochat_fp4.nvfp4.probe import relative_square_error

# The paper's Table 6: [in_features, out_features] of a model's linear layers.
LAYER_SETS: dict[str, dict[str, tuple[int, int]]] = {
    "800M": {"qkv": (2048, 6144), "out": (2048, 2048), "upgate": (2048, 11264), "down": (5632, 2048)},
    "3B": {"qkv": (3072, 9216), "out": (3072, 3072), "upgate": (3072, 16384), "down": (8192, 3072)},
    "7B": {"qkv": (4096, 12288), "out": (4096, 4096), "upgate": (4096, 22016), "down": (11008, 4096)},
    "22B": {"qkv": (6144, 18432), "out": (6144, 6144), "upgate": (6144, 32768), "down": (16384, 6144)},
    "tiny": {"upgate": (128, 256), "down": (256, 128)},  # This set tries the program out, also on a CPU.
}
TOKENS = 8 * 2048  # A batch of 8 and a sequence of 2048 (the paper, Appendix D.1).
METHODS = ("fp8", "clover", "clover_search", "nvidia", "tetrajet_v2")
PASSES = {"forward": "forward", "forward+backward": "forward_backward"}  # The name of a pass -> the method of Layer.
# Limits of the relative square error against BF16. It is the rounding error of two operands in the forward pass (0.02),
# and of four operands in a gradient.
LIMITS = {"output": 0.05, "grad_input": 0.15, "grad_weight": 0.15}
COLUMNS = {
    "model": ("model", ""), "mode": ("mode", ""), "pass": ("pass", ""), "method": ("method", ""), "ms": ("ms", ""),
    "x BF16": ("ratio", ""), "TFLOP/s": ("tflops", "{:7.0f}"), "spread": ("spread", "{:.1%}"),
    "SM MHz": ("mhz", "{:.0f}"), "W": ("watts", "{:.0f}"), "limit": ("limit", ""),
}  # fmt: skip


class Layer:
    """A linear layer with its input and grad_output, which can be called again and again."""

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
        """Runs both passes. Returns the output and the gradients of input and weight."""
        y = self.output()
        return (y.detach(), *torch.autograd.grad(y, (self.x, self.linear.weight), self.e))


def graphed(function: Callable[[], object]) -> Callable[[], None]:
    """Captures the function in a CUDA graph. Returns a function that replays it."""
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


def wrong(label: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> str | None:
    """Returns the reason why the results of a method are too far from those of BF16 to be right, or None."""
    for (name, limit), g, w in zip(LIMITS.items(), got, want):
        error = relative_square_error(g, w)
        if not error < limit:  # NaN is refused, too.
            return f"{label}: {name} is off BF16 by a relative square error of {error:.1e}, expected below {limit}"
    return None


def layers_of(model: str, methods: list[str], tokens: int, device, problems: dict[str, str]) -> dict[str, list[Layer]]:
    """Returns the layers of each method, on the same tensors. A method with wrong results is added to `problems`
    instead."""
    layers: dict[str, list[Layer]] = {m: [] for m in methods if m not in problems}
    for layer_name, (k, n) in LAYER_SETS[model].items():
        torch.manual_seed(0)
        weight = torch.randn(n, k, device=device) * k**-0.5
        x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16).requires_grad_()
        e = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
        for method in layers:
            layers[method].append(Layer(method, k, n, weight, x, e))
        want = layers["bf16"][-1].forward_backward()
        for method in list(layers):
            if problem := wrong(f"{method}, {model} {layer_name}", layers[method][-1].forward_backward(), want):
                problems[method] = problem
                del layers[method]
    return layers


def call(layers: list[Layer], which: str) -> None:
    """Runs a pass of all layers, one after the other."""
    for layer in layers:
        getattr(layer, PASSES[which])()


def on_a_cpu(models: list[str], mode: str) -> bool:
    """Returns True if the layers are to run without a GPU. Only the tiny ones can do so, and without a CUDA graph."""
    return not torch.cuda.is_available() and models == ["tiny"] and mode == "eager"


def record_of(model: str, mode: str, which: str, method: str, numbers: dict, bf16_ms: float, tokens: int) -> dict:
    """Returns the record of a measurement, with its ratio to BF16 and its TFLOP/s."""
    flops = sum(2.0 * tokens * k * n for k, n in LAYER_SETS[model].values()) * (1 if which == "forward" else 3)
    record = {"model": model, "mode": mode, "pass": which, "method": method} | numbers
    return record | {"ratio": numbers["ms"] / bf16_ms, "tflops": flops / numbers["ms"] / 1e9}


def measure(
    models: list[str], methods: list[str], tokens: int, passes: list[str], seconds: float, results: common.Results,
    mode: str = "graph",
) -> list[str]:  # fmt: skip
    """Measures the layers and returns the problems. `results` gets a record for each model, pass and method that is
    right, and is written whenever there are new records."""
    device = torch.device("cpu") if on_a_cpu(models, mode) else common.need_cuda("layers")
    problems = {m: p for m in methods if (p := layer_problem(device, m))}
    if "bf16" in problems:
        return list(problems.values())
    records: list[dict] = []
    for model in models:
        layers = layers_of(model, methods, tokens, device, problems)
        for which in passes:
            functions = {m: functools.partial(call, of, which) for m, of in layers.items()}
            if mode == "graph":
                functions = {m: graphed(f) for m, f in functions.items()}
            found = common.steady(functions, seconds)
            for method, numbers in found.items():
                records.append(record_of(model, mode, which, method, numbers, found["bf16"]["ms"], tokens))
            results.records = [r for r in records if r["method"] not in problems]
            results.write()
            del functions
        del layers
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.records = [r for r in records if r["method"] not in problems]
    return list(problems.values())


def main(argv: list[str] | None = None) -> None:
    parser = common.argument_parser(__doc__)
    add = parser.add_argument
    add("--models", default="800M,3B,7B", help=f"of {', '.join(LAYER_SETS)}")
    known = "of nf.METHODS or lab/recipes.py, or all of both; bf16 is always there"
    add("--methods", default=",".join(METHODS), help=known)
    add("--tokens", type=int, default=TOKENS, help="rows of the input")
    add("--eager", action="store_true", help="calls from the host (default: replays of a CUDA graph)")
    add("--passes", default=",".join(PASSES), help="with commas")
    add("--seconds", type=float, default=1.0, help="to warm up, and to time, in each visit")
    args = parser.parse_args(argv)
    models = common.some_of("--models", args.models, LAYER_SETS)
    passes = common.some_of("--passes", args.passes, PASSES)
    if args.tokens < 1 or not 0 < args.seconds < 3600:
        raise UserError("--tokens must be at least 1, --seconds positive and less than an hour")
    methods = common.methods_of(args.methods)
    settings = {"models": models, "methods": methods, "tokens": args.tokens, "seconds": args.seconds}
    results = common.Results("bench_linear", args.json, settings)
    mode = "eager" if args.eager else "graph"
    name = "a CPU" if on_a_cpu(models, mode) else torch.cuda.get_device_name(common.need_cuda("layers"))
    print(f"{name}; {nf.backend()}; {args.tokens} tokens")
    problems = measure(models, methods, args.tokens, passes, args.seconds, results, mode)
    print(common.show(sorted(results.records, key=lambda r: r["pass"]), COLUMNS))
    results.finish(problems)
