"""What a plan must know of this machine and of the base directory; everything else in a plan is arithmetic."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.dataset import DATASET, MAX_SHARD
from nanochat_fp4.data.download import file_problem
from nanochat_fp4.data.needs import Missing
from nanochat_fp4.data.shards import index_to_filename
from nanochat_fp4.hardware import usable_cpus
from nanochat_fp4.plan.cards import UNNAMED, Card, card_of_device, find_card
from nanochat_fp4.plan.settings import Settings


@dataclass(frozen=True)
class Machine:
    """cards: of each GPU that the processes may use; none on a CPU."""

    cards: tuple[Card, ...]
    cpus: int
    here: bool = True  # False: GPU names another machine, for a plan alone

    @property
    def card(self) -> Card | None:
        return self.cards[0] if self.cards else None

    def processes(self, settings: Settings) -> int:
        """One for each GPU, or NPROC. Raises UserError for more than the machine has."""
        usual = max(1, len(self.cards))
        number = settings.processes or usual
        most, what = (usual, "GPU(s)") if self.cards else (self.cpus, "CPU(s)")
        if number > most and not self.here:
            raise UserError(f"NPROC={number}: GPU and GPU_MEMORY plan a machine with one GPU; leave NPROC out")
        if number > most:
            raise UserError(f"NPROC={number}: this machine has {most} {what}; use at most {most}")
        return number

    def __str__(self) -> str:
        if not self.cards:
            return "no GPU"
        others = "" if self.here else "; not this machine, a plan alone"
        card = self.cards[0]
        return f"{len(self.cards)} x {card.name}, {f'{card.arch}, ' if card.arch else ''}{card.memory}{others}"


def this_machine(gpu: str, gpu_memory: str) -> Machine:
    """This machine, or one GPU of that name or memory. Raises UserError for a card whose memory is not known."""
    try:
        gib = float(gpu_memory or 0)
    except ValueError:
        gib = -1.0
    if not 0 <= gib < 10**6 or (gpu_memory and gib == 0):
        raise UserError(f"GPU_MEMORY={gpu_memory}: expected a number of GiB, for example GPU_MEMORY=24")
    if gpu or gib:
        return Machine((find_card(gpu or UNNAMED, gib),), usable_cpus(), here=False)
    cards = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        arch = f"sm_{properties.major}{properties.minor}"
        cards.append(card_of_device(properties.name, properties.total_memory / 2**30, arch))
    return Machine(tuple(cards), usable_cpus())


@dataclass(frozen=True)
class Facts:
    """What the base directory has, and what can be had.

    missing: of each later stage
    made: the stages whose output is there for every run of the plan; None where nobody looked
    """

    text: str = "embedded"  # folder (DATA_DIR), shards (downloaded before), embedded, or hub
    why_text: str = ""  # why it is not the hub
    shards: int = 0  # that are here
    own_bytes: int = 0  # of the text of DATA_DIR; 0 where it is not known without reading it
    tokenizer: int | None = None  # tokens of the one that is here
    asked_tokens: int | None = None  # that it was asked for; a small text may yield fewer
    disk_free: float = 0.0  # bytes
    missing: dict[str, list[Missing]] = field(default_factory=dict)
    made: frozenset[str] | None = None


def text_source(settings: Settings) -> tuple[str, str, int]:
    """(Facts.text, why not the hub, shards that are here), by the rule of data/dataset.py."""
    base = settings.base_dir
    if settings.data_dir:
        return "folder", "DATA_DIR", 0
    shards = sum((base / "base_data" / index_to_filename(i)).is_file() for i in range(MAX_SHARD + 1))
    if shards >= 2:
        return "shards", "downloaded before", shards
    if (base / "embedded_data/manifest.json").is_file():
        return "embedded", "built before; for FineWeb-Edu: python -m nanochat_fp4.data.dataset -n 8", shards
    problem = file_problem(DATASET, index_to_filename(0))
    return ("hub", "", shards) if problem is None else ("embedded", problem, shards)


def own_bytes(files: list[Path]) -> int:
    """The bytes of these files of text, or 0 if some are compressed."""
    plain = all(f.suffix.lower() not in (".gz", ".parquet") for f in files)
    return sum(f.stat().st_size for f in files) if plain else 0


def made(base: Path, tags: list[str]) -> frozenset[str]:
    """The stages whose output is in the base directory, for every one of these runs."""
    places = {"base": "base_checkpoints", "mid": "mid_checkpoints"}
    found = {stage for stage, place in places.items() if all(any((base / place / tag).rglob("*.pt")) for tag in tags)}
    return frozenset(found | ({"tok"} if tokenizer_sizes(base)[0] is not None else set()))


def tokenizer_sizes(base: Path) -> tuple[int | None, int | None]:
    """(tokens of the tokenizer that is here, tokens that it was asked for). 0 for one that cannot be read."""
    folder = base / "tokenizer"
    if not all((folder / name).is_file() for name in ("tokenizer.json", "token_bytes.pt")):
        return None, None
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        return len(content["tokens"]) + len(content["special_tokens"]), content.get("asked_tokens")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, None


def disk_free(folder: Path) -> float:
    """Bytes that are free where the folder is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return float(shutil.disk_usage(folder).free)
