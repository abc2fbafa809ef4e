"""nanochat-fp4 (python -m nanochat_fp4): the stages as commands of the installed package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanochat_fp4 as nf
from nanochat_fp4 import __main__ as command
from nanochat_fp4 import cli
from nanochat_fp4.cli import UserError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(monkeypatch, capsys):
    """run(arguments): exit status and what it printed, in this process."""
    kept = {name: m for name, m in sys.modules.items() if name.split(".")[0] in ("scripts", "eval")}
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(cli, "PROGRAM", None)

    def runner(*arguments):
        for name in [n for n in sys.modules if n.split(".")[0] in ("scripts", "eval")]:
            del sys.modules[name]
        monkeypatch.setattr(sys, "argv", ["nanochat-fp4", *arguments])
        with pytest.raises(SystemExit) as e:
            command.run()
            raise SystemExit(0)
        return e.value.code, *capsys.readouterr()

    yield runner
    for name in [n for n in sys.modules if n.split(".")[0] in ("scripts", "eval")]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_a_stage_of_the_wheel_is_the_one_that_lies_in_it(run, tmp_path, monkeypatch):
    """The wheel has scripts/ and eval/ in nanochat_fp4/programs."""
    monkeypatch.setattr(command, "PACKAGE", tmp_path)
    for name in ("scripts", "eval"):
        shutil.copytree(ROOT / name, tmp_path / "programs" / name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and Path(p).resolve() != ROOT])
    status, out, err = run("tok_train", "--vocab=4")
    wrong = "error: unrecognized arguments: --vocab=4; did you mean --vocab-size? (see nanochat-fp4 tok_train --help)\n"
    assert status == 2 and err == wrong
    assert Path(sys.modules["scripts"].__file__).parent == tmp_path / "programs" / "scripts"


def test_messages_of_the_wheel_name_its_own_command(tmp_path):
    """It has no package `scripts`, so that `python -m scripts.chat_sft` would find nothing, or nanochat's."""
    shutil.copytree(ROOT / "nanochat_fp4", tmp_path / "nanochat_fp4", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "nanochat_fp4" / "programs").mkdir()
    asked = "from nanochat_fp4.training import load_model; load_model.find_model_tag('sft', None)"
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'kernels'}", "NANOCHAT_BASE_DIR": str(tmp_path / "base")}
    how = {"cwd": tmp_path, "env": os.environ | paths, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", asked], **how)
    variable, said = f"NANOCHAT_BASE_DIR={tmp_path}/base", done.stderr.splitlines()[-1]
    assert f"make it with {variable} nanochat-fp4 chat_sft, or all stages with {variable} bash" in said
    assert "scripts" not in said


def test_what_there_is(run):
    """Every script and no helper module; the list and one line for what is missing or misspelt."""
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert set(command.STAGES) == scripts - {"__init__"}
    names = [*command.RUNS, *command.STAGES, *command.TOOLS]
    status, listed, err = run("--help")
    assert status == 0 and err == "" and all(f"\n  {name} " in listed for name in names)
    assert run("--version") == (0, f"nanochat-fp4 {nf.__version__}\n", "")
    for words, named in ((), "missing"), (("base_trian",), "base_train?"), (("__init__",), "__init__"):
        status, out, err = run(*words)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
        assert named in err
    assert command.programs() == ROOT


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # a module of the package that was imported
@pytest.mark.parametrize("name", [*command.STAGES, *command.TOOLS])
def test_every_command_has_help(run, name):
    status, out, err = run(name, "--help")
    assert status == 0 and out.startswith("usage: ") and err == "", err
    assert f"nanochat-fp4 {name} " in out or name == "upstream"  # which has a usage of its own


def test_a_run_becomes_the_shell_script(run, monkeypatch):
    """In this Python's environment, or in that of VENV."""
    monkeypatch.delenv("VENV", raising=False)
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    assert run("speedrun")[0] == 0
    assert run("run1000", "--help")[0] == 0
    monkeypatch.setenv("VENV", "/mine")
    assert run("speedrun")[0] == 0
    assert [call[1][1:] for call in calls] == [
        [f"{ROOT}/speedrun_fp4.sh"], [f"{ROOT}/run1000_fp4.sh", "--help"], [f"{ROOT}/speedrun_fp4.sh"]
    ]  # fmt: skip
    assert [call[2]["VENV"] for call in calls] == [sys.prefix, sys.prefix, "/mine"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("speedrun")[2].startswith("error: bash")


def test_a_full_size_model_is_not_begun_on_a_cpu_by_accident(tiny_base, monkeypatch):
    from scripts import base_train

    flags = "--depth=1 --aspect-ratio=64 --head-dim=64 --max-seq-len=32 --num-iterations=1000000000".split()
    with pytest.raises(UserError, match=r"no GPU .* hours .* --device-type=cpu") as e:
        base_train.main(flags)
    assert "\n" not in str(e.value) and not list(tiny_base.glob("base_checkpoints/*/"))
