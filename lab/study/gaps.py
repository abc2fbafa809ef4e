"""Makes tables of training runs. They show the gap of each method to the BF16 run with the same seed, text, tokenizer
and forward pass.

An Item describes a table: the methods whose runs it takes or trains, its columns, and the paper's numbers and claims.
`table` makes the table of any Item. COLUMNS has a function for each column, which makes the cell of a method.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import runs as kept_runs
from lab import statistics as stats
from lab.study import sweep, sweep_results, sweep_runs
from lab.study.context import Context, Outcome
from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4.recipes import Recipe
from nanochat_fp4.training.memory import operand_bytes

LAB = str(Path(__file__).resolve().parents[1])
# The forward pass that is evaluated -> the name of its bits per byte in a run.
VALUES = {"own": "val_bpb", "BF16": "val_bpb_bf16"}
# Methods of stored runs that nothing trains any more. Tables of these runs keep their rows.
STORED_ALONE = (
    "clover_feedback", "clover_feedback_late", "clover_late", "clover_refined", "clover_search_feedback",
    "clover_late_refined_bf16", "clover_feedback_late_bf16",
)  # fmt: skip
ONE_TERM = "val_bpb_one_term"  # The bits per byte in plain NVFP4, as export writes it, of runs that end in two terms.
PARTS = ("30%", "50%", "70%", "80%", "90%")  # The parts of the run at which columns show the gap.


@dataclass(frozen=True)
class Claim:
    """A claim of the paper that the gap of `better` is smaller than that of `worse`."""

    text: str
    better: str
    worse: str

    def verdict(self, runs: list[dict], size: str) -> str:
        """Says in words whether the runs agree, which they do if the difference is negative with its whole interval."""
        difference = stats.difference(runs, size, self.better, self.worse)
        if not difference.n:
            return "no runs"
        agrees = "agrees" if difference.mean < 0 else "DISAGREES"
        return f"{agrees if difference.decided else 'undecided'} ({difference} points)"


def corrected(name: str, claims: Sequence[Claim], runs: list[dict], size: str) -> list[str]:
    """Says what Holm's correction for a table's claims decides. Their verdicts have an interval each."""
    pairs = [stats.pairs(runs, size, claim.better, claim.worse) for claim in claims]
    p_values = stats.holm([stats.p_value([a - b for a, b in zip(*of)]) for of in pairs])
    said = [f"{claim.text} p = {p:.3f}{'' if p < 0.05 else ' (undecided)'}" for claim, p in zip(claims, p_values)]
    some = len(said) > 1 and not all(map(math.isnan, p_values))
    family = f"{len(said)} claims (Holm; all of {name} whose two methods are in these runs)"
    return [f"corrected for {family}: {', '.join(said)}"] if some else []


@dataclass(frozen=True)
class Item:
    """A table of training runs.

    methods: the methods, as lab.study.sweep takes them, or a function that returns them for a size. If there are none,
             the table takes all stored runs.
    columns: names of COLUMNS
    beside:  the method to which the columns "minus" and "share" compare
    whole:   the runs are whole ones from scratch: rows are sorted by their gaps, and drawn as curves
    paper:   the paper's numbers, BPB for bf16 and gaps in percent for the others, one for each of `models`
    size, ratio: the size, and the tokens per parameter, of the runs that the table trains
    """

    title: str
    methods: Sequence[str] | Callable[[str], Sequence[str]] = ()
    columns: Sequence[str] = ("paper", "BPB", "own: gap", "BF16: gap", "seeds")
    beside: str = "clover"
    whole: bool = False
    claims: Sequence[Claim] = ()
    paper: dict[str, tuple[float, ...]] = field(default_factory=dict)
    models: Sequence[str] = ()
    notes: Sequence[str] = ()
    size: str = "d8"
    ratio: float = 20.0
    also: Sequence[str] = ()  # Further methods, which are shown if the stored runs have them.
    quick: Sequence[str] = ()  # The methods with --quick.


# ----------------------------------------------------------------------------------------------------------------------
# Stored runs


def stored_runs(context: Context, all_seeds: bool = False) -> tuple[list[dict], dict]:
    """Returns the runs of --results that have one size, and the other entries of its first study. Raises UserError
    unless the runs can be compared.

    Runs that can be compared have one text, one tokenizer, and for each method one length. The runs of a seed have one
    order of the text and are evaluated on the same part of it. The entry "file" of a run is the number of its study.
    Without `all_seeds` a seed counts if it has a bf16 run.
    """
    names = kept_runs.names_of(context.args.results)
    if not names:
        problem = "this item takes its runs from a study; name one of python -m lab.runs"
        raise UserError(f"{problem}, or a JSON file of lab.study.sweep: --results=NAME")
    content, *_ = contents = [kept_runs.stored(name) for name in names]
    sizes = list(dict.fromkeys(r["size"] for c in contents for r in c["results"]))
    if len(sizes) > 1 and not context.args.sizes:
        raise UserError(f"--results has runs of {', '.join(sizes)}; choose one of them, --sizes={sizes[0]}")
    size = context.args.sizes or sizes[0]
    for name, other in zip(names, contents):
        if other["data"] != content["data"]:
            both = f"{name} is of {other['data']}, {names[0]} of {content['data']}"
            raise UserError(f"{both}: give sweeps of the same text")
    runs = [r | {"file": i} for i, c in enumerate(contents) for r in c["results"] if r["size"] == size]
    seen: dict[tuple, dict] = {}
    for r in runs:  # Studies may have a run in common.
        first = seen.setdefault((r["method"], r["seed"]), r)
        if (first["val_bpb"], first["steps"]) != (r["val_bpb"], r["steps"]):
            raise UserError(f"--results has {r['method']} of seed {r['seed']} twice; give files of different runs")
    seeds = {r["seed"] for r in runs if r["method"] == "bf16"}
    if not seeds:
        raise UserError(f"{context.args.results} has no bf16 run of size {size!r}; gaps are to bf16")
    # The last seed of an interrupted sweep may have no bf16 run.
    runs = [r for r in runs if all_seeds or r["seed"] in seeds]
    if unused := [name for i, name in enumerate(names) if i not in {r["file"] for r in runs}]:
        problem = f"no run of {unused[0]} has size {size!r} and a bf16 run of its seed in --results"
        raise UserError(f"{problem}; add its file")
    runs = [r for r in runs if r is seen[r["method"], r["seed"]]]
    if {r["method"] for r in runs} == {"bf16"}:
        raise UserError(f"{context.args.results} has bf16 runs of size {size!r} alone; gaps are those of other methods")
    refuse_unlike(runs)
    used = [c | {"results": [r for r in runs if r["file"] == i]} for i, c in enumerate(contents)]
    return runs, content | {"environment": kept_runs.pooled(used)}


def refuse_unlike(runs: list[dict]) -> None:
    """Raises UserError if runs cannot be compared, because they have different tokenizers, a method has several
    lengths, or a seed has several texts."""
    for name, what in (("val_text", "validation texts"), ("tokenizer", "tokenizers"), ("vocab_size", "vocabularies")):
        if len(values := {r[name] for r in runs if r.get(name)}) > 1:
            raise UserError(f"--results has runs of different {what} ({values}); gaps are between runs of one")
    length: dict[str, int] = {}
    for r in runs:
        if (steps := length.setdefault(r["method"], r["steps"])) != r["steps"]:
            both = f"{r['method']} of {steps:,} and of {r['steps']:,} steps"
            raise UserError(f"--results has runs of {both}; give files of one, or name the others by a --variant")

    def text(run: dict) -> tuple:
        return [f for f in run["flags"] if f.startswith("--data-seed=")], run.get("eval_tokens")

    base: dict[int, dict] = {}
    for r in sorted(runs, key=lambda r: r["method"] != "bf16"):
        first = base.setdefault(r["seed"], r)
        if text(r) != text(first):
            both = f"{r['method']} and {first['method']} of seed {r['seed']} in --results"
            mend = "give files of sweeps with the same --vary-data and --eval-tokens"
            raise UserError(f"{both} read the text in different orders or are evaluated on different parts; {mend}")


def steps_of(runs: list[dict]) -> int:
    """Returns the usual number of steps, which is that of bf16."""
    return next(r["steps"] for r in runs if r["method"] == "bf16")


def methods_of(runs: list[dict]) -> list[str]:
    """Returns all methods but bf16, in the order of the runs."""
    return [m for m in dict.fromkeys(r["method"] for r in runs) if m != "bf16"]


def measured_on(runs: list[dict], data: str) -> str:
    """Returns the sizes, the text, the numbers of tokens that are trained and evaluated, and the seeds of runs, for the
    line below a table."""
    tokens, seeds = sorted({r["tokens"] for r in runs}), sorted({r["seed"] for r in runs})
    sizes = ", ".join(dict.fromkeys(r["size"] for r in runs))
    where = f"{sizes}, data {data}, {'/'.join(f'{t:,}' for t in tokens)} tokens"
    return f"{where}, {sweep_results.evaluated_on(runs)}, seeds {seeds}"


def length_notes(runs: list[dict]) -> list[str]:
    """Returns notes that name methods with other lengths than bf16's, and methods with another number of parameters."""
    note = sweep_results.other_lengths(runs, runs[0]["size"])
    notes = [note] if note else []
    parameters = {r["method"]: r.get("num_params") for r in runs}
    if other := {m: n for m, n in parameters.items() if n != parameters["bf16"]}:
        sizes = ", ".join(f"{m} {n:,}" for m, n in other.items())
        notes += [f"bf16 has {parameters['bf16']:,} parameters, {sizes}"]
    return notes


