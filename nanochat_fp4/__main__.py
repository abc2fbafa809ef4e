"""The command of the installed package.

`nanochat-fp4 base_train --depth=4` does what `python -m scripts.base_train --depth=4` does in a checkout, and so does
`torchrun -m nanochat_fp4 base_train --depth=4`. `nanochat-fp4 speedrun` is `bash speedrun_fp4.sh`, from any folder.

No package with the name `scripts` may lie in site-packages, because a nanochat checkout would import it instead of its
own. The wheel therefore has scripts/, eval/ and the shell scripts inside of this package, in the folder `programs`,
which takes the place of a checkout's root for them.
"""

import ast
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from nanochat_fp4 import __version__, cli
from nanochat_fp4.cli import UserError, did_you_mean, print_safely, run_main

PACKAGE = Path(__file__).resolve().parent
RUNS = {
    "speedrun": "every stage from text to report: d20 on GPUs, a small model on a CPU",
    "run1000": "the same for d32",
}
# In the order of a run. --help shows the first sentence of each module.
STAGES = {
    name: f"scripts.{name}"
    for name in "plan tok_train tok_eval base_train base_loss base_eval mid_train chat_sft chat_rl chat_eval chat_cli "
    "chat_web export".split()
}
TOOLS = {
    "doctor": "nanochat_fp4.doctor",
    "upstream": "nanochat_fp4.upstream",
    "dataset": "nanochat_fp4.data.dataset",
    "tokenizer": "nanochat_fp4.data.tokenizer",
    "report": "nanochat_fp4.evaluation.report",
}


def programs() -> Path:
    """Returns the folder with scripts/, eval/ and the shell scripts. It is the checkout, if this package lies in
    one."""
    installed = PACKAGE / "programs"
    return installed if installed.is_dir() else PACKAGE.parent


def first_sentence(module: str) -> str:
    """Returns the first sentence of a module's docstring. The module is not imported, because that needs torch."""
    folder = programs() if module.startswith("scripts.") else PACKAGE.parent
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def usage() -> str:
    """Returns the text of --help."""
    groups = {"whole runs, by variables, e.g. QAT_METHOD=nvidia nanochat-fp4 speedrun": RUNS}
    for title, modules in (("stages, in the order of a run", STAGES), ("tools", TOOLS)):
        groups[title] = {name: first_sentence(module) for name, module in modules.items()}
    lines = ["nanochat-fp4 COMMAND [flags]; COMMAND --help has the flags, --version the version"]
    for title, commands in groups.items():
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
        runpy.run_module((STAGES | TOOLS)[name], run_name="__main__", alter_sys=True)
    else:
        wrong = f"there is no command {name!r}" if name else "a command is missing"
        raise UserError(f"{wrong}; {did_you_mean(name, known) or 'see nanochat-fp4 --help'}")


def run() -> None:
    """Runs the command of the installed package."""
    run_main(main)


if __name__ == "__main__":
    run()
