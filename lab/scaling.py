"""Answers whether training in 4 bits is like training with fewer parameters, or like training on fewer tokens.

    python -m lab.reproduce effective --results paper        # the paper's 21 runs, lab/results/paper_runs.json
    python -m lab.reproduce effective --results 'ladder_*'   # studies of lab.runs, of several N and D

A law of the losses of BF16's runs is fitted. N is the number of parameters of the blocks, and D the number of tokens:

    L(N, D) = E + (A N^-a + B D^-b)^c      Quartet's law (arXiv 2505.14669)

The exponent c is fitted, or fixed at 1 (Chinchilla's law). A method's gap is its loss over BF16's at the same N, D and
seed. The effective parameters of a method are the share e of N for which L(e N, D) / L(N, D) is the method's gap. The
effective tokens are the corresponding share of D. The rms residual, in percentage points of gap, says which of the two
describes a method better.

If sizes and lengths have several seeds, a share has an interval. DRAWS sets of seeds are drawn with replacement, a law
is fitted to each, and 95% of the shares lie in the interval. Each run of a sweep counts twice: with its own forward,
and evaluated in BF16.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab import RESULTS
from lab import runs as kept_runs
from lab import statistics as stats
from lab.study.sweep_runs import flag_values
from nanochat_fp4.cli import UserError
from nanochat_fp4.models.gpt import config_from_depth

PAPER_RUNS = RESULTS / "paper_runs.json"
BASE_PARAMETERS, BASE_TOKENS, BASE_RATIO = 1e8, 1e9, 20.0  # The units of the fits.
SIZES, LENGTHS = 3, 3  # A law needs at least so many, because fewer leave its exponents open.
SHOWN_RATIOS = (12, 25, 50, 100, 200, 400)  # Tokens per parameter.
DRAWS = 100
Table = tuple[list[str], list[list]]  # A header and rows.
OF_TWO_LENGTHS = "d6_longer"  # The study whose exponent is taken for runs of one length.
IN_BF16 = ", BF16 forward"  # The name of a method that is evaluated in BF16 ends so.


@dataclass(frozen=True)
class Run:
    """The final loss of one training run, in any unit. The method "bf16" is the baseline."""

    parameters: float
    tokens: float
    method: str
    loss: float
    seed: int = 0


@dataclass(frozen=True)
class Law:
    """The constants E, A, a, B, b, c of L(N, D) and the rms residual in percent. Units: N in 1e8, D in 1e9."""

    constants: tuple[float, ...]
    rms: float

    def loss(self, parameters: float | np.ndarray, tokens: float | np.ndarray) -> float | np.ndarray:
        """Returns the loss L(N, D) of the law."""
        floor, of_n, alpha, of_d, beta, outer = self.constants
        n, d = parameters / BASE_PARAMETERS, tokens / BASE_TOKENS
        return floor + (of_n * n**-alpha + of_d * d**-beta) ** outer


@dataclass(frozen=True)
class Share:
    """The share of N or D that a method keeps, the rms residual of its mean gaps in percentage points, and the number
    of runs."""

    share: float
    rms: float
    runs: int


def least_squares(residual: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> np.ndarray:
    """Returns the arguments near `start` that minimize the sum of squared residuals (Levenberg and Marquardt)."""
    x, damping = np.array(start, dtype=float), 1e-2
    now = residual(x)
    for _ in range(3000):
        columns = [(residual(x + step) - residual(x - step)) / 2e-5 for step in 1e-5 * np.eye(len(x))]
        jacobian = np.stack(columns, axis=1)
        curvature = jacobian.T @ jacobian
        curvature += damping * np.diag(np.diag(curvature) + 1e-12)
        step = np.clip(np.linalg.solve(curvature, -jacobian.T @ now), -0.5, 0.5)
        then = residual(x + step)
        if then @ then < now @ now:
            small = now @ now - then @ then < 1e-12 * (now @ now)
            x, now, damping = x + step, then, damping / 3
            if small:
                break
        else:
            damping *= 3
            if damping > 1e12:
                break
    return x


def fit_law(runs: Sequence[Run], outer: bool = True) -> Law:
    """Fits the law to BF16's runs, with c fitted (outer) or fixed at 1. Raises UserError if there are too few runs."""
    mine = [r for r in runs if r.method == "bf16"]
    if problem := too_few(mine):
        raise UserError(problem)
    n, d, loss = (np.array([getattr(r, name) for r in mine]) for name in ("parameters", "tokens", "loss"))

    def constants(x: np.ndarray) -> tuple[float, ...]:
        return tuple(float(v) for v in np.exp(x)) + (() if outer else (1.0,))

    def residual(x: np.ndarray) -> np.ndarray:
        return np.log(Law(constants(x), 0.0).loss(n, d) / loss)

    lowest, rest = 0.3 * loss.min(), 0.35 * loss.min()
    start = np.log([lowest, rest, 0.3, rest, 0.4, 1.0])
    x = least_squares(residual, start if outer else start[:-1])
    return Law(constants(x), 100 * float(np.sqrt(np.mean(residual(x) ** 2))))