def along(runs: list[dict], curve: str = "curve", column: int = 1) -> dict[str, dict[int, dict[int, float]]]:
    """Returns the gaps to bf16 along the runs, in percent: method -> seed -> step -> gap.

    curve:  "curve" for the validation text, or "loss_curve" for the training text, whose points are means of the steps
            before
    column: the column of "curve", which is 1 for the own forward and 2 for the BF16 forward
    """
    base = {r["seed"]: {c[0]: c[1] for c in r.get(curve, ())} for r in runs if r["method"] == "bf16"}
    gaps: dict[str, dict[int, dict[int, float]]] = {}
    for r in runs:
        if r["method"] != "bf16" and r["seed"] in base and r["steps"] == steps_of(runs):
            bf16 = base[r["seed"]]
            known = [c for c in r.get(curve, ()) if c[0] in bf16 and c[0] and c[column:]]
            gaps.setdefault(r["method"], {})[r["seed"]] = {c[0]: 100 * (c[column] / bf16[c[0]] - 1) for c in known}
    return gaps


def recipes_of(run: dict) -> Sequence[Recipe] | None:
    """Returns the recipes of a run, none if its row has left, or None if a rounding is a function of a user's, whose
    format nobody knows here: the fields beside it are NVFP4's."""
    try:
        recipes = sweep_runs.method_plan(run["flags"]).recipes
    except ValueError:
        return []
    gemms = [gemm for r in recipes for p in (r, r.final) for gemm in (p.output, p.grad_input, p.grad_weight)]
    functions = [o.rounding.quantize for gemm in gemms for o in (gemm.a, gemm.b) if o.rounding and o.rounding.quantize]
    # By their files: lab/recipes.py given to --recipes is a module of another name.
    files = [getattr(getattr(function, "__code__", None), "co_filename", "") for function in functions]
    return recipes if all(file.startswith(LAB) for file in files) else None


