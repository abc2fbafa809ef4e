"""
Runs a script of your own, unmodified nanochat checkout with the linear layers of its model quantized.

    NANOCHAT_DIR=~/nanochat QAT_METHOD=clover python -m nanochat_fp4.upstream scripts.base_train -- --depth=20

No file of the checkout changes. The script runs as __main__ in a namespace that the runner owns, where the runner reads
the place of the run, `step` and `num_iterations`. These functions of the checkout are wrapped in memory:

- GPT.init_weights converts the model afterwards. Both supported revisions call it before torch.compile, before they
  load weights and before they build optimizers. The Parameters stay the same objects.
- GPT.setup_optimizer(s): from here on each rank draws its own random numbers, and the method follows the run.
- GPT.forward without targets (samples, CORE, chat) gives each token a scale of its own, so that an answer depends
  neither on the rest of the batch nor on the KV cache. A loss is computed as in training.
- save_checkpoint and load_checkpoint keep the Gram matrices of error feedback in method_<step>.pt beside nanochat's
  files.

Messages go to stderr, because stdout is the script's.
"""

import argparse
import functools
import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.common import get_dist_info, load_recipes, print0, resolve_method
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, one_line, run_main
from nanochat_fp4.nvfp4.gram_matrices import GRAM_EVERY, GRAM_TOKENS

# Pre-training quantizes everything; later stages and evaluations keep the forward pass (the paper, Appendix C). The
# tokenizer's scripts have no model.
BACKWARD_OF_SCRIPT = {"scripts.base_train": "full", "scripts.tok_train": "none", "scripts.tok_eval": "none"}


def say(text: object) -> None:
    """Lines on stderr, from rank 0."""
    for line in str(text).splitlines():
        print0(f"nanochat_fp4: {line}", file=sys.stderr, flush=True)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The options before the first --; script_args are the script's arguments, after it. Raises UserError."""
    parser = ArgumentParser(
        prog="python -m nanochat_fp4.upstream",
        usage="NANOCHAT_DIR=~/nanochat %(prog)s [options] SCRIPT -- [the script's own arguments]",
        description="Run a script of an unmodified nanochat checkout ($NANOCHAT_DIR) with its model quantized.",
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="as after python -m in the checkout: scripts.base_train")
    text = f"QAT method (default: $QAT_METHOD, else clover): {', '.join(nf.METHODS)}; or a row that --recipes registers"
    add("--method", help=text)
    text = "Python file that registers methods of your own by nanochat_fp4.register, as $RECIPES does"
    add("--recipes", type=load_recipes, default="", metavar="FILE.py", help=text)
    text = "full: quantize forward and backward; forward: the backward pass stays in BF16; none: everything does "
    text += "(default: full for base_train and forward for all other scripts)"
    add("--backward", choices=("full", "forward", "none"), help=text)
    text = "leave layers alone whose name matches, e.g. 'transformer.h.0.*'; can be repeated"
    add("--skip", action="append", default=[], metavar="PATTERN", help=text)
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.script_args = argv[cut + 1 :]
    args.method = resolve_method(args.method)
    args.backward = args.backward or BACKWARD_OF_SCRIPT.get(args.script, "forward")
    return args


def find_script(script: str) -> tuple[Path, Path]:
    """(folder of the checkout in NANOCHAT_DIR, file of a script named as after python -m). Raises UserError."""
    value = os.environ.get("NANOCHAT_DIR") or ""
    root = Path(value).expanduser().resolve()
    if not value or not (root / "nanochat/gpt.py").is_file():
        raise UserError(f"NANOCHAT_DIR={value} is not a nanochat checkout; set it to the folder of yours")
    path = root.joinpath(*script.split(".")).with_suffix(".py")
    if "/" in script or not path.is_file():
        there = ", ".join(f"scripts.{p.stem}" for p in sorted(root.glob("scripts/*.py")) if p.stem != "__init__")
        raise UserError(f"there is no script {script!r} in {root}; there are: {there}")
    return root, path