def too_few(runs: Sequence[Run]) -> str:
    """Returns the reason why BF16's runs are too few for a law, in one line, or "" if they suffice."""
    sizes, lengths = sorted({r.parameters for r in runs}), {r.tokens for r in runs}
    if len(sizes) >= SIZES and len(lengths) >= LENGTHS and len(runs) > 6:
        return ""
    of = f"one size (N = {sizes[0]:,.0f})" if len(sizes) == 1 else f"{len(sizes)} sizes"
    return (
        f"no effective parameters: bf16 has {len(runs)} runs of {of} and {len(lengths)} lengths; a law L(N, D) takes 7 "
        f"runs of at least {SIZES} sizes and {LENGTHS} lengths; train more with lab.study.sweep --sizes"
    )


def pairs(runs: Sequence[Run], method: str) -> list[tuple[float, float, list[float]]]:
    """Returns a method's gaps as a list of (N, D, gaps to bf16 in percent). There is a gap for each seed that both
    have."""
    losses: dict[tuple, dict[str, float]] = {}
    for r in runs:
        losses.setdefault((r.parameters, r.tokens, r.seed), {})[r.method] = r.loss
    found: dict[tuple, list[float]] = {}
    for (n, d, _), of in losses.items():
        if method in of and "bf16" in of:
            found.setdefault((n, d), []).append(100 * (of[method] / of["bf16"] - 1))
    return [(n, d, gaps) for (n, d), gaps in found.items()]


def effective(law: Law, runs: Sequence[Run], method: str, of: str = "parameters") -> Share:
    """Returns the share of "parameters" or "tokens" for which the law's gaps are the method's. Raises UserError if the
    method has no gap."""
    found = pairs(runs, method)
    if not found:
        raise UserError(f"{method} has no run with bf16's N, D and seed; give runs of both")

    n, d, gap, seeds = (np.array(v) for v in zip(*[(n, d, np.mean(gaps), len(gaps)) for n, d, gaps in found]))

    def points(log_share: np.ndarray) -> np.ndarray:
        share = math.exp(log_share[0])
        less = law.loss(n * share, d) if of == "parameters" else law.loss(n, d * share)
        return 100 * (less / law.loss(n, d) - 1) - gap

    x = least_squares(lambda log_share: np.sqrt(seeds) * points(log_share), [-0.3])
    return Share(math.exp(x[0]), float(np.sqrt(np.mean(points(x) ** 2))), int(np.sum(seeds)))


def constant_gap(runs: Sequence[Run], method: str) -> tuple[float, float]:
    """Describes a method by a single gap for all N and D. Returns (this gap in percent, the rms residual of the mean
    gaps in percentage points). Each mean gap is weighted by its number of seeds."""
    gap, seeds = zip(*[(np.mean(gaps), len(gaps)) for _, _, gaps in pairs(runs, method)])
    mean = float(np.average(gap, weights=seeds))
    return mean, float(np.sqrt(np.mean((np.array(gap) - mean) ** 2)))


def exponent_of_tokens(law: Law, parameters: float, tokens: float) -> float:
    """Returns the local exponent b of L ~ D^-b at this size and length."""
    more, less = (law.loss(parameters, tokens * factor) for factor in (1.001, 1 / 1.001))
    return -float(np.log(more / less)) / (2 * math.log(1.001))


