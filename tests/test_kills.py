"""SIGKILL at every file operation of what writes a folder: a checkpoint, pruning, an export, converted text.

Each check runs in a process of its own that has no threads, because a fork of a process with threads can hang.
"""

import itertools
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _exporting import names_beside, value_of, write_value
from _forking import count_operations

from nanochat_fp4.data.dataset import ensure_data, open_text
from nanochat_fp4.training.checkpoint_manager import (
    delete_remains,
    find_last_step,
    list_steps,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

TASKS = Path("/proc/self/task")  # the threads of this process, on Linux


def status_of(action: Callable[[], Any]) -> int:
    """How a fork ends that does this. With a thread that holds a lock at the fork it would wait for ever."""
    assert not TASKS.exists() or len(os.listdir(TASKS)) == 1, "this process has threads"
    if not (pid := os.fork()):
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_everywhere(
    scratch: Path, action: Callable[[Path], Any], before: Path | None = None, every: int = 1
) -> Iterator[Path]:
    """
    Runs action(folder) in children that die at their n-th file operation, n = 1, 1 + every, ..., until one is through.

    Yields the folder of each, a copy of `before` (or an empty one) that the action has worked in. The last one is of
    the child that was not killed.
    """
    for n in itertools.count(1, every):
        folder = scratch / str(n)
        if before is None:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(before, folder)
        status = status_of(lambda folder=folder, n=n: (count_operations(n), action(folder)))
        assert status in (0, -signal.SIGKILL), status
        yield folder
        if status == 0:
            return


def in_order(found: list, order: list) -> bool:
    """Whether the states were found in this order, each at least once."""
    return [x for i, x in enumerate(found) if i == 0 or x != found[i - 1]] == order


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def save(folder: Path, step: int, value: float | None = None) -> bool:
    tensor = torch.full((100,), float(step if value is None else value))
    return save_checkpoint(folder, step, {"w": tensor}, {"m": tensor}, {"value": float(tensor[0])})


def checkpoint_value(folder: Path, step: int) -> float:
    model, (optimizer,), meta = load_checkpoint(folder, step, "cpu", load_optimizer=True)
    values = {*model["w"].tolist(), *optimizer["m"].tolist(), meta["value"]}
    assert len(values) == 1 and meta["step"] == step  # never a mixture of the old one and the new one
    return values.pop()


def check_save(scratch: Path, steps: tuple[int, ...], order: list) -> None:
    """A save of step 10 where there are these steps."""
    before = scratch / "before"
    before.mkdir()
    for step in steps:
        save(before, step)
    found = []
    for folder in killed_everywhere(scratch, lambda folder: save(folder, 10, 11), before):
        left = list_steps(folder)
        found.append(checkpoint_value(folder, left[0]) if left else None)
        assert left == ([find_last_step(folder), *steps[: len(left) - 1]] if left else [])
        delete_remains(folder)  # the next run tidies up
        save(folder, 15)
        prune_checkpoints(folder, 3, 15)
        assert checkpoint_value(folder, 15) == 15 and list_steps(folder) == [15, *left]
        assert sorted(os.listdir(folder)) == [f"step_{step:06d}" for step in reversed(list_steps(folder))]
    assert in_order(found, order) and len(found) > 10, found


def check_pruning(scratch: Path) -> None:
    for step in (1, 2, 3, 4):
        save(scratch / "before", step)
    kills = 0
    for folder in killed_everywhere(scratch, lambda folder: prune_checkpoints(folder, 2, 4), scratch / "before"):
        assert checkpoint_value(folder, 4) == 4 and checkpoint_value(folder, 3) == 3 and find_last_step(folder) == 4
        delete_remains(folder)
        save(folder, 5)
        prune_checkpoints(folder, 2, 5)
        assert list_steps(folder) == [5, 4] and len(os.listdir(folder)) == 2
        kills += 1
    assert kills > 8


# ----------------------------------------------------------------------------------------------------------------------
# Exports


def export(folder: Path, value: int, overwrite: bool = True) -> None:
    write_value(folder / "out", value, overwrite)


def whole_export(folder: Path) -> tuple[int, bool]:
    """(its value, whether it has its name). An old export may have been renamed aside, and is whole there."""
    if (folder / "out").exists():
        return value_of(folder / "out"), True
    (old,) = folder.glob(".out.*.old")
    return value_of(old), False


def check_export(scratch: Path) -> None:
    """The old export is whole, under its name or aside, or the new one is; another program's files stay."""
    before = scratch / "before"
    export(before, 1)
    (before / ".out.part").mkdir()
    (before / ".out.part" / "work").touch()
    found = []
    for number, folder in enumerate(killed_everywhere(scratch, lambda folder: export(folder, 2), before)):
        found.append(whole_export(folder))
        # A second kill, of the export that finishes; at each operation would be hundreds.
        value, named = found[-1]
        if not named or number % 5 == 0:
            (again := scratch / f"again_{number}").mkdir()
            for twice in killed_everywhere(again, lambda folder: export(folder, 4), folder, every=5 if named else 1):
                assert whole_export(twice)[0] in (value, 4)
                export(twice, 3)
                assert value_of(twice / "out") == 3 and (twice / ".out.part" / "work").exists()
                assert names_beside(twice) == {"out", ".out.part"}
        export(folder, 3)
        assert value_of(folder / "out") == 3 and names_beside(folder) == {"out", ".out.part"}
    assert in_order(found, [(1, True), (1, False), (2, True)]) and len(found) > 25, found


def check_first_export(scratch: Path) -> None:
    found = []
    for folder in killed_everywhere(scratch, lambda folder: export(folder, 2, overwrite=False)):
        out = folder / "out"
        found.append(value_of(out) if out.exists() else None)
        export(folder, 4, overwrite=out.exists())
        assert value_of(out) == 4 and names_beside(folder) == {"out"}
    assert in_order(found, [None, 2]) and len(found) > 15, found


# ----------------------------------------------------------------------------------------------------------------------
# Text of one's own, stored in the base directory


def check_conversion(scratch: Path) -> None:
    import datasets  # noqa: F401  each fork would import it

    texts = scratch / "texts"
    texts.mkdir()
    for i in range(25):
        (texts / f"{i}.txt").write_text(f"Document {i}. " * 300)

    def convert(folder: Path) -> None:
        os.environ["NANOCHAT_BASE_DIR"] = str(folder)
        ensure_data(str(texts))

    def read(folder: Path) -> None:
        os.environ["NANOCHAT_BASE_DIR"] = str(folder)
        digests = [open_text(split, texts)[0].digest() for split in ("train", "val")]
        (scratch / "digests").write_text(" ".join(digests))

    def stored(folder: Path) -> str:
        assert status_of(lambda: read(folder)) == 0  # pyarrow reads in threads
        return (scratch / "digests").read_text()

    *killed, whole = killed_everywhere(scratch, convert)
    expected = stored(whole)
    assert len(killed) > 5
    for folder in killed:
        *_, again = killed_everywhere(scratch / f"{folder.name}_again", convert, folder, every=1000)
        assert stored(again) == expected


CHECKS = {
    "first save": (check_save, ((), [None, 11.0])),
    "save that replaces the newest": (check_save, ((5, 10), [10.0, 11.0])),
    "pruning": (check_pruning, ()),
    "export": (check_export, ()),
    "first export": (check_first_export, ()),
    "conversion": (check_conversion, ()),
}


def run_check(name: str, scratch: str) -> None:
    torch.set_num_threads(1)
    check, arguments = CHECKS[name]
    check(Path(scratch), *arguments)


@pytest.mark.parametrize("name", CHECKS)
def test_a_kill_at_any_file_operation_loses_nothing(fork_server, tmp_path, name):
    fork_server.run_ranks(f"import test_kills as t; t.run_check({name!r}, {str(tmp_path)!r})", 1)
    shutil.rmtree(tmp_path)


def test_a_job_that_leaves_a_process_is_not_waited_for(fork_server):
    """Whoever waits for the end of its pipe waits as long as that process lives."""
    before = time.monotonic()
    (child,) = fork_server.run_ranks("import os, time\nprint(os.fork() or time.sleep(300))", 1)
    while Path("/proc", child.strip(), "cwd").exists():  # a zombie has none
        time.sleep(0.01)
    assert time.monotonic() - before < 200
