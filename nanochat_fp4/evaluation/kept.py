"""
Finished parts of an evaluation on the disk, so that one that is killed goes on where it was.

    kept = Kept(folder / "unfinished_000005.json", key_of(model, tokenizer) | {"tokens": 1024})
    score = kept.part("ARC-Easy", lambda: measure("ARC-Easy"))    # measured, or read where it was measured before
    kept.finish()                                                 # whoever asks again measures again
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.common import get_dist_info, of_all_ranks, print0
from nanochat_fp4.files import atomic_write


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters and buffers, by name. All ranks call this together; rank 0 computes it."""
    digest = ""
    if get_dist_info()[1] == 0:
        hashing = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor):  # a module's extra state can be something else
                hashing.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                hashing.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        digest = hashing.hexdigest()
    return of_all_ranks(digest)[0]


def key_of(model: torch.nn.Module, tokenizer: Any) -> dict[str, str]:
    """The part of a key that every evaluation needs. The device's type belongs to it, for a CPU computes in FP32 what a
    GPU computes in BF16. All ranks call this together."""
    device = next(model.parameters()).device.type
    return {"weights": weights_hash(model), "tokenizer": tokenizer.fingerprint(), "device": device}


class Kept:
    """
    Parts by their names, each a value that JSON holds.

    path: the file, which is beside nothing else of this name; its folder is made if need be.
    key: everything that the parts depend on besides their names. Parts of another key have a file of their own.
    All ranks make it and call its methods together. Rank 0 alone touches the disk.
    """

    def __init__(self, path: Path, key: dict[str, Any]):
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        self.path, self.rank = path.with_name(f"{path.stem}_{digest[:12]}{path.suffix}"), get_dist_info()[1]
        self.parts: dict[str, Any] = of_all_ranks(self._read() if self.rank == 0 else None)[0]

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What measure() returns, or returned before the evaluation was killed."""
        if name in self.parts:
            print0(f"{name}: measured before, {self.path}")
            return self.parts[name]
        value = measure()
        self.parts[name] = value
        if self.rank == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(self.path, json.dumps(self.parts) + "\n")
            except OSError as e:  # the evaluation itself needs no disk
                print0(f"warning: {self.path} cannot be written ({e.strerror}); {name} is lost if this is interrupted")
        return value

    def finish(self) -> None:
        """The results are where they belong."""
        if self.rank == 0:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            parts = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return parts if isinstance(parts, dict) else {}
