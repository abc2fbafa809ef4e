"""The page that a person reads: how long, does it fit, what does it gain, which method."""

import json
import math
import textwrap
from collections.abc import Sequence

from nanochat_fp4.cli import table
from nanochat_fp4.models.optim8bit import STATES
from nanochat_fp4.nvfp4.methods import FOR_THE_PAPER, ON_A_BLACKWELL, WHICH
from nanochat_fp4.plan.base import COMPARED, Base, describe, fitting_methods, roomiest
from nanochat_fp4.plan.cards import (
    CARDS,
    PUBLISHED,
    SINGLE_SOURCE,
    UNNAMED,
    Card,
    Rate,
    gain_of,
    is_measured,
    is_of_another_card,
    is_timed,
    precisions,
    slow_by_micro_batch,
    unequal_gain,
)
from nanochat_fp4.plan.cpu_steps import minutes_of
from nanochat_fp4.plan.hours import Hours, evaluated_tokens
from nanochat_fp4.plan.plan import SHARD_TOKENS, Plan
from nanochat_fp4.plan.settings import RUNS, read
from nanochat_fp4.plan.stages import ARGS, arguments, wanted
from nanochat_fp4.training.memory import GOOD_ROWS

GIB = 2**30
# A longer run of the same model lowers the loss as tokens^-b. b is 0.084 of d6 here, and at least 0.02 at d20 to d32 by
# the law of the paper's runs (docs/results.md, section 7).
EXPONENTS = (0.084, 0.02)
OWN_BYTES = 4  # of a token, by and large; of own text nothing is known before it is read
FAR = 2  # An estimate for a model that is so many times larger or smaller than those that were timed says so.


def amount(count: float) -> str:
    """A count in words of three digits: 246 thousand, 11.2 billion."""
    for size, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:.0f}"


def page(plan: Plan) -> str:
    parts = [head(plan), how_long(plan), does_it_fit(plan), which_method(plan), numbers(plan), missing(plan)]
    return "\n".join(part for part in parts if part)


def head(plan: Plan) -> str:
    s, facts = plan.settings, plan.facts
    text = {
        "folder": f"{s.data_dir} (DATA_DIR)",
        "shards": f"FineWeb-Edu, {s.numbers['NUM_SHARDS']} shards, {facts.shards} of them here",
        "hub": f"FineWeb-Edu, {s.numbers['NUM_SHARDS']} shards from the hub",
        "embedded": f"the embedded corpus, small ({facts.why_text})",
    }[facts.text]
    to_come = f"{plan.text_bytes / 1e9:.0f} GB of text to come, " if plan.text_bytes else ""
    lines = [
        f"nanochat_fp4: {s.run}",
        f"  machine   {plan.machine}, {plan.processes} process{'es' if plan.processes > 1 else ''}",
        f"  methods   {' '.join(s.methods)}   (QAT_METHOD={s.methods[0]}; COMPARE=1 adds the bf16 baseline)",
        f"  runs      {' '.join(base.tag for base in plan.bases)}",
        f"  stages    {' '.join(stage for stage in s.stages)}",
        f"  folder    {s.base_dir}   (NANOCHAT_BASE_DIR)",
        *([f"  text      {text}{read_by(plan)}"] if {"tok", "base"} & set(s.stages) else []),
        f"  disk      {to_come}{plan.checkpoint_bytes / 1e9:.1f} GB of checkpoints"
        f"{f'; {facts.disk_free / 1e9:.0f} GB are free' if plan.machine.here else ''}",
        *([f"  tokenizer {kept}"] if (kept := kept_tokenizer(plan)) else []),
        *(f"  note      {note}" for note in s.notes),
    ]
    if plan.machine.card and plan.machine.card.capability >= 100 and not s.method_is_named:
        lines.append(
            "  note      clover is the paper's method; for this card clover_fp8_forward or fp8 is recommended (see "
            "below)"
        )
    return "\n".join(lines)


def kept_tokenizer(plan: Plan) -> str:
    """Says that a tokenizer is taken as it is, which may be of another text. The empty text if the run makes one."""
    if plan.facts.tokenizer is None or "tok" not in plan.settings.stages:
        return ""
    return (
        f"that of this folder is kept, {plan.facts.tokenizer} tokens; one of another text needs a NANOCHAT_BASE_DIR of "
        "its own"
    )


