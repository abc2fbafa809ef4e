"""Runs or parses every command that README.md, CONTRIBUTING.md and docs/ print, and says of each how far it got.

    python dev/check_pages.py                      # all pages; exit status 1 if a command fails
    python dev/check_pages.py docs/memory.md       # some pages
    python dev/check_pages.py --rewrite            # writes the outputs of console blocks anew, if they differ

A command that takes seconds on a CPU (RUNS below) is run. Any other Python program only parses its arguments, with its
own argument parser. Shell scripts are checked by `bash -n`. Python examples are compiled, and their names nf.* must
exist. Files and modules that a page names must exist, too, and so must a name that it says to be in a file. Bash itself
reads each line, with `python`, `bash`, `pip` and similar programs replaced by this file. Nothing needs a GPU or the
network.
"""

import argparse
import atexit
import concurrent.futures
import itertools
import os
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("python", "bash", "pip", "torchrun", "git", "nanochat-fp4", "vllm", "llama-server", "hf", "curl")
COMMAND = re.compile(rf"(?:[A-Z_0-9]+=\S* )*(?:timeout \S+ \S+ )?(?:{'|'.join(PROGRAMS)}|export|grep) ")
# Commands that are run. Each takes at most a minute or two of one core, and reads only what the repository has.
RUNS = re.compile(
    r"python -c|python examples/plain_loop|PLAN_ONLY=1|python -m nanochat_fp4\.doctor$|grep "
    r"|python -m lab\.reproduce (list|leaderboard|horizon|forwards|remedies|equal_time|claims|extra_steps|table5)"
    r"|python -m lab\.(pages|runs)$|bash \S+ --help|nanochat-fp4 --help|python -m lab\.bench \S+ --predict"
)
# Names on the pages that stand for a reader's own -> names that exist here.
STAND_INS = {"FILE.py": "lab/recipes.py", "my_sr": "clover_search"}
MISSING = {"vllm", "llama-server", "hf", "git", "curl", "pip"}  # Programs of others, which are not run.
MARK, SECONDS = "CHECKED", 300  # A shim's last line begins with MARK and says how far it got.


def commands(text: str) -> list[tuple[str, str | None]]:
    """Returns the commands of a page as (command, its output if the page prints it, otherwise None). They are those of
    console blocks, of other blocks, and of `spans` in the text."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S)
    found: list[tuple[str, str | None]] = []
    for kind, block in blocks:
        if kind == "console":
            found += re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
        elif kind in ("bash", "sh", ""):
            found += [(line, None) for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    # A part that waits for its study is a comment (lab/pages.py).
    rest = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text, flags=re.M | re.S)
    indented = re.sub(r"\\\n\s*", "", "\n".join(re.findall(r"^ {4,}(.*(?:\\\n.*)*)", rest, re.M)))
    found += [(line.strip(), None) for line in indented.splitlines() if COMMAND.match(line.strip())]
    found += [(span, None) for span in re.findall(r"`([^`\n]+)`", rest) if COMMAND.match(span)]
    cleaned = [(re.sub(r"\s+#\s.*", "", command).strip(), output) for command, output in found]
    return list(dict.fromkeys((command, output) for command, output in cleaned if command))


def examples(text: str) -> list[str]:
    """Returns a page's blocks of Python, fenced or indented."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.M | re.S)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    indented = re.findall(r"(?:^\n)((?: {4,}.*\n|\n)+)", rest, re.M)
    return [textwrap.dedent(block) for _, block in blocks] + [
        textwrap.dedent(block) for block in indented if re.match(r"\s*(import|from|model =|nf\.)", block)
    ]


def shim(program: str, words: list[str]) -> None:
    """Takes the place of a program in a command that is only parsed. Prints how far it got."""
    if program == "bash":
        if not words or words[0].startswith("-"):
            sys.exit(f"no shell script: {words}")
        subprocess.run(["/bin/bash", "-n", words[0]], check=True)
        print(MARK, "parsed", "by bash -n")
    elif program in MISSING:
        print(MARK, "not here:", f"{program} is not of this project")
    else:
        if program == "torchrun":
            words = list(itertools.dropwhile(lambda word: word.startswith("--"), words))
        if program == "nanochat-fp4":
            words = ["-m", "nanochat_fp4", *words]
        parse(words) if words else print(MARK, "not here:", "it names no module")