def exponent(runs: list[dict], value: str = "val_bpb") -> tuple[float, dict[str, float]]:
    """Fits loss ~ steps^-b. Returns (b of all methods that have several lengths, b of each such method).

    The runs of each method and seed have a level of their own. Raises UserError if no method has two lengths.
    """
    groups: dict[tuple, list[dict]] = {}
    for r in runs:
        groups.setdefault((r.get("computed") or r["method"], r["seed"]), []).append(r)
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


def resampled(runs: Sequence[Run], random: np.random.Generator) -> list[Run]:
    """Draws, for each N and D, as many seeds as bf16 has, with replacement. Returns all runs of the drawn seeds."""
    cells: dict[tuple, dict[int, list[Run]]] = {}
    for r in runs:
        cells.setdefault((r.parameters, r.tokens), {}).setdefault(r.seed, []).append(r)
    drawn = []
    for seeds in cells.values():
        known = [seed for seed, of in seeds.items() if any(r.method == "bf16" for r in of)]
        for i, seed in enumerate(random.choice(known, len(known)) if known else ()):
            drawn += [replace(r, seed=i) for r in seeds[seed]]
    return drawn


def intervals(runs: Sequence[Run], methods: Sequence[str], outer: bool) -> dict[tuple[str, str], str]:
    """Returns the interval of each share as text: (method, "parameters" or "tokens") -> " (low to high)". It holds 95%
    of the resampled shares. With a single seed the text is ""."""
    kinds = [(m, of) for m in methods for of in ("parameters", "tokens")]
    if len({r.seed for r in runs}) < 2:
        return dict.fromkeys(kinds, "")
    random, shares = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = resampled(runs, random)
        if not all(pairs(drawn, m) for m in methods):
            continue
        law = fit_law(drawn, outer)
        shares.append([effective(law, drawn, *kind).share for kind in kinds])
    return {kind: " ({:.2f} to {:.2f})".format(*np.percentile(v, [2.5, 97.5])) for kind, v in zip(kinds, zip(*shares))}


def reference(runs: Sequence[Run]) -> float:
    """Returns the size at which a trend's level is stated: 100M if the runs are on both sides of it, otherwise the
    largest N."""
    sizes = [r.parameters for r in runs]
    return BASE_PARAMETERS if min(sizes) <= BASE_PARAMETERS <= max(sizes) else max(sizes)


def trend(runs: Sequence[Run], method: str) -> dict[str, tuple[float, float]]:
    """Fits ln gap = ln level + size ln(N / reference) + ratio ln(D / N / 20) to the mean gaps, by least squares.

    Returns "level" (a gap in percent), "size" and "ratio", each with half of its 95% interval. Raises UserError for
    fewer than four gaps, for gaps that are not positive, and for gaps of a single size or length.
    """
    found = [(n, d, float(np.mean(gaps))) for n, d, gaps in pairs(runs, method)]
    if len(found) < 4 or min(g for _, _, g in found) <= 0:
        raise UserError(f"{method} has {len(found)} gaps to bf16; a trend takes at least four, all above zero")
    size = reference(runs)
    sizes = [math.log(n / size) for n, _, _ in found]
    ratios = [math.log(d / n / BASE_RATIO) for n, d, _ in found]
    design, y = np.stack([np.ones(len(found)), sizes, ratios], axis=1), np.log([g for _, _, g in found])
    fit, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if rank < 3:
        raise UserError(f"{method} has gaps of one size, or of one length; a trend takes several of both")
    freedom = len(y) - 3
    variance = float(np.sum((y - design @ fit) ** 2)) / freedom * np.diag(np.linalg.inv(design.T @ design))
    halves = stats.t95(freedom) * np.sqrt(variance)
    level = math.exp(fit[0])
    return {
        "level": (level, level * float(halves[0])),
        "size": (float(fit[1]), float(halves[1])),
        "ratio": (float(fit[2]), float(halves[2])),
    }


