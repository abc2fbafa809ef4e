"""Table 2: traffic of range alignment, as lab.measure.traffic counts it."""

from lab.measure import traffic
from lab.study.reproduce_common import Context, Outcome

# (bits read, bits written, mma.m16n8k16 per group) of each kernel; the paper's Table 2.
TABLE_2 = {"naive": ("4.5 + 4.5", "0 + 4.5", 2), "post hoc": ("4.5 + 1", "5 + 0.5", 1)}


def table2(context: Context) -> Outcome:
    counted = context.piece("table2", {"rows": traffic.ROWS, "columns": traffic.COLUMNS}, traffic.measure)
    rows, totals = [], {}
    for alignment, launches in counted.items():
        kernels = [
            (traffic.of_operand(launch["read"]), traffic.of_operand(launch["written"]), launch["rotations"])
            for launch in launches
        ]
        kernels = [k for k in kernels if k[0] + k[1] > 0]
        read, written, rotations = zip(*kernels)
        paper_read, paper_written, paper_rotations = TABLE_2[alignment]
        totals[alignment] = sum(read) + sum(written)
        rows += [
            [alignment, "bits read per element", paper_read, " + ".join(f"{v:g}" for v in read)],
            [alignment, "bits written per element", paper_written, " + ".join(f"{v:g}" for v in written)],
            [alignment, "rotations per element", paper_rotations, f"{sum(rotations):g}"],
        ]
    saving = 1 - totals["post hoc"] / totals["naive"]
    rows.append(["saving", "of all traffic", "about 20%", f"{100 * saving:.1f}%"])
    notes = [
        "counted while the kernels run in Triton's interpreter; a rotation is what the paper counts as one "
        "mma.m16n8k16 per group of 16 values",
        "0.25 bits more than the paper's in each post hoc kernel: EDEN's S, an FP32 number for 128 values, is written "
        "by the first kernel and read by the second",
    ]

    def plot(axes) -> None:
        kinds = ("read", "written")
        for i, alignment in enumerate(counted):
            bottom = 0.0
            for j, kind in enumerate(kinds):
                bits = sum(traffic.of_operand(launch[kind]) for launch in counted[alignment])
                axes.bar(i, bits, 0.5, bottom=bottom, color=f"C{j}", label=kind if i == 0 else None)
                bottom += bits
        axes.set_xticks(range(len(counted)), list(counted))
        axes.set_ylabel("bits moved per element")

    title = "Table 2: memory traffic and rotations of MS-EDEN requantization"
    numbers = {"launches": counted, "bits": totals, "saving": saving}
    return Outcome(title, ["alignment", "what", "paper", "here"], rows, notes, numbers, plot, "exact counts")
