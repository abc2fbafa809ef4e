"""Runs one of the benchmarks by its name:

    python -m lab.bench layers --models 3B           # the paper's Table 6, against BF16
    python -m lab.bench steps --depth 20             # training steps of whole models: tokens/s, memory, Table 7
    python -m lab.bench memory                       # tensors that a block keeps for its backward pass; without a GPU
    torchrun --nproc_per_node=2 -m lab.bench parallel --parallel fsdp
    python -m lab.bench compare layers.json steps.json   # shows results beside published numbers

`python -m lab.bench NAME --help` prints the flags of a benchmark.
"""

import importlib
import os
import sys

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # PyTorch reads it when CUDA starts.

from nanochat_fp4 import cli
from nanochat_fp4.cli import UserError, run_main

NAMES = ("layers", "steps", "memory", "parallel", "compare")


def main() -> None:
    name, *argv = sys.argv[1:] or [""]
    if name not in NAMES:
        if name not in ("", "-h", "--help"):
            raise UserError(f"there is no benchmark {name!r}; use one of {', '.join(NAMES)}")
        print(__doc__)
        return
    cli.PROGRAM = f"python -m lab.bench {name}"
    importlib.import_module(f"lab.bench.{name}").main(argv)


if __name__ == "__main__":
    run_main(main)