def read_by(plan: Plan) -> str:
    """How much of the text the base training reads, and how often where it reads shards more than once."""
    if "base" not in plan.settings.stages:
        return ""
    tokens, facts = plan.bases[0].tokens, plan.facts
    shards = int(plan.settings.numbers["NUM_SHARDS"]) if facts.text in ("hub", "shards") else 0
    times = tokens / (shards * SHARD_TOKENS) if shards else 1.0
    held = facts.own_bytes / OWN_BYTES
    if held and tokens > held:
        return (
            f"; {amount(tokens)} tokens are trained on, and it has about {amount(held)}, so it is read more than once"
        )
    again = f", so the text is read about {span(times, times)} times" if times > 1.1 else ""
    return f"; {amount(tokens)} tokens are trained on{again}"


def how_long(plan: Plan) -> str:
    if plan.machine.card is None:
        return how_long_on_a_cpu(plan)
    if "base" not in plan.settings.stages:
        return "How long? Hours are known of the base training alone, which is not among these stages."
    lines = [
        "How long does the base training take, with its validations? Mid-training, SFT and benchmarks come besides."
    ]
    for base, found in zip(plan.bases, plan.hours):
        if found is None:
            lines += not_known(base, plan.machine.card)
            continue
        lines.append(f"  {base.method}: {duration(found.low, found.high)} {found.kind}, {speed(found)} tokens/s")
        lines += [f"    {line}" for line in doubts(base, found, plan.machine.card)]
    if len(plan.hours) > 1 and all(plan.hours):
        ends = (sum(getattr(found, end) for found in plan.hours) for end in ("low", "high"))
        lines.append(f"  Together: {duration(*ends)}.")
    lines += dict.fromkeys(f"  {found.kind} from {source}" for found in plan.hours if found for source in found.sources)
    if plan.machine.card.products and not all(plan.hours):
        low, high, source = plan.machine.card.products
        lines.append(f"  Large BF16 products run at {span(low, high)} TFLOP/s here, as users measured them ({source}).")
    share = evaluated_tokens(plan.bases[0]) / (plan.bases[0].tokens + evaluated_tokens(plan.bases[0]))
    if any(plan.hours):
        lines.append(f"  Validation is {100 * share:.0f}% of that.")
    if any(found and found.kind == "estimated" for found in plan.hours):
        lines.append("  An estimate is scaled by FLOPs from another model, most often of another program.")
    if any(found is None or found.kind == "estimated" for found in plan.hours):
        lines.append(
            '  To measure: NUM_ITERATIONS=20 STAGES="tok base" trains 20 steps, and bash dev/measure.sh times four '
            "methods. The next plan takes their speeds."
        )
    return "\n".join(lines)


def not_known(base: Base, card: Card) -> list[str]:
    """Why a method has no hours on this card, and the steps of other methods that are published."""
    timed = [key for key in ("bf16", "fp8", "nvfp4") if any(key in rate for rate in card.rates)]
    if card.name == UNNAMED:
        return [f"  {base.method}: not known. GPU=... names the GPU; GPU_MEMORY says its memory alone."]
    if not timed:
        return [f"  {base.method}: not known. Nobody has published a whole training step of this GPU."]
    own = " and ".join(precisions(base.method, base.work))
    sources = ", ".join(dict.fromkeys(rate["source"] for rate in card.rates))
    return [
        f"  {base.method}: not known. Nobody has published whole training steps with this method, or in each of its "
        f"precisions ({own}), on this GPU.",
        f"    Published are steps in {' and '.join(timed)} ({sources}).",
    ]


