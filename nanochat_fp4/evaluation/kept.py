"""
Stores the finished parts of an evaluation on the disk, so that an evaluation that was killed continues where it was.

    kept = Kept(folder / "unfinished_000005.json", key_of(model, tokenizer) | {"tokens": 1024})
    score = kept.part("ARC-Easy", lambda: measure("ARC-Easy"))  # measured now, or read if it was measured before
    kept.finish()                                               # after this, another evaluation measures again
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
    """Returns the SHA-256 of all parameters and buffers by name. Rank 0 computes it. All ranks must call this
    function together."""
    digest = ""
    if get_dist_info()[1] == 0:
        hashing = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor):  # The extra state of a module can be something else.
                hashing.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                hashing.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        digest = hashing.hexdigest()
    return of_all_ranks(digest)[0]


def key_of(model: torch.nn.Module, tokenizer: Any) -> dict[str, str]:
    """Returns the part of a key that every evaluation needs. It has the type of the device, because a CPU computes
    in FP32 what a GPU computes in BF16. All ranks must call this function together."""
    device = next(model.parameters()).device.type
    return {"weights": weights_hash(model), "tokenizer": tokenizer.fingerprint(), "device": device}


class Kept:
    """
    The parts of an evaluation by their names. Each part is a value that JSON can represent.

    - path: the path of the file. The hash of the key is added to its name, and its folder is made if necessary.
    - key: everything that the parts depend on besides their names. Parts with another key have a file of their own.

    All ranks must make this object and call its methods together. Only rank 0 reads and writes the file.
    """

    def __init__(self, path: Path, key: dict[str, Any]):
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        self.path, self.rank = path.with_name(f"{path.stem}_{digest[:12]}{path.suffix}"), get_dist_info()[1]
        self.parts: dict[str, Any] = of_all_ranks(self._read() if self.rank == 0 else None)[0]

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the result of measure(), or its stored result from before the evaluation was killed."""
        if name in self.parts:
            print0(f"{name}: measured before, {self.path}")
            return self.parts[name]
        value = measure()
        self.parts[name] = value
        if self.rank == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(self.path, json.dumps(self.parts) + "\n")
            except OSError as e:  # The evaluation itself does not need the disk.
                print0(f"warning: {self.path} cannot be written ({e.strerror}); {name} is lost if this is interrupted")
        return value

    def finish(self) -> None:
        """Deletes the file. It is called when the results are in their final place."""
        if self.rank == 0:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            parts = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return parts if isinstance(parts, dict) else {}
