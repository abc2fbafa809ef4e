"""Bandwidth of every quantization kernel, on the bytes it must move, as a share of what a copy reaches.

    python -m lab.measure.bench_quantize
    python -m lab.measure.bench_quantize --rows 16384 --columns 3072 --only clover
    python -m lab.measure.bench_quantize --roofline h200                    # a prediction; needs no GPU

A kernel whose results differ from the reference's is not timed. Tensors are larger than any cache. Most of the
time goes into compiling, minutes if Triton's cache is empty; each row is printed and written as soon as it is there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch

import nanochat_fp4 as nf
from lab.measure import bench_common as common
from lab.predict import step_time
from lab.predict.machines import MACHINES
from lab.predict.step_time import BF16, CODES, Step
from nanochat_fp4.devices import median_ms
from nanochat_fp4.doctor import copy_bandwidth, kernel_problem
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.nvfp4.operands import Quantization, quantize_operand
from nanochat_fp4.nvfp4.quantizers import get_rounding

# Multiples of 16, as what is timed: for other sizes (the doctor's) Triton compiles every kernel once more.
CHECKED_SHAPE = (2048, 2048)
SECOND_KERNEL = "scales: the second kernel of clover"
# Rounding of rows, dtype of the input, whether the values are decoded as well.
ROUNDED = (
    ("rtn", torch.bfloat16, True),
    ("four_over_six", torch.bfloat16, True),
    ("four_over_six", torch.bfloat16, False),
    ("four_over_six", torch.float32, True),
    ("scale_search_3", torch.bfloat16, True),
    ("scale_search_6", torch.bfloat16, True),
    ("rtn_16x16", torch.bfloat16, True),
    ("four_over_six_16x16", torch.bfloat16, True),
    ("sr", torch.bfloat16, True),
    ("sr_four_over_six", torch.bfloat16, True),
)
# Of rotating kernels: (rounding, RHT dimension) of the operand along the rows and along the columns, and whether they
# read codes.
ROTATED = {
    "grad_output clover": (("ms_eden", 128), ("ms_eden", 128), False),
    "grad_output clover_search": (("ms_eden_search", 128), ("ms_eden_search", 128), False),
    "grad_output tetrajet_v2": (("sr", 128), ("sr", 128), False),
    "grad_output nvidia": (("sr", 0), ("sr", 16), False),
    "requantize clover": (None, ("ms_eden", 128), True),
    "requantize clover_search": (None, ("ms_eden_search", 128), True),
    "requantize tetrajet_v2": (None, ("sr", 128), True),
}


@dataclass(frozen=True)
class Kernel:
    """What is timed: its budget, the (rounding, RHT dimension) pairs that must be right first, and how it is set up."""

    steps: list[Step]
    checks: list[tuple[str, int]]
    setup: Callable[[torch.device], Callable[[], object]]


def kernels(rows: int, columns: int) -> dict[str, Kernel]:
    """Every kernel by name, on a tensor (rows, columns)."""
    elements = rows * columns

    def random(device, dtype=torch.bfloat16):
        return torch.randn(rows, columns, device=device, dtype=dtype)

    def amax(device):
        from nvfp4_kernels.quantize import amax

        x = random(device)
        return lambda: amax(x)

    def rounded(rounding: str, dtype: torch.dtype, decode: bool, device):
        from nvfp4_kernels.quantize import amax, quantize

        x = random(device, dtype)
        largest, seed, spec = amax(x), torch.tensor(1, device=device), get_rounding(rounding)
        constants = (spec.grid_max, spec.scale_cap, list(spec.candidates), spec.stochastic, spec.block_rows, decode)
        return lambda: quantize(x, largest, seed, 0, *constants)

    def decode(device):
        from nvfp4_kernels.decode import decode

        t = _codes(random(device))
        return lambda: decode(t.codes, t.scales)

    def rotated(row, col, emulated: bool, from_codes: bool, device):
        from nvfp4_kernels.rotate import rotate_quantize

        x, seed = random(device), torch.tensor(1, device=device)
        t = _codes(x) if from_codes else None
        source = (t.codes, t.scales, t.tensor_scale) if t else (x, None, None)
        made = [_operand(*o, stream, emulated) if o else None for o, stream in ((row, 2), (col, 4))]
        return lambda: rotate_quantize(*source, made[0], seed, seed, made[1], seed, seed)

    def scales(device):
        from nvfp4_kernels.scales import finish

        pseudo = torch.rand(rows, columns // 16, device=device).bfloat16()
        correction = torch.ones(rows, columns // 128, device=device)
        largest = torch.tensor(4.0, device=device).view(torch.int32)
        operand, seed = _operand("ms_eden", 128, 2, False), torch.tensor(1, device=device)
        return lambda: finish(pseudo, correction, largest, seed, operand)

    amax_step = Step("amax", elements * BF16, elements * step_time.AMAX_INSTRUCTIONS)
    result = {"amax": Kernel([amax_step], [("rtn", 0)], amax)}
    for rounding, dtype, decoded in ROUNDED:
        name = f"{rounding} {'fp32' if dtype == torch.float32 else 'bf16'}{' + decode' if decoded else ''}"
        _, step = step_time.quantize_steps(name, elements, dtype.itemsize, get_rounding(rounding), decoded)  # no amax
        result[name] = Kernel([step], [(rounding, 0)], partial(rounded, rounding, dtype, decoded))
    decode_step = Step("decode", elements * (CODES + BF16), elements * step_time.DECODE_INSTRUCTIONS)
    result["decode"] = Kernel([decode_step], [("rtn", 0)], decode)
    for name, (row, col, from_codes) in ROTATED.items():
        checks, source = [o for o in (row, col) if o], CODES if from_codes else BF16
        for emulated in (True, False):
            label = f"{name} -> {'bf16' if emulated else 'codes'}"
            steps = step_time.rotate_steps(label, elements, source, [get_rounding(o[0]) for o in checks], emulated)
            result[label] = Kernel(steps, checks, partial(rotated, row, col, emulated, from_codes))
    scales_bytes, instructions = elements * (step_time.PSEUDO + 1 / 16), elements / 16 * step_time.FINISH_INSTRUCTIONS
    result[SECOND_KERNEL] = Kernel([Step("scales", scales_bytes, instructions)], [("ms_eden", 128)], scales)
    return result


def _codes(x: torch.Tensor):
    return quantize_operand(x, Quantization(get_rounding("four_over_six")), keep_codes=True)


def _operand(rounding: str, rht_dim: int, stream: int, emulated: bool):
    from nvfp4_kernels.rotate import Operand

    spec = get_rounding(rounding)
    limits = (spec.grid_max, spec.scale_cap, spec.candidates)
    return Operand(*limits, spec.stochastic, spec.ms_eden, rht_dim, stream, stream, emulated)


def measure(chosen: dict[str, Kernel], device: torch.device, problems: list[str]) -> Iterator[tuple[str, float]]:
    """(name, milliseconds) of each kernel whose checks agree; the others go to `problems`."""
    verdict = cache(lambda rounding, rht_dim: kernel_problem(device, get_rounding(rounding), rht_dim, CHECKED_SHAPE))
    for name, kernel in chosen.items():
        if wrong := next(filter(None, (verdict(*check) for check in kernel.checks)), None):
            problems.append(f"{name} ({wrong})")
            continue
        yield name, median_ms(kernel.setup(device))
        torch.cuda.empty_cache()


def second_kernel_share(records: list[dict]) -> float | None:
    """Time of the scales-only kernels of clover's grad_output over that of the kernel before them; None if not timed.

    The kernel that makes codes is timed with one second kernel for each of its two operands."""
    ms = {r["kernel"]: r["ms"] for r in records}
    second, both = ms.get(SECOND_KERNEL), ms.get("grad_output clover -> codes")
    return 2 * second / (both - 2 * second) if second and both else None


def main(argv: list[str] | None = None) -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=16384, help="rows of the tensor, a multiple of 128")
    parser.add_argument("--columns", type=int, default=9216, help="columns of the tensor, a multiple of 128")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    args = parser.parse_args(argv)
    if min(args.rows, args.columns) < 128 or args.rows % 128 or args.columns % 128:
        raise UserError(f"--rows {args.rows} --columns {args.columns}: expected multiples of 128")
    chosen = {name: k for name, k in kernels(args.rows, args.columns).items() if args.only in name}
    if not chosen:
        raise UserError(f"--only {args.only!r} matches none of: {', '.join(kernels(128, 128))}")

    settings, width = {"rows": args.rows, "columns": args.columns}, max(map(len, chosen))
    results = common.Results("bench_quantize", args.json, settings, MACHINES.get(args.roofline))
    problems: list[str] = []
    if machine := results.machine:
        print(results.header(gemm=False))
        copy = machine.bandwidth
        times = ((name, sum(step_time.predicted_ms(s, machine) for s in k.steps)) for name, k in chosen.items())
    else:
        device = common.need_cuda("bench_quantize")
        copy = settings["copy_gb_per_s"] = copy_bandwidth(device)
        print(f"{torch.cuda.get_device_name()}; {nf.backend()}; copy {copy:.0f} GB/s")
        times = measure(chosen, device, problems)
    print(f"{f'{args.rows} x {args.columns}':{width}}  {'MB':>9}  {'ms':>7}  {'GB/s':>6}  {'of copy':>7}", flush=True)
    for name, ms in times:
        num_bytes = sum(s.num_bytes for s in chosen[name].steps)
        rate = num_bytes / ms / 1e6
        print(f"{name:{width}}  {num_bytes / 1e6:9.3f}  {ms:7.3f}  {rate:6.0f}  {rate / copy:7.0%}", flush=True)
        record = {"kernel": name, "bytes": num_bytes, "ms": ms, "gb_per_s": rate, "share_of_copy": rate / copy}
        results.records.append(record)
        settings["second_kernel_share"] = second_kernel_share(results.records)
        results.write()
    if (share := settings.get("second_kernel_share")) is not None:
        print(f"second kernel of post hoc alignment: {share:.1%} of the first, for both operands of grad_output")
    results.finish(problems)


if __name__ == "__main__":
    run_main(main)
