"""Beyond the paper, from --results alone: what longer training buys each method, and bits per byte at equal hours.

Losses are those of small runs, and fall with their steps as those of runs of several lengths do. Hours are step_time's
predictions for models of widths where 4 bits pay, trained for as many tokens a parameter. Nothing here was timed.
"""

import itertools
import statistics
from typing import Any

import numpy as np

from lab.predict.machines import MACHINES, Machine
from lab.predict.predicted_time import BATCH, computation, mean_step_ms, micro_batch_of, phases_of
from lab.predict.step_time import Shape, tokens_per_second
from lab.study.long_runs import VALUES, cost_cells, methods_of, outcome, steps_of, stored_runs
from lab.study.reproduce_common import Context, Outcome
from lab.study.statistics import pooled_differences, with_half
from nanochat_fp4.errors import UserError
from nanochat_fp4.evaluation.plots import BASELINE, COLORS

CARDS, DEPTHS = ("rtxpro4000", "rtx5090", "b200"), (20, 26, 32)
RATIO = 11.6  # tokens of a run for each parameter of blocks and head, as in d6's runs
METHODS = ("bf16", "fp8", "clover", "clover_feedback_late")
SHOWN = ("bf16", "fp8", "fp8_tuned", "clover", "clover_feedback_late")  # FP8's losses, twice


def method_ms(method: str, depth: int, machine: Machine, band: str) -> float:
    """Predicted milliseconds of a mean step of a run; the band is that of 4 bits, for FP8 it is turned round."""
    if method == "fp8_tuned":
        speeds = tokens_per_second(Shape(depth), method, machine, micro_batch=micro_batch_of(machine))
        return BATCH * 1e3 / speeds[{"best": "worst", "worst": "best"}.get(band, "")]
    ms = mean_step_ms(phases_of({"method": method}), depth, machine, band)
    assert ms is not None  # METHODS are all predicted
    return ms


def common_bpb(runs: list[dict]) -> dict[str, dict[str, float]]:
    """forward -> method -> mean BPB of its runs of bf16's length, over the seeds that all METHODS have.

    FP8's losses are "fp8_tuned"'s, too. Raises UserError where a method is missing.
    """
    of = {m: {r["seed"]: r for r in runs if r["method"] == m and r["steps"] == steps_of(runs)} for m in METHODS}
    seeds = set.intersection(*map(set, of.values()))
    if not seeds:
        missing = [m for m in METHODS if not of[m]]
        problem = f"no run of {missing[0]} of bf16's length" if missing else f"no seed of all of {', '.join(METHODS)}"
        raise UserError(f"--results has {problem}; add its file")
    found = {f: {m: statistics.fmean(of[m][s][v] for s in seeds) for m in METHODS} for f, v in VALUES.items()}
    return {forward: bpb | {"fp8_tuned": bpb["fp8"]} for forward, bpb in found.items()}


def first_of(runs: list[dict], bpb: dict[str, float], value: str) -> str:
    """Who is ahead, and by how much of the next one, with the seeds' interval; the better FP8 of both counts."""
    worse = "fp8_tuned" if bpb["fp8"] <= bpb["fp8_tuned"] else "fp8"
    first, second = sorted(bpb.keys() - {worse}, key=bpb.__getitem__)[:2]
    trained = [name.removesuffix("_tuned") for name in (first, second)]
    half = pooled_differences(runs, runs[0]["size"], trained[1], value=value)[trained[0]].half
    return f"{first} by {with_half(100 * (bpb[second] / bpb[first] - 1), half, 2)}% of {second}"


