"""
Runs a script of the user's own, unmodified nanochat checkout, with the linear layers of its model quantized.

    NANOCHAT_DIR=~/nanochat QAT_METHOD=clover python -m nanochat_fp4.upstream scripts.base_train -- --depth=20

No file of the checkout changes. The script runs as __main__ in a namespace that this runner owns. There the runner
reads how far the run is (`step` and `num_iterations`). These functions of the checkout are wrapped in memory:

- GPT.init_weights: the model is converted afterwards. Both supported revisions call it before torch.compile, before
  they load weights and before they build optimizers. The Parameters stay the same objects.
- GPT.setup_optimizer(s): from here on each rank draws its own random numbers, and the method follows the run.
- GPT.forward without targets (samples, CORE, chat): each token gets a scale of its own, so that an answer depends
  neither on the rest of the batch nor on the KV cache. A loss is computed as in training.

Messages go to stderr, because stdout belongs to the script.
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
from nanochat_fp4.cli import ArgumentParser, UserError, one_line, run_main
from nanochat_fp4.common import add_recipes_argument, get_dist_info, print0, resolve_method

# Pre-training quantizes everything. Later stages and evaluations quantize only the forward pass (the paper, Appendix
# C). The scripts of the tokenizer have no model.
BACKWARD_OF_SCRIPT = {"scripts.base_train": "full", "scripts.tok_train": "none", "scripts.tok_eval": "none"}


def say(text: object) -> None:
    """Prints lines on stderr, on rank 0 only."""
    for line in str(text).splitlines():
        print0(f"nanochat_fp4: {line}", file=sys.stderr, flush=True)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parses the options before the first --. The arguments after it become script_args, which are the script's.
    Raises UserError."""
    parser = ArgumentParser(
        prog="python -m nanochat_fp4.upstream",
        usage="NANOCHAT_DIR=~/nanochat %(prog)s [options] SCRIPT -- [the script's own arguments]",
        description="Run a script of an unmodified nanochat checkout ($NANOCHAT_DIR) with its model quantized.",
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="as after python -m in the checkout: scripts.base_train")
    text = f"QAT method (default: $QAT_METHOD, else clover): {', '.join(nf.METHODS)}; or a row that --recipes registers"
    add("--method", help=text)
    add_recipes_argument(parser)
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
    """Returns the folder of the checkout in NANOCHAT_DIR, and the file of a script, which is named as after python
    -m. Raises UserError if there is no checkout or no such script."""
    value = os.environ.get("NANOCHAT_DIR") or ""
    root = Path(value).expanduser().resolve()
    if not value or not (root / "nanochat/gpt.py").is_file():
        raise UserError(f"NANOCHAT_DIR={value} is not a nanochat checkout; set it to the folder of yours")
    path = root.joinpath(*script.split(".")).with_suffix(".py")
    if "/" in script or not path.is_file():
        known_scripts = ", ".join(f"scripts.{p.stem}" for p in sorted(root.glob("scripts/*.py")))
        raise UserError(f"there is no script {script!r} in {root}; there are: {known_scripts}")
    return root, path


