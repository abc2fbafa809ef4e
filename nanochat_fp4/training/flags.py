"""The flags of the training stages: of all of them, of pre-training, and of the stages after it."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import nanochat_fp4 as nf
from nanochat_fp4.console import parse_rate
from nanochat_fp4.errors import UserError
from nanochat_fp4.models.cross_entropy import HEADS
from nanochat_fp4.models.gpt import RECOMPUTE
from nanochat_fp4.models.lean import STATES
from nanochat_fp4.parallel import MODES
from nanochat_fp4.training.load_model import SWITCHES

# Settings that a branch may have of its own. "oscillation" was a flag.
METHOD_CHANGES = (
    "layer_methods", "method_phases", "oscillation", "branch_from", "separate_qkv", "exact_relu_squared"
)  # fmt: skip
METHODS = f"{', '.join(nf.METHODS)}; or an ablation (nf.ABLATIONS)"
# word of --runtime -> (attribute, value)
RUNTIME = {
    "compile": ("compile", True),
    "eager": ("compile", False),
    "deterministic": ("deterministic", True),
    "skip-nonfinite": ("on_nonfinite", "skip"),
    **{f"recompute-{name}": ("recompute", name) for name in RECOMPUTE},
    "shuffle-documents": ("shuffle_documents", True),
}
RECOMPUTE_WORDS = tuple(word for word in RUNTIME if word.startswith("recompute-"))


class SetsSeveral(argparse.Action):
    """A flag for several attributes: const(text) returns them, or raises ValueError. Their defaults: set_defaults."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None):
        try:
            attributes = self.const(values)
        except ValueError as e:
            raise argparse.ArgumentError(self, str(e)) from None
        for name, value in attributes.items():
            setattr(namespace, name, value)


def add_several(parser: argparse.ArgumentParser, flag: str, parse: Callable[[str], dict], text: str) -> None:
    metavar = flag.lstrip("-").replace("-", "_").upper()
    parser.add_argument(flag, action=SetsSeveral, const=parse, dest=argparse.SUPPRESS, metavar=metavar, help=text)


def add_run_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """The flags that every training stage has, with the same meaning. more: this stage's words of --runtime besides
    deterministic, skip-nonfinite, telemetry and recompute-*."""
    add = parser.add_argument
    # Logging
    run = os.environ.get("WANDB_RUN") or "dummy"
    add("--run", default=run, help="wandb run name ('dummy' disables wandb logging; TRACKER=trackio: a local page)")
    # Runtime
    text = "over several processes: all weights in each (ddp), or shards of them that are gathered in 4 bits (fsdp)"
    add("--parallel", choices=MODES, default="ddp", help=text)
    text = "weights, gradients, moments in FP32; or in BF16 with stochastic rounding and 8 bits, for half the memory "
    text += "(default: fp32; in later stages that of the model)"
    add("--state", choices=STATES, default="fp32", help=text)
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    words = ("deterministic", "skip-nonfinite", *RECOMPUTE_WORDS, *more)
    add_several(
        parser,
        "--runtime",
        lambda text: parse_runtime(text, words),
        "with commas: deterministic (the same bits each time on a GPU, too; slower there), skip-nonfinite (skip an "
        "update with NaN or infinity, where a run saves and stops), telemetry=N (measure each layer's quantization "
        "error every N steps), recompute-codes, -codes-mlp, -mlp, -all or -none (compute again in the backward pass "
        "what kept 4-bit codes determine, the same and the hidden layer, the MLP, everything, or nothing: less memory)"
        + (", compile or eager (torch.compile or not; default: on a GPU only)" if "compile" in more else "")
        + (
            ", shuffle-documents (train on all documents in one random order, which the second number of --seed "
            "chooses; takes a copy of the text on disk)"
            if "shuffle-documents" in more
            else ""
        ),
    )
    parser.set_defaults(deterministic=False, on_nonfinite="stop", telemetry_every=-1, recompute="none")
    # Checkpoints
    add_several(
        parser,
        "--save-every",
        parse_save_every,
        "save checkpoints every N steps (-1 = only at end), or at these steps, with commas: '@500,900'",
    )
    parser.set_defaults(save_every=-1, save_at=[])
    add("--keep-last", type=int, default=2, help="keep so many of the newest checkpoints (0 or -1 = all)")
    text = "resume from this step, or from the 'latest' intact checkpoint if there is one (-1 = disable)"
    add("--resume-from-step", type=_step_or_latest, default=-1, help=text)
    add("--overwrite", action="store_true", help="start over although this stage has checkpoints under the model tag")