def gemm_work(runs: list[dict], method: str, steps: int) -> str:
    """Returns the GEMM work of the first run of a method, as the text of a cell. The unit is the work of `steps` steps
    with all GEMMs in 4 bits. It is "-" if nobody knows the format of a rounding."""
    run = next(r for r in runs if r["method"] == method)
    if recipes_of(run) is None:
        return "-"
    of_step = sum(sweep_results.COST[bits] * share for bits, share in run["gemm_work"].items())
    return f"{of_step * run['steps'] / steps:.2f}"


def counted(runs: list[dict]) -> str:
    """Says what the GEMM work of each method's first run is of. Runs that were stored without their head have the work
    of the blocks alone."""
    first = {r["method"]: r for r in reversed(runs)}
    with_head = [method for method in dict.fromkeys(r["method"] for r in runs) if first[method].get("head")]
    said = "of all linear layers of the blocks"
    if len(with_head) == len(first):
        return f"{said} and of the output head, which the pages leave out"
    return said + (f", and of the output head of {', '.join(with_head)}" if with_head else "")


def ends_in_two_terms(runs: list[dict], method: str) -> bool:
    """Returns True if a method has more GEMM work than one term takes, so that it ends in two terms."""
    return max(sum(r["gemm_work"].values()) for r in runs if r["method"] == method) >= 1.001


