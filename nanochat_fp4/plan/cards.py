"""GPUs by their names, in any spelling, and how fast others have seen them train (nanochat_fp4/cards.json)."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.cli import UserError
from nanochat_fp4.models.gpt import GPT, config_from_depth
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Recipe

CARDS = Path(__file__).parent.parent / "cards.json"
MEASURED_STEPS = "measurements/steps.json"  # what dev/measure.sh writes into the base directory
# Programs of two authors on one card (RTX PRO 4000, NVFP4) differ by a factor of two. A rate with a single source is
# therefore widened by the root of that in both directions.
SINGLE_SOURCE = 1.4
UNNAMED = "a GPU without a name"  # of GPU_MEMORY alone
# Rates count as those of such rows, which are nanochat's. Few sources say the length of theirs.
PUBLISHED = {"max_seq_len": 2048, "window_pattern": "SSSL"}
# Shares of a run's multiply-adds in 4, 8 and 16 bits (phases.MethodPlan.work). None: all in the method's precisions.
Work = Mapping[int, float] | None


@dataclass(frozen=True)
class Card:
    """A GPU.

    arch:     sm_90, ..., or "" for one that is not known
    rates:    records of cards.json
    products: TFLOP/s of large BF16 products as users measured them, two ends, and the source; or None
    """

    name: str
    gib: float
    arch: str = ""
    rates: tuple[dict[str, Any], ...] = ()
    products: tuple[float, float, str] | None = None

    @property
    def memory(self) -> str:
        """Its memory in words: 32 GiB, 0.5 GiB."""
        return f"{self.gib:.0f} GiB" if self.gib >= 9.95 else f"{self.gib:.2g} GiB"

    @property
    def capability(self) -> int:
        """120 for sm_120; 0 where it is not known. From 100 on tensor cores multiply 4 bits, from 89 on 8 bits."""
        return int(self.arch.removeprefix("sm_") or 0)


@dataclass(frozen=True)
class Rate:
    """Tokens a second of one GPU, or a ratio of such rates, as an estimate with two ends.

    sources: where the ends are from
    models:  weights in products of the models that were timed, where the rate was scaled from them
    single:  whether it was widened, because one model alone was timed
    """

    low: float
    high: float
    sources: tuple[str, ...]
    models: tuple[float, ...] = ()
    single: bool = False


def read_cards() -> list[Card]:
    cards = json.loads(CARDS.read_text())["cards"]
    products = [(*c["bf16_products"], c["bf16_products_source"]) if "bf16_products" in c else None for c in cards]
    return [Card(c["name"], c["gib"], c["arch"], tuple(c["rates"]), p) for c, p in zip(cards, products)]


def _bare(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def same_gpu(a: str, b: str) -> bool:
    """Whether two names are of the same GPU: NVIDIA GeForce RTX 5090, and rtx5090."""
    return _bare(a) == _bare(b)


def find_card(name: str, gib: float = 0.0) -> Card:
    """The card of a name that a user typed: rtx5090, 5090, "RTX 5090". gib: GPU_MEMORY, which any card may have.

    Raises UserError, with the names that are alike, for a card whose memory is not known.
    """
    cards = read_cards()
    same = [c for c in cards if same_gpu(c.name, name)]
    ending = [c for c in cards if _bare(name) and _bare(c.name).endswith(_bare(name))]
    found = (same or (ending if len(ending) == 1 else []) or [None])[0]
    if found is not None:
        return replace(found, gib=gib or found.gib)
    if gib:
        return Card(name, gib)
    names = {_bare(c.name): c.name for c in cards}
    alike = [names[n] for n in difflib.get_close_matches(_bare(name), names, n=3)]
    meant = (
        f"did you mean {' or '.join(dict.fromkeys([c.name for c in ending] + alike))}? Or " if ending or alike else ""
    )
    raise UserError(
        f"GPU={name} is not in nanochat_fp4/cards.json; {meant}give its memory in GiB, for example GPU_MEMORY=24"
    )


def card_of_device(device_name: str, gib: float, arch: str = "") -> Card:
    """The card of torch.cuda.get_device_name(), with the memory and the architecture of this very device."""
    # "RTX 5090 Laptop GPU" and "RTX 5090 D" are other chips, or the same with less power; "MIG" is a part of one.
    other = r"(?!.*\b(Laptop|Max-Q|MIG|Ti|SUPER|D)\b)"
    known = [c for c in read_cards() if re.search(rf"\b{re.escape(c.name)}\b{other}", device_name)]
    card = max(known, key=lambda c: len(c.name), default=Card(device_name, gib))
    return replace(card, name=device_name, gib=gib, arch=arch or card.arch)


def with_measurements(card: Card, base_dir: Path) -> Card:
    """The card with the steps that dev/measure.sh timed on this very GPU, as a rate like those of cards.json. Where it
    has none, the card as it is."""
    try:
        content = json.loads((base_dir / MEASURED_STEPS).read_text(encoding="utf-8"))
        settings, records = content["settings"], content["records"]
        timed = [r for r in records if r.get("tokens_per_second") and r["recompute"] == "none"]
        if not same_gpu(content["environment"]["gpu"], card.name) or not timed:
            return card
        shape = timed[0]["depth"], settings["vocab_size"], PUBLISHED["max_seq_len"], settings["head_dim"]
        with torch.device("meta"):
            model = GPT(config_from_depth(*shape, settings["aspect_ratio"], PUBLISHED["window_pattern"]))
        rates = {
            r["method"]: r["tokens_per_second"] * r["flops_per_token"] / model.estimate_flops()
            for r in reversed(timed)
            if r["depth"] == timed[0]["depth"]
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return card
    rates |= {"nvfp4": rates["clover"]} if "clover" in rates else {}
    weights = model.num_scaling_params() - model.transformer.wte.weight.numel()
    rate = {"source": "dev/measure.sh", "model": f"nanochat d{timed[0]['depth']}", "note": "on this GPU", "here": True}
    rate |= {"weights": weights, "gpus": 1, "equal": list(rates), **rates}
    return replace(card, rates=(rate, *card.rates))


def is_measured(card: Card, method: str | Recipe) -> bool:
    """Whether dev/measure.sh has timed this very method on this GPU."""
    return any("here" in rate and get_recipe(method).name in rate for rate in card.rates)


def precisions(method: str | Recipe, work: Work = None) -> tuple[str, ...]:
    """The precisions in cards.json that a method multiplies in; two where some layers are in FP8 and others in FP4.
    Without work, layers that a method keeps in BF16 do not count."""
    if work:
        return tuple(key for bits, key in ((16, "bf16"), (8, "fp8"), (4, "nvfp4")) if work[bits])
    keys = set()
    for recipe in get_recipe(method).parts:
        operands = [o for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight) for o in (gemm.a, gemm.b)]
        elements = {o.rounding.element for o in operands if o.rounding}
        forward = {o.rounding.element for o in (recipe.output.a, recipe.output.b) if o.rounding}
        keys |= {"nvfp4" if "e2m1" in elements else "fp8"} if elements else set()
        keys |= {"fp8"} if forward and "e2m1" not in forward else set()
    return tuple(sorted(keys)) or ("bf16",)


def _between(rates: list[Rate | None]) -> Rate | None:
    """From the slowest to the fastest of these rates; None where one of them is not known."""
    if not all(rates):
        return None
    sources = dict.fromkeys(source for rate in rates for source in rate.sources)
    models = [weights for rate in rates for weights in rate.models]
    low, high = min(rate.low for rate in rates), max(rate.high for rate in rates)
    return Rate(low, high, tuple(sources), tuple(models), any(rate.single for rate in rates))


def _beside_bf16(quantized: Rate | None, bf16: Rate | None, work: Work) -> Rate | None:
    """The rate of a run that makes a share of its products in BF16, or more than one product for a GEMM. The time of a
    step is proportional to the work in each precision."""
    if not work or quantized is None or (work[16] == 0 and work[4] + work[8] == 1):
        return quantized
    if bf16 is None:
        return None
    in_bf16, rest = work[16], work[4] + work[8]
    low, high = (1 / (in_bf16 / b + rest / q) for b, q in ((bf16.low, quantized.low), (bf16.high, quantized.high)))
    sources = tuple(dict.fromkeys((*quantized.sources, *bf16.sources)))
    return replace(quantized, low=low, high=high, sources=sources)


def is_timed(card: Card, method: str | Recipe) -> bool:
    """Whether somebody has timed this very method beside BF16, on a card of this kind."""
    return _gain(card, get_recipe(method).name) is not None


def _keys(card: Card, recipe: Recipe, work: Work) -> tuple[str, ...]:
    """The method itself where it was timed on cards of this kind; otherwise the precisions in which it quantizes."""
    keys = precisions(recipe, work)
    if is_timed(card, recipe) and set(keys) <= set(precisions(recipe)):
        return (recipe.name,)
    return tuple(key for key in keys if key != "bf16") or ("bf16",)


def speed_of(card: Card, method: str | Recipe, weights: float, work: Work = None) -> Rate | None:
    """Tokens a second of a method on this card, with so many weights in products. Where nobody has timed the method,
    it lies between the speeds of the precisions in which it quantizes, and work in BF16 takes BF16's time."""
    recipe = get_recipe(method)
    quantized = _between([_speed(card, key, weights) for key in _keys(card, recipe, work)])
    return _beside_bf16(quantized, _speed(card, "bf16", weights), work)


