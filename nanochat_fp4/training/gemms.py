"""The choice of an implementation for each FP4 product of a run. All implementations are tested and timed, and the
fastest one is taken.

Rank 0 chooses for all ranks. The products are those of the model itself: forward, dgrad and wgrad of each layer, at the
size of the run's micro-batch. A child process has each implementation of dispatch.IMPLEMENTATIONS multiply operands of
these shapes. An implementation whose result is wrong is refused for the shape. The others are timed, and so are the
emulated GEMM, BF16 and FP8 for comparison. The variable NVFP4_GEMM leaves one implementation to choose from.

Implementations sum in different orders, so the choice decides the bits of a run. Checkpoints therefore keep it.
"""

import concurrent.futures
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.common import is_ddp_initialized, print0
from nanochat_fp4.hardware import median_ms
from nanochat_fp4.nvfp4 import dispatch, probe
from nanochat_fp4.nvfp4.dispatch import IMPLEMENTATIONS
from nanochat_fp4.nvfp4.gemm import Decoded, GemmOperand, Plain, gemm
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.operands import Codes
from nanochat_fp4.training.micro_batch import try_micro_batch

BASELINES = ("BF16", "FP8", "emulated")
MEET_SECONDS = 10.0  # The other ranks ask rank 0 so often whether it is done; each collective has a timeout.


class ProductShape(NamedTuple):
    """The shape of a product (M, K) . (N, K)^T -> (M, N), and the dtype of its result, "bfloat16" or "float32"."""

    m: int
    n: int
    k: int
    dtype: str

    @property
    def out_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}{' FP32' if self.dtype == 'float32' else ''}"


Measured = tuple[float | None, str]  # The time in milliseconds, or None and the reason why there is no time.


def measured(device: torch.device, name: str, product: ProductShape) -> Measured:
    """Times one of IMPLEMENTATIONS or BASELINES on a product. An implementation is timed only if its result is
    right."""
    (m, n, k), dtype = product[:3], product.out_dtype
    if name in IMPLEMENTATIONS:
        problem = probe.problem_of_shape(device, lambda *pair: dispatch.mm(*pair, name), (m, n, k), (dtype,))
        if problem:
            return None, problem
    made = (probe.tiled(probe.random_operand(device, rows, k)) for rows in (m, n))
    x, y = pair = [Codes(t.codes, t.scales, t.tensor_scale) for t in made]
    bf16 = [] if name in IMPLEMENTATIONS else [v.matrix(torch.bfloat16) for v in pair]
    fp8 = [v.to(torch.float8_e4m3fn) for v in bf16] if name == "FP8" else []

    def multiply(*operands: GemmOperand) -> torch.Tensor:
        return gemm(*operands, compute_dtype=torch.bfloat16, out_dtype=dtype)

    baselines = {
        "BF16": lambda: multiply(*map(Plain, bf16)),
        "FP8": lambda: dispatch.mm_fp8(fp8[0], x.tensor_scale, fp8[1], y.tensor_scale, dtype),
        "emulated": lambda: multiply(*(Decoded(v.matrix(torch.bfloat16), v.tensor_scale) for v in pair)),
    }
    try:
        return median_ms(baselines.get(name, lambda: dispatch.mm(x, y, dtype, name))), ""
    except Exception as error:  # A library or a compiler fails, or no memory is left beside the model.
        return None, f"raises {(str(error).splitlines() or [type(error).__name__])[0][:200]}"


def run_jobs(device: str, jobs: list[tuple[str, int, int, int, str]]) -> Iterator[Measured]:
    """Yields the result of `measured` for each (name, *product). Ends the process if CUDA stops working."""
    for name, *product in jobs:
        result = measured(torch.device(device), name, ProductShape(*product))
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # After an illegal address all later calls would fail.
            sys.exit(result[1])
        yield result


def measure(jobs: list[tuple[str, ProductShape]], device: str) -> dict[tuple[str, ProductShape], Measured]:
    """Returns the results of `measured` for all jobs, which a child process computes. `device` is a text like
    "cuda:0".

    If the child process dies, the implementation that ended it gets no further job, and another child process goes on.
    """
    results: dict[tuple[str, ProductShape], Measured] = {}
    for name, product in jobs:
        if missing := dispatch.missing_reason("cuda", name):
            results[name, product] = None, missing
    while jobs := [job for job in jobs if job not in results]:
        encoded = [(name, *product) for name, product in jobs]
        finished, problem = probe.in_child(__name__, f"run_jobs({device!r}, {encoded!r})")
        results |= {job: (ms, why) for job, (ms, why) in zip(jobs, finished)}
        for job in jobs[len(finished) :]:
            if job[0] == jobs[len(finished)][0]:
                results[job] = None, problem
    return results


