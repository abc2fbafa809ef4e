"""The stages of a run as commands, and what becomes of a stage whose data cannot be had."""

import argparse
import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.needs import Missing, Need
from nanochat_fp4.plan.base import LOSS_FLAGS, Base, in_variables, parse
from nanochat_fp4.plan.settings import Settings

SCRIPTS = {"core": "base_eval", "mid": "mid_train", "sft": "chat_sft", "eval": "chat_eval"}
ARGS = {"core": "CORE_ARGS", "mid": "MID_ARGS", "sft": "SFT_ARGS", "eval": "EVAL_ARGS"}
# The stage that another one needs, and the folder of the checkpoints that a training stage makes.
BEFORE = {"base": "tok", "loss": "base", "core": "base", "mid": "base", "sft": "mid"}
MADE_BY = {"base": "base_checkpoints", "mid": "mid_checkpoints", "sft": "chatsft_checkpoints"}
# Flags with which a stage needs no files. Answers to the local tasks are short.
EMBEDDED = {"mid": ["--data=local"], "sft": ["--data=local"], "eval": ["--task-name=local", "--max-new-tokens=64"]}
EMBEDDED_ROWS = 4  # of a device's batch in mid-training, whose embedded mixture would be less than one usual step


@dataclass(frozen=True)
class Stage:
    """A module of the run and its flags, in so many processes.

    It is skipped where `section` of the report is newer than the checkpoints in `source`, and left out where a stage of
    `needs` has failed. beside: it runs in the background, and only the stages that need it wait for its end. output:
    the folder of the checkpoints that it makes, if it trains.
    """

    name: str
    title: str
    command: list[str]
    processes: int = 1
    beside: bool = False
    needs: tuple[str, ...] = ()
    section: str = ""
    source: str = ""
    output: str = ""


@dataclass(frozen=True)
class LeftOut:
    """What a run goes without, and what brings it back."""

    what: str
    why: str
    remedies: tuple[str, ...]


@dataclass
class Chosen:
    """What of the later stages runs: their flags as typed, and what is left out."""

    words: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def wanted(settings: Settings) -> list[str]:
    """The later stages that this run has; eval is the benchmarks after mid and sft."""
    kinds = [kind for kind in ("core", "mid", "sft") if kind in settings.stages]
    return kinds + (["eval"] if {"mid", "sft"} & set(kinds) else [])


def arguments(settings: Settings, kind: str, words: Sequence[str] | None = None) -> argparse.Namespace:
    """A later stage's flags as its own parser reads them, and checked as the stage will check them."""
    words = settings.words_of(ARGS[kind]) if words is None else words
    first = ["-i", "sft"] if kind == "eval" else []
    return parse(SCRIPTS[kind], [*first, *words], ARGS[kind])


def check_flags(settings: Settings, kind: str, processes: int) -> None:
    """Raises UserError for what a later stage would refuse after hours, such as a batch that does not divide."""
    module = importlib.import_module(f"scripts.{SCRIPTS[kind]}")
    try:
        if kind != "core":  # whose flags stand alone
            module.check_flags(arguments(settings, kind), int(settings.numbers["SEQ_LEN"]), processes)
    except UserError as e:
        raise UserError(f"{ARGS[kind]}: {e}") from None


def check_loss(args: argparse.Namespace, sequence_len: int, processes: int) -> None:
    """As check_flags, of base_loss, whose flags have variables of their own."""
    try:
        importlib.import_module("scripts.base_loss").check_flags(args, sequence_len, processes)
    except UserError as e:
        raise UserError(in_variables(str(e), LOSS_FLAGS)) from None


def check_order(settings: Settings, made: Collection[str], tags: list[str]) -> None:
    """Raises UserError for a stage that needs the output of another one which neither runs nor is there."""
    for stage in settings.stages:
        first = BEFORE.get(stage)
        if first and first not in settings.stages and first not in made:
            what = "a tokenizer" if first == "tok" else f"the model of stage {first} ({', '.join(tags)})"
            raise UserError(
                f"STAGES asks for {stage}, which needs {what}, and {settings.base_dir} has none; add {first} to "
                "STAGES, or set the variables and the NANOCHAT_BASE_DIR that it was made with"
            )


