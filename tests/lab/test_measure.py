"""dev/measure.sh: plans, failures, limits. What it measures needs a GPU."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab import ROOT
from lab.bench import compare, steps
from nanochat_fp4.cli import UserError
from nanochat_fp4.nvfp4.methods import WHICH
from scripts import plan as plan_program

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def measure(out: Path | str, python: Path | str = sys.executable, **variables: str) -> subprocess.CompletedProcess:
    known = ("PARTS", "PLAN_ONLY", "LIMIT", "NANOCHAT", "DRY_RUN", "DEPTH")
    environment = {k: v for k, v in os.environ.items() if k not in known} | {"PY": str(python), "OUT": str(out)}
    environment["NVFP4_KERNELS"] = "reference"
    command = ["bash", str(ROOT / "dev" / "measure.sh")]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)


def plan(out: Path, **variables: str) -> tuple[str, dict[str, int]]:
    """(what PLAN_ONLY prints, the seconds of each part)."""
    done = measure(out, PLAN_ONLY="1", LIMIT="", **variables)
    assert done.returncode == 0 and not out.exists()
    lines = [line for line in done.stdout.splitlines() if ", at most " in line]
    return done.stdout, {line.split(",")[0]: int(line.split()[3]) for line in lines}


def checkout_of_nanochat(folder: Path) -> str:
    (folder / "nanochat").mkdir(parents=True)
    (folder / "nanochat/gpt.py").touch()
    return str(folder)


def test_a_plan_runs_nothing_and_what_a_stranger_runs_ends_within_20_minutes(tmp_path):
    said, limits = plan(tmp_path / "out", PARTS="all")
    assert list(limits) == ["doctor", "tests", "layers", "steps", "steps_32gib"] and limits["layers"] == 240
    assert "steps_nanochat  skipped: NANOCHAT is not set" in said
    everything = plan(tmp_path / "out", PARTS="all", NANOCHAT=checkout_of_nanochat(tmp_path))[1]
    named = re.search(r"PARTS=all: everything, (\d+) minutes", (ROOT / "dev/measure.sh").read_text())[1]
    assert int(named) - 1 < sum(everything.values()) / 60 <= int(named)
    said, limits = plan(tmp_path / "out")
    assert "--methods" not in said.partition("steps,")[2]
    assert list(limits) == ["doctor", "layers", "steps"] and sum(limits.values()) <= 1200


def test_the_depth_of_the_users_run_is_timed_in_more_time_if_it_is_deeper(tmp_path):
    of = {depth: plan(tmp_path / "out", PARTS="steps", DEPTH=depth) for depth in ("", "12", "32")}
    assert [re.search(r"--depth (\d+)", said)[1] for said, _ in of.values()] == ["20", "12", "32"]
    usual, small, large = (limits["steps"] for _, limits in of.values())
    assert usual == small < large


@pytest.mark.parametrize("depth", ["12", "20", "26", "32"])
def test_the_minutes_that_are_named_are_the_limits_of_this_depth(tmp_path, depth):
    """By the plan for every depth, and by the help and docs/one_card.md for those that they name."""
    seconds = sum(plan(tmp_path / "out", DEPTH=depth)[1].values())
    run = plan_program.Plan("speedrun", {"PLAN_ONLY": "1", "GPU": "rtx5090", "DEPTH": depth})
    minutes = int(re.search(r"measure.sh  # (\d+) minutes", plan_program.page(run))[1])
    assert minutes - 1 < seconds / 60 <= minutes
    for path in ("dev/measure.sh", "docs/one_card.md"):
        named = {d: int(m) for m, d in re.findall(r"(\d+) with DEPTH=(\d+)", (ROOT / path).read_text())}
        assert {"26", "32"} <= named.keys() and named.get(depth, minutes) == minutes, path


def test_the_steps_of_every_part_have_the_methods_that_the_plan_advises(tmp_path):
    """measure.sh names none, so that they stand in one place."""
    said, _ = plan(tmp_path / "out", PARTS="steps steps_32gib")
    assert said.count(" lab.bench steps ") == 2 and "--methods" not in said
    assert not any(fixed in said for fixed in ("--head", "--window-pattern", "--cuda-graph", "NANOCHAT_ATTENTION"))
    methods = [method for method, _ in steps.parse_args([]).variants]
    assert methods == ["bf16", "fp8", "clover", "clover_fp8_forward"] and all(method in WHICH for method in methods)
    timed = steps.__doc__.splitlines()
    assert "BF16, FP8, clover, clover_fp8_forward" in next(line for line in timed if line.startswith("    python"))


@no_gpu
def test_a_dry_run_makes_the_table_and_the_file_to_send(fork_server, tmp_path):
    """All parts of measure.sh, in small, on a CPU; then what a plan reads."""
    base, tmp_path = tmp_path, tmp_path / "measurements"
    done = measure(tmp_path, fork_server.python, DRY_RUN="1", DEPTH="32", NANOCHAT_BASE_DIR=str(base / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(line.split(maxsplit=1) for line in done.stdout.split("== summary, in ")[1].splitlines()[1:4])
    assert [line.split()[0] for line in found.values()] == ["ok,", "ok,", "ok,"]
    *_, plan = done.stdout.partition("== the plan of a speedrun")
    methods = re.findall(r"^d2 +(\w+) +(?:bf16|fp8) .*", done.stdout, re.MULTILINE)  # One table, and of numbers.
    assert methods == ["bf16", "fp8", "clover", "clover_fp8_forward"] and not re.search(
        r"^d2 .* 2 +-", done.stdout, re.M
    )
    assert all(word in plan.splitlines()[0] for word in ("dry run", "DEPTH=32", "a tiny d2"))
    card = json.loads((tmp_path / "my_card.json").read_text())
    assert card["statuses"] == {"doctor": 0, "layers": 0, "steps": 0}
    layers, steps = card["parts"]
    assert {r["method"] for r in layers["records"]} >= {"bf16", "clover"}
    assert [r["method"] for r in steps["records"]] == ["bf16", "fp8", "clover", "clover_fp8_forward"]  # as on a GPU
    assert all(r["tokens_per_second"] > 0 and r["problem"] is False for r in steps["records"])
    table = (tmp_path / "my_card.txt").read_text()
    assert "d2, steps" in table and table.rstrip() in done.stdout
    assert "to send it" not in done.stdout and "DRY_RUN" in done.stdout.splitlines()[-1]
    steps = json.loads((tmp_path / "steps.json").read_text())
    steps["environment"]["gpu"] = "RTX 5090"
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    plan = plan_program.Plan("speedrun", {"PLAN_ONLY": "1", "GPU": "rtx5090", "NANOCHAT_BASE_DIR": str(base)})
    timed = plan_program.speeds(plan.s, plan.bases[0])
    assert {name for name, of in timed.items() if not of["runs"]} == {
        "bf16",
        "fp8",
        "clover",
        "clover_fp8_forward",
        "nvfp4",
    }


def test_a_dry_run_has_a_folder_of_its_own(tmp_path):
    """A plan reads the folder of measurements, and a dry run must neither replace nor pass for them."""
    for dry, folder in (("0", "measurements"), ("1", "measurements_dry_run")):
        base = tmp_path / dry
        done = measure("", "true", NANOCHAT_BASE_DIR=str(base), DRY_RUN=dry, PARTS="doctor")
        assert done.returncode == 0 and [path.name for path in base.iterdir()] == [folder], done


def test_a_cards_file_has_nothing_that_its_owner_named(tmp_path):
    secret = "/home/jane/on-janes-host"
    content = {"benchmark": "bench_train", "environment": {"gpu": "NVIDIA X", "platform": secret, "cpu": secret}}
    content["settings"] = {"seq_len": 64, "nanochat": secret, "hardware": secret, "window_pattern": "L"}
    content["records"] = [{"method": "clover", "depth": 2, "problem": f"OSError: {secret}", "path": secret}]
    card = compare.card([content], {"doctor": 0})
    assert secret not in json.dumps(card) and card["parts"][0]["records"][0] == {
        "method": "clover", "depth": 2, "problem": True,
    }  # fmt: skip


def test_a_card_without_its_folder_is_refused(tmp_path):
    content = {"benchmark": "bench_train", "environment": {"gpu": None}, "settings": {}, "records": []}
    (steps := tmp_path / "steps.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="no folder .*none"):
        compare.main([str(steps), f"--card={tmp_path / 'none' / 'c.json'}"])
    with pytest.raises(UserError, match="layers.json is not there; make one with dev/measure.sh"):
        compare.main([str(tmp_path / "layers.json")])


def flags_of(program: str, capsys) -> set[str]:
    """The flags that its help names."""
    with pytest.raises(SystemExit):
        importlib.import_module(program).main(["--help"])
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out))


def test_every_file_and_flag_of_the_plan_is_there(tmp_path, capsys):
    """A GPU is too dear to find out there that a flag was renamed."""
    flags: dict[str, set[str]] = {}
    nanochat = checkout_of_nanochat(tmp_path / "a folder")
    for line in plan(tmp_path / "out", PARTS="all", NANOCHAT=nanochat)[0].splitlines():
        words = shlex.split(line.split(f"{sys.executable} ", 1)[1])
        if "pytest" in words:
            assert all((ROOT / w).is_file() for w in words if w.endswith(".py"))
            continue
        program = f"lab.bench.{words[2]}" if words[1] == "lab.bench" else words[1]
        if program not in flags:
            flags[program] = flags_of(program, capsys)
        assert {w for w in words if w.startswith("--")} <= flags[program], words
        if "--nanochat" in words:  # An empty word and a space survive being pasted.
            assert words[words.index("--methods") + 1] == "" and words[words.index("--nanochat") + 1] == nanochat
    assert len(flags) == 3  # doctor, layers, steps


def python_that_finds_a_gpu(tmp_path: Path, command: str) -> Path:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit 0\nexec {command}\n')
    python.chmod(0o755)
    return python


@no_gpu
def test_without_a_gpu_nothing_is_measured(tmp_path):
    done = measure(tmp_path / "out")
    assert done.returncode == 2 and "DRY_RUN=1" in done.stderr and not (tmp_path / "out").exists()


@no_gpu
def test_what_fails_leaves_the_others(fork_server, tmp_path):
    python = python_that_finds_a_gpu(tmp_path, f'{fork_server.python} "$@"')
    done = measure(tmp_path, python, PARTS="layers steps_nanochat")
    assert done.returncode == 1
    *_, title, layers, nanochat = done.stdout.splitlines()
    assert title == f"== summary, in {tmp_path}"
    assert layers.split()[:5] == ["layers", "FAILED,", "exit", "status", "2:"]
    assert "no CUDA device" in layers and "no CUDA device" in (tmp_path / "layers.log").read_text()
    assert nanochat.split(maxsplit=1) == ["steps_nanochat", "skipped: NANOCHAT is not set"]


def test_what_takes_too_long_is_cut_off(tmp_path):
    done = measure(tmp_path, python_that_finds_a_gpu(tmp_path, "sleep 60"), PARTS="doctor", LIMIT="1")
    assert done.returncode == 1 and "doctor          FAILED, cut off after 1 s" in done.stdout


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"PARTS": "layers speed"}, "error: PARTS: there is no part 'speed'; the parts are: doctor "),
        ({"LIMIT": "abc"}, "error: LIMIT=abc: expected whole seconds, such as LIMIT=60;"),
        ({"LIMIT": "0"}, "error: LIMIT=0: expected whole seconds"),
        ({"NANOCHAT": "/nope"}, "error: NANOCHAT=/nope is no checkout of karpathy/nanochat"),
        ({"DRYRUN": "1"}, "error: DRYRUN is set, and there is no such variable; did you mean DRY_RUN?"),
        ({"SEED": "12"}, "error: SEED is set, and dev/measure.sh, which has PARTS DRY_RUN DEPTH LIMIT "),
        ({"DEPTH": "d12"}, "error: DEPTH=d12: expected whole layers"),
        ({"QAT_METHOD": "fp8"}, "error: QAT_METHOD is set, and dev/measure.sh"),
        ({"GPU": "rtx5090"}, "error: GPU is set, and dev/measure.sh"),
        ({"METHODS": "fp8"}, "error: METHODS is set, and dev/measure.sh"),
        ({"MEMORY": "24"}, "error: MEMORY is set, and dev/measure.sh"),
        ({"DEPTHS": "26"}, "error: DEPTHS is set, and there is no such variable; did you mean DEPTH?"),
        ({"N_LAYER": "26"}, "error: N_LAYER is set, and there is no such variable; did you mean DEPTH?"),
        (
            {"parts": "layers"},
            "error: parts is set, and names of variables are in capitals; set PARTS, and unset parts",
        ),
    ],
)
def test_variables_that_are_wrong_end_before_anything_runs(tmp_path, variables, message):
    done = measure(tmp_path / "out", **variables)
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
    assert not done.stdout and not (tmp_path / "out").exists()


def test_folders_are_the_callers(tmp_path):
    checkout_of_nanochat(tmp_path / "nanochat")
    environment = {k: v for k, v in os.environ.items() if k != "PARTS"} | {"PLAN_ONLY": "1", "PY": "python"}
    command = ["bash", str(ROOT / "dev/measure.sh")]
    environment |= {"OUT": "out", "NANOCHAT": "nanochat"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("steps_nanochat, at most 400 s: ") and f"--nanochat {tmp_path}/nanochat " in last, done
    assert f"--json {tmp_path}/out/steps_nanochat.json" in last
