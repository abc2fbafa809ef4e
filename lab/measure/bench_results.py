"""What bench_train measured so far: kept, written, and shown in tables and plots."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.measure import bench_common as common
from lab.measure.bench_step import Variant
from nanochat_fp4.common import print0
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, is_out_of_memory, one_line
from nanochat_fp4.step_time import Machine


class Results:
    """What was measured so far: a record for each variant of a depth, and those of time by operation."""

    def __init__(self, settings: dict, path: str):
        self.settings, self.path, self.environment = settings, path, environment_info()
        self.records: list[dict] = []
        self.operations: list[dict] = []

    def add(self, depth: int, variant: Variant, **known: object) -> dict:
        """A new record; what is not known yet is None."""
        unknown = (
            "micro_batch", "micro_batches", "micro_batch_ms", "codes_ms", "update_ms", "gram_ms",
            "tokens_per_second", "ratio", "mfu", "peak_bytes", "bytes_per_token", "memory_ratio", "rounds",
            "recompiles", "problem",
        )  # fmt: skip
        record = {"depth": depth, "variant": str(variant), "method": variant.method, "recompute": variant.recompute}
        self.records.append(record | dict.fromkeys(unknown) | known)
        return self.records[-1]

    def write(self) -> Path:
        records = [*self.records, *self.operations]
        return common.write_json("bench_train", self.path, self.settings, records, self.environment)

    @contextmanager
    def attempt(self, record: dict, what: str) -> Iterator[None]:
        """An error inside becomes the record's problem, and is printed and written."""
        gc.collect()  # before, not after: what an error of the last one keeps alive is let go only when it has left
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                record["problem"] = f"{what}: out of memory; lower --micro-batch, --depth or --seq-len"
            elif isinstance(error, UserError | ValueError):
                record["problem"] = f"{what}: {one_line(error)}"
            else:
                traceback.print_exc()
                record["problem"] = f"{what}: {type(error).__name__}: {one_line(error)}"
            print0(f"FAILED d{record['depth']} {record['variant']}, {record['problem']}", flush=True)
            self.write()


def add_ratios(records: list[dict]) -> None:
    """To BF16 that computes nothing twice, where it was measured."""
    base = next((r for r in records if (r["method"], r["recompute"]) == ("bf16", "none")), {})
    for ratio, key in (("ratio", "tokens_per_second"), ("memory_ratio", "bytes_per_token")):
        for r in records:
            r[ratio] = r[key] / base[key] if r[key] and base.get(key) else None


def describe_memory(record: dict) -> str:
    text = f"micro-batch {record['micro_batch']}"
    if record["peak_bytes"]:
        text += f", peak {record['peak_bytes'] / 2**30:.2f} GiB"
    if record["bytes_per_token"]:
        text += f", {record['bytes_per_token'] / 1e6:.3f} MB/token"
    return text


def show(records: list[dict]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    header = ["", "variant", "micro-batch", "tokens/s", "x BF16", "MFU", "peak GiB", "MB/token", "x BF16 "]
    rows = [
        [
            f"d{r['depth']}", r["variant"] + (" FAILED" if r["problem"] else ""), cell(r["micro_batch"], "{}"),
            cell(r["tokens_per_second"], "{:.0f}"), cell(r["ratio"], "{:.2f}"), cell(r["mfu"], "{:.1f}%"),
            cell(r["peak_bytes"] and r["peak_bytes"] / 2**30, "{:.2f}"),
            cell(r["bytes_per_token"] and r["bytes_per_token"] / 1e6, "{:.3f}"), cell(r["memory_ratio"], "{:.2f}"),
        ]
        for r in records
    ]  # fmt: skip
    return common.table(header, rows)


def plot(records: list[dict], hardware: str, target: Path) -> None:
    """Bars: tokens/s, and the largest micro-batch, of each variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"d{r['depth']} {r['variant']}" for r in records]
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.5 + 0.4 * len(records)), sharey=True)
    for axis, key, title in zip(axes, ("tokens_per_second", "micro_batch"), ("tokens/s", "micro-batch, rows")):
        values = [r[key] for r in records]
        bars = axis.barh(labels, values, color=["0.6" if r["method"] == "bf16" else "tab:green" for r in records])
        axis.bar_label(bars, [f"{v:,.0f}" for v in values], padding=3)
        axis.set_xlabel(title)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.suptitle(hardware, fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def show_prediction(machine: Machine, records: list[dict]) -> str:
    gemm = "native NVFP4 GEMM" if machine.fp4 else "emulated: decode to BF16, BF16 GEMM"
    lines = [
        f"PREDICTION for {machine.name}, not a measurement: {gemm}; {machine.source}. Time of a block's linear layers "
        f"over BF16's, {records[0]['tokens']} tokens; everything outside of them left out"
    ]
    widths = list(records[0]["ratios"])
    rows = [[r["method"], *(f"{r['ratios'][w]:.2f}" for w in widths), r["width"] or "none"] for r in records]
    lines.append(common.table(["method", *(f"width {w}" for w in widths), "faster from width"], rows))
    return "\n".join(lines)
