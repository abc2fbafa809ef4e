"""
A checkpoint: everything that a run's next step depends on. No other module spells the names of its parts on the disk.

    checkpoint = Checkpoint.load(folder, step, device, rank)
    checkpoint.meta.run_config, checkpoint.weights, checkpoint.optimizers, ...
    checkpoint.save(rank)

checkpoint_manager.py writes and reads the files, and does not know what is in them.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat_fp4.training.checkpoint_manager import load_checkpoint, save_checkpoint

# Keys of optim_<step>_rank<rank>.pt, a file that each process has.
OPTIMIZERS, RNG, POSITION = "optimizers", "rng", "dataloader"


@dataclass
class LoopState:
    """The part of the loop's state that a checkpoint keeps."""

    numbers: dict[str, float] = field(default_factory=dict)  # of the newest evaluation
    best: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    looked_at: int = -1  # the newest step that the functions of before_step have run for
    progress: float = 0.0  # of the run, from 0 to 1
    training_seconds: float = 0.0


class Metadata(dict):
    """meta_<step>.json: what a checkpoint says of itself, and the numbers of the newest evaluation.

    nanochat's own files lack most of this. A property whose part is missing has an empty value.
    """

    @classmethod
    def of_run(
        cls,
        *,
        model_config: dict[str, Any],
        run_config: dict[str, Any],
        tunable: dict[str, Any],
        user_config: dict[str, Any],
        recipes: list[Any],
        commit: str | None,
        **more: Any,
    ) -> "Metadata":
        """What all checkpoints of a run have in common.

        model_config: the arguments of the model's class, as nanochat has them
        run_config: settings that decide the bits, which a resume must have again
        tunable: settings that a resume may change; a note names them
        user_config: all flags
        recipes: the methods' recipes as records
        more: device_batch_size, max_seq_len, and parent (the model that the run began with)
        """
        known = {"model_config": model_config, "run_config": run_config, "tunable": tunable, "user_config": user_config}
        return cls(**known, recipes=recipes, commit=commit, **more)

    @classmethod
    def read(cls, folder: Path, step: int) -> "Metadata":
        """Reads the file without checking it. A damaged file gives empty metadata; Checkpoint.load says why."""
        try:
            found = json.loads((folder / f"meta_{step:06d}.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            found = None
        return cls(found) if isinstance(found, dict) else cls()

    def at(self, loop: LoopState, loss: dict[str, Any]) -> "Metadata":
        """The metadata of one checkpoint of the run: with the state of the loop and of the loss monitor."""
        return Metadata({**loop.numbers, **self, "loop_state": asdict(loop), "loss_state": loss})

    def loaded_from(self, model_tag: str) -> "Metadata":
        """The same metadata with the tag of the folder that the model was loaded from."""
        return Metadata({**self, "model_tag": model_tag})

    def _dict(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    @property
    def step(self) -> int | None:
        return self.get("step")

    @property
    def model_tag(self) -> str | None:
        """The tag of the folder that the model was loaded from. It is not in the file."""
        return self.get("model_tag")

    @property
    def model_config(self) -> dict[str, Any]:
        return self._dict("model_config")

    @property
    def user_config(self) -> dict[str, Any]:
        return self._dict("user_config")

    @property
    def tunable(self) -> dict[str, Any]:
        return self._dict("tunable")

    @property
    def parent(self) -> dict[str, Any]:
        return self._dict("parent")

    @property
    def run_config(self) -> dict[str, Any] | None:
        """None if the checkpoint does not say how it was trained, as nanochat's own do not."""
        return self._dict("run_config") or None

    @property
    def loop_state(self) -> Any:
        return self.get("loop_state")

    @property
    def loss_state(self) -> Any:
        return self.get("loss_state")

    @property
    def state(self) -> str:
        """--state of the run."""
        return self.user_config.get("state", "fp32")

    @property
    def recipes(self) -> Any:
        return self.get("recipes", [])

    @property
    def commit(self) -> str | None:
        return self.get("commit")

    @property
    def gemms(self) -> Any:
        """The FP4 library of each product (gemms.Choice.record); None where none was chosen."""
        return self.get("gemms")

    @gemms.setter
    def gemms(self, record: dict[str, Any]) -> None:
        self["gemms"] = record

    @property
    def device_batch_size(self) -> int | None:
        """Rows of a micro-batch, if the checkpoint says so."""
        rows = self.get("device_batch_size") or self.user_config.get("device_batch_size")
        return rows if isinstance(rows, int) and rows > 0 else None

    @property
    def tokenizer(self) -> str | None:
        """The fingerprint of the tokenizer."""
        found = (self.run_config or {}).get("tokenizer") or self.get("tokenizer")
        return found if isinstance(found, str) else None


@dataclass
class Checkpoint:
    """
    A run at one step. Only rank 0 has weights and method when a checkpoint is saved.

    weights: of the whole model
    optimizers, rng, position: this rank's optimizers, generators, and place in the data after the last trained batch
    method: what the QAT method has learned besides the weights (nf.gram_state)
    of_ranks: (optimizers, position) of each rank, if a run of another number of processes saved the checkpoint
    """

    folder: Path
    step: int
    meta: Metadata
    weights: dict[str, Tensor] | None = None
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    rng: dict[str, Tensor] = field(default_factory=dict)
    position: Any = None
    method: dict[str, Tensor] | None = None
    of_ranks: list[tuple[list[dict[str, Any]], Any]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, step: int, device: torch.device, rank: int) -> "Checkpoint":
        """Reads a checkpoint onto the device. Raises UserError if it does not agree with its manifest."""
        weights, own, meta = load_checkpoint(folder, step, device, load_optimizer=True, rank=rank)
        own, parts = own if isinstance(own, dict) else {}, []
        for part in own.get("ranks", ()):
            part = part if isinstance(part, dict) else {}
            parts.append((part.get(OPTIMIZERS), part.get(POSITION)))
        state = own.get(OPTIMIZERS), own.get(RNG), own.get(POSITION)
        return cls(Path(folder), step, Metadata(meta), weights, *state, of_ranks=parts)

    def save(self, rank: int) -> bool:
        """Saves, and returns whether all of the checkpoint is on the disk. All ranks call this together."""
        of_rank = {OPTIMIZERS: self.optimizers, RNG: self.rng, POSITION: self.position}
        return save_checkpoint(self.folder, self.step, self.weights, of_rank, self.meta, rank, self.method)

    def forget(self) -> None:
        """Drops the tensors, so that their memory is free. The run has taken them up."""
        self.weights, self.optimizers, self.rng, self.of_ranks = None, [], {}, []
