"""The flags of the training stages: those that all stages have, those of pre-training, and those of the later
stages."""

import argparse
import os

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError, number_type, parse_count, parse_rate
from nanochat_fp4.common import add_recipes_argument
from nanochat_fp4.models.gpt import RECOMPUTE
from nanochat_fp4.models.optim import ORTHOGONALIZERS
from nanochat_fp4.models.optim8bit import STATES
from nanochat_fp4.parallel import MODES

METHODS = f"{', '.join(nf.METHODS)}; or a row that --recipes registers"
# What is of a call alone: a resume says nothing of its change.
OF_THE_CALL = {"resume_from_step", "overwrite", "run", "model_tag", "model_step", "branch_from", "dry_run", "recipes"}
# Memory, safety, and how often something is measured or saved: a resume may change these flags, and the name that a
# plan gives to a run does not hold them. A branch is a run of its own.
SAME_RUN = OF_THE_CALL - {"branch_from"} | set(
    "parallel state recompute device_type on_nonfinite telemetry_every save_every save_at keep_last compile cuda_graph "
    "device_batch_size eval_every eval_tokens sample_every core_metric_every core_metric_max_per_task".split()
)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every training stage has with the same meaning."""
    add = parser.add_argument
    # Logging
    add("--run", default=os.environ.get("WANDB_RUN") or "dummy", help="wandb run name ('dummy' disables wandb logging)")
    # Runtime
    text = "over several processes: all weights in each (ddp), or shards of them that are gathered in 4 bits (fsdp)"
    add("--parallel", choices=MODES, default="ddp", help=text)
    text = "weights, gradients, moments in FP32; or in BF16 with stochastic rounding and 8 bits, for half the memory "
    text += "(default: fp32; in later stages that of the model)"
    add("--state", choices=STATES, default="fp32", help=text)
    text = "compute again in the backward pass, instead of keeping: what kept 4-bit codes determine (codes), that and "
    text += "the hidden layer (codes-mlp), the MLP (mlp), or everything (all); less memory (default: none; in later "
    text += "stages that of the model)"
    add("--recompute", choices=RECOMPUTE, default="none", help=text)
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    text = "the same bits each time on a GPU, too; slower there"
    add("--deterministic", action="store_true", help=text)
    text = "at an update with NaN or infinity: save and stop, or skip the update"
    add("--on-nonfinite", choices=("stop", "skip"), default="stop", help=text)
    text = "measure each layer's quantization error every N steps (-1 = disable)"
    add("--telemetry-every", type=int, default=-1, metavar="N", help=text)
    # Checkpoints
    text = "save checkpoints every N steps (-1 = only at end)"
    add("--save-every", type=int, default=-1, metavar="N", help=text)
    add("--save-at", type=_steps, default=[], metavar="STEPS", help="save at these steps, too, with commas: 500,900")
    add("--keep-last", type=int, default=2, help="keep so many of the newest checkpoints (0 or -1 = all)")
    text = "resume from this step, or from the 'latest' intact checkpoint if there is one (-1 = disable)"
    add("--resume-from-step", type=_step_or_latest, default=-1, help=text)
    add("--overwrite", action="store_true", help="start over although this stage has checkpoints under the model tag")


def add_compile_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --compile and --no-compile."""
    text = "torch.compile the model or not (default: on a GPU only)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help=text)


parse_steps = number_type(int, lambda n: n == -1 or n >= 1, "at least 1 step, or -1 for another limit")
_step = number_type(int, lambda n: n >= -1, "a step, 'latest' or -1")


def _steps(text: str) -> list[int]:
    return [parse_count(step) for step in text.split(",")]


def _step_or_latest(text: str) -> int | str:
    return text if text == "latest" else _step(text)


def steps_of_epochs(args: argparse.Namespace, count: int, what: str, flag: str, per_step: int) -> int:
    """Returns the number of steps: --num-iterations, or those of --num-epochs over `count` conversations, `per_step`
    of them in each step. `what` and `flag` name both numbers in the error. Raises UserError if there is not a single
    step."""
    steps = args.num_iterations if args.num_iterations >= 1 else count // per_step * args.num_epochs
    if steps < 1:
        counts = f"{count} {what}, {flag}={per_step} and --num-epochs={args.num_epochs}"
        raise UserError(f"{counts} make no step; lower the one or raise the other")
    return steps