def enter_checkout(root: Path) -> None:
    """Makes imports work as in `cd root; python -m ...`, and keeps Python from writing __pycache__ there.

    The checkout's `scripts` and `tasks` have no __init__.py. Another package of such a name anywhere on sys.path, like
    this project's own `scripts`, would therefore be imported in their place. These modules are made here to prevent
    this.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path.insert(0, str(root))
    for folder in root.iterdir():
        if any(folder.glob("*.py")) and not (folder / "__init__.py").exists():
            sys.modules[folder.name] = types.ModuleType(folder.name)
            sys.modules[folder.name].__path__ = [str(folder)]


def changed(what: str) -> UserError:
    """Returns the error for a checkout that does not have what the runner needs."""
    return UserError(
        f"this checkout cannot be patched: {what}; use a revision that has it (f5425245f and 92d63d4 do), or call "
        "nanochat_fp4.convert(model) in your own copy of the script, before torch.compile"
    )


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replaces owner.name by a function that calls around(the original function, *its arguments)."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: around(original, *args, **kwargs)))


def per_token_logits(forward: Callable, model: nn.Module, idx: torch.Tensor, targets=None, *args, **kwargs):
    """Computes the forward pass, and without targets gives each token a scale of its own."""
    if targets is not None:
        return forward(model, idx, targets, *args, **kwargs)
    with nf.per_token_scale(model):
        return forward(model, idx, targets, *args, **kwargs)


class Patch:
    """The changes to the model of one script, which runs in `namespace`."""

    def __init__(self, recipe: nf.Recipe, skip: list[str], namespace: dict[str, Any]):
        self.recipe, self.skip, self.namespace = recipe, skip, namespace
        self.model: nn.Module | None = None

    def install(self) -> None:
        """Wraps the functions of nanochat.gpt. Raises UserError if one of them is missing."""
        try:
            cls = importlib.import_module("nanochat.gpt").GPT
            arguments = list(inspect.signature(cls.forward).parameters)[1:3]
        except (ImportError, AttributeError) as e:
            raise changed(one_line(e)) from e
        # The older revision has setup_optimizers.
        optimizer = "setup_optimizers" if hasattr(cls, "setup_optimizers") else "setup_optimizer"
        around = {"init_weights": self.init_weights, optimizer: self.setup_optimizer, "forward": per_token_logits}
        if arguments != ["idx", "targets"] or not all(hasattr(cls, name) for name in around):
            raise changed("nanochat.gpt has no GPT with init_weights(), setup_optimizer() and forward(idx, targets)")
        for name, function in around.items():
            wrap(cls, name, function)

    def init_weights(self, original: Callable, model: nn.Module) -> None:
        """Initializes the weights, and converts the first model."""
        original(model)
        if model is self.model:
            return
        classes = {name: type(m) for name, m in model.named_modules()}
        try:  # The checkout's own validation uses the scales of the method.
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
            # Without a GPU the layers run the reference. It has many small operations, which take minutes to compile.
            model.forward = torch.compiler.disable(model.forward)

    def setup_optimizer(self, original: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Sets the optimizer up, gives each rank a seed of its own, and lets the method follow the run. Raises
        UserError if the script has replaced quantized layers."""
        if model is not self.model:
            raise changed("the optimizer is set up for a GPT that init_weights was not called on")
        layers = dict(model.named_modules())
        if replaced := [name for name in model.nf_report.converted if not isinstance(layers.get(name), nf.QuantLinear)]:
            raise UserError(f"the script replaced the quantized {replaced[0]}; leave out --fp8, or use --method bf16")
        _, rank, _, world_size = get_dist_info()
        if world_size > 1:
            # nanochat gives every rank the same seed, because all ranks must draw the same weights, which exist by now.
            # The errors of rotations and stochastic rounding average out over ranks only if each rank draws other
            # numbers.
            torch.manual_seed(torch.initial_seed() + rank)
        # A hook of the module that torch.compile has made is not compiled.
        modules = [m for m in self.namespace.values() if isinstance(m, nn.Module)]
        called = next((m for m in modules if m is not model and getattr(m, "_orig_mod", None) is model), model)
        called.register_forward_pre_hook(self.before_forward)
        return original(model, *args, **kwargs)

    def before_forward(self, called: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
        """Sets the method of the step that a forward pass belongs to."""
        step, steps = self.namespace.get("step"), self.namespace.get("num_iterations")
        if not self.recipe.late or not (called.training and torch.is_grad_enabled()):
            return
        if not isinstance(step, int) or not isinstance(steps, int):
            raise changed("its script does not say where the run is, in variables step and num_iterations")
        if nf.set_progress(self.model, min(1.0, step / steps)):
            say(f"step {step}: from here on {self.recipe.final}")


@functools.cache
def quantized_subclass(quantized: type, original: type) -> type:
    """Returns a subclass of `quantized` and of the checkout's own Linear.

    The newest nanochat counts FLOPs with isinstance, and derives its training horizon and MFU from the count.
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
        exec(compile(path.read_bytes(), path, "exec"), vars(script))  # noqa: S102  This is the user's own script.
    except UserError:
        raise
    except Exception:  # An error of the script ends in a traceback and status 1, as usual.
        traceback.print_exc()
        sys.exit(1)
    if recipe.quantizes and patch.model is None:
        say(f"warning: {args.script} ended and has initialized no GPT: nothing was quantized")


if __name__ == "__main__":
    run_main(main)