def needs(settings: Settings, kind: str) -> list[Need]:
    """What a later stage will load. Raises UserError for flags that it would refuse."""
    args = arguments(settings, kind)
    try:
        return importlib.import_module(f"scripts.{SCRIPTS[kind]}").needs(args)
    except UserError as e:
        raise UserError(f"{ARGS[kind]}: {e}") from None


def embedded(settings: Settings, kind: str, processes: int) -> list[str]:
    """Flags with which a stage trains on, or answers, what is embedded."""
    flags = list(EMBEDDED[kind])
    if kind == "mid":
        tokens = EMBEDDED_ROWS * (arguments(settings, kind).max_seq_len or int(settings.numbers["SEQ_LEN"])) * processes
        flags += [f"--device-batch-size={EMBEDDED_ROWS}", f"--total-batch-size={tokens}", f"--eval-tokens={8 * tokens}"]
    return flags


def choose(settings: Settings, missing: dict[str, list[Missing]], processes: int = 1) -> Chosen:
    """The flags of the later stages with what can be had. missing: by stage.

    A stage that lacks what is vital gets the embedded data, and CORE, which has none, is left out. Of other things a
    stage does without. Raises UserError where STAGES names the stage.
    """
    chosen = Chosen({kind: settings.words_of(ARGS[kind]) for kind in wanted(settings)})
    for kind, words in list(chosen.words.items()):
        lacks = missing.get(kind, [])
        if not lacks or "--allow-missing" in words:
            continue
        reasons: dict[str, list[str]] = {}
        for m in lacks:
            reasons.setdefault(m.why, []).append(m.what)
        why = "; ".join(f"{', '.join(what)}: {reason}" for reason, what in reasons.items())
        remedies = tuple(dict.fromkeys(m.remedy for m in lacks))
        if settings.stages_are_named:
            raise UserError(
                f"STAGES asks for {kind}, which needs {why}. To have it: {'; '.join(remedies)}; or leave it out"
            )
        if kind == "core":
            del chosen.words[kind]
            what = "the CORE metric"
        else:
            what = instead(kind, words, lacks, needs(settings, kind), embedded(settings, kind, processes))
        chosen.left_out.append(LeftOut(what, why, remedies))
    return chosen


def instead(kind: str, words: list[str], lacks: list[Missing], of_stage: list[Need], without_files: list[str]) -> str:
    """Changes a stage's flags so that it needs nothing of what is missing; says in words what it goes without."""
    if kind == "eval":
        if any(m.what == "a sandbox" for m in lacks):
            module = importlib.import_module("scripts.chat_eval")
            names = [
                n
                for n in module.chosen_tasks(module.parse_args(["-i", "sft", *words]).task_name)
                if n not in module.RUNS_CODE
            ]
            words.append(f"--task-name={'|'.join(names)}")
        rows = [m for m in lacks if m.what != "a sandbox"]
        if rows and len(rows) >= len([n for n in of_stage if n.what != "a sandbox"]):
            words.extend(without_files)
            return "the benchmarks (three small tasks take their place)"
        words.extend(["--allow-missing"] if rows else [])
        return f"of the benchmarks: {', '.join(m.what for m in lacks)}"
    if any(m.vital for m in lacks):
        words.extend(without_files)
        return f"nanochat's conversations in {kind} (a small embedded mixture takes their place)"
    words.append("--allow-missing")
    return f"of the conversations in {kind}: {', '.join(m.what for m in lacks)}"