# ----------------------------------------------------------------------------------------------------------------------
# Columns


@dataclass(frozen=True)
class Rows:
    """The rows of a table for one size: its runs, and the item of the table. The columns are made of this."""

    runs: list[dict]
    item: Item

    @property
    def size(self) -> str:
        """The size of the runs."""
        return self.runs[0]["size"]

    def of(self, method: str) -> list[dict]:
        """Returns the runs of a method."""
        return [r for r in self.runs if r["method"] == method]

    def gap(self, method: str, value: str) -> stats.Estimate:
        """Returns the gap of a method over bf16, in percent."""
        return stats.gap(self.runs, self.size, method, value)

    def minus(self, method: str, value: str) -> stats.Estimate | None:
        """Returns the gap of a method minus the gap of `beside`, in percentage points, paired by seed. Returns None for
        `beside` itself, and if the two have no seed in common."""
        difference = stats.difference(self.runs, self.size, method, self.item.beside, value)
        return difference if difference.n and method != self.item.beside else None

    def share(self, method: str, value: str) -> str:
        """Returns the share of the gap of `beside` with the same forward, on the seeds of both. Returns "-" if `beside`
        has no gap."""
        share = stats.share(self.runs, self.size, method, self.item.beside, value)
        return "-" if share is None else "1" if method == self.item.beside else share.shown(sign="-")


def _work_by_bits(rows: Rows, method: str) -> str:
    run = rows.of(method)[0]
    if recipes_of(run) is None:
        return "-"
    work = run["gemm_work"]
    return " / ".join(f"{100 * work[bits]:.1f}" for bits in ("4", "8", "16"))


def _by_seed(value: str) -> Callable[[Rows, str], str]:
    def cell(rows: Rows, method: str) -> str:
        gaps = stats.gaps_by_seed(rows.runs, rows.size, method, value)
        return " / ".join(f"{v:.2f}" for v in gaps.values())

    return cell


def _on_the_way(part: str) -> Callable[[Rows, str], str]:
    def cell(rows: Rows, method: str) -> str:
        steps, share = steps_of(rows.runs), float(part.rstrip("%")) / 100
        gaps = [(s / steps, gap) for of in along(rows.runs).get(method, {}).values() for s, gap in of.items()]
        near = [gap for at, gap in gaps if abs(at - share) < 0.01]
        return f"{fmean(near):.2f}" if near else "-"

    return cell


def _training_text(rows: Rows, method: str) -> str:
    """Returns the gap on the training text at the end of the run, and its share of clover's."""
    curves, steps = along(rows.runs, "loss_curve"), steps_of(rows.runs)
    own, clover = ({s: g[steps] for s, g in curves.get(m, {}).items() if steps in g} for m in (method, "clover"))
    both, share = own.keys() & clover.keys(), ""
    if both and min(clover[s] for s in both) > 0:  # If clover has no gap, there is no share of it.
        share = f" ({sum(own[s] for s in both) / sum(clover[s] for s in both):.2f}x)"
    return f"{fmean(own.values()):.2f}{share}" if own else "-"