def changed_flags(args: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """Returns the flags whose values differ from the defaults, as a user would type them. The report shows them."""
    typed = []
    for name, value in vars(args).items():
        flag = name.replace("_", "-")
        if value == getattr(defaults, name) or name == "resume_from_step":
            continue
        if isinstance(value, bool):
            typed.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            typed.append(f"--{flag}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return " ".join(typed)


METHOD_OF_THE_MODEL = f"QAT method (default: the one the model was trained with): {METHODS}"


def add_model_arguments(parser: argparse.ArgumentParser, *precisions: str) -> None:
    """Adds the flags of a script that uses a trained model: the model, the device, and the forward pass.
    `precisions` are the choices of --precision, the default first. Without any, the script has no such flag."""
    add = parser.add_argument
    add("-g", "--model-tag", default=None, help="model tag to load (default: that of the largest model)")
    add("-s", "--step", "--model-step", type=int, default=None, help="step to load (default: the last one)")
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    add_recipes_argument(parser)
    add("--method", default=None, help=METHOD_OF_THE_MODEL)
    if precisions:
        text = f"forward pass: as the method says (nvfp4), or in BF16{', or both' if 'both' in precisions else ''}"
        add("--precision", default=precisions[0], choices=precisions, help=text)


DATA_FLAGS = {
    "--data": {
        "default": "nanochat",
        "choices": ("nanochat", "local"),
        "help": "nanochat's data, or small ones made on the spot without a network (no benchmark numbers)",
    },
    "--sft-dir": {"help": "folder with train.jsonl and test.jsonl of conversations, in the place of SmolTalk"},
    "--eval-dir": {"help": "folder of benchmark files (default: $NANOCHAT_EVAL_DIR, else the hub); see eval/README.md"},
    "--allow-missing": {"action": "store_true", "help": "leave out a dataset that is not to be had, and do not stop"},
}


def add_data_flags(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Adds these flags of DATA_FLAGS, by default all of them."""
    for flag in flags or DATA_FLAGS:
        parser.add_argument(flag, **DATA_FLAGS[flag])


def add_common_arguments(parser: argparse.ArgumentParser, init_lr_frac: float) -> None:
    """Adds the flags that all stages after pre-training have, nanochat's and our own.

    --state and --recompute have no default here. Unless they are given, the stage takes them from the model that it
    begins with.
    """
    add = parser.add_argument
    parser.epilog = "SIGTERM, Ctrl-C and SIGHUP save a checkpoint and stop within one step."
    add_run_arguments(parser)
    parser.set_defaults(state=None, recompute=None)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of matrix products on a GPU")
    add("--seed", type=int, default=42, help="seed of rotations and stochastic rounding (--quantization full)")
    # Quantization
    add_recipes_argument(parser)
    add("--method", default=None, help=METHOD_OF_THE_MODEL)
    text = "quantize the forward pass only, forward and backward, or nothing"
    add("--quantization", default="forward", choices=("forward", "full", "none"), help=text)
    # Model loading
    add("--model-tag", default=None, help="model tag to load from, and to save under")
    add("--model-step", type=int, default=None, help="model step to load from")
    # Optimization
    add("--embedding-lr", type=parse_rate, default=0.2, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_rate, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add("--matrix-lr", type=parse_rate, default=0.02, help="learning rate for matrix parameters (Muon)")
    add("--weight-decay", type=parse_rate, default=0.0, help="weight decay of the matrix parameters (Muon)")
    text = "how Muon orthogonalizes its updates (default: as the model was trained)"
    add("--orthogonalizer", choices=ORTHOGONALIZERS, default=None, help=text)
    add("--init-lr-frac", type=parse_rate, default=init_lr_frac, help="initial LR as fraction of base LR")
