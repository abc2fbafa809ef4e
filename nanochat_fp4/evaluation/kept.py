"""
The finished parts of an evaluation, kept in the model's metrics.jsonl, so that an evaluation that was killed goes on
where it was.

    kept = Kept(folder, step, key_of(model, tokenizer) | {"tokens": 1024})
    score = kept.part("ARC-Easy", lambda: measure("ARC-Easy"))  # measured now, or read if it was measured before
    kept.finish("benchmarks", scores={"ARC-Easy": score})       # the result; another evaluation measures again
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.common import get_dist_info, of_all_ranks, print0
from nanochat_fp4.evaluation.metrics import MetricsLog, read_jsonl


def key_of(model: torch.nn.Module, tokenizer: Any) -> dict[str, str]:
    """Returns the part of a key that every evaluation needs: the SHA-256 of all parameters and buffers by name, the
    precision of the output head, the tokenizer, and the type of the device, because a CPU computes in FP32 what a GPU
    computes in BF16. Rank 0 computes the hash. All ranks must call this function together."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items() if get_dist_info()[1] == 0 else ():
        if isinstance(tensor, torch.Tensor):  # The extra state of a module can be something else.
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    device = next(model.parameters()).device.type
    key = {"weights": of_all_ranks(weights.hexdigest())[0], "tokenizer": tokenizer.fingerprint(), "device": device}
    return key | {"head": getattr(getattr(model, "lm_head", None), "precision", "bf16")}


class Kept:
    """
    The parts of an evaluation by their names. Each part is a value that JSON can represent.

    - folder: the folder of metrics.jsonl: the model's checkpoints, whose records live and die with the model
    - step: the step of the checkpoint
    - key: everything that the parts depend on besides their names

    All ranks must make this object and call its methods together. Only rank 0 reads and writes the file.
    """

    def __init__(self, folder: Path, step: int, key: dict[str, Any]):
        rank = get_dist_info()[1]
        self.log, self.step = MetricsLog(folder, enabled=rank == 0), step
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]
        parts: dict[str, Any] = {}
        for record in read_jsonl(self.log.path) if rank == 0 else ():
            if record.get("key") == self.key:  # A result ends the evaluation whose parts came before it.
                parts = parts | {record["name"]: record["value"]} if record["event"] == "part" else {}
        self.parts = of_all_ranks(parts)[0]

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the result of measure(), or its stored result from before the evaluation was killed."""
        if name in self.parts:
            print0(f"{name}: measured before, {self.log.path}")
        else:
            self.parts[name] = measure()
            self.log.append("part", self.step, key=self.key, name=name, value=self.parts[name])
        return self.parts[name]

    def finish(self, event: str, **result: Any) -> None:
        """Stores the result of the whole evaluation."""
        self.log.append(event, self.step, key=self.key, **result)