def _one_term(rows: Rows, method: str) -> str:
    """Returns the gap of a run that ends in two terms if it is deployed with one term, and its share of clover's own
    gap."""
    if not ends_in_two_terms(rows.runs, method):
        return "-"
    plain = [r | {ONE_TERM: r["val_bpb"]} if r["method"] in ("bf16", "clover") else r for r in rows.runs]
    of = Rows(plain, rows.item)
    if not any(ONE_TERM in r for r in of.of(method)):
        return "not measured"
    return f"{of.gap(method, ONE_TERM)} ({of.share(method, ONE_TERM)} of clover's)"


def _bytes_kept(rows: Rows, method: str) -> str:
    """Returns the bytes that a layer keeps of an element of its input for the backward pass, at the end of the run."""
    recipes = recipes_of(rows.of(method)[0]) or ()
    inputs = [r.final.grad_weight.b if r.final.grad_weight.b.raw else r.final.output.a for r in recipes]
    return " to ".join(f"{size:.4g}" for size in sorted({operand_bytes(a) for a in inputs})) or "-"


def _paper(rows: Rows, method: str) -> str:
    form = "{:.4f}" if method == "bf16" else "{:+.2f}"
    return " / ".join(form.format(v) for v in rows.item.paper.get(method, ())) or "-"


COLUMNS: dict[str, Callable[[Rows, str], Any]] = {
    "paper": _paper,
    "BPB": lambda rows, method: f"{fmean(r['val_bpb'] for r in rows.of(method)):.4f}",
    "seeds": lambda rows, method: len(rows.of(method)),
    "of seeds": lambda rows, method: ", ".join(str(r["seed"]) for r in rows.of(method)),
    "GEMM work": lambda rows, method: gemm_work(rows.runs, method, steps_of(rows.runs)),
    "work in 4 / 8 / 16 bits, %": _work_by_bits,
    "bytes kept": _bytes_kept,
    "training text": _training_text,
    "one term": _one_term,
    **{part: _on_the_way(part) for part in PARTS},
}
for _name, _value in VALUES.items():
    COLUMNS |= {
        f"{_name}: gap": lambda rows, method, value=_value: str(rows.gap(method, value)),
        f"{_name}: gap, pooled": lambda rows, method, value=_value: str(
            stats.pooled_gap(rows.runs, rows.size, method, value)
        ),
        f"{_name}: minus": lambda rows, method, value=_value: str(rows.minus(method, value) or "-"),
        f"{_name}: share": lambda rows, method, value=_value: rows.share(method, value),
        f"{_name}: by seed": _by_seed(_value),
    }
OF_BF16 = ("paper", "BPB", "seeds", "of seeds", "GEMM work", "work in 4 / 8 / 16 bits, %", "bytes kept")
NOTES = {  # The note below a table that explains a column.
    "own: gap": "own: evaluated with the forward that a run ends with; gaps in percent of BF16's bits per byte",
    "BF16: gap": "BF16: the same weights, evaluated without quantization",
    "own: minus": "minus: the gap minus {beside}'s with the same forward, in points, on the seeds of both",
    "own: share": "share: of {beside}'s gap with the same forward, on the seeds of both; its interval is Fieller's, "
    "and it has none if {beside}'s gap on these seeds may be zero",
    "own: gap, pooled": "pooled: a secondary interval, by the mean variance of the methods with a 4-bit forward, or of "
    "the others; no verdict rests on it",
    "GEMM work": "GEMM work, {work}: 1 is all of it in 4 bits, for bf16's steps; 8 bits count 2 and 16 bits 4, and "
    "other steps count, but not other parameters",
    "work in 4 / 8 / 16 bits, %": "work: multiply-adds over all steps, {work}, by a GEMM's wider operand; more than "
    "100% where operands have two terms",
    "bytes kept": "bytes kept: of an element of a layer's input, from the forward to the backward pass, by count",
    "training text": "training text: the loss of the last fiftieth of the steps, by the own forward",
    "one term": "one term: plain NVFP4, as export writes a run that ends in two terms, and its share of clover's gap",
    "30%": "30% to 90%: the gap on the way, own forward",
}
ALSO = {  # Other columns that the note of a column explains.
    "own: gap": ("own: by seed", "own: minus", "own: share"),
    "BF16: gap": ("BF16: by seed", "BF16: minus", "BF16: share"),
    "own: minus": ("BF16: minus",),
    "own: share": ("BF16: share",),
    "own: gap, pooled": ("BF16: gap, pooled",),
    "30%": PARTS,
}


