"""The command of the installed package.

`nanochat-fp4 base_train --depth=4` does what `python -m scripts.base_train --depth=4` does in a checkout, and so does
`torchrun -m nanochat_fp4 base_train --depth=4`. `nanochat-fp4 speedrun` is `bash speedrun_fp4.sh`, from any folder.

No package with the name `scripts` may lie in site-packages, because a nanochat checkout would import it instead of its
own. The wheel therefore has scripts/, eval/ and the shell scripts inside of this package, in the folder `programs`,
which takes the place of a checkout's root for them.
"""

import difflib
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from nanochat_fp4 import __version__, cli
from nanochat_fp4.cli import UserError, print_safely, run_main

PACKAGE = Path(__file__).resolve().parent
RUNS = {
    "speedrun": "every stage from text to report: d20 on GPUs, a small model on a CPU",
    "run1000": "the same for d32",
}
STAGES = {
    "plan": "what a whole run will do: hours, memory, which method, what to type",
    "tok_train": "train the tokenizer",
    "tok_eval": "compare the tokenizer with GPT-2's and GPT-4's",
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
}
TOOLS = {
    "doctor": ("nanochat_fp4.doctor", "does this machine compute what the paper says, and with which kernels?"),
    "upstream": ("nanochat_fp4.upstream", "run a script of a nanochat checkout, quantized"),
    "dataset": ("nanochat_fp4.data.dataset", "download text"),
    "tokenizer": ("nanochat_fp4.data.tokenizer", "show the tokenizer, or convert nanochat's"),
    "report": ("nanochat_fp4.evaluation.report", "write the report"),
}


def programs() -> Path:
    """Returns the folder with scripts/, eval/ and the shell scripts. It is the checkout, if this package lies in
    one."""
    installed = PACKAGE / "programs"
    return installed if installed.is_dir() else PACKAGE.parent


def usage() -> str:
    """Returns the text of --help."""
    groups = (
        ("whole runs, by variables, e.g. QAT_METHOD=nvidia nanochat-fp4 speedrun", RUNS),
        ("stages, in the order of a run", STAGES),
        ("tools", {name: what for name, (_, what) in TOOLS.items()}),
    )
    lines = ["nanochat-fp4 COMMAND [flags]; COMMAND --help has the flags, --version the version"]
    for title, commands in groups:
        lines += ["", f"{title}:", *(f"  {name:14}{what}" for name, what in commands.items())]
    return "\n".join(lines)


def run_shell(name: str, arguments: list[str]) -> NoReturn:
    """Replaces this process by the shell script of a whole run. The script uses the environment of this Python,
    unless VENV names another one, and says which packages it lacks. Raises UserError if bash is missing."""
    bash = shutil.which("bash")
    if bash is None:
        raise UserError(f"bash is not installed, which {name} needs; install it, or run the stages one by one")
    environment = {**os.environ, "VENV": os.environ.get("VENV") or sys.prefix}
    os.execve(bash, [bash, str(programs() / f"{name}_fp4.sh"), *arguments], environment)


def main() -> None:
    name, *rest = sys.argv[1:] or [""]
    known = (*RUNS, *STAGES, *TOOLS)
    if name in ("-h", "--help", "help"):
        print_safely(usage())
    elif name in ("-V", "--version"):
        print_safely(f"nanochat-fp4 {__version__}")
    elif name in RUNS:
        run_shell(name, rest)
    elif name in known:
        sys.path.insert(0, str(programs()))
        sys.argv[1:] = rest
        cli.PROGRAM = f"nanochat-fp4 {name}"
        module = TOOLS[name][0] if name in TOOLS else f"scripts.{name}"
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        similar = difflib.get_close_matches(name, known, n=1)
        wrong = f"there is no command {name!r}" if name else "a command is missing"
        raise UserError(f"{wrong}; " + (f"did you mean {similar[0]}?" if similar else "see nanochat-fp4 --help"))


def run() -> None:
    """Runs the command of the installed package."""
    run_main(main)


if __name__ == "__main__":
    run()
