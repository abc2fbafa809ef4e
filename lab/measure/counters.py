"""
Hardware counters of the kernels of lab.measure.bench_quantize, by ncu: what a kernel moves and what it waits for.

    python -m lab.measure.counters                                      # five of them, 16384 x 9216
    python -m lab.measure.counters "grad_output clover -> bf16" amax    # by name
    python -m lab.measure.counters --read FOLDER/*.csv                  # what was measured before; no GPU

ncu replays a launch some 15 times, at the clock that the GPU happens to have; the time of a kernel is bench_quantize's
business. ncu is looked for in PATH and where CUDA's installers put it.
"""

import argparse
import csv
import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from lab.measure import bench_quantize
from nanochat_fp4.common import get_base_dir
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, run_main

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = (
    "grad_output clover -> bf16", "grad_output clover -> codes", "requantize clover -> bf16",
    "four_over_six bf16 + decode", "amax",
)  # fmt: skip
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
COUNTERS = {  # of one launch: (metric, factor, format)
    "us": ("gpu__time_duration.sum", 1, "{:.1f}"),
    "read MB": ("dram__bytes_read.sum", 1e-6, "{:.1f}"),
    "written MB": ("dram__bytes_write.sum", 1e-6, "{:.1f}"),
    "DRAM %": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1, "{:.0f}"),
    "issue %": ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1, "{:.0f}"),
    "occupancy %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1, "{:.0f}"),
    "registers": ("launch__registers_per_thread", 1, "{:.0f}"),
    "blocks": ("launch__grid_size", 1, "{:.0f}"),
    "threads": ("launch__block_size", 1, "{:.0f}"),
    "warp instructions M": ("smsp__inst_executed.sum", 1e-6, "{:.1f}"),
    "local loads M": ("smsp__inst_executed_op_local_ld.sum", 1e-6, "{:.2f}"),
    "local stores M": ("smsp__inst_executed_op_local_st.sum", 1e-6, "{:.2f}"),
    "bank conflicts M": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", 1e-6, "{:.2f}"),
}
GROUPS = {  # (metric, its members, factor, format): the largest are shown
    "stalls, warps an issue": (
        "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio",
        "long_scoreboard short_scoreboard barrier math_pipe_throttle mio_throttle wait lg_throttle not_selected "
        "selected no_instruction dispatch_stall branch_resolving membar drain tex_throttle sleeping imc_miss misc",
        1, "{:.2f}",
    ),
    "pipes, % of peak": (
        "sm__inst_executed_pipe_{}.avg.pct_of_peak_sustained_active",
        "alu fma fmaheavy fmalite fp16 lsu xu uniform cbu adu tensor",
        1, "{:.0f}",
    ),
    "thread instructions, M": (
        "smsp__sass_thread_inst_executed_op_{}_pred_on.sum",
        "integer fp32 fp16 conversion bit control memory inter_thread_communication uniform",
        1e-6, "{:.0f}",
    ),
}  # fmt: skip
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def metrics() -> str:
    grouped = [name.format(member) for name, members, *_ in GROUPS.values() for member in members.split()]
    return ",".join([name for name, *_ in COUNTERS.values()] + grouped)


def launch(label: str, rows: int, columns: int) -> None:
    """Runs a kernel, the last time inside the profiler's range."""
    function = bench_quantize.kernels(rows, columns)[label].setup(torch.device("cuda"))
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    function()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def find_ncu() -> str:
    """Raises UserError."""
    found = shutil.which("ncu") or next((p for place in PLACES for p in sorted(glob.glob(place), reverse=True)), None)
    if not found:
        raise UserError("ncu (Nsight Compute) is neither in PATH nor in " + " nor ".join(PLACES))
    return found


def read(text: str) -> list[dict[str, str | dict[str, float]]]:
    """The launches in what `ncu --csv --page raw` printed: {kernel, counters: {metric: value, in us or bytes}}."""
    lines = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    if len(lines) < 2:
        return []
    units, launches = lines[0], []
    for line in lines[1:]:
        counters = {}
        for name, value in line.items():
            number = re.match(r"[\d,.]+", value or "")
            if number and re.fullmatch(r"[\d,]*\.?\d+", number[0]):
                counters[name] = float(number[0].replace(",", "")) * UNITS.get(units[name], 1.0)
        launches.append({"kernel": line["Kernel Name"], "counters": counters})
    return launches


def show(launches: list[dict]) -> str:
    lines = []
    for found in launches:
        have = found["counters"]
        cells = [f"{n} {form.format(have[m] * factor)}" for n, (m, factor, form) in COUNTERS.items() if m in have]
        lines += [f"  {found['kernel'][:60]}", f"    {'; '.join(cells)}"]
        for title, (name, members, factor, form) in GROUPS.items():
            values = {m: have[name.format(m)] * factor for m in members.split() if have.get(name.format(m))}
            largest = sorted(values, key=values.get, reverse=True)[:8]
            if largest:
                lines.append(f"    {title}: " + ", ".join(f"{m} {form.format(values[m])}" for m in largest))
    return "\n".join(lines) or "  nothing was profiled"


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="names in bench_quantize")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=9216)
    parser.add_argument("--out", type=Path, help="folder for ncu's CSVs (default: counters/ in the base directory)")
    parser.add_argument("--read", nargs="+", type=Path, metavar="CSV", help="show these instead")
    parser.add_argument("--launch", help=argparse.SUPPRESS)  # what ncu is given to run
    args = parser.parse_args(argv)
    if args.launch:
        return launch(args.launch, args.rows, args.columns)
    if args.read:
        for path in args.read:
            print(f"{path.name}\n{show(read(path.read_text(errors='replace')))}")
        return

    known = bench_quantize.kernels(128, 128)
    unknown = [k for k in args.kernels if k not in known]
    if unknown:
        raise UserError(f"there is no kernel {unknown[0]!r}; there are: {', '.join(known)}")
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device whose counters could be read; --read shows what was measured before")
    command = [find_ncu(), "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += [
        "--metrics",
        metrics(),
        sys.executable,
        "-m",
        "lab.measure.counters",
        f"--rows={args.rows}",
        f"--columns={args.columns}",
    ]
    out = (args.out or Path(get_base_dir()) / "counters").absolute()
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    failed = []
    for label in args.kernels or DEFAULT:
        done = subprocess.run([*command, "--launch", label], cwd=ROOT, env=environment, capture_output=True, text=True)
        (out / f"{re.sub(r'[^a-z0-9_]+', '_', label)}.csv").write_text(done.stdout)
        launches = read(done.stdout)
        print(f"{label}\n{show(launches)}", flush=True)
        if done.returncode or not launches:
            failed.append(f"{label} ({' '.join((done.stderr or done.stdout).split())[-300:]})")
    if failed:
        raise UserError(f"not measured: {'; '.join(failed)}")


if __name__ == "__main__":
    run_main(main)
