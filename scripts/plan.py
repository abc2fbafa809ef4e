"""
What a run of every stage will do, before anything is made: how long, does it fit, which method, and what to type.

    python -m scripts.plan speedrun                           # of this machine; run1000 likewise
    GPU=rtx5090 DEPTH=26 python -m scripts.plan speedrun      # of a GPU that is not here; NPROC=2 for two of them
    python -m scripts.plan speedrun --all                     # with every number that a variable sets

Variables say what differs from the defaults (nanochat_fp4/variables.py), as for speedrun_fp4.sh. Each stage's own
parser reads its flags, so that what a stage would refuse after hours is refused here.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import textwrap
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import INSTALLED, STAGE, ArgumentParser, UserError, amount, did_you_mean, run_main, switched_on
from nanochat_fp4.common import base_dir_of, base_dir_variable, load_recipes, resolve_method, set_cpu_threads
from nanochat_fp4.data import dataset
from nanochat_fp4.data.sources import hub_url, look_for, url_problem
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.evaluation.report import FOLDERS
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import CARDS, physical_memory, usable_cpus
from nanochat_fp4.locks import running, running_runs
from nanochat_fp4.models.families import family_of_flags
from nanochat_fp4.models.optim8bit import STATES, state_bytes
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.training.checkpoint_manager import list_steps, read_meta
from nanochat_fp4.training.flags import SAME_RUN
from nanochat_fp4.training.memory import SHARE, Memory, choose, largest, plan_accumulation, try_micro_batch
from nanochat_fp4.training.wandb_run import check_wandb
from nanochat_fp4.variables import ARGS, EXPORTED, NUMBERS, RUN, measure_seconds, problem
from scripts import base_eval, base_loss, base_train, chat_eval, chat_sft, mid_train, tok_train

RUN1000 = {"DEPTH": 32, "TOK_SHARDS": 16, "TOK_CHARS": 4_000_000_000, "EVAL_BATCH": 8}
RUNS = {  # name -> (numbers on a GPU, numbers on a CPU, minutes of the whole run on two cores)
    "speedrun": ({}, {}, 5),
    "run1000": (RUN1000, {"DEPTH": 4, "ASPECT_RATIO": 32, "NUM_ITERATIONS": 160}, 10),
}
COMMAND = "command.txt"  # in a run's folder of the report until its script has ended well: what goes on with it
STAGES = ("tok", "base", "loss", "core", "mid", "sft", "report")
# The stage whose output it needs.
BEFORE = {"base": "tok", "loss": "base", "core": "base", "mid": "base", "sft": "mid"}
LATER = {"core": base_eval, "mid": mid_train, "sft": chat_sft, "eval": chat_eval}  # eval: the benchmarks of mid and sft
SAME_FLAG = rf"--(no-)?({'|'.join(SAME_RUN).replace('_', '-')})(?![\w-])(=| +(?!--))?('.*?'|\".*?\"|\S*)"
ADVISED = ("bf16", "fp8", "clover", "clover_fp8_forward")
PUBLISHED = {"max_seq_len": 2048, "window_pattern": "SSSL"}  # Published speeds count as those of such rows.
PRECISIONS = {16: "bf16", 8: "fp8", 4: "nvfp4"}
FAR = 2  # An estimate for a model that is so many times larger or smaller than those that were timed says so.
# A shard of FineWeb-Edu has 250M characters, and a token 4.8. Best-fit packing crops 35% of the text away. A tenth more
# is downloaded than is needed. Of own text nothing is known before it is read; a token has some 4 bytes.
SHARD_TOKENS, SPARE = 250e6 / 4.8 * 0.65, 1.1
# On a CPU the later stages take as long as the base training and OTHER_STEPS steps of it, and a step of SFT takes as
# long as one of the base training (dev/LOG.md).
OTHER_STEPS, PROBE_STEPS, PROBE_SECONDS = 60, 4, 20
MBIT_100 = 100e6 / 8  # bytes a second
CPU_SPEED = 12.9e9  # FLOP/s of clover's small models on two cores, with which the whole speedrun takes five minutes
# What a forward pass keeps on a CPU, in FP32, for each token, block and column: 32 to 53 were measured of d2 and d6.
CPU_FLOATS = 40
EMBEDDED_ROWS = 4  # of a device's batch in mid-training, whose embedded mixture would be less than one usual step
# "RTX 5090 Laptop GPU" and "RTX 5090 D" are other chips, or the same with less power; "MIG" is a part of one.
OTHER_CHIPS = r"(?<![A-Za-z])(Laptop|Max-?Q|MIG|Ti|SUPER|D)(GPU)?\b"
GIB = 2**30

# ----------------------------------------------------------------------------------------------------------------------
# What the user asked for


class Settings:
    """The machine, numbers and flags of a run: the defaults, and what the user's variables changed. Raises UserError,
    which names the variable."""

    def __init__(self, run: str, environment: Mapping[str, str]):
        of_gpu, of_cpu, self.minutes = RUNS[run]
        self.run, self.environment, self.notes = run, environment, []
        self.card, self.here, self.processes = machine(environment)
        place, numbers = (2, of_cpu) if self.card is None else (1, of_gpu)
        self.defaults: dict[str, Any] = {name: row[place] for name, row in NUMBERS.items()}
        self.defaults |= dict.fromkeys(ARGS, "") | numbers
        self.values = {name: value_of(environment.get(name, ""), d) for name, d in self.defaults.items()}
        self.usual_steps = self.defaults["NUM_ITERATIONS"]
        self.memory = self.card["gib"] * GIB if self.card else physical_memory() / self.processes
        if self.card is None:  # A micro-batch of longer rows has fewer of them, and as many tokens.
            length = self.values["SEQ_LEN"]
            self.instead(DEVICE_BATCH=max(1, min(8, 2048 // max(1, length))) if isinstance(length, int) else 8)
        self.vocabulary = 0  # that of the tokenizer which is here
        self.sft_steps, self.about_sft = 0, []  # 0 until its conversations have been counted
        self.base_dir = base_dir_of(environment)
        self.data_dir, self.plan_only = environment.get("DATA_DIR", ""), switched_on("PLAN_ONLY", environment)
        if environment.get("TEXT_COLUMN") not in (None, "", "text") and not self.data_dir:
            raise UserError("TEXT_COLUMN is of text of your own; set DATA_DIR as well, or unset TEXT_COLUMN")
        load_recipes(environment.get("RECIPES", ""), "RECIPES")
        self.method = resolve_method(None, environment)
        self.methods = [self.method, *(["bf16"] if switched_on("COMPARE", environment) else [])]
        if self.methods == ["bf16", "bf16"]:
            raise UserError("COMPARE=1 compares a method with bf16; set another QAT_METHOD, or leave COMPARE out")
        asked = environment.get("STAGES", "").split()
        if unknown := [stage for stage in asked if stage not in STAGES]:
            raise UserError(f"STAGES: there is no stage {unknown[0]!r}; the stages are: {' '.join(STAGES)}")
        self.stages = [stage for stage in STAGES if (stage in asked if asked else stage != "core" or self.card)]
        self.later = [k for k in LATER if k in self.stages or (k == "eval" and {"mid", "sft"} & set(self.stages))]

    def instead(self, **defaults: Any) -> None:
        """Other defaults, which are the values of what the user has not set."""
        self.defaults |= defaults
        self.values |= {name: default for name, default in defaults.items() if not self.environment.get(name)}

    def shorten(self, steps: int) -> None:
        """Gives a CPU's later stages their share of a base training that is shorter than the default. What is only
        measured shrinks to a quarter at most."""
        usual, rows = self.usual_steps, self.defaults["DEVICE_BATCH"]
        trained, measured = min(1, steps / usual), min(1, max(steps / usual, 1 / 4))
        mid = f"--data=local --device-batch-size={rows} --total-batch-size=2048 --eval-tokens=8192"
        # nanochat's fraction of 0.02 is for a model that has learned much. In 20 steps it changes next to nothing.
        sft = "--init-lr-frac=0.5 --eval-steps=4 --eval-metrics-every=-1"
        self.instead(
            MID_ARGS=f"{mid} --num-iterations={max(1, int(60 * trained))}",
            SFT_ARGS=f"--data=local --num-iterations={max(1, int(20 * trained))} {sft}",
            EVAL_ARGS=f"--task-name=local --max-problems={int(32 * measured)} --max-new-tokens=32",
            SPLIT_TOKENS=int(NUMBERS["SPLIT_TOKENS"][2] * measured),
        )

    @property
    def changed(self) -> dict[str, Any]:
        """What the user has set to another value than the default."""
        return {name: value for name, value in self.values.items() if value != self.defaults[name]}

    def tag(self, method: str) -> str:
        """The name of the run with this method: what differs from the defaults is in it."""
        # A name has the depth, and later stages make no other base model.
        same = {"DEPTH", "SPLIT_TOKENS", *ARGS} | {n for n, row in NUMBERS.items() if re.search(SAME_FLAG, row[0])}
        names = {name: name.lower().replace("_", "-").replace("num-iterations", "steps") for name in self.changed}
        parts = [f"_{names[name]}{value}" for name, value in self.changed.items() if name not in same]
        if self.data_dir:
            path = os.path.realpath(Path(self.data_dir).expanduser())
            parts.append(f"_data-{Path(path).name[:20]}-{zlib.crc32(path.encode()) % 10**4:04d}")
        if others := re.sub(SAME_FLAG, "", self.values["BASE_ARGS"]).strip():
            parts.append(f"_{others}")
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", "".join(parts).replace("--", ""))
        text = text if len(text) <= 60 else f"{text[:50]}-{zlib.crc32(text.encode())}"
        return f"d{self.values['DEPTH']}_{method}{text}"

    def words(self, name: str) -> list[str]:
        """The flags in a variable such as MID_ARGS."""
        try:
            return shlex.split(self.values[name])
        except ValueError as e:
            raise UserError(f"{name}={self.values[name]!r}: {e}; close the quotation") from None

    def flags(self, script: str) -> dict[str, str]:
        """The variables of a script's flags: variable -> flag."""
        return {name: row[0].split()[1] for name, row in NUMBERS.items() if row[0].startswith(f"{script} ")}

    def command(self, script: str, names: Sequence[str], **own: Any) -> str:
        """What to type: `own` variables, those of these names that the user has set, and the script."""
        apart = {"PLAN_ONLY", "GPU", "GPU_MEMORY", "PYTHONPATH", *(["VENV"] if INSTALLED else [])}
        apart |= {name for name in names if self.environment.get(name, "") in ("", str(base_dir_of({})))}
        variables = own | {name: self.environment[name] for name in names if name not in {*apart, *own}}
        return " ".join([*(f"{name}={shlex.quote(str(value))}" for name, value in variables.items()), script])

    def argv(self, script: str) -> list[str]:
        return [f"{flag}={self.values[name]}" for name, flag in self.flags(script).items()]

    @contextlib.contextmanager
    def blamed(self, script: str, args: str = "") -> Iterator[None]:
        """Turns what a stage or a model refuses into one line about the variables of its flags. args: the variable with
        more flags of the stage. A flag that the user has typed there stays as it is."""
        said, names = io.StringIO(), {flag: name for name, flag in self.flags(script).items()}
        for word in self.words(args) if args else ():
            names.pop(word.partition("=")[0], None)
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                yield
            return
        except SystemExit:  # A parser's refusal
            text = said.getvalue().strip().splitlines()[-1].removeprefix("error: ").partition(" (see ")[0]
            text = re.sub("invalid int value: .*", "expected a whole number; set another", text)
            text += f" (see {STAGE}{script} --help)"
        except (UserError, ValueError) as e:  # A ValueError is of the model's config.
            text = re.sub(r"([2-9]|\d\d+) device", r"NPROC=\1 device", str(e))
        names["--device-type"] = "BASE_ARGS=--device-type"
        text = re.sub(r"--[\w-]+", lambda flag: names.get(flag[0], flag[0]), text)
        text = re.sub(r"^argument (\w+):", lambda name: f"{name[1]}={self.values[name[1]]}:", text)
        changed = {name: v for name, v in self.changed.items() if name in names.values() or name == args}
        if not any(name in text for name in changed or ["NPROC="]):
            text = f"{', '.join(f'{k}={v}' for k, v in changed.items()) or args or self.run}: {text}"
        plans = "; GPU=rtx5090 plans a machine with such a GPU" if self.plan_only and "no GPU here" in text else ""
        raise UserError(text + plans)