def parse(words: list[str]) -> None:
    """Runs `python WORDS` until its arguments are parsed."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        real(self, *args, **kwargs)
        print(MARK, "parsed", "by its own parser")
        os._exit(sys.stdout.flush() or 0)

    argparse.ArgumentParser.parse_args = parse_args
    name, sys.argv = (words[1], words[1:]) if words[0] == "-m" else (words[0], words)
    sys.path.insert(0, str(ROOT))
    if name.endswith(".py"):
        compile((ROOT / name).read_text(encoding="utf-8"), name, "exec")
        print(MARK, "parsed", "by Python: it compiles")
    elif name in ("pytest", "mkdocs"):
        print(MARK, "not here:", f"{name} is not of this project")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        print(MARK, "parsed", "it has no parser, and ran")


def make_programs(folder: Path, shims: tuple[str, ...]) -> None:
    """Makes `python` and the shims in a folder, which stands at the beginning of PATH."""
    folder.mkdir(parents=True)
    for name in {"python", *shims}:
        this = f'"{Path(__file__).resolve()}" --shim {name}' if name in shims else ""
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {this} "$@"\n')
        (folder / name).chmod(0o755)


def check(programs: Path, command: str, expected: str | None) -> tuple[bool, str]:
    """Checks a command without a GPU and a network, and with an empty home. Returns whether it is right, and how far it
    got or what is wrong. If the output of a console block differs from the page, this is the output."""
    run = expected is not None or RUNS.match(command)
    if re.search(r"OWNER|\bBASE\b|&& nanochat-fp4", command):
        run = None
    for name, stand_in in STAND_INS.items():
        command = command.replace(name, stand_in)
    venv = programs / ("run" if run else "parse")
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_")} | {
            "HOME": folder, "VENV": str(venv), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if not run:
            env |= {"HEAD": "127.0.0.1", "NANOCHAT_DIR": folder}
        try:
            done = subprocess.run(
                ["/bin/bash", "-c", command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"it takes more than {SECONDS} seconds: take it out of RUNS"
    output = done.stdout.replace("\r", "\n")
    if expected is not None:  # In which … stands for any part of a line.
        same = re.fullmatch(".*".join(map(re.escape, expected.split("…"))), output)
        return (True, "ran") if same else (False, output.replace(folder, "…"))
    last = (output.strip().splitlines() or [""])[-1]
    if done.returncode:
        return False, f"exit status {done.returncode}: {last}"
    return True, last.removeprefix(MARK).strip() if last.startswith(MARK) and not run else "ran"


def named(text: str) -> list[str]:
    """Returns the faults in the modules, files and names of nf that a page names in `spans` and in Python examples."""
    import nanochat_fp4 as nf

    wrong = [f"nf.{n} does not exist" for n in set(re.findall(r"\bnf\.(\w+)", text)) if not hasattr(nf, n)]
    for example in examples(text):
        try:
            compile(example, "example", "exec")
        except SyntaxError as e:
            wrong.append(f"Python example, line {e.lineno}: {e.msg}: {e.text}")
    for span in set(re.findall(r"`([\w./]+)`", text)):
        file = re.fullmatch(r"(nanochat_fp4|lab|scripts|eval|dev|tests|docs|examples|kernels)/[\w./]*\w\.\w+", span)
        module = re.fullmatch(r"(nanochat_fp4|lab|scripts|eval)(\.\w+)+", span) and not span.endswith((".py", ".sh"))
        if (file and not (ROOT / span).exists()) or (module and pydoc.locate(span) is None):
            wrong.append(f"{span} does not exist")
    # `NAME`, `OTHER` and `NAME` in `file.py`
    for names, file in re.findall(r"((?:`\w+`(?:, | and )?)+) (?:in|of) `([\w/]+\.py)`", " ".join(text.split())):
        words = re.findall(r"\w+", (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else "")
        wrong += [f"{file} has no {name}" for name in set(re.findall(r"`(\w+)`", names)) - set(words)]
    return wrong


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="default: README.md, CONTRIBUTING.md and docs/")
    parser.add_argument("--rewrite", action="store_true", help="write the outputs of console blocks anew")
    args = parser.parse_args()
    pages = args.pages or [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    failed = total = 0
    programs = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, programs)
    make_programs(programs / "run/bin", ("nanochat-fp4",))
    make_programs(programs / "parse/bin", PROGRAMS)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        found = [c for c in commands(text) if not args.rewrite or c[1] is not None]
        print(f"{page.resolve().relative_to(ROOT)}: {len(found)} commands", flush=True)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for (command, expected), (right, why) in zip(found, pool.map(lambda c: check(programs, *c), found)):
                total, failed = total + 1, failed + (not right)
                print(f"  {'ok' if right else 'FAILED':8}{command}    # {why}", flush=True)
                if args.rewrite and not right:
                    text = text.replace(f"$ {command}\n{expected}", f"$ {command}\n{why}")
                    page.write_text(text, encoding="utf-8")
        for problem in named(text):
            total, failed = total + 1, failed + 1
            print(f"  FAILED  {problem}", flush=True)
    print(f"{total} checked, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    shim(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--shim"] else main()
