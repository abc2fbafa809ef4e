"""dev/measure.sh: plans, failures, limits. What it measures needs a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _commands import options

ROOT = Path(__file__).resolve().parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def measure(out: Path, python: Path | str = sys.executable, **variables: str) -> subprocess.CompletedProcess:
    known = ("PARTS", "PLAN_ONLY", "LIMIT", "QUARTET2", "NANOCHAT")
    environment = {k: v for k, v in os.environ.items() if k not in known} | {"PY": str(python), "OUT": str(out)}
    environment["NVFP4_KERNELS"] = "reference"
    command = ["bash", str(ROOT / "dev" / "measure.sh")]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)


def test_a_plan_runs_nothing(tmp_path):
    done = measure(tmp_path / "out", PLAN_ONLY="1", QUARTET2="/a checkout", LIMIT="")
    assert done.returncode == 0 and not (tmp_path / "out").exists()
    names = [line.split(",")[0] for line in done.stdout.splitlines() if ", at most " in line]
    assert names == ["doctor", "tests", "linear", "quantize", "quartet2", "train", "train_32gib"]
    assert "quartet2, at most 400 s: " in done.stdout and "train_nanochat  skipped: NANOCHAT is not set" in done.stdout


def test_every_file_and_flag_of_the_plan_is_there(tmp_path):
    """A GPU is too dear to find out there that a flag was renamed."""
    flags: dict[str, set[str]] = {}
    for line in measure(tmp_path, PLAN_ONLY="1", QUARTET2="x", NANOCHAT="x").stdout.splitlines():
        words = line.split(f"{sys.executable} ", 1)[1].split()
        if "pytest" in words:
            assert all((ROOT / w).is_file() for w in words if w.endswith(".py"))
            continue
        program = words[1] if words[0] == "-m" else str(ROOT / words[0])
        if program not in flags:
            flags[program] = {flag for action in options(program) for flag in action.option_strings}
        assert {w for w in words if w.startswith("--")} <= flags[program], words
    assert len(flags) == 5


@no_gpu
def test_what_fails_leaves_the_others(fork_server, tmp_path):
    done = measure(tmp_path, fork_server.python, PARTS="linear quartet2")
    assert done.returncode == 1
    *_, title, linear, quartet2 = done.stdout.splitlines()
    assert title == f"== summary, in {tmp_path}"
    assert linear.split()[:5] == ["linear", "FAILED,", "exit", "status", "2:"]
    assert "no CUDA device" in linear and "no CUDA device" in (tmp_path / "linear.log").read_text()
    assert quartet2.split(maxsplit=1) == ["quartet2", "skipped: QUARTET2 is not set"]


def test_what_takes_too_long_is_cut_off(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    done = measure(tmp_path, python, PARTS="doctor", LIMIT="1")
    assert done.returncode == 1 and "doctor          FAILED, cut off after 1 s" in done.stdout


def test_unknown_parts(tmp_path):
    done = measure(tmp_path, PARTS="linear speed")
    assert done.returncode == 2 and "there is no part 'speed'; the parts are: doctor tests linear" in done.stderr