@dataclass
class Choice:
    """The measurements of each product, and the implementation that is taken for it.

    - gpu: the GPU's name
    - count: how often a micro-batch computes each product
    - results: the time of each (implementation or baseline, product)
    - taken: the implementation for each product, one of IMPLEMENTATIONS or "emulated"
    - notes: warnings for the user, one line each
    """

    gpu: str
    count: dict[ProductShape, int]
    results: dict[tuple[str, ProductShape], Measured]
    taken: dict[ProductShape, str]
    notes: list[str] = field(default_factory=list)

    @property
    def record(self) -> dict[str, Any]:
        """The choice in the form in which a checkpoint's metadata keeps it."""
        return {"gpu": self.gpu, "gemms": [[*product, name] for product, name in self.taken.items()]}

    def ms(self, name: str, product: ProductShape) -> float | None:
        """Returns the time of a product in milliseconds, or None if there is none."""
        return self.results.get((name, product), (None, ""))[0]

    def lines(self) -> list[str]:
        """Returns the lines of a table of all times, followed by sentences about the choice."""
        names = [n for n in (*BASELINES, *IMPLEMENTATIONS) if any(self.ms(n, p) for p in self.count)]
        header = f"{'M x N x K, TFLOP/s':>28s}  times" + "".join(f"{name:>12s}" for name in names) + "  taken"
        rows = [f"GEMMs of a micro-batch on {self.gpu}", header]
        for product, count in self.count.items():
            flops = 2 * product.m * product.n * product.k
            cells = (f"{flops / ms / 1e9:12.0f}" if (ms := self.ms(n, product)) else f"{'-':>12s}" for n in names)
            rows.append(f"{product!s:>28s}  {count:5d}{''.join(cells)}  {self.taken.get(product, '-')}")
        for other in ("BF16", "FP8"):
            times = {p: (self.ms(self.taken.get(p, ""), p), self.ms(other, p)) for p in self.count}
            if any(None in pair for pair in times.values()):
                continue
            own_ms, other_ms = (sum(self.count[p] * pair[i] for p, pair in times.items()) for i in (0, 1))
            slower = ", ".join(str(p) for p, (own_time, other_time) in times.items() if own_time >= other_time)
            slower = f"; FP4 is not faster than {other} here: {slower}" if slower else ""
            rows.append(f"all of them: {own_ms:.2f} ms, {other_ms:.2f} ms in {other}{slower}")
        taken = [name for name in IMPLEMENTATIONS if name in self.taken.values()]
        return rows + [f"{name}: {dispatch.PATHS[name]}" for name in taken] + self.notes


def choose(products: Counter[ProductShape], gpu: str, device: str, stored: dict[str, Any] | None = None) -> Choice:
    """Chooses an implementation for each product. `products` counts how often a micro-batch computes each product,
    `gpu` is the GPU's name, and `stored` is the `record` of the run that is resumed.

    On a GPU of the same name a stored choice is kept, so that the bits stay the same, unless an implementation has
    become wrong. Raises ValueError if NVFP4_GEMM asks for an implementation that is wrong on one of the products.
    """
    asked_for = dispatch.gemm_asked_for()

    def able(product: ProductShape) -> list[str]:
        """Returns the implementations that may compute a product. If NVFP4_GEMM names one that has this output
        dtype, it is the only one."""
        names = [name for name in IMPLEMENTATIONS if product.out_dtype in dispatch.output_dtypes(name)]
        return [asked_for] if asked_for in names else names

    jobs = [(name, product) for name in BASELINES for product in products]
    jobs += [(name, product) for name in IMPLEMENTATIONS for product in products if name in able(product)]
    choice = Choice(gpu, dict(products), measure(jobs, device), {})
    for product in products:
        times = {name: choice.ms(name, product) for name in able(product)}
        times_of_right = {name: ms for name, ms in times.items() if ms is not None}
        reasons = "; ".join(
            f"{name} {choice.results[name, product][1]}" for name in times if name not in times_of_right
        )
        emulated, bf16 = choice.ms("emulated", product), choice.ms("BF16", product)
        if times_of_right:
            times_of_right |= {"emulated": emulated} if asked_for == "auto" and emulated is not None else {}
            choice.taken[product] = min(times_of_right, key=times_of_right.__getitem__)
        elif "out of memory" in reasons:
            choice.notes.append(f"note: {product} was not measured, no memory is left beside the model")
        elif asked_for != "auto":
            raise ValueError(
                f"NVFP4_GEMM={asked_for}, but on {product}: {reasons}; unset it, or set NVFP4_GEMM=emulated"
            )
        else:
            choice.taken[product] = "emulated"
            cost = f": {emulated:.2f} ms instead of {bf16:.2f} in BF16" if emulated and bf16 else ""
            choice.notes.append(f"WARNING: {product} runs emulated, slower than BF16{cost} ({reasons})")
    if stored and stored["gpu"] != gpu:
        choice.notes.append(f"note: the run had {stored['gpu']} and has {gpu}: GEMMs are chosen anew, bits change")
    elif stored:
        _keep(choice, {ProductShape(*product): name for *product, name in stored["gemms"]}, asked_for)
    return choice


