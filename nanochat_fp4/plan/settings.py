"""The numbers of speedrun and run1000, and what a user's variables make of them. Nothing here looks at the machine."""

import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nanochat_fp4.cli import UserError, switched_on
from nanochat_fp4.common import default_base_dir, load_recipes, resolve_method
from nanochat_fp4.nvfp4.methods import REGISTERED
from nanochat_fp4.plan.variables import NUMBERS

Number = int | float | str

# nanochat's speedrun.sh and run1000.sh (f5425245f), with three exceptions. DEVICE_BATCH is measured, where nanochat has
# 32 and 8, of the same total batch. SAVE_EVERY is set, where nanochat saves at the end alone, so that little is lost.
# NUM_SHARDS 0 is chosen by the tokens of the run.
GPU: dict[str, Number] = {
    "DEPTH": 20, "ASPECT_RATIO": 64, "HEAD_DIM": 128, "SEQ_LEN": 2048, "WINDOW_PATTERN": "SSSL", "VOCAB_SIZE": 65536,
    "DATA_RATIO": 20, "NUM_ITERATIONS": -1, "TOTAL_BATCH": 524288, "DEVICE_BATCH": "auto", "SEED": 42,
    "MATRIX_LR": 0.02, "EMBEDDING_LR": 0.3, "UNEMBEDDING_LR": 0.004, "NUM_SHARDS": 0, "TOK_SHARDS": 8,
    "TOK_CHARS": 2_000_000_000, "EVAL_EVERY": 250, "EVAL_TOKENS": 10_485_760, "SAMPLE_EVERY": 2000, "CORE_EVERY": 2000,
    "SAVE_EVERY": 1000, "EVAL_BATCH": 32, "SPLIT_TOKENS": 20_971_520,
}  # fmt: skip
# A small model that a CPU trains in minutes. base_train lowers the learning rates by sqrt(batch / 2^19), which is too
# careful for a few hundred steps. These rates are nanochat's, with that undone.
CPU: dict[str, Number] = {
    "DEPTH": 2, "ASPECT_RATIO": 64, "HEAD_DIM": 64, "SEQ_LEN": 256, "WINDOW_PATTERN": "L", "VOCAB_SIZE": 4096,
    "DATA_RATIO": -1, "NUM_ITERATIONS": 120, "TOTAL_BATCH": 2048, "DEVICE_BATCH": 8, "SEED": 42,
    "MATRIX_LR": 0.32, "EMBEDDING_LR": 4.8, "UNEMBEDDING_LR": 0.064, "NUM_SHARDS": 2, "TOK_SHARDS": 2,
    "TOK_CHARS": 10_000_000, "EVAL_EVERY": 40, "EVAL_TOKENS": 16_384, "SAMPLE_EVERY": -1, "CORE_EVERY": -1,
    "SAVE_EVERY": 20, "EVAL_BATCH": 8, "SPLIT_TOKENS": 65_536,
}  # fmt: skip
CPU_ARGS = {
    "MID_ARGS": "--data=local --device-batch-size=8 --total-batch-size=2048 --eval-tokens=8192 --num-iterations=60",
    # nanochat's fraction of 0.02 is for a model that has learned much. In 10 to 20 steps it changes next to nothing.
    "SFT_ARGS": "--data=local --num-iterations=20 --init-lr-frac=0.5 --eval-steps=4 --eval-metrics-every=-1",
    "EVAL_ARGS": "--task-name=local --max-problems=32 --max-new-tokens=32",
}
RUN1000_GPU = {"DEPTH": 32, "TOK_SHARDS": 16, "TOK_CHARS": 4_000_000_000, "EVAL_BATCH": 8}
RUNS = {  # name -> (GPU's numbers, CPU's numbers, minutes of the whole run on a CPU)
    "speedrun": ({}, {}, 5),
    "run1000": (RUN1000_GPU, {"DEPTH": 4, "ASPECT_RATIO": 32, "NUM_ITERATIONS": 160}, 10),
}
STAGES = ("tok", "base", "loss", "core", "mid", "sft", "report")
# How often something is measured or saved makes no other run, and later stages make no other base model.
SAME_RUN = {
    "EVAL_EVERY", "EVAL_TOKENS", "SPLIT_TOKENS", "SAMPLE_EVERY", "SAVE_EVERY", "DEVICE_BATCH", "EVAL_BATCH",
    "CORE_EVERY",
}  # fmt: skip