def more_steps(law: Law, share: float, parameters: float, tokens: float) -> float:
    """Returns the factor by which a model with `share` of its parameters must train longer to reach the loss of the
    whole model. The factor is infinite if no length is enough.
    """
    goal = law.loss(parameters, tokens)
    low, high = 1.0, 1e12
    if law.loss(share * parameters, high * tokens) > goal:
        return math.inf
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if law.loss(share * parameters, middle * tokens) > goal else (low, middle)
    return high


def runs_of(result: dict) -> list[Run]:
    """Converts a run of lab.study.sweep. Returns a Run with its bits per byte by its own forward and, unless it is a
    run of bf16, another one with those in BF16."""
    parameters = result["num_params"]  # For a Llama this is the number of parameters of the blocks.
    flags = flag_values(result["flags"])
    if "depth" in flags:
        shape = (int(flags.get(name, usual)) for name, usual in (("head-dim", 128), ("aspect-ratio", 64)))
        config = config_from_depth(int(flags["depth"]), 1, 1, *shape)
        parameters = 12 * config.n_layer * config.n_embd**2
    runs = [Run(parameters, result["tokens"], result["method"], result["val_bpb"], result["seed"])]
    if result["method"] != "bf16":
        runs += [replace(runs[0], method=result["method"] + IN_BF16, loss=result["val_bpb_bf16"])]
    return runs


def read_runs(names: str) -> list[Run]:
    """Returns the paper's runs ("paper"), or the runs of studies and sweeps' files, whose names are separated by
    commas. Raises UserError."""
    if names == "paper":
        runs = json.loads(PAPER_RUNS.read_text(encoding="utf-8"))["runs"]
        return [Run(r["parameters"], r["tokens"], r["method"], r["loss"]) for r in runs]
    return [run for name in kept_runs.names_of(names) for r in kept_runs.stored(name)["results"] for run in runs_of(r)]


def doubled(ratio: float) -> float:
    """Returns the nearest of 12.5, 25, 50, 100, ..., because the paper's ratios are not round numbers."""
    return 25 * 2.0 ** round(math.log2(ratio / 25))


def millions(parameters: float) -> str:
    """Formats a number of parameters in millions."""
    return f"{parameters / 1e6:.{0 if parameters >= 1e7 else 2}f}M"


def gap_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Makes a table of gaps in percent, with a row for each size and method, and a column for each number of tokens per
    parameter."""
    gaps = {(n, m, doubled(d / n)): np.mean(of) for m in methods for n, d, of in pairs(runs, m)}
    sizes, ratios = sorted({n for n, _, _ in gaps}), sorted({ratio for _, _, ratio in gaps})
    rows = [
        [millions(n), m, *[f"{gaps[n, m, ratio]:.2f}" if (n, m, ratio) in gaps else "-" for ratio in ratios]]
        for n in sizes
        for m in methods
    ]
    return ["N", "method", *[f"{ratio:g}" for ratio in ratios]], rows


def shares(runs: Sequence[Run], method: str) -> dict[float, stats.Estimate]:
    """Returns for each number of tokens per parameter the method's share of clover's gap with the same forward.

    The shares of all sizes are averaged, weighted by the inverse square of their intervals, which are paired by seed. A
    size whose share has no interval does not count.
    """
    mine, cells = method.removesuffix(IN_BF16), {}
    for r in runs:
        if r.method == "bf16" or r.method.endswith(IN_BF16) == method.endswith(IN_BF16):
            cell = {"size": "", "method": r.method.removesuffix(IN_BF16), "seed": r.seed, "val_bpb": r.loss}
            cells.setdefault((r.parameters, r.tokens), []).append(cell)
    found: dict[float, list[stats.Estimate]] = {}
    for (n, d), of in cells.items():
        share = stats.share(of, "", mine)
        if share and share.high > share.low:
            found.setdefault(doubled(d / n), []).append(share)
    weights = {ratio: [4 / (share.high - share.low) ** 2 for share in of] for ratio, of in found.items()}
    return {
        ratio: stats.around(
            float(np.average([share.mean for share in of], weights=weights[ratio])),
            sum(weights[ratio]) ** -0.5,
            sum(share.n for share in of),
        )
        for ratio, of in sorted(found.items())
    }


def share_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Makes a table of shares of clover's gap, with a row for each method and a column for each number of tokens per
    parameter. The last column is the share of the longest runs over that of the shortest. The table has no rows if no
    method but clover has a share.
    """
    rows, of = [], {m: found for m in methods if m.removesuffix(IN_BF16) != "clover" and (found := shares(runs, m))}
    ratios = sorted({ratio for found in of.values() for ratio in found})
    for m, found in of.items():
        first, last = found[min(found)], found[max(found)]
        relative = math.hypot(*((end.high - end.low) / 2 / end.mean for end in (first, last)))
        growth = stats.around(last.mean / first.mean, last.mean / first.mean * relative, first.n + last.n)
        cells = [found[ratio].shown(sign="-") if ratio in found else "-" for ratio in ratios]
        rows.append([m, *cells, growth.shown(sign="-")])
    return ["method", *[f"{ratio:g}" for ratio in ratios], "last over first"], rows


