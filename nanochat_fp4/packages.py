"""The `pip install` command for a module that is not installed."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # This is the root of a checkout, or site-packages.

# The modules that each extra of this package installs.
EXTRAS = {
    "train": ("datasets", "filelock", "huggingface_hub", "matplotlib", "muon", "pyarrow", "rustbpe", "safetensors",
              "tiktoken", "tqdm", "wandb", "yaml"),
    "export": ("compressed_tensors", "gguf", "tokenizers", "transformers"),
    "web": ("fastapi", "starlette", "uvicorn"),
    "trackio": ("trackio",),
    "examples": ("accelerate", "lightning", "peft"),
}  # fmt: skip


# The package itself depends on these modules, and `pip install -e .` installs them.
CORE = ("numpy", "nvfp4_kernels", "torch", "triton")


def install_command(*modules: str) -> str:
    """Returns the `pip install` command that installs the modules, or "" if none of them is in EXTRAS or CORE.

    In a checkout the command names the folder, because no package index has this package's name.
    """
    names_of_extras = ",".join(extra for extra, names in EXTRAS.items() if set(names) & set(modules))
    if not names_of_extras and not set(CORE) & set(modules):
        return ""
    extras = f"[{names_of_extras}]" if names_of_extras else ""
    if not (ROOT / "pyproject.toml").is_file():
        return f"pip install 'nanochat_fp4{extras}'"
    folder = "." if os.path.realpath(os.curdir) == str(ROOT) else ROOT
    return f"pip install -e '{folder}{extras}'"


def remedy(*modules: str) -> str:
    """Returns what to type so that the modules are found. If the checkout's .venv has them, this activates .venv.
    Otherwise it is the install_command."""
    venv = ROOT / ".venv"
    packages = list(venv.glob("lib/python*/site-packages"))
    if packages and Path(sys.prefix) != venv and all((packages[0] / name).is_dir() for name in modules):
        in_root = os.path.realpath(os.curdir) == str(ROOT)
        return f"type `source {'' if in_root else f'{ROOT}/'}.venv/bin/activate` and run it again"
    return install_command(*modules)


def missing_package(error: BaseException) -> str:
    """Returns one line about a ModuleNotFoundError, with what to type (see remedy), if install_command knows the
    module. Otherwise returns ""."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not install_command(name):
        return ""
    return f"the package {name} is not installed in {sys.executable}, which this needs; {remedy(name)}"
