"""
The training documents in one random order of all documents. Without it, documents of a shard or row group stay
together.

The documents are written once into a file without compression, <base dir>/shuffled_data/<key>.arrow. The system maps
the file into memory, so that any document can be read immediately and the text takes no memory of the process. All
seeds and all processes share the file.
"""

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from nanochat_fp4.cli import UserError, format_bytes, one_line
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.data.download import check_space
from nanochat_fp4.data.shards import Shard, data_lock
from nanochat_fp4.files import atomic_open
from nanochat_fp4.progress import Progress

GROUP = 256  # The number of documents that are read at a time.
MIN_GROUPS = 64  # A small corpus has at least so many groups, because groups are dealt to lanes.
TEXT_PER_BYTE = 4  # The bytes of text in a byte of a compressed shard, for the estimate of disk space.


class ShuffledDocuments:
    """
    Groups of documents of `shards`, in the order of `seed`. The same seed and shards give the same order everywhere.

    `digests` are those of the shards' contents. Raises UserError if the disk is full or the file is damaged.
    """

    def __init__(self, shards: list[Shard], digests: list[str], seed: int):
        path = uncompressed_copy(shards, digests)
        count = sum(shard.num_rows for shard in shards)
        try:
            self.texts = pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("text")
            if len(self.texts) != count:
                raise ValueError(f"{len(self.texts)} documents instead of {count}")
        except (pa.ArrowException, OSError, ValueError, KeyError) as e:
            raise UserError(f"{path} is damaged ({one_line(e)[:100]}); delete it and start again") from e
        # NumPy does not change the permutations of RandomState. The third number separates this use of a seed from
        # other uses.
        self.order = np.random.RandomState([seed, 0, 1]).permutation(count)
        self.size = max(1, min(GROUP, count // MIN_GROUPS))

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def read(self, group: int) -> list[str]:
        """Returns the documents of one group."""
        return [self.texts[int(i)].as_py() for i in self.order[group * self.size : (group + 1) * self.size]]


def uncompressed_copy(shards: list[Shard], digests: list[str]) -> Path:
    """Returns the path of an Arrow file with the documents of `shards` in their order. It is made if it does not
    exist."""
    names = [f"{os.path.basename(s.path)} {s.column} {s.rows} {d}" for s, d in zip(shards, digests, strict=True)]
    key = hashlib.sha256("\n".join(["documents 1", *names]).encode()).hexdigest()[:16]
    path = Path(get_base_dir()) / "shuffled_data" / f"{key}.arrow"
    with data_lock():
        if path.is_file():
            return path
        needed = TEXT_PER_BYTE * sum(os.path.getsize(shard.path) for shard in shards)
        check_space(path.parent, needed, f"a copy of {len(shards)} shards without compression, for shuffle-documents")
        print0(f"Writing the documents without compression (about {format_bytes(needed)}) into {path}")
        schema = pa.schema([("text", pa.large_string())])
        total = sum(shard.num_rows for shard in shards)
        with Progress(total=total, desc="shuffle", unit="document") as progress, atomic_open(path) as f:
            with pa.ipc.new_file(f, schema) as writer:
                for shard in shards:
                    for index in range(shard.num_row_groups):
                        texts = shard.read(index)
                        writer.write_batch(pa.record_batch([pa.array(texts, pa.large_string())], schema=schema))
                        progress.update(len(texts))
    return path
