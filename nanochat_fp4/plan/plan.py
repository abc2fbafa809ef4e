"""A plan: everything that a run will do, from settings, this machine and what is there. Pure."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.dataset import MAX_SHARD, SHARD_BYTES
from nanochat_fp4.data.tokenizer import SPECIAL_TOKENS
from nanochat_fp4.models.optim8bit import STATES
from nanochat_fp4.plan.base import (
    LOSS_FLAGS,
    TOKENIZER_FLAGS,
    Base,
    deepest,
    describe,
    fitting_methods,
    parse,
    roomiest,
)
from nanochat_fp4.plan.cards import Card
from nanochat_fp4.plan.hours import Hours, hours
from nanochat_fp4.plan.machine import Facts, Machine
from nanochat_fp4.plan.settings import Settings
from nanochat_fp4.plan.stages import (
    LeftOut,
    Stage,
    check_flags,
    check_loss,
    check_order,
    choose,
    commands,
    needs,
    wanted,
)

# A shard of FineWeb-Edu has 250M characters, and a token 4.8. Best-fit packing crops 35% of the text away.
SHARD_TOKENS = 250e6 / 4.8 * 0.65
SPARE = 1.1  # A tenth more is downloaded than is needed.


@dataclass(frozen=True)
class Plan:
    settings: Settings
    machine: Machine
    processes: int
    facts: Facts
    bases: list[Base]
    stages: list[Stage]
    hours: list[Hours | None]  # of each base training
    left_out: list[LeftOut]
    text_bytes: float  # that are still to be had
    checkpoint_bytes: float  # of all checkpoints that will be on the disk together


def settle(settings: Settings, machine: Machine, steps: Callable[[Base], tuple[int, str] | None]) -> list[Base]:
    """Chooses what the settings leave open: depth on a small card, steps on a slow CPU, shards by tokens.

    steps(base): (steps, the reason) that this CPU has the time for, or None. Raises UserError for what a stage would
    refuse. Returns the base trainings.
    """
    processes = machine.processes(settings)
    if (smallest := 256 + len(SPECIAL_TOKENS)) > int(settings.numbers["VOCAB_SIZE"]):
        raise UserError(f"VOCAB_SIZE={settings.numbers['VOCAB_SIZE']} is too small: at least {smallest} are needed")
    numbers = settings.numbers
    parse("tok_train", [f"{flag}={numbers[n]}" for n, flag in TOKENIZER_FLAGS.items()], "tokenizer", TOKENIZER_FLAGS)
    if "tok" in settings.stages and int(numbers["TOK_CHARS"]) < int(numbers["VOCAB_SIZE"]):
        few = f"TOK_CHARS={numbers['TOK_CHARS']} characters hold no VOCAB_SIZE={numbers['VOCAB_SIZE']} different tokens"
        raise UserError(f"{few}; leave TOK_CHARS out (default: {settings.defaults['TOK_CHARS']}), or lower VOCAB_SIZE")
    for name in ("NUM_SHARDS", "TOK_SHARDS"):
        if numbers[name] != settings.defaults[name] and not 1 <= int(numbers[name]) <= MAX_SHARD:
            problem = f"{name}={numbers[name]}: FineWeb-Edu has 1 to {MAX_SHARD} training shards"
            raise UserError(f"{problem}; set another number, or leave {name} out")
    for kind in wanted(settings):
        needs(settings, kind)  # parses the stage's flags
    card = machine.card
    if card is not None and processes == 1 and (depth := deepest(settings, card, STATES)):
        settings.notes.append(f"d{numbers['DEPTH']} does not fit {card.memory} by count, so DEPTH={depth}")
        settings.instead("DEPTH", depth)
    bases = _bases(settings, machine, processes)
    for kind in wanted(settings):
        check_flags(settings, kind, processes)
    if settings.cpu_minutes and (found := steps(bases[0])):
        settings.numbers["NUM_ITERATIONS"], settings.why_steps = found
        bases = _bases(settings, machine, processes)
    if machine.card is None:
        _shorten_later_stages(settings, bases[0].steps)
    if "loss" in settings.stages:
        row = int(numbers["SEQ_LEN"])
        settings.instead("SPLIT_TOKENS", max(1, int(settings.defaults["SPLIT_TOKENS"]) // row) * row)
        flags = [f"{flag}={numbers[name]}" for name, flag in LOSS_FLAGS.items()]
        check_loss(parse("base_loss", flags, "base loss", LOSS_FLAGS), row, processes)
    shards = -(-bases[0].tokens * SPARE / SHARD_TOKENS // 10) * 10
    if settings.defaults["NUM_SHARDS"] == 0:
        settings.instead("NUM_SHARDS", int(min(max(shards, 10), MAX_SHARD)))
        settings.instead("TOK_SHARDS", min(int(settings.defaults["TOK_SHARDS"]), int(settings.numbers["NUM_SHARDS"])))
    for base in bases:
        if card and base.ways and not base.ways[0].rows and base.ways[0].peak > card.gib * 2**30:
            raise UserError(_too_large(settings, base, card, processes))
    return _bases(settings, machine, processes)


def _bases(settings: Settings, machine: Machine, processes: int) -> list[Base]:
    """All methods train in one state of the optimizer, so that their losses compare."""
    bases = [describe(settings, method, machine.card, processes, STATES) for method in settings.methods]
    states = {base.ways[0].state for base in bases if base.ways}
    if len(states) > 1:
        bases = [describe(settings, method, machine.card, processes, ("lean",)) for method in settings.methods]
    return bases


def _too_large(settings: Settings, base: Base, card: Card, processes: int) -> str:
    """What a base training lacks that does not fit the card, and with which methods it would fit."""
    rows = "one row" if base.args.device_batch_size in ("auto", 1) else f"{base.args.device_batch_size} rows"
    need = f"{base.ways[0].peak / 2**30:.1f} GiB"
    smaller = "lower DEPTH or SEQ_LEN"
    way = roomiest(settings, base, card, processes, STATES)
    if way.rows:
        what = "--device-batch-size" if "--device-batch-size" in settings.flags_of("BASE_ARGS") else "DEVICE_BATCH"
        flags = f" with {' '.join(way.flags)}, which the run then takes" if way.flags else ""
        remedy = f"at most {way.rows} of them fit{flags}; set {what}={way.rows}, or leave {what} out"
    elif base.method != settings.methods[0]:  # the baseline
        remedy = f"leave COMPARE out, or {smaller}"
    elif others := fitting_methods(settings, card, processes, STATES):
        remedy = (
            f"it fits with QAT_METHOD={' or '.join(others)}; take {'it' if len(others) == 1 else 'one'}, or {smaller}"
        )
    else:
        remedy = f"no method makes it fit; {smaller}"
    return f"{base.tag} needs {need} with {rows} by count, and {card.name} has {card.memory}; {remedy}"


def _shorten_later_stages(settings: Settings, steps: int) -> None:
    """On a CPU, gives the later stages and the loss their share of a base training that is shorter than the default.

    What is only measured shrinks to a quarter at most, as with the fewest steps that a probe chooses.
    """
    usual = int(settings.defaults["NUM_ITERATIONS"])
    if steps >= usual:
        return
    measured = max(steps, usual // 4)
    settings.instead("SPLIT_TOKENS", int(settings.defaults["SPLIT_TOKENS"]) * measured // usual)
    shares = {"--num-iterations=": steps, "--max-problems=": measured}
    for name, words in settings.default_args.items():
        fewer = re.sub(
            rf"({'|'.join(shares)})(\d+)", lambda m: f"{m[1]}{max(1, int(m[2]) * shares[m[1]] // usual)}", words
        )
        if settings.args[name] == words:
            settings.args[name] = fewer
        settings.default_args[name] = fewer


def make_plan(settings: Settings, machine: Machine, bases: list[Base], facts: Facts) -> Plan:
    """The plan of settled settings. Raises UserError for what cannot be: a tokenizer of another size, a full disk."""
    processes, numbers, base_dir = machine.processes(settings), settings.numbers, settings.base_dir
    has_tokenizer = facts.tokenizer is not None and "tok" in settings.stages
    if has_tokenizer and numbers["VOCAB_SIZE"] not in (facts.tokenizer, facts.asked_tokens):
        held = f"{base_dir / 'tokenizer'} holds a tokenizer of {facts.tokenizer} tokens"
        raise UserError(
            f"{held}, this run wants {numbers['VOCAB_SIZE']}; set VOCAB_SIZE={facts.tokenizer}, or choose another "
            "NANOCHAT_BASE_DIR"
        )
    if facts.made is not None:
        check_order(settings, facts.made, [base.tag for base in bases])
    chosen = choose(settings, facts.missing, processes)
    shards = int(numbers["NUM_SHARDS"]) if facts.text in ("hub", "shards") and "tok" in settings.stages else 0
    stages = commands(settings, bases, chosen, processes, facts.text, has_tokenizer, facts.shards >= shards)
    kinds = [kind for kind in ("base", "mid", "sft") if kind in settings.stages]
    kept = sum(base.checkpoint_bytes * (1 + max(1, base.args.keep_last)) for base in bases) * len(kinds)
    plan = Plan(
        settings, machine, processes, facts, bases, stages,
        [hours(base, machine.card, processes, base_dir) if machine.card else None for base in bases],
        chosen.left_out, max(0, shards - facts.shards) * float(SHARD_BYTES), kept,
    )  # fmt: skip
    return plan


def disk_problem(plan: Plan) -> str | None:
    """Why the disk does not hold the run, or None."""
    needed, free = plan.text_bytes + plan.checkpoint_bytes, plan.facts.disk_free
    if needed <= free:
        return None
    return (
        f"{plan.settings.base_dir} has {free / 1e9:.1f} GB free, and the run takes {needed / 1e9:.1f} GB "
        f"({plan.text_bytes / 1e9:.1f} of text, {plan.checkpoint_bytes / 1e9:.1f} of checkpoints); free some space, or "
        "set NANOCHAT_BASE_DIR to a larger disk"
    )
