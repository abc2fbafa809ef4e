"""Beyond the paper: what longer training buys each method, and gaps as tokens. From --results alone."""

import statistics
from typing import Any

import numpy as np

from lab.predict.predicted_time import computation
from lab.study.long_runs import VALUES, cost_cells, measured_on, methods_of, steps_of, stored_runs
from lab.study.reproduce_common import Context, Outcome
from nanochat_fp4.errors import UserError


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
        x, y = (
            np.concatenate([v - v.mean() for v in (np.log([r[name] for r in runs]) for runs in of)])
            for name in ("steps", value)
        )
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
        cells = [method, f"{100 * (steps / usual - 1):+.1f}%", *cost_cells(mine[0], usual)]
        for name, value in VALUES.items():
            gap = statistics.fmean(100 * (r[value] / base[r["seed"]][value] - 1) for r in mine)
            alike = 100 * ((1 + gap / 100) * (steps / usual) ** b - 1)
            longer[name] = {"gap": gap, "same_steps": alike, "more_tokens": more_tokens(alike, b)}
            cells += [f"{gap:+.2f}", f"{alike:+.2f}", f"{more_tokens(alike, b):+.0f}%"]
        rows.append([*cells, len(mine)])
        numbers.append(longer)
    shown = ", ".join(f"{name} {of:.3f}" for name, of in single.items())
    what = ("gap", "same steps", "tokens")
    return Outcome(
        "Extra steps, and gaps as tokens",
        ["method", "steps", "GEMM work", "time", *[f"{name}: {w}" for name in VALUES for w in what], "seeds"],
        rows,
        [
            "gap: over bf16 of its usual length, percent; same steps: over a bf16 with as many steps as the method, "
            "whose loss is bf16's times (steps / usual)^-b, not measured",
            "tokens: by how much longer the method must train than bf16 to be level, by the same b",
            f"b = {b:.3f}, of all methods with several lengths: {shown}",
            "runs of other lengths end on other text, and read more of it",
        ],
        {"exponent": b, "exponents": single, "methods": numbers},
        None,
        measured_on(runs, content),
        content["environment"],
    )