def commands(
    settings: Settings,
    bases: list[Base],
    chosen: Chosen,
    processes: int,
    text: str,
    has_tokenizer: bool,
    has_shards: bool,
) -> list[Stage]:
    """All stages in order. text: folder, shards, embedded or hub (machine.py)."""
    made = _tokenizer(settings, text, has_tokenizer, has_shards) if "tok" in settings.stages else []
    for base in bases:
        made += _of_method(settings, base, chosen, processes)
    if "report" in settings.stages:
        made.append(Stage("report", "report", ["nanochat_fp4.evaluation.report", "generate"]))
    return made


def _tokenizer(settings: Settings, text: str, has_tokenizer: bool, has_shards: bool) -> list[Stage]:
    numbers, dataset, from_hub = settings.numbers, "nanochat_fp4.data.dataset", text in ("hub", "shards")
    title, rest = f"text: {numbers['NUM_SHARDS']} shards", [dataset, "-n", f"{numbers['NUM_SHARDS']}"]
    if has_tokenizer:
        return [Stage("download", title, rest)] if from_hub and not has_shards else []
    first = [dataset, "--embedded"] if text == "embedded" else [dataset, "--ensure", "-n", f"{numbers['TOK_SHARDS']}"]
    train = ["scripts.tok_train", f"--max-chars={numbers['TOK_CHARS']}", f"--vocab-size={numbers['VOCAB_SIZE']}"]
    made = [Stage("text", "text", first)]
    if from_hub:
        made.append(Stage("download", title, rest, beside=True, needs=("text",)))
    made.append(Stage("tok", f"tokenizer: {numbers['VOCAB_SIZE']} tokens", train, needs=("text",)))
    # GPT-2's and GPT-4's tokenizers, to compare with, come from the network as well.
    compare = ["scripts.tok_eval", *([] if from_hub else ["--no-compare"])]
    return [*made, Stage("tok_eval", "compression of the tokenizer", compare, needs=("tok",))]


def _of_method(settings: Settings, base: Base, chosen: Chosen, processes: int) -> list[Stage]:
    tag, numbers, words, made = base.tag, settings.numbers, chosen.words, []

    def add(name: str, after: str, title: str, section: str, place: str, script: str, *args: str) -> None:
        """after: the stage whose output it needs. place: the folder of the checkpoints that it is made from."""
        needs = ("text", "tok", "download") if not after else (f"{after} {tag}",)
        command, section = [f"scripts.{script}", *args], f"report/{tag}/{section}.json"
        output = f"{MADE_BY[name]}/{tag}" if name in MADE_BY else ""
        name, title = f"{name} {tag}", f"{title}, {base.method}"
        made.append(Stage(name, title, command, processes, False, needs, section, f"{place}/{tag}", output))

    resume = [f"--model-tag={tag}", "--resume-from-step=latest"]
    if "base" in settings.stages:
        add("base", "", "base training", "base-model-training", "base_checkpoints", "base_train", *base.argv)
    if "loss" in settings.stages:
        args = [f"--device-batch-size={numbers['EVAL_BATCH']}", f"--split-tokens={numbers['SPLIT_TOKENS']}"]
        add(
            "loss", "base", "base loss", "base-model-loss", "base_checkpoints", "base_loss", f"--model-tag={tag}", *args
        )
    if "core" in words:
        args = [f"--model-tag={tag}", *words["core"]]
        add("core", "base", "CORE metric", "base-model-evaluation", "base_checkpoints", "base_eval", *args)
    if "mid" in words:
        add("mid", "base", "mid-training", "midtraining", "base_checkpoints", "mid_train", *resume, *words["mid"])
        args = ["-i", "mid", "-g", tag, *words["eval"]]
        add(
            "eval_mid",
            "mid",
            "evaluation after mid-training",
            "chat-evaluation-mid",
            "mid_checkpoints",
            "chat_eval",
            *args,
        )
    if "sft" in words:
        add("sft", "mid", "SFT", "chat-sft", "mid_checkpoints", "chat_sft", *resume, *words["sft"])
        args = ["-i", "sft", "-g", tag, *words["eval"]]
        add("eval_sft", "sft", "evaluation after SFT", "chat-evaluation-sft", "chatsft_checkpoints", "chat_eval", *args)
    return made
