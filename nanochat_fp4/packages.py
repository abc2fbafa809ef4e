"""Which `pip install` brings a module that is not installed."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of a checkout, or site-packages

# The extra of this package that brings a module.
EXTRAS = {
    "train": ("datasets", "filelock", "huggingface_hub", "matplotlib", "muon", "pyarrow", "rustbpe", "safetensors",
              "tiktoken", "tqdm", "wandb", "yaml"),
    "export": ("compressed_tensors", "gguf", "tokenizers", "transformers"),
    "web": ("fastapi", "starlette", "uvicorn"),
    "trackio": ("trackio",),
}  # fmt: skip


# What the package itself depends on; `pip install -e .` brings these modules.
CORE = ("numpy", "nvfp4_kernels", "torch", "triton")


def install_command(*modules: str) -> str:
    """The `pip install` that brings the modules; "" for a module that is neither of EXTRAS nor of CORE.

    In a checkout pip is given its folder, because no package index has this package's name.
    """
    wanted = ",".join(extra for extra, names in EXTRAS.items() if set(names) & set(modules))
    if not wanted and not set(CORE) & set(modules):
        return ""
    extras = f"[{wanted}]" if wanted else ""
    if not (ROOT / "pyproject.toml").is_file():
        return f"pip install 'nanochat_fp4{extras}'"
    folder = "." if os.path.realpath(os.curdir) == str(ROOT) else ROOT
    return f"pip install -e '{folder}{extras}'"


def remedy(*modules: str) -> str:
    """What to type so that the modules are found: the checkout's .venv where it has them, else install_command."""
    venv = ROOT / ".venv"
    packages = list(venv.glob("lib/python*/site-packages"))
    if packages and Path(sys.prefix) != venv and all((packages[0] / name).is_dir() for name in modules):
        inside = os.path.realpath(os.curdir) == str(ROOT)
        return f"type `source {'' if inside else f'{ROOT}/'}.venv/bin/activate` and run it again"
    return install_command(*modules)


def missing_package(error: BaseException) -> str:
    """One line on a ModuleNotFoundError of a package of ours, with what to type (see remedy); else ""."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not install_command(name):
        return ""
    return f"the package {name} is not installed in {sys.executable}, which this needs; {remedy(name)}"