def _speed(card: Card, key: str, weights: float) -> Rate | None:
    """Tokens a second of a precision.

    The slow end is BF16's slow end on this card times the smallest gain. The fast end is the fastest step of this
    precision that somebody has timed on this card: a product of two programs can be faster than both of them. Where
    nobody has timed one, it is BF16's fast end times the largest gain with equal micro-batches.
    """
    bf16, times, direct = published(card, "bf16", weights), _gain(card, key), published(card, key, weights)
    if key == "bf16" or bf16 is None or times is None:
        return direct
    ends, sources, _ = _scaled(card, key, weights)
    low = min([bf16.low * times.low, *ends])
    high = max(ends, default=bf16.high * times.high)
    return replace(bf16, low=low, high=high, sources=tuple(dict.fromkeys((*bf16.sources, *sources, *times.sources))))


def gain_of(card: Card, method: str | Recipe, work: Work = None, over: str = "bf16") -> Rate | None:
    """How many times as fast as the method `over`, with equal micro-batches: measured with these methods, or else
    between the ratios of their precisions."""
    recipe, other = get_recipe(method), get_recipe(over)
    if recipe.name == other.name:
        return Rate(1.0, 1.0, ())
    ours, theirs = _keys(card, recipe, work), _keys(card, other, None)
    if _gain(card, recipe.name, other.name) and set(precisions(recipe, work)) <= set(precisions(recipe)):
        ours, theirs = (recipe.name,), (other.name,)  # timed beside each other, perhaps without BF16
    quantized = _between([_ratio(card, a, b) for a in ours for b in theirs])
    return _beside_bf16(quantized, _between([_ratio(card, "bf16", b) for b in theirs]), work)


