"""The kernels compiled ahead of time for GPUs that are not here (_instructions.py): what the compiler made of them.

Each target has a process of its own, because Triton's interpreter, which the other tests use, cannot be switched off
again.
"""

import importlib
import json
import re
from collections import Counter
from pathlib import Path

import _instructions as instructions
import pytest
import torch

import nanochat_fp4 as nf

ROOT = Path(__file__).resolve().parents[2]

# Kernels run for real on sm_90. sm_121 is the GB10.
ARCHITECTURES = tuple(pytest.param(n, marks=[pytest.mark.slow] * (n != 120)) for n in (90, 100, 120, 121))
MATRIX_PRODUCT = {90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync", 121: "mma.sync"}
BLACKWELL = (100, 120, 121)  # rounding to E2M1 is an instruction, and the operands of a GEMM are codes


# --------------------------------------------------------------------------------------------------------------------


def compiled(fork_server, arch, methods, cache, every_input=False) -> list[dict]:
    pytest.importorskip("triton")
    code = f"""
import json
import _instructions as t
for record in t.compile_kernels({arch}, {list(methods)}, {every_input}):
    print("RECORD", json.dumps(record))
"""
    (out,) = fork_server.run_ranks(code, 1, env={"NVFP4_KERNELS": "triton", "TRITON_CACHE_DIR": str(cache)})
    return [json.loads(line.removeprefix("RECORD ")) for line in out.splitlines() if line.startswith("RECORD ")]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def clover(fork_server, arch, tmp_path_factory) -> list[dict]:
    """What clover launches on such a GPU."""
    return compiled(fork_server, arch, ["clover"], tmp_path_factory.mktemp(f"sm_{arch}"))


def table(rows) -> str:
    keys = ("kernel", "registers", "stack", "spills", "shared", "instructions", "loops", "constants")
    return "\n" + "\n".join("  ".join(str(r[k]) for k in keys) for r in rows)


def test_clovers_kernels_compile(clover, arch):
    names = Counter(r["kernel"] for r in clover)
    print(table(clover))
    # Rotations: E and E^T in one launch, the same with the gradient of ReLU^2 where there is neither wgmma nor tcgen05,
    # and the requantization of weight and input, which are one kernel.
    assert names["rotate_quantize_kernel"] == (3 if arch >= 120 else 2)
    expected = {"amax", "quantize", "quantize_both", "relu_squared", "rotate_quantize"}
    everywhere = {"repair", "decode", "swizzle", "losses"}
    expected |= {"finish", "transpose_square"} if arch in BLACKWELL else everywhere
    assert {f"{name}_kernel" for name in expected} == set(names) - ({"swizzle_kernel"} if arch in BLACKWELL else set())
    assert all(re.fullmatch(rf"sm_{arch}[af]?", r["target"]) for r in clover)


def test_clovers_kernels_do_not_spill(clover, arch):
    """But for a few bytes of the rotating kernel, which stay in the L1 cache: other versions of Triton differ."""
    spilling = [r for r in clover if r["stack"] > (16 if r["kernel"] == "rotate_quantize_kernel" else 0)]
    assert not spilling, table(spilling)


def test_the_compiler_loses_no_number(fork_server, tmp_path):
    """As ptxas 12.8 did for sm_90 with numbers that were stored and became a part of a word."""
    kernels = compiled(fork_server, 90, [], tmp_path)
    assert "quantize_both_kernel" in {r["kernel"] for r in kernels}
    assert not [r for r in kernels if r["lost"]]


def test_rounding_to_e2m1_is_an_instruction_where_there_is_one(clover, arch):
    """In what the compiler was given and in what it made: each for two values. sm_90 has none, and a rotation to BF16
    does without."""
    for r in clover:
        if r["kernel"] in ("quantize_kernel", "rotate_quantize_kernel"):
            codes = "'FOUR': True" in r["constants"] or "STORE_CODES=True" in r["constants"]
            assert all(count >= 8 if arch in BLACKWELL and codes else count == 0 for count in r["conversions"]), r
        assert r["shared"] <= (99 if arch >= 120 else 227) * 1024


def test_the_rotation_runs_on_tensor_cores(clover, arch):
    for r in clover:
        multiplies = r["kernel"] == "rotate_quantize_kernel"
        assert r["products"] == ([MATRIX_PRODUCT[arch]] if multiplies else []), r["kernel"]


def test_as_many_rotating_programs_are_launched_as_are_resident(fork_server, arch, tmp_path):
    """Of 65536 registers, 228 KiB of shared memory (sm_12x: 100 KiB) and 512 columns of tensor memory, for every row of
    METHODS."""
    records = compiled(fork_server, arch, [method for method in nf.METHODS if method != "bf16"], tmp_path)
    rotating = [r for r in records if r["kernel"] == "rotate_quantize_kernel"]
    assert len(rotating) > 4
    # Inputs are BF16 here, and nothing is written in FP32 to be rotated: 8-bit operands are read as they are.
    assert any("'FROM_E4M3': True" in r["constants"] for r in rotating)
    assert not any("'FP32': True" in r["constants"] for r in rotating)
    # Without wgmma and tcgen05 the gradient of ReLU^2 is not written before it is rotated.
    assert any("'FACTORS': True" in r["constants"] for r in rotating) == (arch >= 120)
    for r in rotating:
        assert r["missing_arguments"] == 0
        registers = -(-r["registers"] // 8) * 8 * 32 * r["warps"]
        resident = min(65536 // registers, (100 if arch >= 120 else 228) * 1024 // (r["shared"] + 1024))
        if r["tensor_memory"]:
            resident = min(resident, 512 // r["tensor_memory"])
        assert resident >= 2, table([r])
        strips = 32 * (2 - r["constants"].count(": None"))  # of the operands; no more programs are launched
        assert r["programs"] == min(resident * instructions.MULTIPROCESSORS, strips), table([r])


# Instructions an element on sm_90, and the largest share of them that a GPU may take: more is a slower kernel.
INSTRUCTIONS = {
    "requantize": 30.2,
    "rotate grad_output": 22.2,
    "rotate gradient of ReLU^2": 28.3,  # not on sm_90, nor on sm_100
    "quantize rows": 33.1,
    "quantize rows and 8 bits": 36.0,
}
SHARES = {90: 1.15, 100: 0.72, 120: 0.95, 121: 0.95}


def test_kernels_take_no_more_instructions_than_before(clover, arch):
    found = {}
    for r in clover:
        if r["kernel"] in instructions.ELEMENTS:
            name = instructions.label(r).partition(" to ")[0]
            found[name] = max(*instructions.per_element(r), found.get(name, 0.0), 0.0)
    assert all(8 < found[name] <= SHARES[arch] * most for name, most in INSTRUCTIONS.items() if name in found), found
    assert {"requantize", "rotate grad_output"} <= found.keys()


@pytest.mark.slow
def test_every_method_and_input_compiles(fork_server, arch, tmp_path):
    from _rows import METHOD_TABLE

    methods = [m for m in METHOD_TABLE if m != "bf16"]
    every = compiled(fork_server, arch, methods, tmp_path, every_input=True)
    print(table(every))
    assert len(every) > 20
    assert not [r for r in every if r["lost"]]
    assert all(r["products"] == [MATRIX_PRODUCT[arch]] for r in every if r["kernel"] == "rotate_quantize_kernel")


# --------------------------------------------------------------------------------------------------------------------
# Rules that hold for every module of kernels/.


def test_a_kernel_has_at_most_thirty_parameters():
    pytest.importorskip("triton")
    kernels = {}
    for path in (ROOT / "kernels" / "nvfp4_kernels").glob("*.py"):
        module = importlib.import_module(f"nvfp4_kernels.{path.stem}")
        kernels |= {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    assert "rotate_quantize_kernel" in kernels
    counts = {name: len(kernel.arg_names) for name, kernel in kernels.items()}
    assert max(counts.values()) <= 30, counts


def test_no_module_of_the_kernels_knows_of_processes():
    """An amax over several processes is the caller's."""
    for path in (ROOT / "kernels" / "nvfp4_kernels").glob("*.py"):
        assert not re.search(r"torch\.distributed|import distributed", path.read_text()), path


# --------------------------------------------------------------------------------------------------------------------
# The operators under torch.compile: what they say they return, and no graph breaks.


def operator_calls():
    """(operator, arguments), of each kind of result once, on tensors that need padding."""
    import nvfp4_kernels.decode
    import nvfp4_kernels.quantize
    import nvfp4_kernels.relu_squared  # noqa: F401
    from nvfp4_kernels.rotate import NONE, RotatedOperand

    op = torch.ops.nvfp4
    x, seed = torch.randn(40, 48), torch.tensor(3)
    codes = op.quantize.default(x, None, None, 0, 6.0, 256.0, [1.0, 1.5], False, 1, True)
    eden = RotatedOperand(6.07, 256.0, (1.0,), False, True, 128, 2, 3)
    eden_codes = eden._replace(emulated=False)
    aligned = RotatedOperand(5.6, 448.0, (1.0,), True, False, 16, 4, 5)
    aligned_codes = aligned._replace(emulated=False)

    def side(operand: RotatedOperand | None) -> tuple:
        return *(operand or NONE), *((seed, seed) if operand else (None, None))

    yield op.amax.default, (x,)
    for block_rows, stochastic, decode in ((16, False, True), (1, True, False)):
        constants = (0, 6.0, 448.0, [1.0], stochastic, block_rows, decode)
        yield op.quantize.default, (x.bfloat16(), None, seed, *constants)
    yield op.decode.default, codes[:2]
    yield op.transpose_square.default, (codes[0][:32], codes[1][:32])
    yield op.relu_squared.default, (x, seed)
    yield op.quantize_relu_squared.default, (x.bfloat16(), seed, 6.0, 256.0, [1.0, 1.5], True)
    for four in (False, True):
        yield op.quantize_relu_squared.default, (x, seed, 6.0, 256.0, [1.0], False, True, 448.0, four)
    arguments = x, None, None
    for row, col in ((eden, aligned_codes), (eden_codes, aligned)):
        yield op.rotate_quantize_sides.default, (*arguments, *side(row), *side(col), torch.full((2,), 9.0))
    yield op.rotate_quantize_sides.default, (*codes[:3], *side(None), *side(eden), None)
    yield op.rotate_quantize_sides.default, (x.to(torch.float8_e4m3fn), None, x[0, 0], *side(None), *side(eden), None)
    kept = torch.full(x.shape, 7, dtype=torch.uint8), torch.full((40, 1), 0.1)
    yield op.rotate_quantize_sides.default, (x, *kept, *side(eden), *side(aligned_codes), torch.full((2,), 9.0))
    yield op.rotated_amax.default, (*arguments, *side(eden), *side(aligned))


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a CPU, in the interpreter")


@interpreted
def test_operators_return_what_their_fakes_say_and_leave_their_inputs_alone():
    """And nothing that they return shares memory. torch's own check of the schema cannot do float8."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen = set()
    for op, arguments in operator_calls():
        inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
        before = [a.clone() for a in inputs]
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        real, fake = ([v] if isinstance(v, torch.Tensor) else list(v) for v in (real, fake))
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride()), (op, arguments)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(inputs, before) if a.dim())
        pointers = [t.data_ptr() for t in real if t.numel()]
        assert len(set(pointers)) == len(pointers) and not set(pointers) & {a.data_ptr() for a in inputs}, op
        if op not in seen:  # fakes with symbolic shapes, functionalization
            seen.add(op)
            torch.library.opcheck(op, arguments, test_utils="test_aot_dispatch_dynamic")
    assert len(seen) == 8


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["clover", pytest.param("nvidia", marks=pytest.mark.slow)])
def test_a_layer_compiles_without_graph_breaks(method, monkeypatch):
    """Forward and backward through the kernels, the same numbers as without a compiler, no recompilation."""
    pytest.importorskip("triton")
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    torch._dynamo.reset()
    linear = nf.QuantLinear(64, 48, method=method)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x, e = torch.randn(40, 64), torch.randn(40, 48)
        results = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            for module in (linear, compiled):
                torch.manual_seed(2)
                leaf = x.clone().requires_grad_()
                y = module(leaf)
                results.append((y.detach(), *torch.autograd.grad(y, (leaf, linear.weight), e)))
        for got, want in zip(*results):
            assert torch.equal(got, want)
