"""Bytes of a compiled block's kernels besides GEMMs and attention, by Inductor's schedule for a GPU that is not here.

    python -m lab.predict.glue --methods bf16,fp8,clover --depth 20 --rows 16 --sm 120 --out glue.json

torch.compile captures a gpt.Block on the CPU, as training calls it between the first and the last micro-batch: weights
are made once, gradients are added where they are made. GEMMs and attention are opaque operators. The graphs are moved
to a GPU without one, and Inductor schedules their kernels. A kernel's bytes are the distinct elements that it reads and
writes: numbers that several instructions or kernels read count once a kernel. Nothing is compiled by Triton.

A kernel is glue unless it reads or writes codes (FP8, or uint8 by the operators of nvfp4), or makes a single number.
"""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import sympy
import torch
import torch._inductor.debug
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils._sympy.functions import Identity

import nanochat_fp4 as nf
from lab.predict.step_time import Shape
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models import flash_attention, gpt
from nanochat_fp4.nvfp4 import contexts, dispatch, epilogue, linear, operands, recipes
from nanochat_fp4.nvfp4.gemm import Decoded, GemmOperand
from nanochat_fp4.nvfp4.operands import Codes

PROCESSORS = {90: 132, 120: 170}  # an H200's, an RTX 5090's
LENGTH, HEAD, SHARE = 2048, 128, 128  # the indices of 1/SHARE of all tokens are looked at
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@torch.library.custom_op("lab::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


@torch.library.custom_op("lab::attention_backward", mutates_args=())
def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    return [torch.zeros_like(t) for t in (q, k, v)]


@torch.library.custom_op("lab::product", mutates_args=())
def _product(a: list[Tensor], b: list[Tensor], m: int, n: int, dtype: torch.dtype) -> Tensor:
    return a[0].new_zeros(m, n, dtype=dtype)


@torch.library.custom_op("lab::product_add", mutates_args=("into",))
def _product_add(a: list[Tensor], b: list[Tensor], into: Tensor) -> None:
    pass


_attention.register_fake(lambda q, k, v: torch.empty(q.shape, dtype=q.dtype, device=q.device))
_attention_backward.register_fake(
    lambda grad, *qkv: [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in qkv[:3]]
)
_product.register_fake(lambda a, b, m, n, dtype: a[0].new_empty(m, n, dtype=dtype))
_product_add.register_fake(lambda a, b, into: None)
_attention.register_autograd(
    lambda ctx, grad: tuple(_attention_backward(grad, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def _tensors(operand: GemmOperand) -> list[Tensor]:
    return [operand.values] if isinstance(operand, Decoded) else [*operand.tensors()]


def _gemm(a, b, *, compute_dtype, out_dtype, into=None) -> Tensor:
    x, y = _tensors(a), _tensors(b)
    return _product(x, y, x[0].shape[0], y[0].shape[0], out_dtype)


def _gemm_add(a, b, into, *, compute_dtype) -> None:
    _product_add(_tensors(a), _tensors(b), into)


def _made_weights(groups, tiles: bool = False) -> list[GemmOperand]:
    """Weight operands without values."""
    made = []
    for layers in groups:
        n, k = sum(layer.out_features for layer in layers), layers[0].in_features
        scale = torch.ones(())
        if layers[0].recipe.output.b.rounding.fp8:
            made.append(operands.FP8(torch.zeros(n, k, dtype=FP8[0]), scale))
        else:
            made.append(Codes(torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // 16, dtype=FP8[0]), scale))
    return made


class _Captured(Exception):
    pass


def capture(
    method: str, config: gpt.GPTConfig, rows: int, recompute: gpt.Recompute
) -> list[tuple[torch.fx.GraphModule, bool]]:
    """[(graph, whether it is the backward pass's)] of a block's forward and backward pass."""
    graphs: list[tuple[torch.fx.GraphModule, bool]] = []

    def keep(gm, inputs, *, is_backward=False, **_):
        graphs.append((gm, is_backward))

        def run(args):
            raise _Captured

        run._boxed_call = True
        return run

    def backend(gm, inputs):
        return compile_fx.compile_fx(gm, inputs, inner_compile=keep, config_patches=gpt.COMPILER_OPTIONS)

    torch._dynamo.reset()
    model = torch.nn.ModuleList([gpt.Block(config, 0)])
    nf.convert(model, method, verbose=False)
    block = torch.compile(gpt.Block.forward, backend=backend, fullgraph=True, dynamic=False)
    x, x0 = (torch.zeros(rows, LENGTH, config.n_embd, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    scalars = [torch.ones((), requires_grad=True) for _ in range(2)]
    tables = gpt.rotary_tables(LENGTH, config.head_dim, gpt.ROTARY_BASE, torch.device("cpu"))
    cos_sin = tuple(t.bfloat16() for t in tables)
    with (
        mock.patch.object(contexts, "quantized_weights", _made_weights),
        nf.quantize_weights_once(model),
        nf.accumulate_gradients(model),
    ):
        with _kernels(), torch.autocast("cpu", dtype=torch.bfloat16), contextlib.suppress(_Captured):
            block(model[0], x, x0, *scalars, cos_sin, (LENGTH, 0), None, recompute)
    return graphs


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """The operators that a GPU's layers call, with opaque GEMMs and attention."""
    with (
        mock.patch.multiple(dispatch, no_kernels_reason=lambda _: None),
        mock.patch.multiple(linear, gemm=_gemm, gemm_add=_gemm_add),
        mock.patch.multiple(epilogue, gemm=_gemm),
        mock.patch.multiple(
            flash_attention,
            attend=lambda q, k, v, *_: _attention(q, k, v).flatten(-2),
            forward=lambda q, k, v, left: (_attention(q, k, v), ()),
            backward=lambda grad, q, k, v, left, out, more: _attention_backward(grad, q, k, v, out),
        ),
        mock.patch.dict(os.environ, NVFP4_KERNELS="triton"),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


@contextlib.contextmanager
def _gpu(sm: int) -> Iterator[None]:
    """Inductor schedules for a GPU of sm_90 or sm_120."""
    fields = dict(type="cuda", index=0, multi_processor_count=PROCESSORS[sm], cc=sm, major=sm // 10)
    fields |= dict(max_threads_per_multi_processor=2048 if sm == 90 else 1536, max_threads_per_block=1024)
    fields |= dict(regs_per_multiprocessor=65536, warp_size=32)
    known = DeviceProperties(**{k: v for k, v in fields.items() if k in DeviceProperties._fields})
    properties = SimpleNamespace(**fields, minor=0, name="GPU", total_memory=2**35, gcnArchName="")
    static = lambda value: staticmethod(lambda *_: value)  # noqa: E731
    with (
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            get_device_properties=lambda *_: properties,
            get_device_capability=lambda *_: (sm // 10, 0),
            current_device=lambda: 0,
            device_count=lambda: 1,
            _lazy_init=lambda: None,
        ),
        mock.patch.multiple(
            CudaInterface,
            get_device_properties=static(properties),
            get_compute_capability=static(sm),
            is_triton_capable=static(True),
            raise_if_triton_unavailable=static(None),
        ),
        mock.patch.object(DeviceProperties, "create", classmethod(lambda *_: known)),
        mock.patch.object(scheduler.Scheduler, "create_backend", lambda self, _: CUDACombinedScheduling(self)),
    ):
        yield


def kernels(gm: torch.fx.GraphModule, backward: bool) -> Iterator[dict[str, Any]]:
    """{pass, kind, read, written: {buffer: bytes}, of: operators} of each kernel that Inductor schedules."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = []
    with mode:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                t = node.meta["val"]
                if isinstance(t, Tensor):
                    t = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                node.meta["val"] = t
                inputs.append(t)
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    with config.patch(gpt.COMPILER_OPTIONS), V.set_fake_mode(mode), torch.no_grad():
        compile_fx.view_to_reshape(gm)
        compile_fx.fake_tensor_prop(gm, inputs)
        compile_fx._recursive_record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=False)
        graph = GraphLowering(gm, example_inputs=inputs, is_backward=backward)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), torch._inductor.debug.DebugContext():
            graph.run(*inputs)
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                yield from _kernel(node, graph, "backward" if backward else "forward")


def _kernel(node, graph, phase: str) -> Iterator[dict[str, Any]]:
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        operator = str(getattr(node.node, "op_overload", None) or "")
        if operator.startswith("nvfp4."):
            tensors = {dep.name: _nbytes(graph, dep.name) for dep in node.read_writes.reads}
            made = {out.get_name(): _nbytes(graph, out.get_name()) for out in node.node.outputs}
            yield {"pass": phase, "kind": "quantizer", "of": operator, "read": tensors, "written": made}
        return
    inside = set(node.get_nodes())
    kept = {b.get_name() for b in node.get_outputs() if {user.node for user in b.users} - inside}
    written = {dep.name for dep in node.read_writes.writes}
    read = _distinct(graph, (dep for dep in node.read_writes.reads if dep.name not in written))
    made = _distinct(graph, (dep for dep in node.read_writes.writes if dep.name in kept))
    origins = {origin.name for part in inside for origin in part.node.get_origins()}
    codes = any(graph.get_dtype(name) in FP8 for name in (*read, *made))
    weights = all(graph.get_dtype(name) == torch.float32 and name in graph.graph_inputs for name in read)
    kind = "weights" if weights else "quantizer" if codes else "glue"
    yield {"pass": phase, "kind": kind, "of": " ".join(sorted(origins))[:120], "read": read, "written": made}


def _nbytes(graph, name: str) -> int:
    return math.prod(map(int, graph.get_buffer(name).get_size())) * graph.get_dtype(name).itemsize


def _distinct(graph, deps) -> dict[str, int]:
    """{buffer: bytes of the distinct elements at these indices}."""
    indices: dict[str, list] = {}
    for dep in deps:
        indices.setdefault(dep.name, []).append(dep)
    made = {}
    for name, some in sorted(indices.items()):
        found, shares = zip(*map(_addresses, some))
        num_bytes = np.unique(np.concatenate(found)).size * max(shares) * graph.get_dtype(name).itemsize
        made[name] = min(num_bytes, _nbytes(graph, name))
    return made


def _addresses(dep) -> tuple[np.ndarray, int]:
    """(the elements that a kernel asks for of the first 1/share of all tokens, share)."""
    sizes, left = [int(size) for size in dep.size], SHARE
    for i, size in enumerate(sizes):  # tokens are the outermost loops
        common = math.gcd(size, left)
        sizes[i], left = size // common, left // common
        if sizes[i] > 1:
            break
    functions = {"FloorDiv": lambda a, b: a // b, "ModularIndexing": lambda x, d, n: x // d % n}
    index = sympy.lambdify(dep.var_names, dep.index.replace(Identity, lambda x: x), [functions, "numpy"])
    return np.unique(index(*np.ogrid[tuple(slice(size) for size in sizes)]) if sizes else index()), SHARE // left


def count(method: str, depth: int, rows: int, sm: int, recompute: str = "none") -> list[dict[str, Any]]:
    """The kernels of a block, with bytes for each token and unit of width."""
    shape = Shape(depth)
    heads = shape.width // HEAD
    config_of_block = gpt.GPTConfig(LENGTH, 64, 1, heads, heads, shape.width)
    with contextlib.ExitStack() as inside:
        if sm >= 100:
            for module in (operands, recipes):
                inside.enter_context(mock.patch.multiple(module, native_gemm=lambda _: "scaled_mm"))
        graphs = capture(method, config_of_block, rows, recompute)
        with _gpu(sm):
            found = [kernel for gm, backward in graphs for kernel in kernels(gm, backward)]
    unit = rows * LENGTH * shape.width
    for kernel in found:
        for side in ("read", "written"):
            kernel[side] = {name: round(num_bytes / unit, 3) for name, num_bytes in kernel[side].items()}
        kernel["bytes"] = round(sum((*kernel["read"].values(), *kernel["written"].values())), 2)
    return [kernel for kernel in found if kernel["bytes"] >= 0.01]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="bf16,fp8,clover", help="clover:codes with --recompute=codes")
    parser.add_argument("--depth", type=int, default=20, help="of the nanochat whose block is counted")
    parser.add_argument("--rows", type=int, default=16, help="of 2,048 tokens")
    parser.add_argument("--sm", type=int, choices=sorted(PROCESSORS), default=90, help="of the GPU")
    parser.add_argument("--out", default="", help="write JSON here")
    args = parser.parse_args(argv)
    if args.depth < 2 or args.depth % 2 or args.rows < 1:
        raise UserError("--depth must be even, --rows at least 1")
    result = {}
    for method in args.methods.split(","):
        name, _, recompute = method.partition(":")
        result[method] = found = count(name, args.depth, args.rows, args.sm, recompute or "none")
        rows = [[k["pass"], k["kind"], k["bytes"], str(k["read"]), str(k["written"]), k["of"][:60]] for k in found]
        print(table([method, "kind", "bytes", "read", "written", "of"], rows))
        for kind in ("glue", "quantizer"):
            print(f"{method}, {kind}: {sum(k['bytes'] for k in found if k['kind'] == kind):.1f} bytes")
    if args.out:
        settings = {"torch": torch.__version__, **vars(args)}
        atomic_write(Path(args.out), json.dumps({"settings": settings, "kernels": result}) + "\n")


if __name__ == "__main__":
    run_main(main)
