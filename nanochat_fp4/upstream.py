"""
Runs a script of your own, unmodified nanochat checkout with the linear layers of its model quantized.

    NANOCHAT_DIR=~/nanochat QAT_METHOD=clover python -m nanochat_fp4.upstream scripts.base_train -- --depth=20
    torchrun --nproc_per_node=8 -m nanochat_fp4.upstream scripts.base_train -- --depth=20

No file of the checkout changes, and nothing is written there. Four methods of its GPT class are wrapped in memory:

    __init__            Counts models. A dry run ends here.
    init_weights        Calls nf.convert afterwards. The Parameters stay the same objects. The two supported revisions,
                        f5425245f and the newest, call init_weights before torch.compile, before they load weights and
                        before they build optimizers.
    setup_optimizer(s)  First checks that the converted layers are still there. Each rank then draws its own random
                        numbers. A method that changes in the course of a run (nvidia_full) gets the script's variables
                        step and num_iterations before each step.
    forward             Computes a loss as in training. Logits (samples, CORE, chat) get a scale for each token, so that
                        an answer depends neither on the rest of the batch nor on the KV cache.

A checkout without these names cannot be patched, and the error names the missing one. Messages go to stderr, because
stdout is the script's.
"""

import argparse
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import runpy
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.common import get_dist_info, load_recipes, print0, resolve_method
from nanochat_fp4.errors import UserError, one_line, run_main

BACKWARD = ("full", "forward", "none")
# Pre-training quantizes everything; later stages and evaluations keep the forward pass (the paper, Appendix C). The
# tokenizer's scripts have no model.
STAGE_BACKWARD = {"base_train": "full", "tok_train": "none", "tok_eval": "none"}
OWN_ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    """A line on stderr, from rank 0."""
    print0(f"nanochat_fp4: {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


@dataclass(frozen=True)
class Options:
    """The choices of the command line and the environment."""

    script: str  # as after python -m: scripts.base_train
    script_args: tuple[str, ...]
    method: str
    recipes: str
    backward: str  # one of BACKWARD
    skip: tuple[str, ...]
    keep_first_blocks: int
    keep_last_blocks: int
    dry_run: bool

    @property
    def recipe(self) -> nf.Recipe | None:
        """The recipe of every converted layer; None if nothing is quantized and the model stays unchanged."""
        recipe = nf.get_recipe("bf16" if self.backward == "none" else self.method)
        if self.backward == "forward":
            recipe = recipe.final.forward_only()
        return recipe if recipe.quantizes else None

    def what(self) -> str:
        """'method clover, quantized: forward and backward'"""
        recipe = self.recipe
        if recipe is None:
            return f"nothing is quantized (method {self.method}, --backward {self.backward})"
        quantized = {"forward": recipe.output != nf.Gemm(), "backward": recipe.forward_only() != recipe}
        return f"method {self.method}, quantized: {' and '.join(name for name, is_so in quantized.items() if is_so)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see python -m nanochat_fp4.upstream --help")


