"""
A checkpoint is everything that the next step of a run depends on. No other module spells the names of its parts on the
disk.

    checkpoint = Checkpoint.load(folder, step, device, rank)
    checkpoint.meta.run_config, checkpoint.weights, checkpoint.optimizers, ...
    checkpoint.save(rank)

checkpoint_manager.py writes and reads the files. It does not know their content.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat_fp4.training.checkpoint_manager import load_checkpoint, save_checkpoint

# These are the keys of the file optim_<step>_rank<rank>.pt, which each process has.
OPTIMIZERS, RNG, POSITION = "optimizers", "rng", "dataloader"


@dataclass
class LoopState:
    """The part of the training loop's state that a checkpoint keeps.

    - numbers are the results of the newest evaluation, and best are the best results so far, both by name.
    - evaluated_at is the step of the newest evaluation.
    - looked_at is the newest step for which the functions of Run.before_step have run.
    - progress is the part of the run that is done, from 0 to 1.
    - training_seconds is the time that steps have taken so far.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    looked_at: int = -1
    progress: float = 0.0
    training_seconds: float = 0.0


class Metadata(dict):
    """The content of meta_<step>.json: a description of the checkpoint, and the results of the newest evaluation.

    Checkpoints of nanochat itself lack most entries. The property of a missing entry has an empty value.
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
        **optional: Any,
    ) -> "Metadata":
        """Returns the metadata that all checkpoints of a run have in common.

        - model_config: the arguments of the model's class, under nanochat's names
        - run_config: the settings that decide the bits, which a resumed run must have again
        - tunable: the settings that a resumed run may change, with a note that names the change
        - user_config: the values of all flags
        - recipes: the methods' recipes as records
        - optional: device_batch_size, max_seq_len, and parent (the model that the run began with)
        """
        required = {
            "model_config": model_config,
            "run_config": run_config,
            "tunable": tunable,
            "user_config": user_config,
        }
        return cls(**required, recipes=recipes, commit=commit, **optional)

    @classmethod
    def read(cls, folder: Path, step: int) -> "Metadata":
        """Reads the file without checking it. A damaged file gives empty metadata, and Checkpoint.load then says
        what is damaged."""
        try:
            content = json.loads((folder / f"meta_{step:06d}.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            content = None
        return cls(content) if isinstance(content, dict) else cls()

    def at(self, loop: LoopState, loss: dict[str, Any]) -> "Metadata":
        """Returns the metadata of one checkpoint of the run, with the states of the loop and of the loss monitor."""
        return Metadata({**loop.numbers, **self, "loop_state": asdict(loop), "loss_state": loss})

    def loaded_from(self, model_tag: str) -> "Metadata":
        """Returns the same metadata with the tag of the folder that the model was loaded from."""
        return Metadata({**self, "model_tag": model_tag})

    def _dict(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    @property
    def step(self) -> int | None:
        return self.get("step")

    @property
    def model_tag(self) -> str | None:
        """The tag of the folder that the model was loaded from. The tag is not stored in the file."""
        return self.get("model_tag")

    @property
    def model_config(self) -> dict[str, Any]:
        """The arguments of the model's class."""
        return self._dict("model_config")

    @property
    def user_config(self) -> dict[str, Any]:
        """The values of all flags."""
        return self._dict("user_config")

    @property
    def tunable(self) -> dict[str, Any]:
        """The settings that a resumed run may change."""
        return self._dict("tunable")

    @property
    def parent(self) -> dict[str, Any]:
        """The model that the run began with."""
        return self._dict("parent")

    @property
    def run_config(self) -> dict[str, Any] | None:
        """The settings that decide the bits of the run, or None if the checkpoint has none. nanochat's own
        checkpoints have none."""
        return self._dict("run_config") or None

    @property
    def loop_state(self) -> Any:
        """The state of the loop (LoopState) as a dict. It is not checked here."""
        return self.get("loop_state")

    @property
    def loss_state(self) -> Any:
        """The state of the loss monitor. It is not checked here."""
        return self.get("loss_state")

    @property
    def state(self) -> str:
        """The --state of the run."""
        return self.user_config.get("state", "fp32")

    @property
    def recipes(self) -> Any:
        """The recipes of the run's methods as records."""
        return self.get("recipes", [])

    @property
    def commit(self) -> str | None:
        """The commit of the code that trained the run."""
        return self.get("commit")

    @property
    def gemms(self) -> Any:
        """The implementation that was chosen for each FP4 product (gemms.Choice.record), or None if none was chosen."""
        return self.get("gemms")

    @gemms.setter
    def gemms(self, record: dict[str, Any]) -> None:
        self["gemms"] = record

    @property
    def device_batch_size(self) -> int | None:
        """The number of rows of a micro-batch, or None if the checkpoint does not have it."""
        rows = self.get("device_batch_size") or self.user_config.get("device_batch_size")
        return rows if isinstance(rows, int) and rows > 0 else None

    @property
    def tokenizer(self) -> str | None:
        """The fingerprint of the tokenizer, or None if the checkpoint does not have it."""
        fingerprint = (self.run_config or {}).get("tokenizer") or self.get("tokenizer")
        return fingerprint if isinstance(fingerprint, str) else None


@dataclass
class Checkpoint:
    """
    The state of a run at one step. When a checkpoint is saved, only rank 0 has weights and method.

    - weights are those of the whole model.
    - optimizers, rng and position are this rank's optimizers, random generators, and place in the data after the last
      batch that was trained on.
    - method is what the QAT method has learned besides the weights (nf.gram_state).
    - of_ranks has (optimizers, position) of each rank, if a run with another number of processes saved the checkpoint.
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
        """Reads a checkpoint, with its tensors on `device`. Raises UserError if a file differs from the checkpoint's
        manifest."""
        weights, of_this_rank, meta = load_checkpoint(folder, step, device, load_optimizer=True, rank=rank)
        of_this_rank, parts = of_this_rank if isinstance(of_this_rank, dict) else {}, []
        for part in of_this_rank.get("ranks", ()):
            part = part if isinstance(part, dict) else {}
            parts.append((part.get(OPTIMIZERS), part.get(POSITION)))
        state = of_this_rank.get(OPTIMIZERS), of_this_rank.get(RNG), of_this_rank.get(POSITION)
        return cls(Path(folder), step, Metadata(meta), weights, *state, of_ranks=parts)

    def save(self, rank: int) -> bool:
        """Saves the checkpoint, and returns whether all of it is on the disk. All ranks must call this method
        together."""
        of_rank = {OPTIMIZERS: self.optimizers, RNG: self.rng, POSITION: self.position}
        return save_checkpoint(self.folder, self.step, self.weights, of_rank, self.meta, rank, self.method)

    def forget(self) -> None:
        """Drops the tensors, so that their memory becomes free. It is called when the run has taken them over."""
        self.weights, self.optimizers, self.rng, self.of_ranks = None, [], {}, []