def parse_runtime(text: str, words: Sequence[str]) -> dict[str, Any]:
    """Attributes of --runtime. Raises ValueError."""
    found: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, number = word.partition("=")
        if name == "telemetry" and number.isdecimal():
            found["telemetry_every"] = int(number)
        elif word in words:
            found |= [RUNTIME[word]]
        else:
            raise ValueError(f"{word!r} is none of {', '.join(words)}, telemetry=N")
    return found


def parse_save_every(text: str) -> dict[str, Any]:
    """Attributes of --save-every. Raises ValueError."""
    try:
        if text.startswith("@"):
            return {"save_at": [int(part) for part in text[1:].split(",")]}
        return {"save_every": int(text)}
    except ValueError:
        raise ValueError(f"{text!r} is neither a number of steps nor steps as in '@500,900'") from None


def parse_seeds(text: str) -> dict[str, int]:
    """Attributes of base_train's --seed. Raises ValueError."""
    seed, _, data_seed = text.partition(",")
    try:
        return {"seed": int(seed), "data_seed": int(data_seed or 0)}
    except ValueError:
        raise ValueError(f"{text!r} is not a number, or two as in '42,3'") from None


def parse_method_changes(text: str) -> dict[str, Any]:
    """Attributes of --method-changes: layer_methods, method_phases, SWITCHES. Raises ValueError."""
    layers, phases, found = [], [], {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, _ = item.partition("=")
        if equals:
            (phases if re.fullmatch(r"[-+.\deE]+", key.strip()) else layers).append(item)
        elif item in SWITCHES:
            found[item] = True
        else:
            raise ValueError(f"{item!r} is not pattern=method, fraction=method, {' or '.join(SWITCHES)}")
    return found | {"layer_methods": ",".join(layers), "method_phases": ",".join(phases)}


def _step_or_latest(text: str) -> int | str:
    if text != "latest" and not re.fullmatch(r"-1|\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step, nor 'latest', nor -1")
    return text if text == "latest" else int(text)


def check_iterations(count: int) -> None:
    """Raises UserError for a --num-iterations that is neither a number of steps nor -1."""
    if count < -1 or count == 0:
        raise UserError(f"--num-iterations={count}: expected at least 1 step, or -1 for another limit")


def steps_of_epochs(args: argparse.Namespace, count: int, what: str, flag: str, per_step: int) -> int:
    """--num-iterations, or the steps of --num-epochs over so many conversations. Raises UserError where it is none."""
    check_iterations(args.num_iterations)
    steps = args.num_iterations if args.num_iterations >= 1 else count // per_step * args.num_epochs
    if steps < 1:
        counts = f"{count} {what}, {flag}={per_step} and --num-epochs={args.num_epochs}"
        raise UserError(f"{counts} make no step; lower the one or raise the other")
    return steps


def changed_flags(args: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The flags that differ from their defaults, as they would be typed; for the report."""
    changed = {k: v for k, v in vars(args).items() if v != getattr(defaults, k) and k != "resume_from_step"}
    runtime = [word for word, (key, value) in RUNTIME.items() if changed.get(key) == value]
    runtime += [f"telemetry={changed['telemetry_every']}"] if "telemetry_every" in changed else []
    methods = [changed.get(key) for key in ("layer_methods", "method_phases")]
    methods += [key for key in SWITCHES if key in changed]
    texts = {"runtime": ",".join(runtime), "method_changes": ",".join(filter(None, methods))}
    if "data_seed" in changed:
        texts["seed"] = f"{args.seed},{args.data_seed}"
    if "save_at" in changed:
        texts["save_every"] = f"@{','.join(map(str, args.save_at))}"
    several = {key for key, _ in RUNTIME.values()} | {*METHOD_CHANGES, "telemetry_every", "data_seed", "save_at"}
    plain = {k: v for k, v in changed.items() if k not in several - {"branch_from"}}
    return " ".join(f"--{k.replace('_', '-')}={v}" for k, v in (plain | texts).items() if v != "")


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """How to quantize."""
    parser.add_argument("--method", default=None, help=f"QAT method (default: $QAT_METHOD, else clover): {METHODS}")
    add_several(
        parser,
        "--method-changes",
        parse_method_changes,
        "changes of the method, with commas: of single layers, 'pattern=method' ('*.c_fc=fp8'); in the course of the "
        "run, 'fraction of the steps=method' ('0.85=bf16'); separate_qkv (quantize q, k and v as three layers, each "
        "with a tensor scale, as the paper's nanochat runs did; as one layer they are faster); exact_relu_squared "
        "(keep relu(x) for the derivative of ReLU^2 as it is, not in 8 bits, as in the paper's runs: more memory)",
    )
    text = (
        "products of the output head in training: in BF16, or in FP8 with a scale for each tensor, as nanochat's --fp8"
    )
    parser.add_argument("--head", choices=HEADS, default="bf16", help=text)
    parser.set_defaults(
        layer_methods="", method_phases="", oscillation="", separate_qkv=False, exact_relu_squared=False
    )


METHOD_OF_THE_MODEL = f"QAT method (default: the one the model was trained with): {METHODS}"


def add_model_arguments(parser: argparse.ArgumentParser, *precisions: str) -> None:
    """Of a script that uses a trained model: the model, the device, and the forward pass. precisions: the choices of
    --precision, the default first."""
    add = parser.add_argument
    add("-g", "--model-tag", default=None, help="model tag to load (default: that of the largest model)")
    add("-s", "--step", "--model-step", type=int, default=None, help="step to load (default: the last one)")
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    add("--method", default=None, help=METHOD_OF_THE_MODEL)
    if precisions:
        what = "forward pass: as the method says (nvfp4)" + (
            ", in BF16, or both" if "both" in precisions else ", or in BF16"
        )
        add("--precision", default=precisions[0], choices=precisions, help=what)


def add_benchmark_arguments(parser: argparse.ArgumentParser) -> None:
    where = "folder of benchmark files (default: $NANOCHAT_EVAL_DIR, else the hub); see eval/README.md"
    parser.add_argument("--eval-dir", default=None, help=where)
    text = "leave out a dataset that is not to be had, instead of stopping"
    parser.add_argument("--allow-missing", action="store_true", help=text)


def add_common_arguments(parser: argparse.ArgumentParser, init_lr_frac: float, *runtime: str) -> None:
    """nanochat's flags that these stages have, and ours. runtime: of add_run_arguments.

    --state and recompute-* are those of the model that the stage begins with, unless they are given.
    """
    add = parser.add_argument
    parser.epilog = "SIGTERM, Ctrl-C, SIGHUP and SIGUSR1 save a checkpoint and stop within one step."
    add_run_arguments(parser, *runtime)
    parser.set_defaults(state=None, recompute=None)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of matrix products on a GPU")
    add("--seed", type=int, default=42, help="seed of rotations and stochastic rounding (--quantization full)")
    # Quantization
    add("--method", default=None, help=METHOD_OF_THE_MODEL)
    text = "quantize the forward pass only, forward and backward, or nothing"
    add("--quantization", default="forward", choices=("forward", "full", "none"), help=text)
    # Model loading
    add("--model-tag", default=None, help="model tag to load from, and to save under")
    add("--model-step", type=int, default=None, help="model step to load from")
    # Data
    text = "nanochat's mixture, or a small one made on the spot without a network (no benchmark numbers)"
    add("--data", default="nanochat", choices=("nanochat", "local"), help=text)
    add("--sft-dir", default=None, help="folder with train.jsonl and test.jsonl of conversations, in place of SmolTalk")
    add_benchmark_arguments(parser)
    # Optimization
    add("--embedding-lr", type=parse_rate, default=0.2, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_rate, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add("--matrix-lr", type=parse_rate, default=0.02, help="learning rate for matrix parameters (Muon)")
    add("--weight-decay", type=parse_rate, default=0.0, help="weight decay of the matrix parameters (Muon)")
    add("--init-lr-frac", type=parse_rate, default=init_lr_frac, help="initial LR as fraction of base LR")