def value_of(text: str, default: Any) -> Any:
    """A variable's value, of its default's kind. What is of no such kind stays a text, which its stage refuses."""
    with contextlib.suppress(ValueError):
        return type(default)(text) if text else default
    return text


# ----------------------------------------------------------------------------------------------------------------------
# The machine


def bare(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def find_card(name: str, gib: float = 0.0) -> dict[str, Any]:
    """The record of cards.json of a name that a user typed: rtx5090, 5090, "RTX 5090". gib: GPU_MEMORY."""
    cards = {bare(card["name"]): card for card in CARDS["cards"]}
    ending = [card for key, card in cards.items() if name and key.endswith(bare(name))]
    if found := cards.get(bare(name)) or (ending[0] if len(ending) == 1 else None):
        return found | ({"gib": gib} if gib else {})
    if gib:
        return {"name": name or "a GPU without a name", "gib": gib, "arch": "", "speed": {}}
    chip, meant = re.search(OTHER_CHIPS, name, re.IGNORECASE), did_you_mean(bare(name), cards)
    meant = f"{chip[0]} in a name means another chip; " if chip else meant and f"{meant} Or "
    give = "give its memory in GiB, for example GPU_MEMORY=24 (and NPROC=2 for two GPUs)"
    raise UserError(f"GPU={name} is not in nanochat_fp4/cards.json; {meant}{give}")


def card_of_device(device_name: str, gib: float, arch: str) -> dict[str, Any]:
    """The record for torch.cuda.get_device_name(), with the memory and the architecture of this very device."""
    known = [c for c in CARDS["cards"] if re.search(rf"\b{re.escape(c['name'])}\b(?!.*{OTHER_CHIPS})", device_name)]
    card = max(known, key=lambda c: len(c["name"]), default={"speed": {}})
    return card | {"name": device_name, "gib": gib, "arch": arch}


def machine(environment: Mapping[str, str]) -> tuple[dict[str, Any] | None, bool, int]:
    """(the record of cards.json of its GPUs, or None; whether it is this machine; the number of processes)."""
    text, memory, gpu = (environment.get(name, "") for name in ("NPROC", "GPU_MEMORY", "GPU"))
    if not re.fullmatch(r"|[1-9]\d{0,3}", text):
        raise UserError(f"NPROC={text!r} is not a number of processes; use 1, 2, ... or leave it out")
    if not re.fullmatch(r"|\d{1,5}(\.\d*)?", memory) or (memory and not float(memory)):
        raise UserError(f"GPU_MEMORY={memory}: expected a number of GiB, for example GPU_MEMORY=24")
    if gpu or memory:
        return find_card(gpu, float(memory or 0)), False, int(text or 1)
    gpus = torch.cuda.device_count()
    most, what = (gpus, "GPU(s)") if gpus else (usable_cpus(), "CPU(s)")
    if int(text or 1) > most:
        raise UserError(f"NPROC={text}: this machine has {most} {what}; use at most {most}")
    device = torch.cuda.get_device_properties(0) if gpus else None
    card = device and card_of_device(device.name, device.total_memory / GIB, f"sm_{device.major}{device.minor}")
    return card, True, int(text or max(1, gpus))


# ----------------------------------------------------------------------------------------------------------------------
# The base training


class Base:
    """The base training with one method: its flags, the model on the meta device, its steps, and the ways in which it
    fits the card. more: flags of a trial, which count before the user's. states: those that may be chosen."""

    def __init__(self, s: Settings, method: str, *more: str, states: Sequence[str] = STATES):
        own, card, processes = s.words("BASE_ARGS"), s.card, s.processes
        self.method, tag = method, s.tag(method)
        self.label = f"{method}: " if len(s.methods) > 1 else ""  # before the facts of one of two methods
        argv = [f"--method={method}", f"--model-tag={tag}", *s.argv("base_train"), "--resume-from-step=latest"]
        with s.blamed("base_train", "BASE_ARGS"):
            args = self.args = base_train.parse_args([*argv, *own, *more])
            self.tag = args.model_tag  # The user may name a run, such as one with a name of an earlier version.
            if self.tag != tag and len(s.methods) > 1:
                raise UserError("--model-tag names one run, and COMPARE=1 trains two; leave out one of both")
            model = make_model(args, s)
            nf.convert(model, method, verbose=False)
            plan = MethodPlan.parse(method, args.layer_methods, args.method_phases)
            plan.apply(model, 0.0)
            self.flops, self.parameters = model.estimate_flops(), model.num_scaling_params()
            rows = plan_accumulation(args.total_batch_size, 1, args.max_seq_len, processes)
            self.steps = base_train.resolve_horizon(args, self.flops, self.parameters)
            self.tokens = self.steps * args.total_batch_size
            sizes = [n for n in range(1, min(rows, 1024 if card else 32) + 1) if rows % n == 0]
            if args.device_batch_size != "auto":
                plan_accumulation(args.total_batch_size, args.device_batch_size, args.max_seq_len, processes)
                sizes = [args.device_batch_size]
            if card is None:
                base_train.check_machine(args, torch.device("cpu"), self.flops * self.tokens)
        self.is_plain, self.work = not plan.layers and not plan.phases, plan.work(model, heads=False)
        self.weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        usual = make_model(argparse.Namespace(**vars(args) | PUBLISHED), s).estimate_flops()
        self.size = self.weights * self.flops / usual
        self.is_fixed = any(word.startswith(("--state", "--recompute")) for word in own)
        self.ways: list[Memory] = []  # The first one is taken. Of some families the memory is not counted.
        if card is None:
            self.ways = [on_cpu(model, s.memory, sizes, args)]
        elif family_of_flags(args).memory_is_counted:
            asked = largest(model, s.memory, sizes, args.state, args.recompute, processes)
            self.ways = [asked] if self.is_fixed else choose(model, s.memory, sizes, states, processes)
            argv += [] if self.is_fixed else self.ways[0].flags
        count = (self.ways and self.ways[0].rows) or sizes[0]  # What fits hardly has no way with rows.
        self.rows = f"{count} row{'s' * (count > 1)}"
        fits = bool(card and self.ways) and self.ways[0].graphed_peak <= SHARE * s.memory
        self.graphed = fits if args.cuda_graph is None else args.cuda_graph
        done = list_steps(s.base_dir / FOLDERS["base"] / self.tag) if s.here else []
        self.done = next((step for step in done if step <= self.steps), 0)  # The run goes on from here.
        saved = state_bytes(model, self.ways[0].state if self.ways else args.state, gpu=bool(card))
        self.argv = argv + own
        self.checkpoint_bytes = (1 + max(1, args.keep_last)) * (saved["weights"] + saved["moments"])


def on_cpu(model: Any, total: float, sizes: Sequence[int], args: argparse.Namespace) -> Memory:
    """The memory of a CPU's step with the largest micro-batch of these that fits, like memory.largest."""
    of, parts = state_bytes(model, args.state), ("weights", "gradients", "moments")
    row = 4 * CPU_FLOATS * model.config.n_layer * model.config.n_embd * args.max_seq_len
    fitting = [rows for rows in sizes if sum(of[part] for part in parts) + rows * row <= total]
    kept = row * max(fitting, default=sizes[0])
    others = dict.fromkeys(("codes", "loss", "update", "graphed_update"), 0.0)
    return Memory(max(fitting, default=0), args.state, "none", of | others | {"activations": kept})


def make_model(args: argparse.Namespace, s: Settings, device: str = "meta") -> Any:
    family = family_of_flags(args)
    config = family.config_from_flags(args, s.vocabulary or int(s.values["VOCAB_SIZE"]))
    with contextlib.redirect_stdout(io.StringIO()), torch.device(device):
        return family.model(config)


def choose_steps(s: Settings, base: Base) -> dict[str, Any]:
    """On a CPU all steps, half or a quarter of them, and the seconds of a step, by a probe before the first run. It is
    stored in the base directory, so that every method, resume and comparison there has the same number."""
    path, most, args, records = s.base_dir / "cpu_steps.json", s.usual_steps, base.args, {}
    name = f"d{args.depth}_{most}"
    with contextlib.suppress(OSError, ValueError):
        records = json.loads(path.read_text(encoding="utf-8"))
    if name in records or s.plan_only or "base" not in s.stages:
        return records.get(name, {})
    model = make_model(args, s, "cpu")
    set_cpu_threads(torch.device("cpu"), model.config.n_embd)
    model.init_weights()
    nf.convert(model, base.method, verbose=False)
    rows = args.device_batch_size if args.device_batch_size != "auto" else args.total_batch_size // args.max_seq_len
    ends: list[float] = []
    while len(ends) <= PROBE_STEPS and (len(ends) < 2 or ends[-1] - ends[0] < PROBE_SECONDS):
        for _ in range(args.total_batch_size // (rows * args.max_seq_len)):
            try_micro_batch(model, rows, args.max_seq_len)
        ends.append(time.monotonic())
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    fits = [n for n in (most, most // 2) if (2 * n + OTHER_STEPS) * seconds <= 60 * s.minutes]
    records[name] = {"steps": max(fits, default=most // 4), "seconds_per_step": seconds}
    s.base_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(records, indent=1) + "\n")
    return records[name]


def speeds(s: Settings, base: Base) -> dict[str, dict[str, Any]]:
    """The speeds of the card by precision or method, as cards.json has them. Those of steps that dev/measure.sh has
    measured on this GPU, of no published runs, count before others."""
    here: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads((s.base_dir / "measurements/steps.json").read_text(encoding="utf-8"))
        for r in content["records"] if bare(content["environment"]["gpu"]) == bare(s.card["name"]) else ():
            if r.get("tokens_per_second") and r["recompute"] == "none":
                times = r["flops_per_token"] / base.flops  # as much work as this model's
                speed = times * r["tokens_per_second"] * base.size / 1e12
                at = f"{r['tokens_per_second']:,.0f} at d{r['depth']}, windows {content['settings']['window_pattern']}"
                of = {"range": [speed, speed], "runs": 0, "timed": 1, "models": [times * base.weights]}
                of |= {"depth": r["depth"], "doubts": [f"scaled from {at}"] * (times != 1)}
                here.setdefault(r["method"], of)
    return s.card["speed"] | here | ({"nvfp4": here["clover"]} if "clover" in here else {})


def hours(s: Settings, base: Base) -> tuple[float, float, list[str]] | None:
    """(fewest hours, most hours, facts about them) of the base training with its validations. None if a precision of
    the method was never timed."""
    timed = speeds(s, base)
    parts = {PRECISIONS[bits]: share for bits, share in base.work.items() if share}
    parts = {base.method: 1.0} if base.is_plain and base.method in timed else parts
    if not parts.keys() <= timed.keys():
        return None
    # The time of a step is proportional to the work in each precision. Speeds are of 1e12 weights and a second.
    work = [sum(share / timed[key]["range"][end] for key, share in parts.items()) for end in (0, 1)]
    slow, fast = (1e12 * s.processes / base.size / seconds for seconds in work)
    # A forward pass is a third of a step's work. A method that quantizes is validated twice, the second time in BF16.
    every, passes = base.args.eval_every, 1 if base.method == "bf16" else 2
    tokens = base.tokens + ((base.steps // every + 1) * base.args.eval_tokens * passes / 3 if every > 0 else 0)
    used = [timed[key] for key in parts]
    sizes = [base.weights / model for of in used for model in of["models"]]
    how = f"{'measured' if base.method in parts and not used[0]['doubts'] else 'estimated by steps'} on this GPU"
    if runs := max(of["runs"] for of in used):
        least = min(parts, key=lambda key: timed[key]["timed"])
        how = f"from {runs} run{'s' * (runs > 1)}, {timed[least]['timed']} of {least} on this card (docs/measured.md)"
    facts = [f"{how}: {span(*(round(x, 2 - int(math.log10(x))) for x in (slow, fast)))} tokens/s"]
    facts += {re.split(";|, times", doubt)[0]: doubt for of in reversed(used) for doubt in of["doubts"]}.values()
    facts += [f"interpolated between {' and '.join(parts)}: nobody has timed {base.method}"] * (len(parts) > 1)
    if min(sizes) > FAR or max(sizes) < 1 / FAR:
        facts.append(f"EXTRAPOLATED: it is {span(min(sizes), max(sizes))} times as large as the models that were timed")
    if base.ways and base.ways[0].recompute != "none":
        facts.append("not counted: activations are computed twice, which took 6% to 8% more on an H200")
    facts += [f"counted as {s.processes} times one GPU (docs/scale.md has what several reach)"] * (s.processes > 1)
    return tokens / fast / 3600, tokens / slow / 3600, facts


# ----------------------------------------------------------------------------------------------------------------------
# The stages


class Stage(NamedTuple):
    """A module of the run and its flags, in so many processes; 0 processes: one in the background.

    It is skipped if its section of the report is newer than the weights in source, and left out if a stage of `needs`
    has failed.
    """

    name: str
    needs: str
    title: str
    processes: int
    command: list[str]
    section: str = ""
    source: str = ""


def later_words(s: Settings) -> tuple[dict[str, list[str]], list[str]]:
    """The flags of the later stages with what can be had, and a line for each thing that the run goes without.

    A stage that lacks what is vital gets the embedded data, and CORE, which has none, is left out. Of other things a
    stage does without. Raises UserError for what a stage would refuse, and if STAGES names a stage that lacks
    something.
    """
    words, args, needs, left_out = {kind: s.words(f"{kind.upper()}_ARGS") for kind in s.later}, {}, {}, []
    for kind, script in ((kind, LATER[kind]) for kind in s.later):
        with s.blamed(script.__name__.split(".")[-1], f"{kind.upper()}_ARGS"):
            args[kind] = script.parse_args([*(["-i", "sft"] if kind == "eval" else []), *words[kind]])
            needs[kind] = script.needs(args[kind])
            if kind != "core":  # whose flags stand alone
                script.check_flags(args[kind], int(s.values["SEQ_LEN"]), s.processes)
    if s.here:
        look_for([need for of in needs.values() for need in of])
    for kind in s.later:
        # Training and validation have sources of one name, of which either may be at fault.
        lacks = list({need.name: need for need in needs[kind] if need.missing}.values())
        there = {need.name for need in needs[kind] if not need.missing}
        # What lies here, a folder that was named or a damaged file, is nothing to go without.
        own = [m for m in lacks if kind != "core" and (m.is_damaged or (m.vital and not m.remote))]
        if not lacks or ("--allow-missing" in words[kind] and not own):
            continue
        reasons = {m.missing: [o.name for o in lacks if o.missing == m.missing] for m in own or lacks}
        named = {r: ", ".join([*of[:2], *([f"and {len(of) - 2} more"] if of[2:] else [])]) for r, of in reasons.items()}
        why = "; ".join(f"{names}: {reason}" for reason, names in named.items())
        to_have = f"To have it: {'; '.join(dict.fromkeys(m.remedy for m in own or lacks if m.remedy))}"
        if own or s.environment.get("STAGES"):
            raise UserError(f"{kind} needs {why}. {to_have}; or leave it out of STAGES")
        what = "goes without a part"
        if kind == "core":
            what = "is left out"
            del words[kind]
        elif any(m.vital for m in lacks) or (kind == "eval" and there <= {"a sandbox"}):
            what, of_eval = "has small embedded data", ["--task-name=local", "--max-new-tokens=64", "--allow-missing"]
            words[kind] += of_eval if kind == "eval" else ["--data=local"]
            if kind == "mid":
                tokens = EMBEDDED_ROWS * (args[kind].max_seq_len or int(s.values["SEQ_LEN"])) * s.processes
                words[kind] += [f"--device-batch-size={EMBEDDED_ROWS}", f"--total-batch-size={tokens}"]
                words[kind].append(f"--eval-tokens={8 * tokens}")
        else:
            words[kind].append("--allow-missing")
        left_out.append(f"{kind} {what}, because of {why}. {to_have}")
    if "sft" in words:
        now = chat_sft.parse_args(words["sft"])
        parts = chat_sft.train_sources(now)
        if now.data == args["sft"].data:
            parts = needs["sft"][: len(parts)]  # which have been looked for
        elif s.here:
            look_for(parts)
        count = sum(len(part.task or ()) for part in parts)
        known = all(part.task or part.missing for part in parts)  # What is still to be downloaded is not.
        with s.blamed("chat_sft", "SFT_ARGS"):
            s.sft_steps = chat_sft.steps_of(now, count) if known else max(0, now.num_iterations)
        if now.sft_dir and s.here:
            own = sum(len(part.task) for part in parts if part.vital)
            in_all = f" of {count:,}, {s.sft_steps:,} steps" * known
            s.about_sft = [f"SFT: {own:,} conversations in {now.sft_dir}{in_all}"]
    return words, left_out


def model_stages(s: Settings, base: Base, words: dict[str, list[str]]) -> list[Stage]:
    """The stages of one method."""
    tag, made, of_eval = base.tag, [], words.get("eval", [])
    resume = [f"--model-tag={tag}", "--resume-from-step=latest", f"--save-every={s.values['SAVE_EVERY']}"]

    def add(name: str, before: str, title: str, section: str, script: str, *flags: str) -> None:
        """before: the stage whose model it takes."""
        stage, needs = name.removeprefix("eval_"), f"{before}:{tag}" if before else "text tok download"
        if stage in s.stages and (stage in words or stage not in LATER):
            section, source = f"report/{tag}/{section}.json", f"{FOLDERS[before or 'base']}/{tag}"
            command, title = [f"scripts.{script}", *flags], f"{title}, {base.method}"
            made.append(Stage(f"{name}:{tag}", needs, title, s.processes, command, section, source))

    add("base", "", "base training", "base-model-training", "base_train", *base.argv)
    add("loss", "base", "base loss", "base-model-loss", "base_loss", resume[0], *s.argv("base_loss"))
    add("core", "base", "CORE metric", "base-model-evaluation", "base_eval", resume[0], *words.get("core", []))
    add("mid", "base", "mid-training", "midtraining", "mid_train", *resume, *words.get("mid", []))
    title = "evaluation after mid-training"
    add("eval_mid", "mid", title, "chat-evaluation-mid", "chat_eval", "-i", "mid", "-g", tag, *of_eval)
    add("sft", "mid", "SFT", "chat-sft", "chat_sft", *resume, *words.get("sft", []))
    title = "evaluation after SFT"
    add("eval_sft", "sft", title, "chat-evaluation-sft", "chat_eval", "-i", "sft", "-g", tag, *of_eval)
    return made


def calls(stages: Sequence[Stage]) -> str:
    """The calls of `stage` and `beside` in dev/pipeline.sh: name, what it needs, section, source, title, processes,
    module, flags."""
    lines = []
    for stage in stages:
        words = [stage.name, stage.needs, stage.section, stage.source, stage.title, str(stage.processes or 1)]
        lines.append(shlex.join(["stage" if stage.processes else "beside", *words, *stage.command]))
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------------------------
# The plan


class Plan:
    """Everything that a run will do. Raises UserError for what a stage would refuse."""

    def __init__(self, run: str, environment: Mapping[str, str]):
        if wrong := problem(set(environment)):
            raise UserError(wrong)
        s = self.s = Settings(run, environment)
        if not s.here and not s.plan_only:
            raise UserError("GPU and GPU_MEMORY plan a machine that is not here; set PLAN_ONLY=1 as well")
        if s.here:
            check_wandb(environment.get("WANDB_RUN", ""))
        folders = (s.base_dir / FOLDERS["base"]).glob("*/") if s.here else ()
        newest = sorted(folders, key=lambda folder: -folder.stat().st_mtime)
        # The base trainings that are here, and the metadata of their newest checkpoints.
        self.runs = {f: read_meta(f, step) for f in newest for step in list_steps(f)[:1]}
        at_work = [*running_runs(s.base_dir), running(s.base_dir / "pipeline")] if s.here and s.plan_only else []
        self.at_work = [who for who in at_work if who]
        self.bases = self.settle()
        for base in self.bases:
            self.check_memory(base)
        self.left_out: list[str] = []
        self.find_text()
        self.words, left_out = later_words(s)
        self.left_out += left_out
        self.stages = self.text_stages() if "tok" in s.stages else []
        for base in self.bases:
            self.stages += model_stages(s, base, self.words)
        if "report" in s.stages:
            command = ["nanochat_fp4.evaluation.report", "generate", f"--model-tag={self.bases[0].tag}"]
            self.stages.append(Stage("report", "", "report", 1, command))
        self.check_order_and_disk()
        self.kept: list[str] = []  # models that stay as they are, although the plan would make others
        self.stages = [self.look_back(stage) for stage in self.stages]

    def settle(self) -> list[Base]:
        """The base trainings, after what is left open is chosen: steps on a slow CPU, shards by tokens. All
        methods train in one state of the optimizer, so that their losses compare."""
        s, n = self.s, self.s.values
        with s.blamed("tok_train"):
            tok_train.parse_args(s.argv("tok_train"))
        self.tokenizer = self.find_tokenizer()
        for name in ("NUM_SHARDS", "TOK_SHARDS"):
            if name in s.changed and n[name] not in range(1, dataset.MAX_SHARD + 1):
                raise UserError(f"{name}={n[name]}: FineWeb-Edu has 1 to {dataset.MAX_SHARD} shards; set such a number")
        first = Base(s, s.method)
        # The steps of a CPU, and the seconds of one.
        self.chosen = {} if s.card or s.environment.get("NUM_ITERATIONS") else choose_steps(s, first)
        if self.chosen:
            s.instead(NUM_ITERATIONS=self.chosen["steps"])
            first = Base(s, s.method)
        if s.card is None:
            s.shorten(first.steps)
        else:
            shards = -(-first.tokens * SPARE / SHARD_TOKENS // 10) * 10
            s.instead(NUM_SHARDS=int(min(max(shards, 10), dataset.MAX_SHARD)))
            s.instead(TOK_SHARDS=min(s.defaults["TOK_SHARDS"], n["NUM_SHARDS"]))
        if "loss" in s.stages:
            row = n["SEQ_LEN"]
            s.instead(SPLIT_TOKENS=max(1, s.defaults["SPLIT_TOKENS"] // row) * row)
            with s.blamed("base_loss"):
                base_loss.check_flags(base_loss.parse_args(s.argv("base_loss")), row, s.processes)
        bases = [Base(s, method) for method in s.methods]
        if len({base.ways[0].state for base in bases if base.ways}) > 1:
            bases = [Base(s, method, states=("lean",)) for method in s.methods]
        return bases

    def check_memory(self, base: Base) -> None:
        """Refuses what needs more memory than there is, and names what fits. What fits hardly gets a note."""
        s, asked, way = self.s, base.args.device_batch_size, next(iter(base.ways), None)
        if way is None or way.rows:
            return
        what = "--device-batch-size" if "--device-batch-size" in s.values["BASE_ARGS"] else "DEVICE_BATCH"
        most = max(Base(s, base.method, "--device-batch-size=auto").ways, key=lambda way: way.rows)
        rows, flags = f"{asked} rows", f" with {' '.join(most.flags)}, which the run then takes" if most.flags else ""
        remedy = f"at most {most.rows} of them fit{flags}; set {what}={most.rows}, or leave {what} out"
        if not most.rows or asked == "auto":
            others = [m for m in ADVISED if base.method == s.method and Base(s, m).ways[0].rows]
            rows, remedy = "one row", f"take QAT_METHOD={' or '.join(others)}, or " if others else ""
            remedy += f"{'leave COMPARE out, or ' * (base.method != s.method)}lower DEPTH or SEQ_LEN"
        total = f"{s.card['name'] if s.card else 'this machine'} has {s.memory / GIB:.3g} GiB"
        needed = f"{way.peak / GIB:.1f} GiB with {', '.join([rows, *way.flags])} by count"
        has = f"{base.tag} needs {needed}, and {total}; {remedy}"
        if way.peak > s.memory:
            raise UserError(has)
        s.notes.append(f"it hardly fits, for 6% is for fragments: {has}")

    def find_text(self) -> None:
        """Where the text comes from, the shards of FineWeb-Edu that are here, and the words about all that. Raises
        UserError for text that cannot be trained on, and for another one than that of a model to go on with."""
        s, shards, self.shards, tokens, guess = self.s, int(self.s.values["NUM_SHARDS"]), 0, 0.0, ""
        folder = s.data_dir or (dataset.found_data() if s.here else None)
        why = f"built before; for FineWeb-Edu: {base_dir_variable(s.base_dir)}python -m nanochat_fp4.data.dataset -n 8"
        if s.here and not folder:
            url = hub_url(dataset.DATASET, dataset.index_to_filename(0))
            why = f"FineWeb-Edu: {problem}" if (problem := url_problem(url)) else ""
        if s.data_dir and (s.here or Path(folder).exists()):
            found = dataset.survey(folder)
            said, tokens = dataset.look_into(found)
            self.text, self.about_text = "folder", [f"DATA_DIR {said}"]
            guess = f" (a guess, {dataset.BYTES_PER_TOKEN} bytes each)"
            if not s.plan_only:  # Text that cannot be trained on ends here. The others are described above the plan.
                train = dataset.open_text("train", dataset.ensure_data(s.data_dir))
                self.about_text = [f"DATA_DIR {folder}, as above"]
                if self.tokenizer:
                    tokens, guess = dataset.count_tokens(train, self.tokenizer) or tokens, ""
            elif self.tokenizer and (known := self.counted(base_train.text_digest(found))):
                tokens, guess = known, ""
        elif s.data_dir:
            self.text, self.about_text = "folder", [f"{folder} (DATA_DIR) was not found here, and is not counted"]
        elif s.here and why and not (folder and Path(folder).name == "base_data"):
            self.text, self.about_text = "embedded", [f"the embedded corpus, which is small ({why})"]
        else:
            self.text, self.shards = "hub", min(shards, len(dataset.survey(folder).train)) if folder else 0
            here = f"{self.shards} of them here" if self.shards else "from the hub"
            self.about_text = [f"FineWeb-Edu, {shards} shard{'s' * (shards > 1)}, {here}"]
            if size := (shards - self.shards) * dataset.SHARD_BYTES:
                long = duration(*[size / MBIT_100 / 3600] * 2)
                self.about_text[0] += f": {size / 1e9:.3g} GB to download, {long} at 100 Mbit/s"
            tokens = shards * SHARD_TOKENS
        if tokens and "base" in s.stages:
            base = self.bases[0]
            self.about_text += base_train.how_often(tokens, base.args.total_batch_size, base.steps, guess).splitlines()
        if self.tokenizer and "tok" in s.stages:
            other = ""
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                record = json.loads((s.base_dir / "report/tokenizer-training.json").read_text("utf-8"))
                trained = record["data"][0]["Data"]
                same = os.path.realpath(trained) == os.path.realpath(folder or s.base_dir / "base_data")
                other = "" if same else f", although it was trained on {trained}"
            held = f"the tokenizer of this folder is kept ({s.vocabulary} tokens){other}; another folder has its own"
            self.about_text.append(held)
        for base in (base for base in self.bases if base.done):
            model, data_dir = s.base_dir / FOLDERS["base"] / base.tag, base.args.data_dir or folder
            if changed := base_train.look_back(model, self.tokenizer, data_dir):
                new = typed(s, NANOCHAT_BASE_DIR=f"{s.base_dir}_new")
                if base.done < base.steps and "base" in s.stages:
                    raise UserError(f"{changed}; give the run its text back, or train on the text of now: {new}")
                self.left_out.append(f"{base.tag} knows nothing new: {changed}. To train on the text of now: {new}")

    def counted(self, text: str) -> int | None:
        """The training tokens of own text with this digest, as a run with this tokenizer has counted them."""
        for folder, meta in self.runs.items():
            if meta.get("text") == text and meta["run_config"].get("tokenizer") == self.tokenizer.fingerprint():
                counts = [r["text_tokens"] for r in read_jsonl(folder / "metrics.jsonl") if r.get("text") == text]
                return counts[-1] if counts else None
        return None

    def find_tokenizer(self) -> RustBPETokenizer | None:
        """The tokenizer that is here, which the run keeps, or None."""
        s, folder = self.s, self.s.base_dir / "tokenizer"
        if not s.here or not all((folder / name).is_file() for name in ("tokenizer.json", "token_bytes.pt")):
            if s.here and "tok" in s.stages:
                tok_train.check_own(folder)
            return None
        tokenizer = RustBPETokenizer.from_directory(folder)  # A damaged file ends here.
        tokens, wanted = tokenizer.get_vocab_size(), s.values["VOCAB_SIZE"]
        asked = json.loads((folder / "tokenizer.json").read_bytes()).get("asked_tokens")
        if "tok" in s.stages and wanted not in (tokens, asked):  # A small text may yield fewer than are asked for.
            held = f"{folder} holds a tokenizer of {tokens} tokens, this run wants {wanted}"
            raise UserError(f"{held}; set VOCAB_SIZE={tokens}, or choose another NANOCHAT_BASE_DIR")
        s.vocabulary = tokens
        return tokenizer

    def unfinished(self) -> Iterator[str]:
        """The newest run of this folder that is not done and with which the command does not go on, if it trains one,
        and the command that goes on with it."""
        for folder, meta in self.runs.items() if "base" in self.s.stages else ():
            step, steps = meta.get("step", 0), meta.get("user_config", {}).get("num_iterations") or 0
            file, at = self.s.base_dir / "report" / folder.name / COMMAND, f"step {step:,} of {steps:,}"
            begun, done = file.is_file(), step >= steps
            if (begun or not done) and folder.name not in {base.tag for base in self.bases} and not running(folder):
                command = file.read_text("utf-8") if begun else "the command that began it"
                yield f"{folder.name}, {'base training done' if done else at}: {command} goes on with it"
                return

    def look_back(self, stage: Stage) -> Stage:
        """The stage, without its section if it is made again: a measurement with other flags than the plan's, and a
        model that somebody has deleted. A model of other flags is kept, because finished work is not lost."""
        kind, _, tag = stage.name.partition(":")
        flags = lambda words: sorted(shlex.split(re.sub(SAME_FLAG, "", shlex.join(words))))  # noqa: E731
        before = now = flags(stage.command[1:])
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # as of an earlier version
            before = flags(json.loads((self.s.base_dir / stage.section).read_text("utf-8"))["arguments"])
        kinds = ["base", "mid", "sft"]
        models = [self.s.base_dir / FOLDERS[k] / tag for k in kinds[kinds.index(kind) :]] if kind in kinds else []
        if not list_steps(models[0]) if models else before != now:
            return stage._replace(section="")
        if before != now:
            old, new = (shlex.join(w for w in a if w not in b) for a, b in ((before, now), (now, before)))
            made = f"{stage.title}: made with {old or 'fewer flags'}, where the plan has {new or 'fewer flags'}"
            remove = shlex.join(["rm", "-r", *(str(model) for model in models if model.is_dir())])
            self.kept += [f"{made}; it is not trained again", f"{remove}  # to train it anew, before the command"]
        return stage

    def left(self, base: Base) -> set[str]:
        """The kinds of stages of a method that are not done. Where its base model is not, no later one is."""
        of = [stage for stage in self.stages if stage.name.endswith(f":{base.tag}")]
        there = [k for k in of if base.done == base.steps and k.section and (self.s.base_dir / k.section).is_file()]
        return {stage.name.partition(":")[0].partition("_")[0] for stage in of if stage not in there}

    def text_stages(self) -> list[Stage]:
        """The stages of the text and the tokenizer. A tokenizer that is there is kept."""
        n, from_hub, module = self.s.values, self.text == "hub", "nanochat_fp4.data.dataset"
        title, rest = "text: FineWeb-Edu", [module, "-n", f"{n['NUM_SHARDS']}"]
        if self.tokenizer is not None:
            return [Stage("download", "", title, 1, rest)] if from_hub and self.shards < n["NUM_SHARDS"] else []
        first = ["--embedded"] if self.text == "embedded" else ["--ensure", "-n", f"{n['TOK_SHARDS']}"]
        train = ["scripts.tok_train", *self.s.argv("tok_train")]
        # GPT-2's and GPT-4's tokenizers, to compare with, come from the network as well.
        compare = ["scripts.tok_eval", *([] if from_hub else ["--no-compare"])]
        return [
            Stage("text", "", "text", 1, [module, *first]),
            *([Stage("download", "text", title, 0, rest)] if from_hub else []),
            Stage("tok", "text", f"tokenizer: {n['VOCAB_SIZE']} tokens", 1, train),
            Stage("tok_eval", "tok", "compression of the tokenizer", 1, compare),
        ]

    def check_order_and_disk(self) -> None:
        """Refuses a stage whose model neither is there nor is made, and a disk that is too small."""
        s, tags = self.s, [base.tag for base in self.bases]
        places = {kind: [s.base_dir / FOLDERS[kind] / tag for tag in tags] for kind in ("base", "mid", "sft")}
        made = {kind for kind, folders in places.items() if all(map(list_steps, folders))} | set(s.stages)
        made |= {"tok"} if self.tokenizer is not None else set()
        for stage, first in ((stage, BEFORE.get(stage, stage)) for stage in s.stages if s.here):
            if first not in made:
                needs = f"STAGES asks for {stage}, which needs what {first} makes ({', '.join(tags)})"
                where = "set the variables and the NANOCHAT_BASE_DIR that it was made with"
                raise UserError(f"{needs}, and {s.base_dir} has none; add {first} to STAGES, or {where}")
        shards = int(s.values["NUM_SHARDS"]) if self.text == "hub" and "tok" in s.stages else 0
        text = max(0, shards - self.shards) * float(dataset.SHARD_BYTES)
        self.checkpoint_bytes = len(places.keys() & set(s.stages)) * sum(base.checkpoint_bytes for base in self.bases)
        # Of an installation torch and CUDA's libraries took 4.8 GB, and the rest 1.
        sizes = {"text": text, "checkpoints": self.checkpoint_bytes, "the installation": 0.0 if s.here else 6e9}
        parts = " + ".join(f"{size / 1e9:.3g} of {what}" for what, size in sizes.items() if size)
        self.disk = f"{sum(sizes.values()) / 1e9:.3g} GB ({parts or 'nothing to come'})"
        place = next(folder for folder in (s.base_dir, *s.base_dir.absolute().parents) if folder.exists())
        if s.here and not (place.is_dir() and os.access(place, os.W_OK)):
            raise UserError(f"cannot create {s.base_dir}; set NANOCHAT_BASE_DIR to a writable folder")
        self.free = shutil.disk_usage(place).free if s.here else math.inf
        kept = [file for folders in places.values() for folder in folders for file in folder.rglob("*.pt")]
        free = self.free + sum(file.stat().st_size for file in kept)  # that the run will replace, or has made already
        if sum(sizes.values()) > free:
            has = f"{s.base_dir} has {free / 1e9:.1f} GB free, and the run takes {self.disk}"
            raise UserError(f"{has}; free some space, or set NANOCHAT_BASE_DIR to a larger disk")


# ----------------------------------------------------------------------------------------------------------------------
# The page


def span(low: float, high: float) -> str:
    a, b = (f"{x:,.0f}" if x >= 9.95 else f"{x:.2g}" for x in (low, high))
    return a if a == b else f"{a} to {b}"


def duration(low: float, high: float) -> str:
    """Hours in words: minutes where they are few, and days beside them where they are many."""
    if high < 1:
        return "less than a minute" if 0 < high < 1 / 60 else f"{span(60 * low, 60 * high)} minutes"
    return f"{span(low, high)} hours" + (f" ({span(low / 24, high / 24)} days)" if high >= 36 else "")


def page(plan: Plan, numbers: bool = False) -> str:
    """The plan in words: a fact a line, and last the command to type, which is never broken. numbers: every number that
    a variable sets."""
    lines, before = [f"nanochat_fp4: the plan of a {plan.s.run}"], ""
    for label, fact in facts(plan, numbers):
        first = f"  {label if label != before else '':11} "
        # A command is never broken.
        width = 10**6 if label == "type" or re.search("bash |^rm ", fact) else 100
        how = {"initial_indent": first, "subsequent_indent": " " * 16}
        lines += textwrap.wrap(fact, width, break_long_words=False, break_on_hyphens=False, **how)
        before = label
    return "\n".join(lines)


def facts(plan: Plan, numbers: bool) -> Iterator[tuple[str, str]]:
    """(label, fact) of each line."""
    s, card, asked = plan.s, plan.s.card, plan.s.environment.get("QAT_METHOD")
    several = f"{s.processes} x " if s.processes > 1 else ""
    what = ", ".join(filter(None, [card["name"], f"{card['gib']:.3g} GiB", card["arch"]])) if card else ""
    what += "" if s.here else "; not this machine"
    yield "machine", f"{several}{what}" if card else f"no GPU, {usable_cpus()} CPUs"
    yield from (("note", note) for note in s.notes)
    for base in plan.bases:
        most = "at most " * (plan.text == "folder" and not s.vocabulary)  # A small text yields fewer tokens.
        steps = f"{base.steps:,} step{'s' * (base.steps > 1)}"
        size = f"{most}{amount(base.parameters)} parameters, {steps}, {amount(base.tokens)} tokens"
        goes_on = f"; step {base.done:,} of {base.steps:,} is done" if base.done else ""
        unset = ", by default" * (base.method == s.method and not asked and card is not None)
        yield "run", f"{base.tag}{unset}: {size}{goes_on}"
    yield from (("at work", who) for who in plan.at_work)
    yield from (("unfinished", line) for line in plan.unfinished())
    yield "stages", " ".join(s.stages)
    yield "folder", f"{s.base_dir}{'; what lies in it is not counted' * (not s.here)}"
    yield "disk", plan.disk + f"; {plan.free / 1e9:.0f} GB are free" * s.here
    about_text = plan.about_text if {"tok", "base"} & set(s.stages) else []
    yield from (("text", fact) for fact in about_text + s.about_sft)
    yield from (("kept", line) for line in plan.kept)
    yield from (("without", line) for line in plan.left_out)
    yield from (("how long", fact) for fact in (how_long(plan) if card else minutes(plan)))
    of_bases = (fact for b in plan.bases if "base" in s.stages for fact in of_memory(s, b))
    yield from (("memory", fact) for fact in dict.fromkeys(of_bases))
    yield from (("set by you", f"{k}={v} (default: {s.defaults[k] or 'none'})") for k, v in s.changed.items())
    every = "  ".join(f"{k}={shlex.quote(str(v))}" for k, v in s.values.items() if v != "")
    yield "numbers", every if numbers else "PLAN_ONLY=all prints those that can be set"
    own = yield from which(plan)
    yield "type", "after the end of what is at work: " * bool(plan.at_work) + typed(s, **own)
    yield "type", f"its hours are in {own.get('QAT_METHOD')}'s line; " * bool(own) + "typed again it goes on"


def typed(s: Settings, **own: Any) -> str:
    """The command of the run, with the user's variables and `own`."""
    return s.command(f"nanochat-fp4 {s.run}" if INSTALLED else f"bash {s.run}_fp4.sh", RUN, **own)


def how_long(plan: Plan) -> Iterator[str]:
    said, whole, left = [], [], set().union(*map(plan.left, plan.bases))
    for base in (base for base in plan.bases if "base" in plan.s.stages and base.done < base.steps):
        if base.ways and base.work[4] and base.weights > 1.5e9 and 0 < base.ways[0].rows <= 2:  # as a d32 has
            said.append("2 rows: clover's d32 had under half of BF16's tokens/s, once, on an H200 that emulates 4 bits")
        if found := hours(plan.s, base):
            *ends, facts = found
            whole.append([end * (1 - base.done / base.steps) for end in ends])
            yield f"base training with {base.method}: {duration(*whole[-1])}{' are left' * bool(base.done)}"
            lost = min(base.steps, base.args.save_every) if base.args.save_every > 0 else base.steps
            long = duration(*(end * lost / base.steps for end in ends))
            lost = f"a power cut loses up to {lost:,} steps, {long} (SAVE_EVERY={-(-lost // 4)}: a quarter)"
            said += [f"{base.label}{facts[0]}", *facts[1:], base.label + lost]
        else:
            yield f"{base.label}not known, for nobody has published whole training steps with {base.method} on this GPU"
    if len(whole) > 1:
        yield f"both: {duration(*map(sum, zip(*whole)))}"
    besides = ", ".join(kind for kind in ("core", "mid", "sft") if kind in left)
    yield from dict.fromkeys(said + [f"besides: {besides} (docs/one_card.md bounds mid and sft)"] * bool(besides))


def minutes(plan: Plan) -> Iterator[str]:
    """The minutes that a CPU's run is made for, or those of another model, other steps or stages, or more methods."""
    base, methods, steps = plan.bases[0], len(plan.bases), 0
    usual = chat_sft.parse_args(shlex.split(plan.s.defaults["SFT_ARGS"])).num_iterations
    each = plan.chosen.get("seconds_per_step", base.flops * base.args.total_batch_size / CPU_SPEED)
    for b, left in ((b, plan.left(b)) for b in plan.bases):
        # The later stages do not grow with the base training.
        later = min(b.steps, plan.s.usual_steps) if {"mid", "sft"} & left else 0
        later += (plan.s.sft_steps - usual) * ("sft" in left and plan.s.sft_steps > 0)
        steps += (b.steps - b.done) * ("base" in left) + later + OTHER_STEPS * bool(left)
    how = f" with {methods} methods" * (methods > 1) + ", on two cores"
    yield f"{duration(*[steps * each / 3600] * 2)} for what is left to do{how}"
    if "sft" in plan.s.stages and not plan.s.sft_steps:
        yield f"with {usual} steps of SFT, which has more: its conversations are counted after their download"
    if plan.chosen:
        yield f"a step took {each:.2g} s in a probe, so there are {plan.chosen['steps']} (NUM_ITERATIONS)"


def taken(base: Base) -> str:
    return f"{(base.ways[0].graphed_peak if base.graphed else base.ways[0].peak) / GIB:.1f}"


def of_memory(s: Settings, base: Base) -> Iterator[str]:
    if not base.ways:
        yield "not counted for this family of models"
        return
    way = base.ways[0]
    graphs, label = "with CUDA graphs, " * base.graphed, base.label * bool(s.card)
    how = f"{graphs}by count (docs/memory.md)" if s.card else "by estimate"
    yield f"{label}{base.rows} of {base.args.max_seq_len:,} tokens: {taken(base)} of {s.memory / GIB:.3g} GiB, {how}"
    if way.flags and not base.is_fixed:
        yield f"{label}the run sets {' '.join(way.flags)} for that; docs/memory.md has other ways for BASE_ARGS"


def which(plan: Plan) -> Generator[tuple[str, str], None, dict[str, str]]:
    """Which method to take: on a GPU a row for each, then one line and one number. Returns the variable that takes
    it."""
    s, card, rival = plan.s, plan.s.card, "clover_fp8_forward"
    recipe, asked = nf.get_recipe(s.method), s.environment.get("QAT_METHOD")
    if asked:  # A row of the user's may have no words.
        yield "method", f"{s.method}: {recipe.summary}" if recipe.summary else str(recipe)
    if card is None:
        yield from [] if asked else [("method", "clover, the paper's, is the default: on a CPU keep it")]
        yield "method", "a CPU emulates 4 bits: a small run shows that everything works, and ranks no method"
        return {}
    here = {method: of for method, of in speeds(s, plan.bases[0]).items() if not of["runs"]}
    needed = min(CARDS["R"], key=lambda of: abs(math.log(of["weights"] / plan.bases[0].weights)))["ratio"][1]
    known, measured = CARDS["take"].get(card["arch"], ""), {"bf16", "fp8", rival} <= here.keys()
    advised = re.findall(r"^\w+", known) or (["fp8", rival] if card["arch"] else [s.method])
    take = known or f"{rival} if it makes {needed} times fp8's tokens/s, and fp8 otherwise"
    if measured:
        # BF16 that is as fast as FP8 loses nothing for it.
        best = max("bf16", "fp8", key=lambda method: here[method]["range"])
        now = here[rival]["range"][0] / here[best]["range"][0]
        advised, take = ([rival], f"{rival}, which") if now >= needed else ([best], f"{best}: {rival}")
        take += f" makes {now:.3f} times {best}'s tokens/s here (d{here[rival]['depth']}), and needs {needed:.3f}"
    gaps = dict(re.findall(r"(\w+) ([\d.]+ ± [\d.]+)", CARDS["gap"])) | {"bf16": "0"}
    of_plan, too_large = {base.method: base for base in plan.bases}, []
    for method in dict.fromkeys(("fp8", rival, "clover", *advised, *s.methods)):
        base = of_plan.get(method) or Base(s, method)
        found = hours(s, base)
        long = f"{span(*found[:2])} h" if found else "unknown hours"
        long += ", interpolated" * ("interpolated" in str(found))
        fits = base.ways and (base.ways[0].rows or base.ways[0].peak <= s.memory)
        too_large += [method] * (bool(base.ways) and not fits)
        needs = f"{base.rows}, {taken(base)} GiB" if fits else "does not fit" if base.ways else "not counted"
        gap = f"d6 gap {gaps[method]}%" if method in gaps else "gap unknown"
        yield "method", f"{method:18}  {gap:19}  {needs}  {long}"
    take = f"take {take}" if card["arch"] else "no method is advised: GPU names no card of cards.json"
    take += "".join(f"; {method} does not fit" for method in advised if method in too_large)
    advised = [method for method in advised if method not in too_large]
    yield "method", take
    if not (known or measured or plan.at_work):
        depth = plan.bases[0].args.depth
        measure = f"bash dev/measure.sh  # {-(-sum(measure_seconds(depth)) // 60)} minutes at most"
        yield "type", s.command(measure, EXPORTED, DEPTH=depth)
    # Who names a method, or is at work on a run, goes on with it. COMPARE=1 trains bf16 as well.
    if asked or not s.plan_only or plan.bases[0].done or not advised or advised[0] in s.methods:
        return {}
    return {"QAT_METHOD": advised[0]}


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=list(RUNS), help="the run")
    parser.add_argument("--all", action="store_true", help="also print every number that a variable sets")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="write dev/pipeline.sh's calls, left_out.txt beside")
    args = parser.parse_args(argv)
    plan = Plan(args.run, {**os.environ, **({} if args.calls else {"PLAN_ONLY": "1"})})
    print(page(plan, args.all))
    if args.calls:
        files = [args.calls.parent / base.tag / COMMAND for base in plan.bases if "base" in plan.s.stages]
        done = f'[ "$STATUS" != 0 ] || {shlex.join(["rm", "-f", *map(str, files)])}\n' * bool(files)
        args.calls.write_text(f"# {typed(plan.s)}\n{calls(plan.stages)}{done}")
        for file in files:
            file.parent.mkdir(exist_ok=True)
            atomic_write(file, typed(plan.s))
        atomic_write(args.calls.with_name("left_out.txt"), "".join(f"{line}\n" for line in plan.left_out))


if __name__ == "__main__":
    run_main(main)
