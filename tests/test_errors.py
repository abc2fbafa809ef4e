"""Errors in one line."""

import errno
import os

import pytest
import torch

from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, one_line, run_main


def test_one_line():
    assert one_line("a\n  b") == "a b" and one_line(KeyError()) == "KeyError"


def run(raised, capsys, monkeypatch=None):
    """(exit status, stderr) of a main that raises."""

    def main():
        raise raised

    with pytest.raises(SystemExit) as e:
        run_main(main)
    return e.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "raised, status, text",
    [
        (UserError("no data;\n  set DATA_DIR"), 2, "error: no data; set DATA_DIR\n"),
        (ValueError("K=17 is not a multiple of 16"), 2, "error: K=17 is not a multiple of 16\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_user_errors_end_in_one_line(raised, status, text, capsys):
    assert run(raised, capsys) == (status, text)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_the_users_to_fix(number, capsys):
    status, err = run(OSError(number, os.strerror(number), "/some/file"), capsys)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and "/some/file" in err


@pytest.mark.parametrize("bug", [TypeError("bug"), KeyError("x"), OSError(errno.EBADF, "bug")])
def test_bugs_keep_their_traceback(bug):
    def main():
        raise bug

    with pytest.raises(type(bug)):
        run_main(main)


def test_out_of_gpu_memory_names_the_flag(capsys):
    status, err = run(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0"), capsys)
    assert status == 2 and "--device-batch-size" in err and err.count("\n") == 1


def test_other_ranks_name_themselves_and_tracebacks_come_on_request(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert run(UserError("bad"), capsys)[1] == "error (rank 3): bad\n"
    monkeypatch.setenv("NANOCHAT_TRACEBACK", "1")
    assert "Traceback" in run(UserError("bad"), capsys)[1]


def test_what_all_ranks_would_say_is_said_by_one(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run(KeyboardInterrupt(), capsys) == (130, "")
    with pytest.raises(SystemExit):
        ArgumentParser().parse_args(["--help"])
    assert capsys.readouterr().out == ""


def test_run_main_returns_when_all_is_well():
    assert run_main(lambda: 1) is None