def parse_args(argv: Sequence[str]) -> Options:
    """Options from the arguments before the first --; the script gets the arguments after --. Raises UserError."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(
        prog="python -m nanochat_fp4.upstream",
        usage="NANOCHAT_DIR=~/nanochat %(prog)s [options] SCRIPT -- [the script's own arguments]",
        description="Run a script of an unmodified nanochat checkout ($NANOCHAT_DIR) with its model quantized.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="as after python -m in the checkout: scripts.base_train")
    text = f"QAT method (default: $QAT_METHOD, else clover): {', '.join(nf.METHODS)}; or a row that --recipes registers"
    add("--method", help=text)
    text = "Python file that registers methods of your own by nanochat_fp4.register, as $RECIPES does"
    add("--recipes", type=load_recipes, default="", metavar="FILE.py", help=text)
    text = "full: quantize forward and backward; forward: the backward pass stays in BF16; none: everything does "
    text += "(default: $QAT_BACKWARD, else full for base_train and forward for all other scripts)"
    add("--backward", help=text)
    text = "leave layers alone whose name matches, e.g. 'transformer.h.0.*'; can be repeated"
    add("--skip", action="append", default=[], metavar="PATTERN", help=text)
    add("--keep-first-blocks", type=int, default=0, metavar="N", help="leave the first N blocks in BF16")
    add("--keep-last-blocks", type=int, default=0, metavar="N", help="leave the last N blocks in BF16")
    add("--dry-run", action="store_true", help="print what would be converted; stop before the weights are made")
    args, unknown = parser.parse_known_args(argv[:cut])
    if unknown:
        raise UserError(f"unknown arguments: {' '.join(unknown)}; the script's own arguments go after --")
    default = STAGE_BACKWARD.get(args.script.rpartition(".")[2], "forward")
    backward = args.backward or os.environ.get("QAT_BACKWARD") or default
    if backward not in BACKWARD:
        where = "--backward" if args.backward else "QAT_BACKWARD"
        raise UserError(f"{where}: unknown value {backward!r}; use one of: {', '.join(BACKWARD)}")
    method = resolve_method(args.method)
    recipe = nf.get_recipe(method)
    if recipe.looks_at_inputs:
        problem = f"method {method!r} rounds by what the layers' inputs are, which a nanochat checkout does not collect"
        raise UserError(f"{problem}; use another method")
    chosen = {"script_args": tuple(argv[cut + 1 :]), "method": method, "backward": backward, "skip": tuple(args.skip)}
    return Options(**vars(args) | chosen)


# ----------------------------------------------------------------------------------------------------------------------
# The checkout


def find_checkout() -> Path:
    """The folder in NANOCHAT_DIR. Raises UserError if it is not a nanochat checkout."""
    value = os.environ.get("NANOCHAT_DIR")
    if not value:
        raise UserError("NANOCHAT_DIR is not set; set it to your nanochat checkout, e.g. NANOCHAT_DIR=~/nanochat")
    root = Path(value).expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"NANOCHAT_DIR={value} is not a folder; set it to your nanochat checkout")
    missing = [name for name in ("nanochat/gpt.py", "scripts") if not (root / name).exists()]
    if missing:
        raise UserError(f"NANOCHAT_DIR={value} is not a nanochat checkout: it has no {' and no '.join(missing)}")
    return root


def find_script(root: Path, script: str) -> Path:
    """The file of a script named as after python -m. Raises UserError with a list of the checkout's scripts."""
    path = root.joinpath(*script.split(".")).with_suffix(".py")
    if re.fullmatch(r"\w+(\.\w+)+", script) and path.is_file():
        return path
    there = ", ".join(f"scripts.{p.stem}" for p in sorted((root / "scripts").glob("*.py")) if p.stem != "__init__")
    raise UserError(f"there is no script {script!r} in {root}; there are: {there}")


class CheckoutFinder(importlib.abc.MetaPathFinder):
    """Top-level packages of the checkout come from the checkout, whatever else is on sys.path.

    The checkout's `scripts` and `tasks` have no __init__.py. A package of the same name anywhere on sys.path would win
    over them, or its scripts would mix with theirs. One such package is this project's own `scripts`.
    """

    def __init__(self, root: Path):
        folders = (p for p in root.iterdir() if p.is_dir() and p.name.isidentifier())
        self.packages = {p.name: p for p in folders if any(p.glob("*.py"))}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        folder = self.packages.get(fullname)
        if folder is None:
            return None
        if (init := folder / "__init__.py").exists():
            return importlib.util.spec_from_file_location(fullname, init, submodule_search_locations=[str(folder)])
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def enter_checkout(root: Path) -> None:
    """Makes imports work as in `cd root; python -m ...`, and keeps Python from writing __pycache__ there.

    The current directory, which python -m puts first, leaves sys.path. The source tree that holds this project leaves
    sys.path as well, for two reasons. `import kernels` must find Hugging Face's package of that name, or none. Child
    processes have sys.path but not the finder, and must find the checkout's `scripts`.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    entries = sys.path[1:] if Path(sys.path[0]).resolve() == Path.cwd() else sys.path
    if (OWN_ROOT / "pyproject.toml").exists():
        entries = [entry for entry in entries if Path(entry).resolve() != OWN_ROOT]
    sys.path[:] = [str(root), *entries]
    sys.meta_path.insert(0, CheckoutFinder(root))


def import_gpt(root: Path) -> ModuleType:
    """The checkout's nanochat.gpt. Raises UserError if a package or a module of nanochat is missing."""
    try:
        return importlib.import_module("nanochat.gpt")
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] == "nanochat":
            raise _changed(root, f"it has no module {e.name}") from e
        problem = f"the checkout {root} needs the package {e.name}, which is not installed"
        raise UserError(f"{problem}; install its requirements (pip install {e.name})") from e
    except ImportError as e:
        raise _changed(root, one_line(e)) from e