@dataclass
class Settings:
    """What a run is to do. numbers and args have every variable of it; defaults and default_args those not set."""

    run: str
    numbers: dict[str, Number]
    defaults: dict[str, Number]
    args: dict[str, str]
    default_args: dict[str, str]
    methods: list[str]
    method_is_named: bool
    stages: list[str]
    stages_are_named: bool
    processes: int | None  # None: not set
    base_dir: Path
    data_dir: str
    gpu: str  # GPU, of a plan for a machine that is not here
    plan_only: bool
    cpu_minutes: float  # how long the whole run may take on a CPU; 0 where its steps are not chosen by time
    why_steps: str = ""  # the reason for NUM_ITERATIONS, where it was chosen by time
    notes: list[str] = field(default_factory=list)

    def instead(self, name: str, default: Number) -> None:
        """Another default, which is the number's value unless the user has set one."""
        if self.numbers[name] == self.defaults[name]:
            self.numbers[name] = default
        self.defaults[name] = default

    @property
    def set_by_user(self) -> dict[str, Number]:
        return {k: v for k, v in self.numbers.items() if v != self.defaults[k]}

    def tag(self, method: str) -> str:
        """The name of the run with this method: what differs from the defaults is in it."""
        parts = [f"_steps{v}" if k == "NUM_ITERATIONS" else f"_{k.lower().replace('_', '-')}{v}"
                 for k, v in self.set_by_user.items() if k not in SAME_RUN | {"DEPTH"}]  # fmt: skip
        if self.data_dir:
            parts.append(f"_data-{Path(self.data_dir).name[:20]}-{zlib.crc32(self.data_dir.encode()) % 10**4:04d}")
        if self.args["BASE_ARGS"]:
            parts.append(f"_{self.args['BASE_ARGS']}")
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", "".join(parts).replace("--", ""))
        if len(text) > 60:
            text = f"{text[:50]}-{zlib.crc32(text.encode())}"
        return f"d{self.numbers['DEPTH']}_{method}{text}"

    def words_of(self, name: str) -> list[str]:
        """The flags in a variable such as MID_ARGS."""
        try:
            return shlex.split(self.args[name])
        except ValueError as e:
            raise UserError(f"{name}={self.args[name]!r}: {e}; close the quotation") from None

    def flags_of(self, name: str) -> set[str]:
        """The names of the flags in such a variable: --depth of --depth=3."""
        return {word.partition("=")[0] for word in self.words_of(name)}

    def without(self, name: str) -> "Settings":
        """The settings of a user who has not set this variable."""
        if name in self.args:
            return replace(self, args=self.args | {name: self.default_args[name]})
        return replace(self, numbers=self.numbers | {name: self.defaults[name]})