def _ratio(card: Card, key: str, over: str) -> Rate | None:
    """How many times as fast as another precision. Where nobody has timed both with equal micro-batches, it follows
    from what both gain over BF16."""
    if key == over:
        return Rate(1.0, 1.0, ())
    if together := _gain(card, key, over):
        return together
    ours, theirs = (Rate(1.0, 1.0, ()) if k == "bf16" else _gain(card, k) for k in (key, over))
    if ours is None or theirs is None:
        return None
    return Rate(ours.low / theirs.high, ours.high / theirs.low, (*ours.sources, *theirs.sources))


def published(card: Card, key: str, weights: float) -> Rate | None:
    """The published rates of this precision, scaled by FLOPs to a model with so many weights in products."""
    ends, sources, models = _scaled(card, key, weights)
    if not ends:
        return None
    single = len(models) == 1 and not any("here" in rate and key in rate for rate in card.rates)
    wider = SINGLE_SOURCE if single else 1.0
    return Rate(min(ends) / wider, max(ends) * wider, tuple(sources), tuple(models), single)


def _scaled(card: Card, key: str, weights: float) -> tuple[list[float], list[str], list[float]]:
    """Every rate of this precision for a model with so many weights, the sources, and the models that were timed."""
    ends, sources, models = [], [], []
    for rate in _own_first([rate for rate in card.rates if key in rate]):
        ends += [value / rate["gpus"] * rate["weights"] / weights for value in _ends(rate[key])]
        sources.append(_source(rate))
        models.append(rate["weights"])
    return ends, sources, models


def _gain(card: Card, key: str, over: str = "bf16") -> Rate | None:
    """How many times as fast as another precision, by default BF16, in the same program and with equal micro-batches:
    on this card, where two models or more were timed on it, otherwise on all cards of its architecture. What
    dev/measure.sh timed here comes first."""
    own, all_alike = (
        [r for r in rates if {key, over} <= set(r["equal"])] for rates in (card.rates, _of_architecture(card))
    )
    alike = _own_first(own if len(own) > 1 or any("here" in rate for rate in own) else all_alike)
    if not alike:
        return None
    low = min(min(_ends(rate[key])) / max(_ends(rate[over])) for rate in alike)
    high = max(max(_ends(rate[key])) / min(_ends(rate[over])) for rate in alike)
    return Rate(low, high, tuple(dict.fromkeys(_source(rate) for rate in alike)))


def slow_by_micro_batch(card: Card) -> str:
    """The note of the slowest published step in BF16 on this card, where its micro-batch was smaller than that of the
    program's other precision. Otherwise ""."""
    rates = _own_first([rate for rate in card.rates if "bf16" in rate])
    slowest = min(rates, key=lambda r: min(_ends(r["bf16"])) / r["gpus"] * r["weights"], default={})
    return slowest["note"] if "bf16" in slowest.get("upper", [])[1:] else ""


def is_of_another_card(card: Card, ratio: Rate) -> bool:
    """Whether a ratio is a single measurement, which was made on another card."""
    return len(ratio.sources) == 1 and ratio.sources[0] not in map(_source, card.rates)


def unequal_gain(card: Card) -> tuple[float, str] | None:
    """The highest published gain over BF16 of a program that gave BF16 a smaller micro-batch, on cards of this kind,
    and its source. No estimate is computed from it. None where this GPU was measured, or nobody has published one."""
    found = [(r[r["upper"][0]] / r[r["upper"][1]], _source(r)) for r in _of_architecture(card) if "upper" in r]
    return max(found, default=None) if not is_measured(card, "bf16") else None


def _of_architecture(card: Card) -> list[dict[str, Any]]:
    return [rate for other in read_cards() if other.arch == card.arch for rate in other.rates]


def _source(rate: dict[str, Any]) -> str:
    return f"{rate['source']} ({rate['model']}, {rate['note']})"


def _ends(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def _own_first(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of this very GPU, where there are some; else those that this program measured; else all."""
    here, measured = ([rate for rate in rates if mark in rate] for mark in ("here", "part"))
    return here or measured or rates
