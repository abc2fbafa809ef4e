"""docs/session.md is what the commands print.

python tests/test_session.py        # writes the outputs anew; lines with … stay if they still fit
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "session.md"


def commands(text: str) -> list[tuple[str, str]]:
    """(command, its lines) of the page's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.S)
    return [(c, out) for block in blocks for c, out in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)]


def run(command: str, folder: Path, executable: str | Path = sys.executable) -> str:
    """stdout and stderr of a command in the repository, by this Python and without a GPU."""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{executable}" "$@"\n')
    python.chmod(0o755)
    keep = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    more = {"VENV": str(folder), "HOME": str(folder), "PATH": f"{folder / 'bin'}:{keep['PATH']}", "PYTHONPATH": path}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=keep | more | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    return done.stdout.replace("\r", "\n")


def fits(masked: str, output: str) -> bool:
    pattern = "".join(".*" if part == "…" else re.escape(part) for part in re.split("(…)", masked))
    return re.fullmatch(pattern, output) is not None


def test_the_commands_print_what_the_page_says(tmp_path, fork_server):
    found = commands(PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 6
    for command, expected in found:
        shown = run(command, tmp_path, fork_server.python)
        assert expected and fits(expected, shown), f"$ {command}\n{shown}\nthe page has\n{expected}"


def test_a_mask_hides_only_itself():
    assert fits("1 of …, done\n", "1 of 7, done\n") and not fits("1 of …, done\n", "2 of 7, done\n")
    assert not fits("a…\n", "a\nb\n")


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for command, expected in commands(text):
            shown = run(command, Path(folder)).replace(folder, "…")
            if not fits(expected, shown):
                text = text.replace(f"$ {command}\n{expected}", f"$ {command}\n{shown}", 1)
    PAGE.write_text(text, encoding="utf-8")