def how_long_on_a_cpu(plan: Plan) -> str:
    """The minutes that the run was made for, or those of another model, other steps, other stages or more methods."""
    s, base, methods = plan.settings, plan.bases[0], len(plan.bases)
    usual = describe(read(s.run, {}, False), "clover", None, 1, ())
    minutes = RUNS[s.run][2]
    work = base.flops * base.args.total_batch_size / usual.flops / usual.args.total_batch_size
    trains, later = "base" in s.stages, bool({"mid", "sft"} & set(s.stages))
    whole = trains and {"mid", "sft"} <= set(s.stages)
    if s.cpu_minutes and whole and 1 / 1.5 < work < 1.5:
        each = f" with each of {methods} methods, {methods * minutes:g} together" if methods > 1 else ""
        return f"How long? The whole run is made for {minutes:g} minutes of this CPU{each}."
    fewest = base.steps // 4 if s.cpu_minutes and not s.why_steps else base.steps
    # Later stages shrink with a shorter base training, and do not grow with a longer one.
    steps = [(n, min(n, usual.steps)) for n in (fewest, base.steps)]
    ends = [minutes_of(n * trains, m * later, work, usual.steps, minutes, methods) for n, m in steps]
    what = ("the whole run takes" if whole else "these stages take") + f" {span(*ends)} minutes"
    lines = [
        f"How long? By FLOPs {what}{f' with {methods} methods' if methods > 1 else ''}.",
        f"  The default run takes {minutes:g} minutes on two cores"
        + (f", and a step here has {work:.2g} times the work of its steps." if abs(work - 1) > 0.05 else "."),
    ]
    if fewest < base.steps:
        lines.append(f"  A probe before training chooses {fewest} to {base.steps} steps.")
    return "\n".join(lines)


def doubts(base: Base, found: Hours, card: Card) -> list[str]:
    """Why hours are worse than their range: models of another size, another recipe, or a single source."""
    lines = []
    if found.models and (base.weights > FAR * max(found.models) or FAR * base.weights < min(found.models)):
        timed = f"{amount(min(found.models))} to {amount(max(found.models))}"
        timed = amount(found.models[0]) if min(found.models) == max(found.models) else timed
        has = f"this model has {amount(base.weights)} weights in products"
        lines.append(f"EXTRAPOLATED: {has}, and those that were timed have {timed}.")
    if found.kind == "measured":
        return lines
    if (note := slow_by_micro_batch(card)) and base.ways and base.ways[0].rows > 1:
        lines.append(
            f"The most hours follow from one slow BF16 run ({note}), so they are probably fewer with more rows."
        )
    if base.work[4] and base.method != "clover" and not is_timed(card, base.method):
        lines.append(
            f"Each source timed its own recipe in 4 bits, which may take less or more time than {base.method}."
        )
    if base.work[16] and base.method != "bf16":
        share = f"{100 * base.work[16]:.0f}% of the products of {base.method}"
        lines.append(f"With these settings {share} are in BF16. They count with BF16's speed.")
    if base.ways and base.ways[0].recompute != "none":
        flag = f"--recompute={base.ways[0].recompute}"
        lines.append(
            f"The hours do not count that activations are computed twice ({flag}): with codes 4% to 8% (H200)."
        )
    if base.more_flops != 1:
        usual = "rows of {max_seq_len:,} tokens with windows {window_pattern}, as which the rates count".format(
            **PUBLISHED
        )
        lines.append(f"A token takes {base.more_flops:.3g} times the FLOPs that it takes in {usual}.")
    if base.more_flops > 1 and base.method != "bf16":
        lines.append("Attention is in BF16 with every method, so a method gains less where attention takes more.")
    if found.single:
        lines.append(f"ONE SOURCE: the speed under this range was widened by {SINGLE_SOURCE} in both directions.")
    return lines


def duration(low: float, high: float) -> str:
    """Hours in words: minutes where they are few, and days beside them where they are many."""
    if high < 1:
        return f"{span(60 * low, 60 * high)} minutes"
    return f"{span(low, high)} hours" + (f" ({span(low / 24, high / 24)} days)" if high >= 72 else "")


def span(low: float, high: float) -> str:
    a, b = (f"{x:,.0f}" if x >= 9.95 else f"{x:.2g}" for x in (low, high))
    return a if a == b else f"{a} to {b}"


def speed(found: Hours) -> str:
    a, b = (f"{round(x, -2):,.0f}" for x in (found.speed_low, found.speed_high))
    return a if a == b else f"{a} to {b}"