def read(run: str, environment: Mapping[str, str], on_gpu: bool) -> Settings:
    """The settings of a run from a user's variables. Raises UserError, which names the variable."""
    for_gpu, for_cpu, minutes = RUNS[run]
    defaults = GPU | for_gpu if on_gpu else CPU | for_cpu
    default_args = {name: "" for name in ("BASE_ARGS", "CORE_ARGS", "MID_ARGS", "SFT_ARGS", "EVAL_ARGS")}
    default_args |= {} if on_gpu else CPU_ARGS
    if not on_gpu:
        defaults, default_args = _for_longer_rows(defaults, default_args, environment.get("SEQ_LEN", ""))
    numbers = {name: _number(name, environment.get(name, ""), defaults[name]) for name in NUMBERS}
    args = {name: environment.get(name) or text for name, text in default_args.items()}
    method = _method(environment)
    compare = switched_on("COMPARE", environment)
    stages = environment.get("STAGES", "").split()
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise UserError(f"STAGES: there is no stage {unknown[0]!r}; the stages are: {' '.join(STAGES)}")
    usual = [stage for stage in STAGES if stage != "core" or on_gpu]
    by_time = not on_gpu and not environment.get("NUM_ITERATIONS")
    return Settings(
        run, numbers, dict(defaults), args, default_args,
        methods=[method] + ["bf16"] * (compare and method != "bf16"),
        method_is_named=bool(environment.get("QAT_METHOD") or environment.get("METHOD")),
        stages=[stage for stage in STAGES if stage in stages] if stages else usual,
        stages_are_named=bool(stages),
        processes=_processes(environment.get("NPROC", "")),
        base_dir=Path(environment.get("NANOCHAT_BASE_DIR") or default_base_dir()),
        data_dir=environment.get("DATA_DIR", ""),
        gpu=environment.get("GPU", ""),
        plan_only=switched_on("PLAN_ONLY", environment),
        cpu_minutes=minutes * by_time,
        notes=_unused_recipes(environment, method, args["BASE_ARGS"]),
    )  # fmt: skip


def _for_longer_rows(
    defaults: dict[str, Number], default_args: dict[str, str], seq_len: str
) -> tuple[dict[str, Number], dict[str, str]]:
    """A CPU's defaults where rows are longer than usual: a micro-batch has fewer of them, and as many tokens."""
    rows, usual = int(defaults["DEVICE_BATCH"]), int(defaults["SEQ_LEN"])
    if not seq_len.isdecimal() or int(seq_len) <= usual:
        return defaults, default_args
    fewer = max(1, rows * usual // int(seq_len))
    mid = default_args["MID_ARGS"].replace(f"--device-batch-size={rows}", f"--device-batch-size={fewer}")
    return defaults | {"DEVICE_BATCH": fewer}, default_args | {"MID_ARGS": mid}


def _number(name: str, text: str, default: Number) -> Number:
    """The value of a variable, of its default's kind."""
    if not text:
        return default
    if name == "WINDOW_PATTERN" or (name, text) == ("DEVICE_BATCH", "auto"):
        return text
    whole = name == "DEVICE_BATCH" or (isinstance(default, int) and name != "DATA_RATIO")
    try:
        return int(text) if whole or re.fullmatch(r"[-+]?\d+", text) else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        problem = f"{name}={text}: expected {kind}, such as the default {default}"
        raise UserError(f"{problem}; set another one or leave {name} out") from None


def _method(environment: Mapping[str, str]) -> str:
    wished, other = environment.get("QAT_METHOD", ""), environment.get("METHOD", "")
    if wished and other and wished != other:
        raise UserError(f"QAT_METHOD={wished} and METHOD={other} are two methods; unset one of them")
    load_recipes(environment.get("RECIPES", ""), "RECIPES")
    try:
        return resolve_method(wished or other or "clover")
    except UserError as e:
        message = str(e).removeprefix("--method: ").replace("--recipes=", "RECIPES=")
        raise UserError(f"QAT_METHOD: {message}") from None


def _unused_recipes(environment: Mapping[str, str], method: str, base_args: str) -> list[str]:
    """A hint where RECIPES has methods and the run takes none of them."""
    names = sorted(REGISTERED) if environment.get("RECIPES") else []
    if not names or method in names or any(name in base_args for name in names):
        return []
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return [f"RECIPES has {shown}, and this run trains with {method}; QAT_METHOD={names[0]} trains with it"]


def _processes(text: str) -> int | None:
    if text and not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise UserError(f"NPROC={text!r} is not a number of processes; use 1, 2, ... or leave it out")
    return int(text) if text else None
