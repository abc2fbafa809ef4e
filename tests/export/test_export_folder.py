"""The folder of an export: whose files it replaces, two exports at once, and kills at every file operation."""

import json
import os
import shutil
from pathlib import Path

import _forking
import pytest
from _exporting import save_small

from nanochat_fp4.errors import UserError
from nanochat_fp4.export.folder import FORMAT, LIST, fresh_folder, prepare, publish
from nanochat_fp4.files import atomic_write
from nanochat_fp4.training.resume import held_run
from scripts import export


def write(out: Path, value: int, overwrite: bool = True) -> None:
    """An export of two files, and of a third where the value is even."""
    with held_run(out):
        prepare(out, overwrite)
        with fresh_folder(out) as part:
            for name in ("README.md", "config.json", "tokenizer.json")[: 3 - value % 2]:
                atomic_write(part / name, str(value))
            publish(part, out, overwrite)


def value_of(out: Path) -> int:
    """The value of an export, whole; AssertionError where files of two are mixed."""
    files = {path.name: path.read_text() for path in out.iterdir()}
    value = int(files["README.md"])
    assert len(files) == 4 - value % 2 and {v for k, v in files.items() if k != LIST} == {str(value)}
    return value


def test_the_script_replaces_an_export_and_nothing_else(tiny_base, tmp_path):
    save_small(tiny_base, "gpt", "clover")
    out, mine = tmp_path / "out", tmp_path / "out.part"
    mine.mkdir()
    (mine / "work").write_text("mine")

    def run(*flags: str) -> None:
        export.main(["--source=base", "--format=safetensors", f"--out={out}", "--eval-tokens=0", *flags])

    run()
    files = sorted(os.listdir(out))
    assert "model.safetensors" in files and LIST in files
    with pytest.raises(UserError, match="is there already; choose another --out"):
        run()
    run("--overwrite")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds notes.txt, not of the export, so --overwrite leaves it") as refused:
        run("--overwrite")
    assert "\n" not in str(refused.value) and sorted(os.listdir(out)) == sorted([*files, "notes.txt"])
    (out / "notes.txt").unlink()
    link = tmp_path / "link"
    link.symlink_to(out)
    export.main(["--source=base", "--format=safetensors", f"--out={link}", "--eval-tokens=0", "--overwrite"])
    assert link.is_symlink() and sorted(os.listdir(out)) == files and (mine / "work").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "out.part", "link", "tiny", ".out.lock"}
    with held_run(out), pytest.raises(UserError, match=f"another export is writing {out}: .*choose another --out") as e:
        run("--overwrite")
    assert "\n" not in str(e.value) and sorted(os.listdir(out)) == files


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power cut after --overwrite leaves neither the old weights nor the new ones."""
    flushed, fsync, rename = set(), os.fsync, os.rename

    def renamed(source, target):
        if Path(target) == tmp_path / "out":
            assert {path.stat().st_ino for path in Path(source).iterdir()} <= flushed
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "rename", renamed)
    with fresh_folder(tmp_path / "out") as part:
        (part / "model.safetensors").write_bytes(b"as save_file writes it")
        publish(part, tmp_path / "out", overwrite=False)


@pytest.mark.parametrize("stranger", ["a", "folder", ".git"])
def test_files_of_others_stay(tmp_path, stranger):
    """In a folder that is no export, in an export, and in one that is written meanwhile."""
    out = tmp_path / "out"
    out.mkdir()
    write(out, 1)  # an empty folder is nobody's
    shutil.copytree(out, tmp_path / "before")
    (out / stranger).mkdir()
    with pytest.raises(UserError, match="not of the export"):
        write(out, 2)
    (out / LIST).unlink()
    with pytest.raises(UserError, match="is not an export"):
        write(out, 2)
    shutil.copyfile(tmp_path / "before" / LIST, out / LIST)
    (out / stranger).rmdir()
    with pytest.raises(UserError, match="not of the export"), fresh_folder(out) as part:
        (out / stranger).mkdir()
        publish(part, out, True)
    (out / stranger).rmdir()
    assert value_of(out) == 1 and sorted(os.listdir(tmp_path)) == [".out.lock", "before", "out"]
    with pytest.raises(UserError, match="is there already"), fresh_folder(out) as part:
        publish(part, out, False)
    assert value_of(out) == 1


OUTSIDE = json.dumps({"format": FORMAT, "files": ["README.md", "../mine"]})


@pytest.mark.parametrize("text", ["[]", "{", '{"files": ["README.md"]}', "", OUTSIDE])
def test_a_damaged_list_deletes_nothing(tmp_path, text):
    out = tmp_path / "out"
    write(out, 1)
    (out / LIST).write_text(text)
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="is not an export"):
        write(out, 2)
    assert (out / "README.md").read_text() == "1" and (tmp_path / "mine").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Kills, in a process without threads: see test_checkpoint_manager.py

OPERATIONS = ("mkdir", "open", "replace", "rename", "unlink", "rmdir", "fsync")


def beside(folder: Path) -> set[str]:
    """The names in a folder, without the lock's own files."""
    return {name for name in os.listdir(folder) if ".out.lock" not in name}


def a_killed_export_is_finished_by_the_next(tmp_path):
    """At each kill the old export is whole, under its name or aside, or the new one is; strangers' files stay."""
    write(tmp_path / "before" / "out", 1)
    found, n, killed = [], 0, True
    while killed:
        n += 1
        folder = tmp_path / str(n)
        out, mine = folder / "out", folder / ".out.part"
        shutil.copytree(tmp_path / "before", folder)
        mine.mkdir()
        (mine / "work").touch()
        killed = _forking.killed_at(n, lambda out=out: write(out, 2), OPERATIONS)
        aside = [path for path in folder.glob(".out.*.old") if not out.exists()]
        found.append(value_of(*aside) * 10 if aside else value_of(out))
        for m in range(1, 5) if aside else (n,) if n % 3 == 0 else ():  # a second kill, of the one that finishes
            again = folder.with_name(f"{folder.name}_{m}")
            shutil.copytree(folder, again)
            _forking.killed_at(m, lambda again=again: write(again / "out", 4), OPERATIONS)
            write(again / "out", 3)
            assert value_of(again / "out") == 3 and (again / ".out.part" / "work").exists()
            assert beside(again) == {"out", ".out.part"}
    order = [1, 10, 2]
    assert [order.index(x) for x in found] == sorted(order.index(x) for x in found) and set(found) == set(order)
    assert n > 25, n


def a_killed_first_export_is_all_or_nothing(tmp_path):
    found, n, killed = [], 0, True
    while killed:
        n += 1
        out = tmp_path / str(n) / "out"
        killed = _forking.killed_at(n, lambda out=out: write(out, 2, overwrite=False), OPERATIONS)
        found.append(out.exists() and value_of(out))
        write(out, 4, overwrite=out.exists())
        assert value_of(out) == 4 and beside(out.parent) == {"out"}
    assert found == sorted(found) and found[0] is False and found[-1] == 2 and n > 15, found


CHECKS = (a_killed_export_is_finished_by_the_next, a_killed_first_export_is_all_or_nothing)


def test_kills(tmp_path, fork_server):
    code = f"import _forking, test_export_folder as t; _forking.write_results(t.CHECKS, {str(tmp_path)!r})"
    fork_server.run_ranks(code, 1)
    assert {p.name: p.read_text() for p in tmp_path.glob("*.result")} == {f"{c.__name__}.result": "" for c in CHECKS}
