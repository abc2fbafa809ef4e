"""Bytes and rotations of the MS-EDEN requantization (the paper's Table 2), counted while the kernels run.

    python -m lab.measure.traffic            # JSON; runs in Triton's interpreter, on any CPU

The kernels that training launches are executed by Triton's interpreter, with every load, store and matrix product
counted where it happens: bytes of the elements whose mask is set, by the kernel argument they belong to; an element
that one load asks for several times counts once. Nothing is assumed about what a kernel should move. Not counted: the
atomic maximum, one number a tile.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch

from lab import ROOT
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, run_main

ROWS, COLUMNS = 256, 256  # whole tiles: nothing is padded
# The rotation and what draws it: a constant of a few KB that stays in the caches, however often tiles read it.
SHARED = ("hadamard", "seed", "rht_seed", "amax", "tensor_scale")


@dataclass
class Launch:
    """One kernel launch: bytes read and written by argument name, and multiply-adds of its matrix products."""

    kernel: str
    read: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)
    rotated: int = 0


def count_launches(function) -> list[Launch]:
    """What the kernels that function() launches do. Needs TRITON_INTERPRET=1 from before triton was imported."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    originals = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store", "create_dot")}
    call = executor.__call__
    launches: list[Launch] = []
    ranges: list[tuple[int, int, str]] = []

    def add(counter: Counter, pointers, mask) -> None:
        addresses = np.unique(pointers.data[mask.data.astype(bool)])
        if addresses.size:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            first = int(addresses[0])
            counter[next((name for low, high, name in ranges if low <= first < high), "?")] += addresses.size * size

    def load(self, pointers, mask, *rest):
        add(launches[-1].read, pointers, mask)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest):
        add(launches[-1].written, pointers, mask)
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    def dot(self, a, b, *rest):
        launches[-1].rotated += a.data.shape[-2] * b.data.shape[-1]  # by a matrix of 128, or of 16 with butterflies
        return originals["create_dot"](self, a, b, *rest)

    def tensors(named):
        for name, value in named:
            if hasattr(value, "data_ptr"):
                yield name.removesuffix("_ptr"), value
            elif hasattr(value, "_asdict"):  # a record of arguments
                yield from tensors(value._asdict().items())

    def launch(self, *arguments, **keywords):
        launches.append(Launch(self.fn.__name__))
        ranges[:] = [
            (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name)
            for name, t in tensors([*zip(self.arg_names, arguments), *keywords.items()])
        ]
        return call(self, *arguments, **keywords)

    patched = {"create_masked_load": load, "create_masked_store": store, "create_dot": dot}
    with mock.patch.multiple(builder, **patched), mock.patch.object(executor, "__call__", launch):
        function()
    return launches


def requantization() -> dict[str, list[dict]]:
    """{alignment: launches} of requantizing a tensor from its 4-bit codes along its other dimension, rotated by 128.

    naive:    the tensor's maximum first, then scales aligned with it: two passes. Our launcher does that for the
              roundings that need it (here nearest rounding; EDEN's S would be computed in the second pass, and moves
              nothing more)
    post hoc: MS-EDEN as it trains
    Per launch: kernel, bits read and written per element by argument, rotations per element.
    """
    from nanochat_fp4.nvfp4.operands import Codes, Quantization, quantize_operand
    from nanochat_fp4.nvfp4.quantizers import get_rounding, quantize_reference

    torch.manual_seed(0)
    t = quantize_reference(torch.randn(ROWS, COLUMNS), get_rounding("four_over_six"))
    codes = Codes(t.codes, t.scales, t.tensor_scale)
    elements, seed = ROWS * COLUMNS, torch.tensor(1)
    result = {}
    for alignment, rounding in (("naive", "rtn"), ("post hoc", "ms_eden")):

        def requantize(rounding=rounding):
            how = Quantization(get_rounding(rounding), seed=seed, rht_dim=128, rht_seed=seed)
            with mock.patch.dict(os.environ, NVFP4_KERNELS="triton"):
                quantize_operand(codes, how, transpose=True, keep_codes=True)

        result[alignment] = []
        for launch in count_launches(requantize):
            ways = {"read": launch.read, "written": launch.written}
            bits = {way: {k: 8 * v / elements for k, v in counter.items()} for way, counter in ways.items()}
            result[alignment].append({"kernel": launch.kernel, **bits, "rotations": launch.rotated / elements})
    return result


def of_operand(bits: dict[str, float]) -> float:
    """Bits per element without the arguments that all tiles share."""
    return sum(v for name, v in bits.items() if not any(shared in name for shared in SHARED))


def measure() -> dict[str, list[dict]]:
    """requantization(); where this process compiles its kernels, in another one that interprets them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return requantization()
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-m", "lab.measure.traffic"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the kernels could not be interpreted: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0], epilog="Prints JSON; needs no GPU.")
    parser.parse_args(argv)
    print(json.dumps(measure()))


if __name__ == "__main__":
    run_main(main)