def does_it_fit(plan: Plan) -> str:
    card = plan.machine.card
    if card is None or not plan.bases[0].ways or "base" not in plan.settings.stages:
        return ""
    lines = ["Does it fit? Memory by count, without the CUDA context (docs/memory.md)."]
    for base in plan.bases:
        lines += memory_of(base, card) if base.ways[0].rows else hardly(plan, base, card)
    lines += larger_later(plan)
    first = plan.bases[0]
    if len(first.ways) > 1 and (first.ways[0].flags or not first.ways[0].rows):
        lines.append(
            f"  Other ways for {first.method}, the chosen one first (BASE_ARGS='--state=... --recompute=...'):"
        )
        rows = [[w.state, w.recompute, w.rows or "-", f"{w.peak / GIB:.1f}"] for w in first.ways]
        lines += ["    " + line for line in table(["state", "recompute", "rows", "GiB"], rows).splitlines()]
        text = (
            f"The first one with {GOOD_ROWS} rows is taken, because with fewer a product is too small for a large GPU. "
            "FP32 state comes before lean state, which rounds weights to BF16, and less recomputation comes before "
            "more, which takes 4% to 8% of the time (H200)."
        )
        lines += textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def larger_later(plan: Plan) -> list[str]:
    """Micro-batches of later stages that are larger than the largest one of the base training that fits."""
    if not all(base.args.device_batch_size == "auto" and base.ways[0].rows for base in plan.bases):
        return []
    rows, seq_len = min(base.ways[0].rows for base in plan.bases), plan.bases[0].args.max_seq_len
    lines = []
    for kind in [kind for kind in wanted(plan.settings) if kind in ("mid", "sft")]:
        args = arguments(plan.settings, kind)
        tokens = (args.device_batch_size or 0) * (getattr(args, "max_seq_len", None) or seq_len)
        if tokens > rows * seq_len:
            flag = f"{ARGS[kind]}: --device-batch-size={args.device_batch_size}"
            lines.append(f"  {flag} hardly fits, for the base training has at most {rows} rows; leave the flag out.")
    return lines


def hardly(plan: Plan, base: Base, card: Card) -> list[str]:
    """A base training that by count fits only if nothing is lost to fragments."""
    asked = base.args.device_batch_size
    rows = "one row takes" if asked in ("auto", 1) else f"{asked} rows take"
    need = f"{base.ways[0].peak / GIB:.1f} GiB of {card.memory}, and 6% is for fragments"
    largest = roomiest(plan.settings, base, card, plan.processes, STATES)
    if largest.rows:
        flags = f" with {' '.join(largest.flags)}" if largest.flags else ""
        remedy = f"By count at most {largest.rows} rows fit{flags}; lower the number, or leave it to the run."
    else:
        others = fitting_methods(plan.settings, card, plan.processes, STATES)
        remedy = f"By count it fits with {' or '.join(others) or 'no method'}."
    return [f"  {base.tag}: hardly, for by count {rows} {need}", f"    {remedy}"]


def memory_of(base: Base, card: Card) -> list[str]:
    way = base.ways[0]
    rows = f"{way.rows} row{'s' if way.rows > 1 else ''} of {base.args.max_seq_len} tokens"
    rows += " (the run tries which fit)" if base.args.device_batch_size == "auto" else ""
    flags = f", {' '.join(way.flags)}" if way.flags else ""
    names = {name: name for name in ("weights", "gradients", "moments", "codes", "grams", "activations", "loss")}
    names |= {"grams": "Gram matrices"}
    parts = " + ".join(f"{word} {getattr(way, name) / GIB:.1f}" for name, word in names.items() if getattr(way, name))
    return [
        f"  {base.tag}: {rows}, {way.peak / GIB:.1f} of {card.memory}{flags}",
        f"    {parts}; in the update {way.update / GIB:.1f} in the place of the last two",
    ]


