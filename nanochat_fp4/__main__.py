"""The stages as commands of the installed package: `nanochat-fp4 base_train --depth=4` is what
`python -m scripts.base_train --depth=4` is in a checkout, and so is `torchrun -m nanochat_fp4 base_train`.

A package of the name `scripts` must not lie in anybody's site-packages: a nanochat checkout would import it instead of
its own. The wheel therefore holds scripts/ and eval/ inside of this package, in `programs`, which goes on sys.path
here.
"""

import runpy
import sys
from pathlib import Path

from nanochat_fp4.console import print_safely
from nanochat_fp4.errors import UserError, run_main

PACKAGE = Path(__file__).resolve().parent
# The help lists these, in the order of a run. The other scripts can be called as well.
STAGES = {
    "tok_train": "train the tokenizer",
    "base_train": "pre-train",
    "base_loss": "bits per byte on the train and validation text, samples",
    "base_eval": "the CORE metric",
    "mid_train": "mid-training on conversations",
    "chat_sft": "fine-tuning",
    "chat_rl": "reinforcement learning on GSM8K",
    "chat_eval": "benchmarks",
    "chat_cli": "talk to the model in a terminal",
    "chat_web": "talk to it in a browser",
    "export": "to Hugging Face, GGUF and others",
    "import_model": "from GGUF files and transformers",
}


def programs() -> Path:
    """The folder that holds scripts/ and eval/: the checkout's, if this package lies in a checkout."""
    installed = PACKAGE / "programs"
    return installed if installed.is_dir() else PACKAGE.parent


def usage() -> str:
    lines = [f"  {name:14}{what}" for name, what in STAGES.items()]
    return "\n".join(
        [
            "nanochat-fp4 STAGE [flags]: python -m scripts.STAGE of a checkout; STAGE --help has the flags",
            *lines,
            "  dataset, tokenizer, report, doctor, upstream: modules of the package, python -m nanochat_fp4.NAME",
        ]
    )


def main() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print_safely(usage())
        return
    folder = programs()
    known = sorted(path.stem for path in (folder / "scripts").glob("*.py") if path.stem != "__init__")
    if name not in known:
        raise UserError(f"there is no stage {name!r}; there are: {', '.join(known)}")
    sys.path.insert(0, str(folder))
    sys.argv[1:] = rest
    runpy.run_module(f"scripts.{name}", run_name="__main__", alter_sys=True)


def cli() -> None:
    """The command of the installed package."""
    run_main(main)


if __name__ == "__main__":
    cli()