def _changed(root: Path, what: str) -> UserError:
    return UserError(
        f"the checkout {root} has changed too much to be patched: {what}; use a revision that has it (f5425245f and "
        "92d63d4 do), or call nanochat_fp4.convert(model) in your own copy of the script, before torch.compile"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The patch


class Patch:
    """Wraps the methods of a checkout's GPT class, and counts its models and conversions."""

    def __init__(self, options: Options, root: Path):
        self.options, self.root = options, root
        self.recipe = options.recipe
        self.built = False  # Whether a model was constructed, also on the meta device.
        self.initialized: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.converted = 0  # Converted models, still alive or not.
        self.step: int | None = None  # The run's step, for a method that changes in the course of a run.
        self.twice = False

    def install(self, gpt: ModuleType) -> None:
        """Wraps the class's methods. Raises UserError if a method or argument is missing."""
        model_class = getattr(gpt, "GPT", None)
        if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
            raise _changed(self.root, "nanochat.gpt has no model class GPT")
        optimizer = next((n for n in ("setup_optimizer", "setup_optimizers") if hasattr(model_class, n)), None)
        missing = [] if hasattr(model_class, "init_weights") else ["init_weights"]
        missing += [] if optimizer else ["setup_optimizer (or setup_optimizers)"]
        if missing:
            raise _changed(self.root, f"GPT has no {' and no '.join(missing)}")
        parameters = list(inspect.signature(model_class.forward).parameters)
        if "targets" not in parameters:
            raise _changed(self.root, f"GPT.forward has no argument targets (it has {', '.join(parameters)})")
        dtype = getattr(sys.modules.get("nanochat.common"), "COMPUTE_DTYPE", None)
        if self.recipe and dtype is torch.float16:
            problem = f"the checkout computes in float16, and method {self.options.method} needs bfloat16 or float32"
            raise UserError(f"{problem}; set NANOCHAT_DTYPE=bfloat16 (or float32), or use --backward none")
        _wrap(model_class, "__init__", after=self._after_init)
        _wrap(model_class, "init_weights", after=self._after_init_weights)
        _wrap(model_class, optimizer, before=self._before_optimizer)
        if self.recipe:
            model_class.forward = _per_token_logits(model_class.forward, parameters.index("targets") - 1)

    def _after_init(self, model: nn.Module) -> None:
        self.built = True
        if self.options.dry_run:
            self._convert(model)
            say("dry run: the script ends here, before any weights are made")
            raise SystemExit(0)

    def _after_init_weights(self, model: nn.Module) -> None:
        if model in self.initialized:
            self.twice = True
        else:
            self.initialized.add(model)
            self._convert(model)

    def _convert(self, model: nn.Module) -> None:
        self.converted += 1
        if self.recipe is None:
            say("converted no layer: the model computes exactly as the checkout has it")
            return
        classes = {name: type(m) for name, m in model.named_modules()}
        names = ("skip", "keep_first_blocks", "keep_last_blocks")
        chosen = {name: getattr(self.options, name) for name in names}
        chosen |= {"per_token_in_eval": False}  # the checkout's own validation has the method's scales
        try:
            nf.convert(model, self.recipe, verbose=False, **chosen)
        except ValueError as e:
            raise UserError(one_line(e)) from e
        report = model.nf_report
        layers = {name: model.get_submodule(name) for name in report.converted}
        for name, layer in layers.items():
            layer.__class__ = _quantized_subclass(type(layer), classes[name])
        weights = sum(layer.weight.numel() for layer in layers.values())
        say(f"{report.recipe}")
        say(f"{nf.backend()}")
        say(f"converted {len(layers)} linear layers, {weights:,} weights: {summarize(layers)}")
        for reason in dict.fromkeys(reason for _, reason in report.left_alone):
            say(f"left alone: {summarize(name for name, why in report.left_alone if why == reason)} ({reason})")
        for line in precision_lines(self.recipe):
            say(line)
        if next(iter(layers.values())).weight.device.type == "cpu":
            # Without a GPU the layers run the reference, which is many small operations. A C++ compiler takes ten
            # minutes to compile two blocks. Compiling only the code around the layers would recompile in every step.
            model.forward = torch.compiler.disable(model.forward)
            say("no GPU: torch.compile leaves this model alone")

    def _before_optimizer(self, model: nn.Module) -> None:
        if model not in self.initialized:
            raise _changed(self.root, "the optimizer is set up for a GPT that init_weights was never called on")
        if self.recipe is None:
            return
        now, converted = dict(model.named_modules()), model.nf_report.converted
        lost = [type(now.get(name)).__name__ for name in converted if not isinstance(now.get(name), nf.QuantLinear)]
        if lost:
            problem = f"the script replaced {len(lost)} of {len(converted)} converted layers by {lost[0]}"
            both = f"method {self.options.method} and --fp8 exclude each other"
            raise UserError(f"{problem} after init_weights; {both}: drop one of them")
        _, rank, _, world_size = get_dist_info()
        if world_size > 1:
            # nanochat gives every rank the same seed, as the initial weights need. The weights exist by now. Errors of
            # rotations and stochastic rounding average out over ranks only if the ranks draw independently.
            torch.manual_seed(torch.initial_seed() + rank)
        if self.recipe.late:
            self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """From here on set_progress is called before the first forward pass of each step."""
        frame = sys._getframe()
        # Under `python -m nanochat_fp4.upstream` this module is called __main__ as well as the script.
        while frame is not None and (frame.f_globals is globals() or frame.f_globals.get("__name__") != "__main__"):
            frame = frame.f_back
        variables = frame.f_globals if frame is not None else {}
        # torch.compile wraps the model in another module. A hook of the wrapper is not compiled.
        modules = [m for m in variables.values() if isinstance(m, nn.Module)]
        called = next((m for m in modules if m is not model and getattr(m, "_orig_mod", None) is model), model)
        called.register_forward_pre_hook(lambda module, args: self._set_progress(model, variables))

    def _set_progress(self, model: nn.Module, variables: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        step, steps = variables.get("step"), variables.get("num_iterations")
        if not (isinstance(step, int) and isinstance(steps, int) and 0 <= step <= steps):
            where = f"where the run is (step is {step}, num_iterations {steps})"
            raise _changed(self.root, f"its script does not say {where}")
        if step != self.step and nf.set_progress(model, step / max(1, steps)):
            say(f"step {step} of {steps}: from here on {self.recipe.final if step else self.recipe}")
        self.step = step

    def report_end(self) -> None:
        """At the script's end, tells the user how many models were converted, and warns of a second init_weights."""
        script = self.options.script
        if self.recipe and not self.converted:
            what = "built a GPT but never called init_weights" if self.built else "ended without building a GPT"
            say(f"warning: {script} {what}: nothing was quantized")
        elif self.recipe:
            say(f"{script} ended; models converted: {self.converted}; {self.options.what()}")
        if self.twice:
            say("warning: init_weights ran more than once on one model; it was converted the first time, and stayed so")


def _wrap(cls: type, name: str, after: Callable | None = None, before: Callable | None = None) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        if before:
            before(self)
        result = original(self, *args, **kwargs)
        if after:
            after(self)
        return result

    setattr(cls, name, wrapper)


def _per_token_logits(forward: Callable, targets_at: int) -> Callable:
    """GPT.forward that gives each token a tensor scale of its own when called for logits, without targets."""

    @functools.wraps(forward)
    def wrapper(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        targets = args[targets_at] if len(args) > targets_at else kwargs.get("targets")
        if targets is not None:
            return forward(self, *args, **kwargs)
        with nf.per_token_scale(self):
            return forward(self, *args, **kwargs)

    return wrapper


@functools.cache
def _quantized_subclass(quantized: type, original: type) -> type:
    """A subclass of `quantized` and of the checkout's own Linear.

    The newest nanochat counts FLOPs by isinstance, and derives its training horizon and MFU from the count.
    """
    if issubclass(quantized, original):
        return quantized
    return type(quantized.__name__, (quantized, original), {"__module__": quantized.__module__})


# ----------------------------------------------------------------------------------------------------------------------
# Texts


def summarize(names: Iterable[str]) -> str:
    """['h.0.q', 'h.1.q', 'gate'] -> 'h.*.q (2), gate'"""
    groups = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return ", ".join(f"{name} ({count})" if "*" in name else name for name, count in groups.items())


def precision_lines(recipe: nf.Recipe) -> list[str]:
    """Lines that say in which precision the script's printed numbers are computed."""
    if recipe.output == nf.Gemm():
        return ["loss, bits per byte and logits: BF16 forward (this method quantizes the backward pass only)"]
    return [
        "loss, in training and in evaluation (validation bits per byte): NVFP4 forward; nanochat's disable_fp8 does "
        "not touch these layers; to have the number in BF16, evaluate the checkpoint with --backward none",
        "logits (samples, CORE, chat): NVFP4 forward with a tensor scale of its own for every token",
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Running


def run_script(options: Options, path: Path, patch: Patch) -> None:
    """Runs the script as __main__. Its own errors show themselves as always: traceback, exit status 1."""
    sys.argv = [str(path), *options.script_args]
    try:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    patch.report_end()


def main(argv: list[str] | None = None) -> None:
    options = parse_args(sys.argv[1:] if argv is None else argv)
    root = find_checkout()
    path = find_script(root, options.script)
    enter_checkout(root)
    say(f"{options.script} of {root}: {options.what()}")
    patch = Patch(options, root)
    patch.install(import_gpt(root))
    run_script(options, path, patch)


def cli() -> None:
    """The command of the installed package."""
    run_main(main)


if __name__ == "__main__":
    cli()