INTERVALS = (
    "intervals: 95%, paired by seed (the same initialization and data for all), Student's t with seeds - 1 degrees of "
    "freedom; one seed has none"
)

# ----------------------------------------------------------------------------------------------------------------------
# The table


def runs_of(context: Context, name: str, item: Item) -> tuple[list[dict], list[str], dict]:
    """Returns (the runs of --results, or otherwise runs that are trained now; the labels of their methods in order; a
    dict with "data" and "environment"). Raises UserError if there are no runs.
    """
    size = context.args.sizes or ("tiny" if context.quick else item.size)
    methods = item.methods(size) if callable(item.methods) else item.methods
    if context.quick and item.quick:
        methods = [m for m in methods if m.partition(":")[0] in item.quick]
    labels = sweep_runs.labels(methods)
    if not context.args.results:
        methods = [m for m in methods if m not in STORED_ALONE]
        if not methods:
            raise UserError(f"{name} trains nothing: give --results=STUDY (python -m lab.runs)")
        context.chosen_rows([*labels, *size.split(",")])
        where, plan = context.sweep(methods, item.size, item.ratio)
        runs = sweep.run_sweep(where, f"{name}_runs", plan)
        return runs, labels, {"data": sweep_results.data_name(where.data_dir), "environment": None}
    runs, content = stored_runs(context)
    labels += item.also
    runs = [r for r in runs if r["method"] in labels] if labels else runs
    if not methods_of(runs):
        raise UserError(f"{context.args.results} has no run of {name}'s methods")
    return runs, labels or ["bf16", *methods_of(runs)], content


def table(context: Context, name: str, item: Item) -> Outcome:
    """Makes the table of an item, with its rows for each size. Raises UserError if there are no runs."""
    header = ["size", "method", *item.columns]
    shown = context.chosen_columns(header)
    runs, names, content = runs_of(context, name, item)
    data = content["data"]
    sizes = list(dict.fromkeys(r["size"] for r in runs))
    table_rows, notes, gaps = [], [], {}
    for size in sizes:
        rows = Rows([r for r in runs if r["size"] == size], item)
        order = [m for m in names if rows.of(m)]
        if item.whole:  # The method with the smallest gap by its own forward comes last.
            order.sort(key=lambda m: -rows.gap(m, "val_bpb").mean if m != "bf16" else -math.inf)
        for method in order:
            has = [c for c in item.columns if method != "bf16" or c in OF_BF16]
            cells = [COLUMNS[c](rows, method) if c in has else "-" for c in item.columns]
            table_rows.append([size, method, *cells])
            gaps[f"{size} {method}"] = {value: rows.gap(method, value) for value in VALUES.values()}
        chosen = runs_of_rows(rows.runs, context.args.rows)
        methods = {r["method"] for r in chosen}
        notes += filter(None, [sweep_results.of_one_seed(chosen, size)])
        claims = [c for c in item.claims if rows.of(c.better) and rows.of(c.worse)]
        said = [c for c in claims if {c.better, c.worse} <= methods]
        notes += [f"the paper: {c.text}. Here, {size}: {c.verdict(chosen, size)}" for c in said]
        # A correction is for all claims of the table, whichever rows are shown, and so is the best of the systems.
        notes += [*corrected(name, claims, rows.runs, size), *reduction(rows)]
        notes += last_phase(chosen) if item.whole else []
        if differs := sweep_results.difference_from_paper(rows.runs[0], data):
            notes.append(f"{size} differs from the paper's runs: {differs}")
        notes += length_notes(chosen) if item.whole else []
    notes.append(INTERVALS)
    words = {"beside": item.beside, "work": counted(runs)}
    notes += [note.format(**words) for of, note in NOTES.items() if {of, *ALSO.get(of, ())} & set(shown)]
    numbers = {"gaps": gaps}
    if not context.args.results:
        numbers["results"] = [{k: v for k, v in r.items() if k != "environment"} for r in runs]

    def plot(axes: Any) -> None:
        if item.whole:
            draw_curves(axes, Rows(runs_of_rows(runs, context.args.rows), item))
        else:
            draw_bars(axes, [Rows([r for r in runs if r["size"] == size], item) for size in sizes], names)

    where = measured_on(runs, data)
    return Outcome(item.title, header, table_rows, [*notes, *item.notes], numbers, plot, where, content["environment"])


