"""The folder of an export: written under a fresh name, renamed whole, replaced without touching anybody else's files.

    with held_run(out, ...):                 # one export at a time
        prepare(out, overwrite)              # what a killed export left; refuses what is not to be replaced
        with fresh_folder(out) as part:      # .<name>.<random>.part beside `out`
            ...                              # files of FILES
            publish(part, out, overwrite)    # the old export -> .<name>.<random>.old, part -> out, .old is deleted

export.json lists the files of an export. Only files on this list are ever deleted, and the list is deleted last.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from nanochat_fp4.console import logger
from nanochat_fp4.errors import UserError
from nanochat_fp4.files import atomic_write, fsync_dir

LIST = "export.json"
FORMAT = "nanochat_fp4 export, version 1"
# All that any format writes. A folder that is not finished yet lists them all.
FILES = (
    "model.safetensors", "model.gguf", "config.json", "modeling_nanochat_fp4.py",
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md",
    "hf_quant_config.json",  # of earlier versions, in the format of modelopt
    # of transformers' tokenizers
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip


def own_files(folder: Path) -> set[str] | None:
    """The names on an export's list, the list's own among them; None where there is no such list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        about = json.loads((folder / LIST).read_bytes())
        if about["format"] == FORMAT and set(about["files"]) <= set(FILES):
            return {LIST, *about["files"]}
    return None


def prepare(out: Path, overwrite: bool) -> None:
    """Finishes what killed exports to `out` left beside it. Raises UserError where `out` is not to be replaced.

    Call only with the lock of `out`. An old export that was renamed aside gets its name back if nothing has it.
    """
    for old in _left(out, "old"):
        names = own_files(old)
        if not out.exists() and names and all((old / name).is_file() for name in names):
            os.rename(old, out)
        else:
            _delete(old)
    for part in _left(out, "part"):
        _delete(part)
    check_replaceable(out, overwrite)


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Raise UserError unless `out` is missing, or empty or an export and to be overwritten."""
    if not out.exists():
        return
    if not overwrite:
        raise UserError(f"{out} is there already; choose another --out, or replace it with --overwrite")
    found = {path.name for path in out.iterdir()} if out.is_dir() else None
    own = own_files(out)
    if found is None or found and own is None:
        raise UserError(f"{out} is not an export, so --overwrite leaves it alone; choose another --out, or remove it")
    if strangers := ", ".join(sorted(found - (own or set()))[:4]):
        raise UserError(f"{out} holds {strangers}, not of the export, so --overwrite leaves it alone; move the file")


@contextlib.contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which is deleted at the end unless publish has renamed it."""
    part = _beside(out, "part")
    part.mkdir(parents=True)
    try:
        _write_list(part, FILES)
        yield part
    finally:
        _delete(part)


def publish(part: Path, out: Path, overwrite: bool) -> None:
    """Rename a complete folder to `out`. An old export there is renamed aside first and deleted last.

    Raises UserError where `out` is not to be replaced.
    """
    _write_list(part, sorted(path.name for path in part.iterdir() if path.name != LIST))
    for path in filter(Path.is_file, part.iterdir()):
        with path.open("r+b") as file:
            os.fsync(file.fileno())  # the packages of safetensors and GGUF do not
    check_replaceable(out, overwrite)
    old = _beside(out, "old")
    if out.exists():
        os.rename(out, old)
    os.rename(part, out)
    fsync_dir(out.parent)
    _delete(old)


def _write_list(folder: Path, names) -> None:
    atomic_write(folder / LIST, json.dumps({"format": FORMAT, "files": list(names)}, indent=2) + "\n")


def _beside(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.{kind}")


def _left(out: Path, kind: str) -> list[Path]:
    """The folders that _beside named."""
    name = re.compile(re.escape(f".{out.name}.") + r"[0-9a-f]{8}\." + kind)
    folders = out.parent.iterdir() if out.parent.is_dir() else ()
    return sorted(path for path in folders if name.fullmatch(path.name) and path.is_dir())


def _delete(folder: Path) -> None:
    """Delete the files on a folder's list, then the list, then the folder. Files of others stay, and their folder."""
    if not folder.is_dir():
        return
    own = own_files(folder) or set()
    unfinished = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")  # of files.atomic_open
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LIST):
        match = unfinished.fullmatch(path.name)
        if path.name in own or match and match[1] in (LIST, *FILES):
            path.unlink()
    try:
        folder.rmdir()
    except OSError:
        logger.warning(f"{folder} is kept: it holds files that no export wrote; move them, then delete the folder")