def enter_checkout(root: Path) -> None:
    """Makes imports work as in `cd root; python -m ...`, and keeps Python from writing __pycache__ there.

    The checkout's `scripts` and `tasks` have no __init__.py, so another package of such a name anywhere on sys.path (as
    this project's own `scripts`) would win. They are therefore made here.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path.insert(0, str(root))
    for folder in root.iterdir():
        if any(folder.glob("*.py")) and not (folder / "__init__.py").exists():
            sys.modules[folder.name] = types.ModuleType(folder.name)
            sys.modules[folder.name].__path__ = [str(folder)]


def changed(what: str) -> UserError:
    return UserError(
        f"this checkout cannot be patched: {what}; use a revision that has it (f5425245f and 92d63d4 do), or call "
        "nanochat_fp4.convert(model) in your own copy of the script, before torch.compile"
    )


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replaces owner.name by a function that calls around(the original, *its arguments)."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: around(original, *args, **kwargs)))


def per_token_logits(forward: Callable, model: nn.Module, idx: torch.Tensor, targets=None, *args, **kwargs):
    if targets is not None:
        return forward(model, idx, targets, *args, **kwargs)
    with nf.per_token_scale(model):
        return forward(model, idx, targets, *args, **kwargs)


class Patch:
    """What is done to the model of one script, which runs in `namespace`."""

    def __init__(self, recipe: nf.Recipe, skip: list[str], namespace: dict[str, Any]):
        self.recipe, self.skip, self.namespace = recipe, skip, namespace
        self.model: nn.Module | None = None
        self.step: int | None = None  # of the last forward pass in training
        self.gram_file: Path | None = None  # of the checkpoint that was loaded

    def install(self) -> None:
        """Wraps the functions of nanochat.gpt and nanochat.checkpoint_manager. Raises UserError for a missing one."""
        try:
            cls = importlib.import_module("nanochat.gpt").GPT
            checkpoints = importlib.import_module("nanochat.checkpoint_manager")
        except (ImportError, AttributeError) as e:
            raise changed(one_line(e)) from e
        if not (
            hasattr(cls, "init_weights") and list(inspect.signature(cls.forward).parameters)[1:3] == ["idx", "targets"]
        ):
            raise changed("nanochat.gpt has no GPT with init_weights() and forward(idx, targets)")
        name = "setup_optimizer" if hasattr(cls, "setup_optimizer") else "setup_optimizers"  # of the older revision
        if not (hasattr(cls, name) and hasattr(checkpoints, "save_checkpoint")):
            raise changed("there is no GPT.setup_optimizer, or no checkpoint_manager.save_checkpoint")
        wrap(cls, "init_weights", self.init_weights)
        wrap(cls, name, self.setup_optimizer)
        wrap(cls, "forward", per_token_logits)
        wrap(checkpoints, "save_checkpoint", self.save_checkpoint)
        wrap(checkpoints, "load_checkpoint", self.load_checkpoint)

    def init_weights(self, original: Callable, model: nn.Module) -> None:
        original(model)
        if model is self.model:
            return
        classes = {name: type(m) for name, m in model.named_modules()}
        try:  # the checkout's own validation has the method's scales
            nf.convert(model, self.recipe, verbose=False, skip=tuple(self.skip), per_token_in_eval=False)
        except ValueError as e:
            raise UserError(one_line(e)) from e
        for name in model.nf_report.converted:
            layer = model.get_submodule(name)
            layer.__class__ = quantized_subclass(type(layer), classes[name])
        self.model = model
        say(f"{nf.backend()}\n{model.nf_report}")
        say("loss and validation bits per byte: the method's own forward; in BF16: evaluate with --backward none")
        if next(model.parameters()).device.type == "cpu":
            # Without a GPU the layers run the reference, many small operations that a compiler takes minutes for.
            model.forward = torch.compiler.disable(model.forward)
        self.load_gram_matrices()

    def setup_optimizer(self, original: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if model is not self.model:
            raise changed("the optimizer is set up for a GPT that init_weights was not called on")
        layers = dict(model.named_modules())
        if lost := [name for name in model.nf_report.converted if not isinstance(layers.get(name), nf.QuantLinear)]:
            raise UserError(
                f"the script replaced {lost[0]} after it was quantized; leave out --fp8, or use --method bf16"
            )
        _, rank, _, world_size = get_dist_info()
        if world_size > 1:
            # nanochat gives every rank the same seed, as the initial weights need. The weights exist by now. Errors of
            # rotations and stochastic rounding average out over ranks only if the ranks draw independently.
            torch.manual_seed(torch.initial_seed() + rank)
        # A hook of the module that torch.compile has made is not compiled.
        modules = [m for m in self.namespace.values() if isinstance(m, nn.Module)]
        called = next((m for m in modules if m is not model and getattr(m, "_orig_mod", None) is model), model)
        called.register_forward_pre_hook(self.before_forward)
        return original(model, *args, **kwargs)

    def before_forward(self, called: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
        """Before the first forward pass of a step: the method of this step, and a look at the layers' inputs."""
        model, recipe, step = self.model, self.recipe, self.namespace.get("step")
        if not (recipe.late or recipe.uses_feedback) or not (called.training and torch.is_grad_enabled()):
            return
        if not isinstance(step, int) or (recipe.late and not isinstance(self.namespace.get("num_iterations"), int)):
            raise changed("its script does not say where the run is, in variables step and num_iterations")
        if step == self.step:
            return
        self.step = step
        if recipe.late and nf.set_progress(model, min(1.0, step / self.namespace["num_iterations"])):
            say(f"step {step}: from here on {recipe.final}")
        # As QuantizedTraining: after the updates of steps 0, 10, ...; and as soon as there is none, after a resume.
        if recipe.uses_feedback and step and (step % GRAM_EVERY == 1 or not nf.gram_state(model)):
            rows = max(1, GRAM_TOKENS // batch[0].shape[1])
            nf.update_gram_matrices(model, lambda: model(*(tensor[:rows] for tensor in batch)))

    def save_checkpoint(self, original: Callable, folder: str, step: int, *args: Any, **kwargs: Any) -> None:
        original(folder, step, *args, **kwargs)
        path, matrices = gram_path(folder, step), nf.gram_state(self.model) if self.model else {}
        if matrices and get_dist_info()[1] == 0:
            torch.save(matrices, path)
        elif get_dist_info()[1] == 0:
            path.unlink(missing_ok=True)  # of a run with another method

    def load_checkpoint(self, original: Callable, folder: str, step: int, *args: Any, **kwargs: Any) -> Any:
        self.gram_file = gram_path(folder, step)
        self.load_gram_matrices()  # base_train has its model before it loads; other scripts make it afterwards
        return original(folder, step, *args, **kwargs)

    def load_gram_matrices(self) -> None:
        if self.model and self.recipe.uses_feedback and self.gram_file and self.gram_file.exists():
            nf.load_gram_state(self.model, torch.load(self.gram_file, weights_only=True))


def gram_path(folder: str, step: int) -> Path:
    return Path(folder) / f"method_{step:06d}.pt"


@functools.cache
def quantized_subclass(quantized: type, original: type) -> type:
    """A subclass of `quantized` and of the checkout's own Linear.

    The newest nanochat counts FLOPs by isinstance, and derives its training horizon and MFU from the count.
    """
    return type(quantized.__name__, (quantized, original), {"__module__": quantized.__module__})


def main(argv: list[str] | None = None) -> None:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    root, path = find_script(args.script)
    enter_checkout(root)
    say(f"{args.script} of {root}: method {args.method}, quantized: {args.backward}")
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    script.__file__, sys.argv = str(path), [str(path), *args.script_args]
    recipe = nf.get_recipe("bf16" if args.backward == "none" else args.method)
    recipe = recipe.final.forward_only() if args.backward == "forward" else recipe
    patch = Patch(recipe, args.skip, vars(script))
    try:
        if recipe.quantizes:
            patch.install()
        exec(compile(path.read_bytes(), path, "exec"), vars(script))  # noqa: S102  # the user's own script
    except UserError:
        raise
    except Exception:  # of the script: as always, a traceback and status 1
        traceback.print_exc()
        sys.exit(1)
    if recipe.quantizes and patch.model is None:
        say(f"warning: {args.script} ended and has initialized no GPT: nothing was quantized")


def cli() -> None:
    """The command of the installed package."""
    run_main(main)


if __name__ == "__main__":
    cli()