def _keep(choice: Choice, stored: dict[ProductShape, str], asked_for: str) -> None:
    """Replaces the new choice by the choice before, wherever that one still works."""
    for product in choice.count:
        chosen = choice.taken.get(product)
        name = stored.get(product, chosen)
        problem = choice.results.get((name, product), (None, ""))[1]
        if name == chosen:
            continue
        if problem and "out of memory" not in problem or asked_for not in ("auto", name):
            why = problem or f"NVFP4_GEMM={asked_for}"
            choice.notes.append(f"WARNING: {product} was made by {name} so far, by {chosen} from here on ({why})")
        else:
            choice.taken[product] = name


def use(model: nn.Module, libraries: dispatch.Libraries) -> None:
    """Gives all layers of the model these libraries for their FP4 products."""
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer.libraries = libraries


def products_of(model: nn.Module, rows: int, seq_len: int, dtype: torch.dtype | None) -> Counter[ProductShape]:
    """Returns how often a micro-batch computes each product that FP4 tensor cores could compute.

    To save memory, only passes of one and of two rows are recorded. A size that differs between them grows in
    proportion to the number of rows.
    """
    passes = []
    for size in (1, 2):
        recording = dispatch.RecordingLibraries()
        use(model, recording)
        try:
            with torch.compiler.set_stance("force_eager"):
                try_micro_batch(model, size, seq_len, dtype)
        finally:
            use(model, dispatch.FIRST_RIGHT)
        passes.append(recording.products)
    model.zero_grad(set_to_none=True)
    if len(passes[0]) != len(passes[1]):  # The tokens decide what is computed, so the two passes cannot be compared.
        return Counter()
    sizes = [
        [a + (rows - 1) * (b - a) for a, b in zip(one_row[:3], two_rows[:3])] for one_row, two_rows in zip(*passes)
    ]
    return Counter(ProductShape(*mnk, str(one_row[3]).removeprefix("torch.")) for mnk, one_row in zip(sizes, passes[0]))


def from_rank_0(work: Callable[[], Any]) -> Any:
    """Returns the result of work() on all ranks. Only rank 0 computes it. All ranks must call this function
    together. Raises UserError on all ranks if work() raises ValueError.

    Measuring takes minutes if a library is compiled first, and a rank that waits in one collective for longer than the
    process group's timeout is ended. Rank 0 therefore works in a thread, and all ranks meet every MEET_SECONDS.
    """

    def result() -> tuple[Any, str]:
        try:
            return work(), ""
        except ValueError as error:
            return None, one_line(error)

    if not is_ddp_initialized():
        value, problem = result()
    elif dist.get_rank() == 0:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            working = pool.submit(result)
            while not concurrent.futures.wait([working], timeout=MEET_SECONDS).done:
                dist.broadcast_object_list([None], src=0)
        value, problem = working.result()
        dist.broadcast_object_list([(value, problem)], src=0)
    else:
        box: list[Any] = [None]
        while box[0] is None:
            dist.broadcast_object_list(box, src=0)
        value, problem = box[0]
    if problem:
        raise UserError(problem)
    return value


def choose_gemms(
    model: nn.Module, rows: int, seq_len: int, dtype: torch.dtype | None, stored: dict[str, Any] | None
) -> Choice | None:
    """Chooses an implementation for each FP4 product, prints the table, and gives the choice to the model's layers
    on all ranks. Returns the choice, or None if FP4 tensor cores compute nothing.

    `stored` is the Choice.record of the run that is resumed. All ranks must call this function together. Raises
    UserError if NVFP4_GEMM asks for an implementation that does not work here.
    """
    use(model, dispatch.FIRST_RIGHT)
    try:
        if dispatch.native_gemm(model.get_device().type) is None:
            if stored:
                print0(f"note: the run had FP4 GEMMs on {stored['gpu']} and emulates them here: bits change")
            return None
    except ValueError as error:
        raise UserError(one_line(error)) from error
    products = products_of(model, rows, seq_len, dtype)
    gpu, device = torch.cuda.get_device_name(), f"cuda:{torch.cuda.current_device()}"
    choice = from_rank_0(lambda: choose(products, gpu, device, stored) if products else None)
    if choice is not None:
        use(model, dispatch.ChosenLibraries({(*p[:3], p.out_dtype): name for p, name in choice.taken.items()}))
        print0("\n".join(choice.lines()))
    return choice