def equal_time(context: Context) -> Outcome:
    runs, content = stored_runs(context)
    bpb_of, exponents = common_bpb(runs), {forward: exponent(runs, value)[0] for forward, value in VALUES.items()}
    rows, numbers, panels = [], [], []
    depths = DEPTHS[:1] if context.quick else DEPTHS
    for card, depth in itertools.product(CARDS, depths):
        machine, shape = MACHINES[card], Shape(depth)
        steps = RATIO * (shape.block_weights + shape.head_weights) / BATCH
        hours: dict[str, dict[str, float]] = {}
        for band in ("", "best", "worst"):
            ms = {m: method_ms(m, depth, machine, band if m in SHOWN[2:] else "") for m in SHOWN}
            hours[band] = {m: steps * ms[m] / 3.6e6 for m in SHOWN}
        panels.append((f"{machine.name}, d{depth}", hours[""]))
        budget = min(hours[""].values())
        record = {"machine": machine.name, "depth": depth, "hours": hours, "budget": budget}
        for forward, value in VALUES.items():
            cells, at = [], {band: {} for band in hours}
            for m in SHOWN:
                for band in hours:  # a method trains for budget / hours of its steps
                    at[band][m] = bpb_of[forward][m] * (hours[band][m] / budget) ** exponents[forward]
                low, high = sorted((at["best"][m], at["worst"][m]))
                cells.append(f"{at[''][m]:.4f}" + (f" ({low:.4f} to {high:.4f})" if high - low > 5e-5 else ""))
            ahead = [first_of(runs, at[band], value) for band in ("", "worst")]
            rows.append([machine.name, f"d{depth}", f"{budget:.3g}", forward, *cells, *ahead])
            record["bpb" if forward == "own" else "bpb_bf16"] = at[""]
        numbers.append(record)

    def plot(axes: Any) -> None:
        axes.set_axis_off()
        colors = dict(zip(SHOWN, (BASELINE, *COLORS)))
        for i, (name, hours) in enumerate(panels):
            row, column = divmod(i, len(depths))
            panel = axes.inset_axes((0.06 + 0.325 * column, 0.7 - 0.345 * row, 0.27, 0.24))
            for m in SHOWN:
                for forward, style in (("own", "-"), ("BF16", ":")):
                    shares = np.linspace(0.5, 1, 20)
                    line = bpb_of[forward][m] * shares ** -exponents[forward]
                    panel.plot(hours[m] * shares, line, style, color=colors[m], lw=1)
                    panel.plot(hours[m], line[-1], ".", color=colors[m])
            panel.set_title(name, fontsize=7, pad=2)
            panel.tick_params(labelsize=5, pad=1)
            panel.set_xlabel("hours, predicted", fontsize=5, labelpad=0)
            panel.set_ylabel("validation BPB, d6" if column == 0 else "", fontsize=5)
        for m in SHOWN:
            axes.plot([], [], color=colors[m], marker=".", label=m)
        axes.plot([], [], ":", color=BASELINE, label="the same, evaluated with a BF16 forward")

    title = "At equal time: measured BPB of d6 against predicted hours"
    header = ["GPU", "", "hours", "forward", *SHOWN, "ahead", "ahead, worst case of 4 bits"]
    notes = [
        "forward: each method's own, or the same weights evaluated in BF16",
        "ASSUMPTION: losses of d6, hours of larger models on GPUs that have not run it; gaps may differ with size",
        f"hours: of the fastest method for {RATIO} tokens a parameter; the others get as many steps as fit into it",
        f"BPB ~ steps^-{exponents['own']:.3f} ({exponents['BF16']:.3f} in BF16), of all methods with several lengths",
        "±: 95% of the seeds, with the pooled scatter of a run",
        "brackets: the band of its own instructions and GEMMs, of feedback and of FP8's tuning",
        "worst case of 4 bits: their worst band against the fastest tuned FP8",
    ]
    return outcome(runs, content, title, header, rows, notes, {"bpb": bpb_of, "predictions": numbers}, plot)


def exponent(runs: list[dict], value: str = "val_bpb") -> tuple[float, dict[str, float]]:
    """(b of loss ~ steps^-b of all methods with two lengths or more, the same of each such method).

    A method's runs of one seed have a level of their own. Raises UserError where no method has two lengths.
    """
    groups: dict[tuple, list[dict]] = {}
    for r in runs:
        groups.setdefault((computation(r), r["seed"]), []).append(r)
    groups = {key: of for key, of in groups.items() if len({r["steps"] for r in of}) > 1}
    if not groups:
        raise UserError("--results has no method of two lengths with one seed; add a sweep with --num-iterations")

    def fit(of: list[list[dict]]) -> float:
        logs = [np.log([[r["steps"], r[value]] for r in runs]) for runs in of]
        x, y = np.concatenate([log - log.mean(0) for log in logs]).T
        return -float(x @ y / (x @ x))

    single: dict[str, list[list[dict]]] = {}
    for of in groups.values():
        single.setdefault(min((r["method"] for r in of), key=len), []).append(of)
    return fit(list(groups.values())), {name: fit(of) for name, of in single.items()}


def more_tokens(gap: float, b: float) -> float:
    """By how many percent more tokens a gap in percent is made up for."""
    return 100 * ((1 + gap / 100) ** (1 / b) - 1)


def extra_steps(context: Context) -> Outcome:
    """Runs of other lengths against BF16 of its usual length, and against BF16 given the same steps."""
    runs, content = stored_runs(context)
    usual, (b, single) = steps_of([r for r in runs if r["method"] == "bf16"]), exponent(runs)
    base = {r["seed"]: r for r in runs if r["method"] == "bf16"}
    rows, numbers = [], []
    for method in ["bf16", *methods_of(runs)]:
        mine = [r for r in runs if r["method"] == method and r["seed"] in base]
        steps = mine[0]["steps"]
        longer: dict[str, Any] = {"method": method, "steps": steps / usual}
        cells = [method, f"{100 * (steps / usual - 1):+.1f}%", *cost_cells(mine, method, usual)]
        for name, value in VALUES.items():
            gap = statistics.fmean(100 * (r[value] / base[r["seed"]][value] - 1) for r in mine)
            alike = 100 * ((1 + gap / 100) * (steps / usual) ** b - 1)
            longer[name] = {"gap": gap, "same_steps": alike, "more_tokens": more_tokens(alike, b)}
            cells += [f"{gap:+.2f}", f"{alike:+.2f}", f"{more_tokens(alike, b):+.0f}%"]
        rows.append([*cells, len(mine)])
        numbers.append(longer)
    shown = ", ".join(f"{name} {of:.3f}" for name, of in single.items())
    what = [f"{name}: {w}" for name in VALUES for w in ("gap", "same steps", "tokens")]
    header = ["method", "steps", "GEMM work", "time", *what, "seeds"]
    notes = [
        "gap: over bf16 of its usual length, percent; same steps: over a bf16 with as many steps as the method, whose "
        "loss is bf16's times (steps / usual)^-b, not measured",
        "tokens: by how much longer the method must train than bf16 to be level, by the same b",
        f"b = {b:.3f}, of all methods with several lengths: {shown}",
        "runs of other lengths end on other text, and read more of it",
    ]
    numbers_of = {"exponent": b, "exponents": single, "methods": numbers}
    return outcome(runs, content, "Extra steps, and gaps as tokens", header, rows, notes, numbers_of)