def which_method(plan: Plan) -> str:
    card = plan.machine.card
    if card is None or "base" not in plan.settings.stages:
        return ""
    gaps = json.loads(CARDS.read_text())["gaps"]
    work, rows = {base.method: base.work for base in plan.bases}, []
    for method in dict.fromkeys([*COMPARED, *work]):
        gap, row = gaps.get(method), [method]
        for over in ("bf16", "fp8"):
            ratio = gain_of(card, method, work.get(method), over)
            mark = " *" if ratio and is_of_another_card(card, ratio) else ""
            row.append(span_of_two(f"{ratio.low:.2f}", f"{ratio.high:.2f}") + mark if ratio else "not published")
            ends = equal_time(gap, gaps[over], ratio) if gap and ratio and method != over else None
            row.append(span_of_two(*(f"{round(end, 1) + 0.0:+.1f}" for end in ends)) if ends else "-")
        row += [f"{g[0]:.2f} ± {g[1]:.2f}" for g in (gap["own"], gap["bf16"])] if gap else ["not measured"] * 2
        rows.append([row[0], *row[5:], *row[1:5]])
    header = [
        "method",
        "own forward",
        "BF16 forward",
        "times BF16's speed",
        "at equal time",
        "times FP8's",
        "at equal time",
    ]
    ratios = "Published ratios of speed on cards of this kind, with equal micro-batches"
    if is_measured(card, "bf16"):
        ratios = "Ratios of speed on this GPU (dev/measure.sh), or published ones where it has not timed the precision"
    lines = [
        f"What does it gain? {ratios}.",
        "  Bits per byte over BF16 in percent, and after the same hours those over BF16 and over FP8. The gaps are",
        "  of d6 (17M parameters, 160M tokens), EXTRAPOLATED to this model.",
        *("  " + line for line in table(header, rows).splitlines()),
    ]
    if any(cell.endswith(" *") for row in rows for cell in row):
        lines.append("  * one measurement, of another card")
    if gain_of(card, "clover_mixed") and not is_timed(card, "clover_mixed"):
        lines.append("  The best case of clover_mixed assumes that its products in FP8 cost no more than NVFP4's.")
    if unequal := unequal_gain(card):
        text = f"With a smaller micro-batch for BF16, NVFP4 had {unequal[0]:.2f} times its speed: {unequal[1]}."
        lines += textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([*lines, *advice(card, gaps, exponents_of(plan.bases[0].weights))])


def exponents_of(weights: float) -> dict[float, str]:
    """The exponents by which methods are ranked, and where each is from: both of EXPONENTS, and between them the law's
    for the size that is nearest to a model with so many weights in products."""
    sizes = json.loads(CARDS.read_text())["exponents"]["of"]
    near = min(sizes, key=lambda size: abs(math.log(size["weights"] / weights)))
    high, low = EXPONENTS
    law = f"d{near['depth']}, by the law of the paper's runs"
    return {high: "as in d6", near["b"]: law, low: "the least of d20 to d32"}


