"""
What a checkpoint is: everything that a run's next step depends on. The names of its parts on the disk are here alone.

    checkpoint = Checkpoint.load(folder, step, device, rank)
    checkpoint.meta.run_config, checkpoint.weights, checkpoint.optimizers, ...
    checkpoint.save(rank)

checkpoint_manager.py writes and reads the files, and knows nothing of their content.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat_fp4.training.checkpoint_manager import load_checkpoint, save_checkpoint

# Of optim_<step>_rank<rank>.pt, a file of each process.
OPTIMIZERS, RNG, POSITION = "optimizers", "rng", "dataloader"


@dataclass
class LoopState:
    """The state of the loop that a checkpoint keeps."""

    numbers: dict[str, float] = field(default_factory=dict)  # the last evaluation's
    best: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    looked_at: int = -1  # the last step that everything before a step was done for
    progress: float = 0.0  # from 0 to 1
    training_seconds: float = 0.0


class Metadata(dict):
    """meta_<step>.json: what a checkpoint says of itself. Beside the names below are the last evaluation's numbers.

    Files of others (nanochat's own, damaged ones) may lack anything. A property then has an empty value.
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
        """
        model_config: of the model's class, as nanochat has it. run_config: settings that decide the bits, which a
        resume must have again. tunable: settings that a resume may change, and then notes. user_config: all flags.
        recipes: of the methods. more: device_batch_size, max_seq_len, and parent, the model that the run began with.
        """
        known = {"model_config": model_config, "run_config": run_config, "tunable": tunable, "user_config": user_config}
        return cls(**known, recipes=recipes, commit=commit, **more)

    @classmethod
    def read(cls, folder: Path, step: int) -> "Metadata":
        """Of the file alone, which nothing has checked. Empty for a damaged one: loading the checkpoint says why."""
        try:
            found = json.loads((folder / f"meta_{step:06d}.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            found = None
        return cls(found) if isinstance(found, dict) else cls()

    def at(self, loop: LoopState, loss: dict[str, Any]) -> "Metadata":
        """Of a checkpoint of this run: with the loop's state, its last evaluation's numbers, and the loss monitor's."""
        return Metadata({**loop.numbers, **self, "loop_state": asdict(loop), "loss_state": loss})

    def loaded_from(self, model_tag: str) -> "Metadata":
        """With the name of the folder that the model was loaded from."""
        return Metadata({**self, "model_tag": model_tag})

    def _dict(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    @property
    def step(self) -> int | None:
        return self.get("step")

    @property
    def model_tag(self) -> str | None:
        """Of loaded_from; no part of the file."""
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
        """None: the checkpoint does not say how it was trained, as nanochat's own."""
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
    A run at a step. weights and method are of the whole model, and on rank 0 alone when they are saved. optimizers,
    rng and position are this rank's. method: what the QAT method has learned besides the weights (nf.gram_state).

    position: of the loader, after the last batch that was trained on.
    of_ranks: the optimizers' states, and the positions, of each rank of a run that had another number of processes.
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
        """Checked against the manifest, its tensors on the device. Raises UserError."""
        weights, own, meta = load_checkpoint(folder, step, device, load_optimizer=True, rank=rank)
        own, parts = own if isinstance(own, dict) else {}, []
        for part in own.get("ranks", ()):
            part = part if isinstance(part, dict) else {}
            parts.append((part.get(OPTIMIZERS), part.get(POSITION)))
        state = own.get(OPTIMIZERS), own.get(RNG), own.get(POSITION)
        return cls(Path(folder), step, Metadata(meta), weights, *state, of_ranks=parts)

    def save(self, rank: int) -> bool:
        """True once the checkpoint is on the disk as a whole. All ranks call this together."""
        of_rank = {OPTIMIZERS: self.optimizers, RNG: self.rng, POSITION: self.position}
        return save_checkpoint(self.folder, self.step, self.weights, of_rank, self.meta, rank, self.method)

    def forget(self) -> None:
        """Lets go of the tensors, when the run has them."""
        self.weights, self.optimizers, self.rng, self.of_ranks = None, [], {}, []
