"""Computes how fast each GPU trains, from whole steps that others and this project have timed, and writes the result
into nanochat_fp4/cards.json, which the plan of a run reads.

    python -m lab.cards            # prints the speeds as a table; --json prints the file
    python -m lab.cards --write

The timed steps are in lab/results/published_steps.json, and those of this project in lab/results/bench.json. A speed is
tokens per second of one GPU times the weights in matrix products, because a step of another model takes as much longer
as it has more of them. The file has for each card:

    speed     for each precision, and for a method that was timed itself: the `range` of speeds in 1e12; the number of
              published `runs` behind it, and of those that `timed` it on this card; the weights of the smallest and the
              largest of the `models` that were timed on this card; and `doubts`, sentences about its ends
    gain      the range of tokens per second over BF16's, with equal micro-batches
    over_fp8  the range of clover_fp8_forward's tokens per second over fp8's

`bf16_peaks` are the dense BF16 peaks of tensor cores with FP32 accumulation, in TFLOP/s, from the vendors' data sheets.
Each key is a pattern of a device's name in lower case, and the first that matches counts, so longer names come first.
PRO cards do not halve the rate with FP32 accumulation.

`take` is the method to take on GPUs of an architecture, if no measurement of the user's can change it. `R` is the ratio
of clover_fp8_forward's to fp8's tokens per second from which clover_fp8_forward ends ahead after the same hours, by
depth. Its two values have the two exponents `b`, by which a longer run lowers the loss as tokens^-b: that of the runs
of d6, and that of the law of the paper's runs at this size. `gap` says by how much the validation loss of methods is
above BF16's, own forward, in runs of d6. `lora` is a ladder of sizes by others, to be read beside R: NVFP4's tokens per
second over FP8's, and clover_fp8_forward's over fp8's if its two thirds in 4 bits gained as much.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from lab import RESULTS, ROOT, scaling, table
from lab import runs as kept_runs
from lab import statistics as stats
from nanochat_fp4.cli import ArgumentParser, run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import config_from_depth

CARDS, PUBLISHED = ROOT / "nanochat_fp4/cards.json", RESULTS / "published_steps.json"
PRECISIONS = ("bf16", "fp8", "nvfp4")
# The method that a plan weighs against fp8, and the share of its products in 4 bits (dgrad and wgrad).
RIVAL, IN_4_BITS = "clover_fp8_forward", 2 / 3
STUDIES = ("d6_mixed", "d6_fp8_forward")  # The studies of the table of docs/results.md that says which method to take.
DEPTHS = (12, 20, 26, 32)
OLDER = ("sm_70", "sm_75")  # GPUs of no card here, of which a method is advised all the same
# Programs of two authors on one card (RTX PRO 4000, NVFP4) differ by a factor of two. An end of a speed that rests on a
# single source is therefore widened by the root of that.
SINGLE_SOURCE = 1.4
ABOUT = "Written by python -m lab.cards --write; the docstring of lab/cards.py explains the fields."


class Span(NamedTuple):
    """A range of speeds or of ratios, and the published steps behind each end and behind all of it."""

    low: float
    high: float
    of_low: dict[str, Any]
    of_high: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def ends(self) -> list[float]:
        return [float(f"{end:.4g}") for end in (self.low, self.high)]


@cache
def published() -> list[dict[str, Any]]:
    """The GPUs of published_steps.json. A step of this project has its rates from bench.json, and clover's counts as
    NVFP4's."""
    cards = json.loads(PUBLISHED.read_text(encoding="utf-8"))["cards"]
    bench = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    for step in (step for card in cards for step in card["rates"] if "part" in step):
        records = [r for r in bench[step["part"]]["records"] if r.get("tokens_per_second")]
        rates = {r["method"]: r["tokens_per_second"] for r in records}  # The last one's micro-batch is BF16's.
        names = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "clover", RIVAL: RIVAL}
        step |= {key: rates[method] for key, method in names.items() if method in rates}
        step["equal"] = [key for key in names if key in step]
    return cards


def both_ends(step: dict[str, Any], key: str) -> tuple[float, float]:
    """The slow and the fast end of a step's speed, for each GPU and times the weights."""
    of = step[key] if isinstance(step[key], list) else [step[key]]
    return min(of) / step["gpus"] * step["weights"], max(of) / step["gpus"] * step["weights"]


def own_first(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for step in steps if "part" in step] or steps


def directly(card: dict[str, Any], key: str) -> Span | None:
    """The speed of a precision as it was timed on this card."""
    steps = own_first([step for step in card["rates"] if key in step])
    if not steps:
        return None
    low = min(steps, key=lambda step: both_ends(step, key)[0])
    high = max(steps, key=lambda step: both_ends(step, key)[1])
    return Span(both_ends(low, key)[0], both_ends(high, key)[1], low, high, steps)


def widened(*spans: Span) -> float:
    """The factor by which an end that is computed from these spans is uncertain: one of them may have a single
    source, which is a part of bench.json or a program of others."""
    sources = [{step.get("part") or step["source"] for step in span.steps} for span in spans]
    return SINGLE_SOURCE if any(len(of) == 1 for of in sources) else 1.0