def span_of_two(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def difference_of(gap: dict[str, list[float]], other: dict[str, list[float]]) -> tuple[float, float]:
    """Returns the difference of two gaps of cards.json, with the own forward, and the half of its interval."""
    return gap["own"][0] - other["own"][0], math.hypot(gap["own"][1], other["own"][1])


def equal_time(
    gap: dict[str, list[float]], other: dict[str, list[float]], ratio: Rate, exponents: Sequence[float] = EXPONENTS
) -> tuple[float, float]:
    """Percent of bits per byte over another method after the same hours, in which the faster one trains on more tokens.

    gap, other: of cards.json, over BF16. ratio: the first method's speed over the other's.
    """
    difference, interval = difference_of(gap, other)
    ends = (difference + interval, ratio.low), (difference - interval, ratio.high)
    found = [(1 + g / 100) * speed**-b - 1 for g, speed in ends for b in exponents]
    return 100 * min(found), 100 * max(found)


def advice(card: Card, gaps: dict[str, dict[str, list[float]]], exponents: dict[float, str]) -> list[str]:
    """Which method to take, and what the ratios of speed say about it: a method is behind where another one of the same
    hours ends lower under this exponent, wherever in their ranges gaps and ratio are."""
    if all(is_measured(card, method) for method in ("fp8", "clover_mixed")):
        lines = ["fp8 and clover_mixed are timed on this GPU."]
    elif not card.arch:
        lines = [WHICH]
    elif card.capability >= 100:
        lines = [ON_A_BLACKWELL, FOR_THE_PAPER]
    else:
        take = "so take fp8." if card.capability >= 89 else "and it has no FP8 tensor cores either, so take bf16."
        lines = [f"This GPU has no FP4 tensor cores: it emulates 4 bits, which saves memory and costs time, {take}"]
        lines.append(FOR_THE_PAPER)
    known = [method for method in COMPARED if gain_of(card, method)]
    if len(known) < 2:
        lines.append("Nobody has published ratios of speed for this card. At equal tokens bf16 ends lowest, then fp8.")
        known = []
    said = textwrap.wrap(f"Which method? {' '.join(lines)}", 110, subsequent_indent="  ")
    of = f" of {', '.join(known)}" if len(known) < len(COMPARED) else ""
    for b, where in exponents.items() if known else ():
        first = [
            a for a in known
            if not any(equal_time(gaps[a], gaps[o], gain_of(card, a, over=o), [b])[0] > 0 for o in known if o != a)
        ] or known  # fmt: skip
        names = " or ".join(filter(None, (", ".join(first[:-1]), first[-1])))
        said.append(f"  After the same hours, if the loss falls as tokens^-{b:g} ({where}): {names} ends lowest{of}.")
    if {"fp8", "clover_mixed"} <= set(known):
        said += textwrap.wrap(break_even(card, gaps, list(exponents)), 110, initial_indent="  ", subsequent_indent="  ")
    return said


def break_even(card: Card, gaps: dict[str, dict[str, list[float]]], exponents: Sequence[float]) -> str:
    """The rule by which somebody who times both methods takes one of them. exponents: the highest first."""
    difference, interval = difference_of(gaps["clover_mixed"], gaps["fp8"])
    levels, points = [], []
    for b in exponents:
        least, level, most = ((1 + (difference + d) / 100) ** (1 / b) for d in (-interval, 0, interval))
        levels.append(f"{level:.2f}")
        points.append(f"{level:.2f} ({least:.2f} to {most:.2f}) with {b:g}")
    ratio = gain_of(card, "clover_mixed", over="fp8")
    here = f"The table has {span_of_two(f'{ratio.low:.2f}', f'{ratio.high:.2f}')}."
    return (
        "clover_mixed ends ahead of fp8 from this many times fp8's tokens/s on: "
        f"{', '.join(points[:-1])}, and {points[-1]}. {here} If yours is between {levels[0]} and {levels[-1]}, take "
        f"clover_mixed from {levels[1]} on, and fp8 below, because its exponent is that of the nearest size."
    )


def numbers(plan: Plan) -> str:
    s = plan.settings
    values = {**s.numbers, **{name: value for name, value in s.args.items() if value}}
    items = [f'{k}="{v}"' if " " in str(v) else f"{k}={v}" for k, v in values.items()]
    lines, line = ["Numbers, each a variable that can be set:"], ""
    for item in items:
        if line and len(line) + len(item) > 100:
            lines.append(f"  {line}")
            line = ""
        line += ("  " if line else "") + item
    lines.append(f"  {line}")
    if s.cpu_minutes:
        why = s.why_steps or "a probe before training may choose half or a quarter of them"
        lines.append(
            f"  chosen for a CPU: NUM_ITERATIONS={s.numbers['NUM_ITERATIONS']} ({why}); set it to have another number"
        )
    changed = {k: v for k, v in s.set_by_user.items() if not (k == "NUM_ITERATIONS" and s.why_steps)}
    changed |= {k: v for k, v in s.args.items() if v != s.default_args[k]}
    defaults = s.defaults | s.default_args
    return "\n".join(
        [*lines, *(f"  set by you: {k}={v} (default: {defaults[k] or 'none'})" for k, v in changed.items())]
    )


def missing(plan: Plan) -> str:
    lines = ["This run goes without:"] if plan.left_out else []
    for left in plan.left_out:
        lines += [f"  {left.what}", *wrapped(f"because {left.why}")]
        lines += [line for remedy in left.remedies for line in wrapped(f"to have it: {remedy}")]
    return "\n".join(lines)


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="      ", break_long_words=False)
