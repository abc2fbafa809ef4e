"""What becomes of a file on a bad disk, in a half download, or at the hands of a user."""

import contextlib
import hashlib
import json
import random
from pathlib import Path
from typing import Any


def edit_meta(folder: Path, step: int, **changes) -> None:
    """As a checkpoint of another version of the program has it: with a checksum that is right."""
    path = folder / f"step_{step:06d}/meta_{step:06d}.json"
    meta = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "sha256"} | changes
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**meta, "sha256": digest}))


ODD = (None, True, False, -1, 0, 1, 3.5, 10**30, 1e308, float("nan"), float("-inf"), "", "x", "\ud800", "\0")
ODD += ([], {}, [1], {"a": 1}, [[]], "../../x", "1" * 300, -(2**63))


def odd_json(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced, removed, repeated or put elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        out = dict(value)
        kind = rng.random()
        if kind < 0.15:
            del out[key]
        elif kind < 0.25:
            out[str(rng.choice(ODD))[:20]] = out.pop(key)
        else:
            out[key] = odd_json(out[key], rng)
        return out
    if isinstance(value, list) and value and rng.random() < 0.85:
        i, out = rng.randrange(len(value)), list(value)
        kind = rng.random()
        if kind < 0.15:
            del out[i]
        elif kind < 0.25:
            out.insert(i, out[i])
        else:
            out[i] = odd_json(out[i], rng)
        return out
    return rng.choice(ODD)


DAMAGES = ("cut", "replaced", "too long", "senseless", "bytes", "a byte", "odd value", "odd value in a line")


def damaged(data: bytes, rng: random.Random, how: str | None = None, place: float | None = None) -> bytes:
    """
    Cut short, with random bytes, noise, senseless, too long, or JSON (lines) with odd values in it. place: from 0 to 1,
    about where in the file; JSON that is none gets a few bytes changed there instead. Either is drawn where not given.
    """
    how = rng.choice(DAMAGES) if how is None else how
    place = rng.random() if place is None else place
    at = min(len(data), int(place * (len(data) + 1)))
    if how == "cut":
        return data[:at]
    if how == "replaced":
        return data[:at] + rng.randbytes(rng.randrange(300)) if rng.random() < 0.5 else rng.randbytes(300)
    if how == "too long":
        return data[:at] + rng.randbytes(rng.randrange(1, 300)) + data[at:]
    if how == "senseless":
        return rng.choice(
            [b"", b"\n", b"{}", b"[]", b"null", b"[" * 100_000, b"\x00" * 500, b"\xff\xfe", b'{"a":' * 5000]
        )
    if how == "odd value":
        with contextlib.suppress(ValueError):
            return json.dumps(odd_json(json.loads(data), rng)).encode("utf-8", "surrogatepass")
    if how == "odd value in a line":
        with contextlib.suppress(ValueError, IndexError):
            lines = data.splitlines()
            i = min(int(place * len(lines)), len(lines) - 1)
            lines[i] = json.dumps(odd_json(json.loads(lines[i]), rng)).encode("utf-8", "surrogatepass")
            return b"\n".join(lines)
    out = bytearray(data or b"x")
    for _ in range(1 if how == "a byte" else 40):
        out[(at + rng.randrange(100)) % len(out)] = rng.randrange(256)
    return bytes(out)
