"""The leaderboard: after how many training tokens a run first has a stated loss on its validation text."""

import statistics
from collections.abc import Sequence

from lab import runs as kept_runs
from lab.study.reproduce_common import Context, Outcome
from nanochat_fp4.errors import UserError

# Studies that were validated often along the run, and the bits per byte that are to be reached.
TARGETS = {"d6_stored": 1.27, "d2_embedded": 2.6}


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """The step at which the loss of a curve of (step, loss, ...) first is `target`; None if it never is.

    Between two validations it is interpolated.
    """
    for i, (step, loss, *_) in enumerate(curve):
        if loss <= target:
            before, higher = curve[i - 1][:2] if i else (step, loss)
            return step if higher == loss else before + (step - before) * (higher - target) / (higher - loss)
    return None


def leaderboard(context: Context) -> Outcome:
    """A row for each method of --results, the fewest tokens over BF16's of the same seed first.

    Runs have one text, tokenizer and size, and were trained from their first step. Raises UserError.
    """
    group = context.args.results or next(iter(TARGETS))
    if group not in TARGETS:
        raise UserError(
            f"--results={group}: the leaderboard has {', '.join(TARGETS)}; other studies validate too rarely"
        )
    target, tokens = TARGETS[group], {}
    contents = [kept_runs.stored(name) for name in kept_runs.names_of(group)]
    runs = [r for content in contents for r in content["results"]]
    for r in runs:
        step = reached(r["curve"], target)
        if step is not None and not any(flag.startswith("--branch-from") for flag in r["flags"]):
            tokens.setdefault(r["method"], {})[r["seed"]] = round(step * r["tokens"] / r["steps"])
    seeds = sorted({seed for of in tokens.values() for seed in of})
    over = {m: statistics.fmean(n / tokens["bf16"][seed] for seed, n in of.items()) for m, of in tokens.items()}
    rows = []
    for method in sorted(over, key=over.__getitem__):
        cells = [f"{tokens[method][seed]:,}" if seed in tokens[method] else "-" for seed in seeds]
        rows.append([method, f"{over[method]:.4f}", *cells])
    first = runs[0]
    title = f"Leaderboard: training tokens to {target:g} bits per byte, own forward"
    where = (
        f"{first['size']}, {first['num_params']:,} parameters, data {contents[0]['data']}, {first['vocab_size']} tokens"
    )
    header = ["method", "over bf16", *(f"seed {seed}" for seed in seeds)]
    notes = ["over bf16: the mean over the seeds of both, of the tokens over bf16's", "runs from scratch alone"]
    return Outcome(title, header, rows, notes, {"tokens": tokens}, None, where, contents[0]["environment"])
