"""The folder of an export: whose files it replaces, and several writers at once. Kills: tests/test_kills.py."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from _exporting import names_beside, save_small, value_of
from _exporting import write_value as write

from nanochat_fp4.export.save import FORMAT, LIST, new_export
from scripts import export


def test_the_script_replaces_an_export_and_nothing_else(tiny_base, tmp_path):
    save_small(tiny_base, "gpt", "clover")
    out, mine = tmp_path / "out", tmp_path / "out.part"
    mine.mkdir()
    (mine / "work").write_text("mine")
    out.mkdir()  # empty: nobody's

    def run(*flags: str, out: Path = out) -> None:
        export.main(["--source=base", "--format=safetensors", f"--out={out}", "--eval-tokens=0", *flags])

    run()
    files = sorted(os.listdir(out))
    assert "model.safetensors" in files and LIST in files
    with pytest.raises(ValueError, match="already"):
        run()
    run("--overwrite")
    link = tmp_path / "link"
    link.symlink_to(out)
    run("--overwrite", out=link)
    assert link.is_symlink() and sorted(os.listdir(out)) == files and (mine / "work").read_text() == "mine"
    assert {*os.listdir(tmp_path)} == {"out", "out.part", "link", "tiny"}  # No lock stays, not of a refusal either.
    with new_export(out, True), pytest.raises(ValueError, match="another export is writing"):
        run("--overwrite")


@pytest.mark.parametrize("flags", [["--format=safetensors"], ["--format=compressed-tensors", "--weights-only"]])
def test_an_export_that_measures_nothing_reads_no_text(tiny_base, tmp_path, monkeypatch, flags):
    save_small(tiny_base, "gpt", "clover")
    monkeypatch.setattr(export, "text_to_measure", None)
    export.main(["--source=base", f"--out={tmp_path / 'out'}", "--eval-tokens=0", *flags])
    assert "Bits per byte" not in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(TypeError):
        export.main(["--source=base", f"--out={tmp_path / 'other'}", "--eval-tokens=64", *flags])


def test_readers_see_whole_exports_and_writers_are_alone(tmp_path):
    """Whoever looks meanwhile sees a whole export, or none while it is replaced. A second writer is refused."""
    out, trouble, done = tmp_path / "out", [], {0: 0, 100: 0}

    def writer(first: int) -> None:
        while done[first] < 20:
            try:
                write(out, first + done[first])
                done[first] += 1
            except ValueError as e:
                if "another export" not in str(e):
                    trouble.append(e)
                    return

    writers = [threading.Thread(target=writer, args=(first,)) for first in done]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        try:
            if "README.md" not in (listed := json.loads((out / LIST).read_text())["files"]):
                trouble.append(listed)
        except FileNotFoundError:
            continue
    assert not trouble and value_of(out) in (19, 119) and names_beside(tmp_path) == {"out"}


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    """A shell expands it neither in --out=~/out nor inside of Python."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with new_export("~/out"):
        pass
    assert (tmp_path / "home" / "out" / LIST).exists() and not (tmp_path / "~").exists()


def test_an_empty_folder_is_taken_with_its_rights(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    write(tmp_path / "out", 1, overwrite=False)
    assert value_of(tmp_path / "out") == 1 and (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power cut after overwriting leaves neither the old weights nor the new ones."""
    flushed, fsync, rename = set(), os.fsync, os.rename

    def renamed(source, target):
        if Path(target) == tmp_path / "out":
            assert {path.stat().st_ino for path in Path(source).iterdir()} <= flushed
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(Path, "rename", renamed)
    with new_export(tmp_path / "out") as part:
        (part / "model.safetensors").write_bytes(b"as save_file writes it")


@pytest.mark.parametrize("stranger", ["a", "folder", ".git"])
def test_files_of_others_stay(tmp_path, stranger):
    """In a folder that is no export, in an export, and in one that is written meanwhile."""
    out = tmp_path / "out"
    write(out, 1)
    shutil.copytree(out, tmp_path / "before")
    (out / stranger).mkdir()
    with pytest.raises(ValueError, match=stranger):
        write(out, 2)
    (out / LIST).unlink()
    with pytest.raises(ValueError, match="is not an export"):
        write(out, 2)
    shutil.copyfile(tmp_path / "before" / LIST, out / LIST)
    (out / stranger).rmdir()
    with pytest.raises(ValueError, match=stranger), new_export(out, True):
        (out / stranger).mkdir()
    (out / stranger).rmdir()
    assert value_of(out) == 1 and names_beside(tmp_path) == {"before", "out"}
    with pytest.raises(ValueError, match="already"):
        write(out, 2, overwrite=False)
    assert value_of(out) == 1


OUTSIDE = json.dumps({"format": FORMAT, "files": ["README.md", "../mine"]})


@pytest.mark.parametrize("text", ["[]", "{", '{"files": ["README.md"]}', "", OUTSIDE])
def test_a_damaged_list_deletes_nothing(tmp_path, text):
    out = tmp_path / "out"
    write(out, 1)
    (out / LIST).write_text(text)
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="overwritten"):
        write(out, 2)
    assert (out / "README.md").read_text() == "1" and (tmp_path / "mine").exists()