SYSTEMS = ("nvidia", "four_over_six", "tetrajet_v2", "four_over_six_biased", "tetrajet_v2_rht128")


def reduction(rows: Rows) -> list[str]:
    """Says which share of the gap of the best other system clover has, if all gaps are clearly above zero."""
    gaps = {m: rows.gap(m, "val_bpb") for m in (*SYSTEMS, "clover") if rows.of(m)}
    if len(gaps) < 2 or "clover" not in gaps or not all(g.above_zero for g in gaps.values()):
        return []
    best = min(gaps.keys() - {"clover"}, key=lambda m: gaps[m].mean)
    share = stats.share(rows.runs, rows.size, "clover", best)
    shown = share.shown(sign="-") if share else "no share"
    return [f"clover's gap over that of {best}, the best other system of {len(gaps) - 1} ({rows.size}): {shown}"]


def last_phase(runs: list[dict], early: str = "clover_feedback", late: str = "clover_feedback_late") -> list[str]:
    """Splits the difference between clover and a method with a last phase into parts, in percentage points, paired by
    seed."""
    size, of = runs[0]["size"], stats.gaps_by_seed
    own, bf16 = ({m: of(runs, size, m, value) for m in ("clover", early, late)} for value in VALUES.values())
    seeds = sorted(set.intersection(*(set(of) for of in own.values())))
    if not seeds:
        return []
    parts = (
        (f"{early} trains and rounds", own[early], own["clover"]),
        (f"{early}'s weights are evaluated in BF16", bf16[early], own[early]),
        ("the last phase trains", bf16[late], bf16[early]),
        ("its own forward instead of BF16", own[late], bf16[late]),
        (f"{late} minus clover", own[late], own["clover"]),
    )
    *shown, whole = [f"{what} {stats.estimate([a[s] - b[s] for s in seeds]).shown(3)}" for what, a, b in parts]
    return [f"{whole}, of which: {'; '.join(shown)}"]


# ----------------------------------------------------------------------------------------------------------------------
# Plots


def draw_bars(axes: Any, sizes: list[Rows], names: Sequence[str]) -> None:
    """Draws gaps by method and size: bars with the own forward, dashes with the BF16 forward, and the paper's
    points."""
    item = sizes[0].item
    others = [m for m in names if m != "bf16" and (m in item.paper or any(rows.of(m) for rows in sizes))]
    for i, rows in enumerate(sizes):
        width = 0.8 / len(sizes)
        shown = [(j, m) for j, m in enumerate(others) if rows.of(m)]
        at = [j + width * (i - (len(sizes) - 1) / 2) for j, _ in shown]
        gaps = [rows.gap(m, "val_bpb") for _, m in shown]
        errors = [0.0 if math.isnan(v.low) else v.high - v.mean for v in gaps]
        axes.bar(
            at, [v.mean for v in gaps], width, yerr=errors, capsize=3, alpha=0.6, label=f"{rows.size}, own forward"
        )
        alike = [rows.gap(m, "val_bpb_bf16").mean for _, m in shown]
        axes.plot(at, alike, "_", color=plots.COLORS[1], markersize=12, label=f"{rows.size}, BF16 forward")
    published = {j: item.paper[m] for j, m in enumerate(others) if m in item.paper}
    for marker, name, values in zip("os", item.models, zip(*published.values())):
        axes.plot(list(published), values, f"k{marker}", mfc="none", label=f"paper: {name}")
    axes.set_xticks(range(len(others)), others, rotation=45, ha="right", fontsize=11 if len(others) <= 12 else 9)
    axes.figure.set_size_inches(7, 6)  # The names below the bars are long.
    axes.set_ylabel("increase of validation\nBPB over bf16, %")


