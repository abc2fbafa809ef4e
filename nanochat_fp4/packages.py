"""Which `pip install` brings a module that is not installed."""

import os
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


def install_command(*modules: str) -> str:
    """The `pip install` that brings the modules; "" for a module that is not of EXTRAS.

    In a checkout pip is given its folder, because no package index has this package's name.
    """
    wanted = ",".join(extra for extra, names in EXTRAS.items() if set(names) & set(modules))
    if not wanted:
        return ""
    if not (ROOT / "pyproject.toml").is_file():
        return f"pip install 'nanochat_fp4[{wanted}]'"
    folder = "." if os.path.realpath(os.curdir) == str(ROOT) else ROOT
    return f"pip install -e '{folder}[{wanted}]'"


def missing_package(error: BaseException) -> str:
    """One line on a ModuleNotFoundError of an optional package, with the `pip install` that brings it; else ""."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    command = install_command(name)
    return f"the package {name} is not installed, which this needs; {command}" if command else ""