def gain(card: dict[str, Any], key: str, over: str = "bf16") -> Span | None:
    """How many times as fast as another precision, in the same program and with equal micro-batches: on this card if
    two models or more were timed on it, and otherwise on all cards of its architecture."""
    alike = [step for other in published() if other["arch"] == card["arch"] for step in other["rates"]]
    own, all_alike = ([s for s in steps if {key, over} <= set(s["equal"])] for steps in (card["rates"], alike))
    steps = own_first(own if len(own) > 1 else all_alike)
    if not steps:
        return None
    lows = [both_ends(step, key)[0] / both_ends(step, over)[1] for step in steps]
    highs = [both_ends(step, key)[1] / both_ends(step, over)[0] for step in steps]
    low, high = min(lows), max(highs)
    return Span(low, high, steps[lows.index(low)], steps[highs.index(high)], steps)


def speed(card: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The record of cards.json for a precision, or for a method that was timed itself.

    The slow end is BF16's slow end times the smallest gain. The fast end is the fastest step that somebody has timed in
    this precision, because a product of two programs can be faster than both of them; if nobody has timed one, it is
    BF16's fast end times the largest gain. An end is widened once if a speed or a gain in it has a single source.
    """
    bf16, times, timed = directly(card, "bf16"), gain(card, key), directly(card, key)
    if key == "bf16" or bf16 is None or times is None:
        if timed is None:
            return None
        slow, wider = key, (widened(timed),) * 2
        found = timed._replace(low=timed.low / wider[0], high=timed.high * wider[1])
    else:
        slow, wider = "bf16", (widened(bf16, times), widened(timed) if timed else widened(bf16, times))
        low, of_low = bf16.low * times.low / wider[0], bf16.of_low
        if timed and timed.low < low:
            low, of_low, slow = timed.low, timed.of_low, key
        high, of_high = (timed.high, timed.of_high) if timed else (bf16.high * times.high, bf16.of_high)
        steps = [*bf16.steps, *(timed.steps if timed else []), *times.steps]
        found = Span(low, high * wider[1], of_low, of_high, steps)
    runs, doubts = {json.dumps(step): step for step in found.steps}, []
    if max(wider) > 1:
        ends = "both ends" if min(wider) > 1 else f"the {'slow' if wider[0] > 1 else 'fast'} end"
        of_both = f", {found.of_low['source']}" if len(runs) > 1 and found.of_low is found.of_high else ""
        doubts.append(f"{ends} widened by {SINGLE_SOURCE}: ONE SOURCE{of_both}")
    rows = found.of_low.get("micro_batch", {})
    few = f" with {rows[slow]} row{'s' * (rows[slow] > 1)}" * (rows[slow] < max(rows.values())) if slow in rows else ""
    other = next((c["name"] for c in published() if slow != key and times.of_low in c["rates"] and c != card), "")
    if few or other:
        what = f"{slow.upper()}{few}" + f", times {other}'s gain" * bool(other)
        doubts.append(f"the slow end: {what}{'; more rows take fewer hours' * bool(few)}")
    on_this_card = [step["weights"] for step in runs.values() if step in card["rates"]]
    return {
        "range": [float(f"{end / 1e12:.4g}") for end in (found.low, found.high)],
        "runs": len(runs),
        "timed": len(timed.steps) if timed else 0,
        "models": [min(on_this_card), max(on_this_card)],
        "doubts": doubts,
    }


def rival_over_fp8(card: dict[str, Any]) -> list[float] | None:
    """The range of clover_fp8_forward's tokens per second over fp8's: as timed, or else its backward pass at NVFP4's
    speed and its forward pass at FP8's."""
    if timed := gain(card, RIVAL, over="fp8"):
        return timed.ends
    if (four := gain(card, "nvfp4", over="fp8")) is None:
        return None
    return [float(f"{two_thirds(ratio):.4g}") for ratio in (four.low, four.high)]


def two_thirds(ratio: float) -> float:
    """clover_fp8_forward's tokens per second over fp8's if NVFP4 makes `ratio` times FP8's."""
    return 1 / (IN_4_BITS / ratio + 1 - IN_4_BITS)


def lora() -> dict[str, Any]:
    """The ladder of sizes by others: NVFP4 over FP8, and what it means for clover_fp8_forward over fp8."""
    of = json.loads(PUBLISHED.read_text(encoding="utf-8"))["lora"]
    ratios = {step["model"]: step["nvfp4"] / step["fp8"] for step in of.pop("tokens_per_second")}
    return of | {"ratio": {model: [round(r, 2), round(two_thirds(r), 2)] for model, r in ratios.items()}}


def of_studies(studies: Sequence[str]) -> list[dict]:
    """The runs of studies of one text, each with seeds of its own."""
    return [run for name in studies for run in kept_runs.stored(name)["results"]]  # an unknown name is refused


def lost(studies: Sequence[str]) -> stats.Estimate | None:
    """The gap of clover_fp8_forward minus that of fp8, own forward, in points, paired by seed, or None."""
    runs = of_studies(studies)
    difference = stats.difference(runs, runs[0]["size"], RIVAL, "fp8")
    return difference if difference.n else None


def gaps() -> str:
    """The gaps of the methods of the studies STUDIES, own forward, in percent and with their intervals."""
    runs = of_studies(STUDIES)
    found = {method: stats.gap(runs, runs[0]["size"], method) for method in ("fp8", RIVAL, "clover")}
    return ", ".join(f"{method} {of.shown(sign='-')}" for method, of in found.items())


def break_even(studies: Sequence[str] = STUDIES) -> list[dict[str, Any]]:
    """The ratios R by depth, and the interval of R by the law that the difference's interval gives. There are none if
    no study has runs of both."""
    more = lost(studies)
    if more is None:
        return []
    own = scaling.exponent(kept_runs.stored(scaling.OF_TWO_LENGTHS)["results"])[0]
    law, found = scaling.fit_law(scaling.read_runs("paper")), []
    for depth in DEPTHS:
        width = config_from_depth(depth, 1, 1, 128, 64).n_embd
        blocks, head = 12 * depth * width**2, 65536 * width
        b = scaling.exponent_of_tokens(law, blocks, 20 * (blocks + 2 * head))
        ratios = [round((1 + more.mean / 100) ** (1 / exponent), 3) for exponent in (own, b)]
        interval = [round((1 + end / 100) ** (1 / b), 2) for end in (more.low, more.high)] if more.n > 1 else []
        of = {"depth": depth, "weights": blocks + head, "b": [round(own, 3), round(b, 3)]}
        found.append(of | {"ratio": ratios, "interval": interval})
    return found


def take(arch: str, cards: list[dict[str, Any]], ratios: list[dict[str, Any]]) -> str | None:
    """The method to take on GPUs of an architecture, with the range of its gain on all cards of it. None if it has FP4
    tensor cores, unless clover_fp8_forward is behind fp8 at every size there."""
    capability, ranges = int(arch.removeprefix("sm_")), {}
    for key in ("fp8", "nvfp4"):
        ends = [end for card in cards for end in card.get("gain", {}).get(key, [])]
        ranges[key] = f"{min(ends):.2f} to {max(ends):.2f} times BF16's tokens/s" if ends else "an unknown gain"
    if capability < 89:
        return "bf16: this GPU has neither FP4 nor FP8 tensor cores, and emulates both"
    if capability < 100:
        return f"fp8 ({ranges['fp8']}): this GPU emulates 4 bits"
    over = [card["over_fp8"][1] for card in cards if "over_fp8" in card]
    if ratios and over and max(over) < min(min(of["ratio"]) for of in ratios):
        return f"fp8 ({ranges['fp8']}): 4 bits gain too little over it on such cards"
    return None


def content() -> dict[str, Any]:
    """The content of nanochat_fp4/cards.json."""
    cards, ratios = [], break_even()
    for card in published():
        speeds = {key: speed(card, key) for key in (*PRECISIONS, RIVAL)}
        gains = {key: found.ends for key in ("fp8", "nvfp4", RIVAL) if (found := gain(card, key))}
        record = {key: card[key] for key in ("name", "gib", "arch")}
        record["speed"] = {key: found for key, found in speeds.items() if found}
        record |= {"gain": gains} if gains else {}
        record |= {"over_fp8": ratio} if (ratio := rival_over_fp8(card)) else {}
        cards.append(record)
    of_arch = {arch: [c for c in cards if c["arch"] == arch] for arch in sorted({*OLDER, *(c["arch"] for c in cards)})}
    takes = {arch: said for arch, alike in of_arch.items() if (said := take(arch, alike, ratios))}
    peaks = json.loads(PUBLISHED.read_text(encoding="utf-8"))["bf16_peaks"]
    return {
        "about": ABOUT,
        "bf16_peaks": peaks,
        "take": takes,
        "R": ratios,
        "gap": gaps(),
        "lora": lora(),
        "cards": cards,
    }


def as_text() -> str:
    text = json.dumps(content(), indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def as_table() -> str:
    """The speeds as a table, a row for each card and precision, with the sources of what was timed on the card."""
    rows, made = [], content()
    weights = next(of["weights"] for of in made["R"] if of["depth"] == 20)
    for card, of in zip(made["cards"], published(), strict=True):
        for key, found in (card["speed"] or {"-": None}).items():
            ends = " to ".join(f"{1e12 * end / weights:,.0f}" for end in found["range"]) if found else "-"
            sources = dict.fromkeys(step["source"] for step in of["rates"] if key in step)
            rows.append([card["name"], card["gib"], key, ends, found["runs"] if found else "-", "; ".join(sources)])
    return table(["card", "GiB", "precision", "tokens/s of d20", "runs", "timed on the card by"], rows)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Speeds of GPUs for the plan of a run")
    parser.add_argument("--write", action="store_true", help=f"write {CARDS.relative_to(ROOT)}")
    parser.add_argument("--json", action="store_true", help="print what --write writes, in the place of a table")
    args = parser.parse_args(argv)
    if args.write:
        atomic_write(CARDS, as_text())
    else:
        print(as_text().rstrip() if args.json else as_table())


if __name__ == "__main__":
    run_main(main)