def runs_of_rows(runs: list[dict], rows: str) -> list[dict]:
    """Returns the runs of the methods among the rows that --rows chooses, and those of BF16, with which all others are
    compared. If --rows names no method, all runs are returned."""
    chosen = {name.strip() for name in rows.split("|")}
    return [r for r in runs if r["method"] in chosen | {"bf16"}] if chosen & set(methods_of(runs)) else runs


def draw_lines(axes: Any, lines: dict[str, list[tuple]]) -> None:
    """Draws the runs of each method. If there are more methods than colours, the others are dashed, and no method has a
    band, because bands would hide lines."""
    for i, (method, of) in enumerate(lines.items()):
        plots.curve(axes, method, of, "-" if i < len(plots.COLORS) else "--")
    if len(lines) > len(plots.COLORS):
        axes.figure.set_size_inches(7, 6)  # The legend is long.
        for band in list(axes.collections):
            band.remove()


def scale_of_second_half(panels: Sequence[Any], middle: float) -> None:
    """Gives panels of gaps the scale that the lines have from the middle on. While the learning rate is high, seeds may
    differ by ten times as much as methods differ at the end."""
    lines = [line for panel in panels for line in panel.lines]
    second = [0.0, *(y for line in lines for x, y in zip(*line.get_data()) if x >= middle)]
    margin = 0.2 * (max(second) - min(second)) or 1
    for panel in panels:
        panel.set_ylim(min(second) - margin, max(second) + margin)


def draw_curves(axes: Any, rows: Rows) -> None:
    """Draws the gaps along the runs of methods that were trained from scratch, in two panels with the same scale, one
    for each forward."""
    steps, runs = steps_of(rows.runs), rows.runs
    late = {r["method"] for r in runs if any(f.startswith("--branch-from") for f in r["flags"])}
    axes.set_axis_off()
    panels = [axes.inset_axes((0.52 * i, 0.0, 0.48, 0.88)) for i in range(2)]
    for panel, column, title in zip(panels, (1, 2), ("its own forward", "a BF16 forward")):
        curves = along(runs, column=column)
        measured = [m for m in methods_of(runs) if any(curves.get(m, {}).values())]
        lines = {}
        for method in (m for m in measured if m not in late or m == "clover_feedback_late"):
            seeds = curves[method].values()
            points = [[(100 * s / steps, g) for s, g in sorted(at.items()) if s > 0.15 * steps] for at in seeds]
            if of := [tuple(zip(*of)) for of in points if of]:
                lines[method] = of
        draw_lines(panel, lines)
        panel.set_title(f"evaluated with {title}", fontsize=11)
        panel.set_xlabel("steps, %")
    scale_of_second_half(panels, 50)
    panels[1].tick_params(labelleft=False)  # The scale is that of the first panel, which stands beside it.
    panels[0].set_ylabel("increase of validation\nBPB over bf16, %", fontsize=11)
    for line in panels[0].lines:
        if not line.get_label().startswith("_"):
            legend = axes.plot([], [], line.get_linestyle(), color=line.get_color(), label=line.get_label())[0]
            legend.set(marker=line.get_marker(), markersize=line.get_markersize())