def law_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Makes a table of the constants of the law of BF16's losses, E + (A (N / 100M)^-a + B (D / 1B)^-b)^c, with c
    fitted and with c = 1."""
    laws = {"c fitted": fit_law(runs), "c = 1": fit_law(runs, outer=False)}
    rows = [[name, *[f"{v:.4g}" for v in law.constants], f"{law.rms:.2f}"] for name, law in laws.items()]
    return ["law", "E", "A", "a", "B", "b", "c", "rms, %"], rows


def effective_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Makes a table with the effective parameters, the effective tokens and a single gap of each method, by both
    laws."""
    rows = []
    for name in ("c fitted", "c = 1"):
        law, ranges = fit_law(runs, name == "c fitted"), intervals(runs, methods, outer=name == "c fitted")
        for m in methods:
            n, d = effective(law, runs, m), effective(law, runs, m, "tokens")
            of_n, of_d = f"{n.share:.3f}{ranges[m, 'parameters']}", f"{d.share:.3f}{ranges[m, 'tokens']}"
            mean, rms = constant_gap(runs, m)
            rows.append([name, m, n.runs, of_n, f"{n.rms:.2f}", of_d, f"{d.rms:.2f}", f"{mean:.2f}", f"{rms:.2f}"])
    header = ["law", "method", "runs", "of N", "rms of N, points", "of D", "rms of D, points", "one gap, %"]
    return [*header, "rms of one gap, points"], rows


def growth_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Makes a table of the trends ln gap = ln level + size ln(N / reference) + ratio ln(tokens per parameter / 20). The
    level is in percent, and intervals are 95%."""
    rows = [[m, *[f"{value:.3f} ± {half:.3f}" for value, half in trend(runs, m).values()]] for m in methods]
    return ["method", f"level at N = {millions(reference(runs))}", "size", "ratio"], rows


def closing_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Makes a table of the factors in parameters, and in steps, that close clover's gap at the reference size."""
    size, rows = reference(runs), []
    for name in ("c fitted", "c = 1"):
        law = fit_law(runs, name == "c fitted")
        share = effective(law, runs, "clover").share
        steps = [more_steps(law, share, size, ratio * size) for ratio in SHOWN_RATIOS]
        rows.append([name, "parameters", *[f"{1 / share:.2f}"] * len(steps)])
        rows.append([name, "steps", *[f"{factor:.2f}" for factor in steps]])
    return ["law", f"times, at N = {millions(size)}", *map(str, SHOWN_RATIOS)], rows


TABLES = {  # The name of a table in lab.reproduce -> (its title, the function that makes it).
    "law": ("The law of BF16's losses: E + (A (N / 100M)^-a + B (D / 1B)^-b)^c", law_table),
    "effective": ("Effective parameters, effective tokens, and one gap for all sizes and lengths", effective_table),
    "by_length": ("Gap to BF16 in percent, by size and tokens per parameter", gap_table),
    "shares_by_length": ("Share of clover's gap, all sizes, by tokens per parameter", share_table),
    "growth": ("ln gap = ln level + size ln(N / reference) + ratio ln(tokens per parameter / 20)", growth_table),
    "closing": ("What closes clover's gap, by tokens per parameter", closing_table),
}
