"""Two runs under one tag, and folders that cannot be written: told before anything is trained or deleted."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from _assertions import assert_same, final_state
from _samples import save_base
from _training import BASE

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.locks import held_run, running, running_runs
from nanochat_fp4.training import trainer
from nanochat_fp4.training.checkpoint_manager import read_meta
from nanochat_fp4.training.load_model import find_resume_step
from scripts import base_train, tok_train

TAG = "run"
BASE = [*BASE, "--eval-every=-1", "--method=bf16", "--num-iterations=3", "--save-every=1", f"--model-tag={TAG}"]


@pytest.fixture
def run(fork_server, tiny_base):
    def run(*flags, **job):
        return fork_server.run("scripts.base_train", [*BASE, *flags], env={"NANOCHAT_BASE_DIR": str(tiny_base)}, **job)

    return run


@pytest.fixture
def folder(tiny_base):
    return tiny_base / "base_checkpoints" / TAG


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ----------------------------------------------------------------------------------------------------------------------
# One run at a time


def test_a_second_run_is_refused_and_told_who_is_there(run, folder):
    with held_run(folder):
        for flags in ([], ["--overwrite"], ["--resume-from-step=latest"]):
            second = run(*flags)
            assert second.status == 2, second.log
            last = second.log.splitlines()[-1]
            who = rf"error: another run is training in {folder}: process {os.getpid()} on {socket.gethostname()} since "
            assert re.match(who + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait ", last)
        assert not folder.exists()
    assert run().status == 0


def test_a_run_that_was_killed_is_in_nobodys_way(fork_server, folder):
    code = "import os, sys, time\nfrom nanochat_fp4.locks import held_run\n"
    code += "with held_run(sys.argv[1]): print(os.getpid(), flush=True)"
    code += ", time.sleep(60)"
    holder = subprocess.Popen([fork_server.python, "-c", code, folder], stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())
    with pytest.raises(UserError, match=f"process {pid} on "):
        held_run(folder).__enter__()
    os.kill(pid, signal.SIGKILL)
    holder.communicate()
    assert holder.returncode == -signal.SIGKILL
    with held_run(folder):
        pass


def test_what_a_run_uses_is_not_replaced_under_it(tiny_base, monkeypatch):
    """Before it has saved anything, too: there is only its lock to ask."""
    monkeypatch.delenv("DATA_DIR")
    save_base(tiny_base, tag="a", n_layer=1)
    kept = {path: path.read_bytes() for path in tiny_base.rglob("*") if path.is_file()}
    base, tokenizer = ["--model-tag=a", "--overwrite"], ["--vocab-size=300"]
    replacers = [
        ("base_checkpoints/new", "base_checkpoints/new .process", lambda: tok_train.main(tokenizer)),
        ("mid_checkpoints/a", "mid_checkpoints/a .process", lambda: tok_train.main([*tokenizer, "--overwrite"])),
        ("chatsft_checkpoints/a", "/chatsft_checkpoints/a .process", lambda: base_train.main([*BASE, *base])),
        ("mid_checkpoints/a", "/base_checkpoints/a", lambda: base_train.main([*BASE, *base])),
    ]
    for user, said, replace in replacers:
        with held_run(tiny_base / user), pytest.raises(UserError, match=said):
            replace()
    assert {path: path.read_bytes() for path in kept} == kept
    assert running_runs(tiny_base) == [] and running(tiny_base / "mid_checkpoints" / "a") is None
    with held_run(tiny_base / "mid_checkpoints" / "b"):  # of another model
        base_train.main([*BASE, *base])


def test_a_run_begins_with_the_tokenizer_that_is_there(tiny_base, monkeypatch):
    """Replaced in the last moment before the run holds its lock."""
    real = trainer.held_run

    def late(folder):
        tok_train.main(["--vocab-size=300"])
        return real(folder)

    monkeypatch.setattr(trainer, "held_run", late)
    base_train.main(BASE)
    meta = read_meta(tiny_base / "base_checkpoints" / TAG, 3)
    assert meta["run_config"]["tokenizer"] == get_tokenizer().fingerprint() and get_tokenizer().get_vocab_size() == 300


def pair(fork_server, tiny_base: Path) -> None:
    """Two runs begin at the same moment; one trains as if it were alone, the other is refused."""
    folder, environment = tiny_base / "base_checkpoints" / TAG, {**os.environ, "NANOCHAT_BASE_DIR": str(tiny_base)}
    argv = [fork_server.python, "-m", "scripts.base_train", *BASE]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(argv, env=environment, **pipe) for _ in range(2)]
    logs = "\n".join(process.communicate()[0] for process in both)
    assert sorted(process.returncode for process in both) == [0, 2], logs
    # Where the processor had no time for the second one until the first was done, it finds what that one made.
    assert re.search("error: (another run|.* already)", logs), logs
    assert_same(final_state(folder, 3), final_state(tiny_base.with_name("alone") / "base_checkpoints" / TAG, 3))
    shutil.rmtree(folder)


@pytest.fixture
def alone(fork_server, tiny_base):
    """The same run with nobody in its way, beside tiny_base."""
    base = tiny_base.with_name("alone")
    shutil.copytree(tiny_base, base)
    assert fork_server.run("scripts.base_train", BASE, env={"NANOCHAT_BASE_DIR": str(base)}).status == 0


def test_of_two_runs_under_one_tag_one_trains(fork_server, tiny_base, alone):
    pair(fork_server, tiny_base)


@pytest.mark.soak
def test_of_many_pairs_of_runs_under_one_tag_one_trains(fork_server, tiny_base, alone):
    for _ in range(10):
        pair(fork_server, tiny_base)


# ----------------------------------------------------------------------------------------------------------------------
# A folder that can be written


@pytest.mark.parametrize(
    "fault, reason", [(("unwritable",), "Permission denied"), (("small_disk", 200_000), "cannot take a checkpoint")]
)
def test_a_folder_that_takes_no_checkpoint_is_told_before_anything_is_deleted(run, folder, fault, reason):
    first = run()
    assert first.status == 0, first.log
    before = content(folder)
    # With --overwrite: the checkpoint is larger than what its deletion frees.
    refused = run("--overwrite", "--aspect-ratio=512", fault=(*fault, *([str(folder)] if len(fault) == 1 else [])))
    folder.chmod(0o755)
    last = refused.log.splitlines()[-1]
    assert refused.status == 2 and re.match(rf"error: .*{reason}", last), last
    assert content(folder) == before


def test_overwrite_deletes_the_run_and_nothing_else(run, folder):
    assert run().status == 0
    (folder / "plots").mkdir()
    for name in ("notes.txt", "plots/loss.png"):
        (folder / name).write_text("mine")
    again = run("--overwrite", "--num-iterations=1")
    assert again.status == 0 and "files that no run wrote" in again.log and "notes.txt, plots" in again.log
    assert (folder / "notes.txt").read_text() == (folder / "plots/loss.png").read_text() == "mine"
    assert [p.name for p in folder.glob("step_*")] == ["step_000001"]


def test_latest_of_a_mistyped_tag_says_that_the_run_begins_anew(tiny_base, capsys, monkeypatch):
    for similar in (True, False):  # With a run beside it of a similar name, and without one.
        folder = tiny_base / "base_checkpoints"
        if similar:
            save_base(tiny_base)
        assert find_resume_step(folder / "d2_clovr", "latest", False) is None
        line = capsys.readouterr().out.splitlines()[-1]
        assert "d2_clovr has no checkpoint" in line and line.endswith("did you mean d2_clover?") == similar
        monkeypatch.setenv("NANOCHAT_BEGAN", "1")  # The plan of a run has made the tag.
        assert find_resume_step(folder / "d2_clovr", "latest", False) is None
        assert "did you mean" not in capsys.readouterr().out
        monkeypatch.delenv("NANOCHAT_BEGAN")
        shutil.rmtree(folder, ignore_errors=True)
