"""nanochat-fp4 (python -m nanochat_fp4): the stages as commands of the installed package."""

import shutil
import sys
from pathlib import Path

import pytest

from lab.measure import traffic
from nanochat_fp4 import __main__ as command
from nanochat_fp4.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(monkeypatch, capsys):
    """run(arguments): exit status and what it printed, in this process."""
    kept = {name: m for name, m in sys.modules.items() if name.split(".")[0] in ("scripts", "eval")}
    monkeypatch.setattr(sys, "path", list(sys.path))

    def runner(*arguments):
        for name in [n for n in sys.modules if n.split(".")[0] in ("scripts", "eval")]:
            del sys.modules[name]
        monkeypatch.setattr(sys, "argv", ["nanochat-fp4", *arguments])
        with pytest.raises(SystemExit) as e:
            command.cli()
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
    assert status == 2 and "error: unrecognized arguments: --vocab=4; did you mean --vocab-size?" in err, err
    assert Path(sys.modules["scripts"].__file__).parent == tmp_path / "programs" / "scripts"


def test_what_there_is(run):
    status, out, err = run()
    assert status == 0 and all(f"  {name} " in out for name in command.STAGES)
    assert all((ROOT / "scripts" / f"{name}.py").is_file() for name in command.STAGES)
    status, out, err = run("base_trian")
    assert status == 2 and err.startswith("error: there is no stage 'base_trian'; there are: base_eval, ")
    assert command.programs() == ROOT


def test_help_of_traffic(capsys):
    with pytest.raises(SystemExit) as e:
        traffic.main(["--help"])
    assert e.value.code == 0 and "Bytes and rotations" in capsys.readouterr().out


def test_a_full_size_model_is_not_begun_on_a_cpu_by_accident(tiny_base, monkeypatch):
    from scripts import base_train

    flags = "--depth=1 --aspect-ratio=64 --head-dim=64 --max-seq-len=32 --num-iterations=1000000000".split()
    with pytest.raises(UserError, match=r"no GPU here, and this run takes .* hours or more .* --device-type=cpu") as e:
        base_train.main(flags)
    assert "\n" not in str(e.value) and not list(tiny_base.glob("base_checkpoints/*"))
