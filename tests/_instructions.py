"""Instructions of the kernels for GPUs that are not here: compiled ahead of time, counted in SASS.

QuantLinear runs on a CPU, forward and backward, with every launch of a kernel replaced by its compilation: so what is
compiled is what training launches, with its compile-time arguments, its specialization on alignment and its launch
options, for the GEMM that the GPU has. What the layer computes is garbage.

Instructions are those of a kernel's loop (of the whole kernel where it has none) by the elements that a thread has of
a tile, for each operand that is made: 64 of a rotating kernel's strip, 16 of the others. Spills are loads and stores of
local memory in the whole kernel. ptxas, cuobjdump and the compiler are Triton's own.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch

BLACKWELL = (100, 120, 121)  # the operands of a GEMM are codes
MULTIPROCESSORS = 4  # of the GPU that is not here
# R1 is the stack's. ptxas names it also where it has lost a value, and beside a number that is rounded alone.
LOST = r"^(?!.*(?: R1, c\[|PACK_AB.* R1(?:\.reuse)?, R\d+(?:\.reuse)?, RZ )).*\bR1\b"
ELEMENTS = {"quantize_kernel": 16, "rotate_quantize_kernel": 64}  # of a thread, of a tile


def compiled_instead_of_launched(arch: int) -> dict[str, dict]:
    """From here on this process compiles kernels for such a GPU where it would launch them. Returns the dict that gets
    a record of each different one. Runs in the process without the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    class Utilities:
        """The resources of a multiprocessor. The registers of a kernel are in its cubin."""

        def get_device_properties(self, device):
            shared = (227 if arch < 120 else 99) * 1024
            return {"max_num_regs": 65536, "max_shared_mem": shared, "multiprocessor_count": MULTIPROCESSORS}

        def load_binary(self, name, cubin, shared, device):
            return None, None, _dump(cubin)[1]["REG"], 0, 1024

    class NoGPU:
        """As much of a driver as the compiler asks for."""

        utils = Utilities()

        def launcher_cls(self, source, metadata):
            return None

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

    triton.runtime.driver.set_active(NoGPU())
    launched: dict[str, dict] = {}
    original = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in launched:
            constants = {self.arg_names[k[0]]: v for k, v in kernel.src.constants.items() if len(k) == 1}
            launched[kernel.hash] = {"kernel": self.fn.__name__, "constants": repr(constants), **_inspect(kernel)}
        if not warmup:
            kernel[grid](*args, *(kwargs[name] for name in self.arg_names[len(args) :] if name in kwargs))
        return kernel

    def launcher(kernel, grid):
        """The compiled kernel takes all arguments in their order. It knows no names and no defaults."""
        missing, record = len(kernel.src.fn.arg_names), launched[kernel.hash]
        most = max(grid[0], record.get("programs", 0))
        return lambda *args: record.update(programs=most, missing_arguments=missing - len(args))

    JITFunction.run, CompiledKernel.__getitem__ = run, launcher

    from nvfp4_kernels import quantize

    from nanochat_fp4.nvfp4 import dispatch

    dispatch.no_kernels_reason = lambda device_type: None
    quantize.conversion_problem = lambda: None  # it needs a GPU
    return launched


def compile_kernels(arch: int, methods: list[str], every_input: bool) -> list[dict]:
    """
    One record for each different kernel that the methods launch, with operands for the GEMM that the GPU has, and for
    the emulated one, too, where every input is wanted. Runs in the process without the interpreter.
    """
    launched = compiled_instead_of_launched(arch)
    import _rows  # noqa: F401 - it registers the rows of tests
    from nvfp4_kernels.decode import decode, swizzle, transpose_square
    from nvfp4_kernels.quantize import amax, quantize, quantize_both
    from nvfp4_kernels.relu_squared import quantize_relu_squared, relu_squared

    import nanochat_fp4 as nf
    from nanochat_fp4.nvfp4 import dispatch
    from nanochat_fp4.nvfp4.epilogue import relu_squared_linear

    cases = [(torch.bfloat16, torch.float32, 512)]
    if every_input:  # FP32 activations, BF16 weights, a number of tokens that nothing divides
        cases += [(torch.float32, torch.float32, 512), (torch.bfloat16, torch.bfloat16, 507)]

    def train(method, dtype, weight_dtype, tokens):
        up, down = (nf.QuantLinear(*sizes, method=method, dtype=weight_dtype) for sizes in ((256, 512), (512, 256)))
        x = torch.zeros(tokens, 256, dtype=dtype, requires_grad=True)
        y = up(x) if every_input else relu_squared_linear(x, up, down)  # Half as many kernels for every method.
        y.backward(torch.zeros_like(y))

    for method in methods if every_input or arch not in BLACKWELL else ():
        for case in cases:
            train(method, *case)
    x, seed, constants = torch.zeros(8, 1536, dtype=torch.bfloat16), torch.tensor(1), (6.0, 256.0, [1.0, 1.5])
    tiles = arch in BLACKWELL
    quantize(x, torch.ones(()), None, 0, *constants, False, 1, False, False, tiles, 448.0)
    for four in (False, True):
        quantize_relu_squared(x, seed, *constants, False, tiles, 448.0, four)
    for rows in (8, 512):  # 512: a tile without masks
        quantize_both(torch.zeros(rows, 1536, dtype=torch.bfloat16), torch.ones(()))
    operand = torch.zeros(256, 128, dtype=torch.uint8), torch.zeros(256, 16, dtype=torch.float8_e4m3fn)
    if every_input or arch not in BLACKWELL:  # kernels that are the same everywhere
        decode(*operand)
        swizzle(operand[1])
        for dtype, columns in ((torch.bfloat16, 1536), (torch.float32, 100)):
            relu_squared(torch.zeros(8, columns, dtype=dtype), torch.tensor(1))
        _launch_loss()
        quantize_relu_squared(x, seed, *constants, True)
        amax(torch.empty(1 << 28, dtype=torch.bfloat16))  # memory that nobody touches: the kernel for large tensors
    if arch in BLACKWELL:
        transpose_square(*operand)
        dispatch.native_gemm = lambda device_type: "cublaslt"  # the GEMM reads codes
        dispatch.mm = lambda a, b, out_dtype, name, _: torch.zeros(len(a.codes), len(b.codes), dtype=out_dtype)
        for method in methods:
            train(method, *cases[0])
    return list(launched.values())


def _launch_loss() -> None:
    """Of BF16 logits: losses alone, and with the gradient in place."""
    from nvfp4_kernels import cross_entropy

    logits, per_token = torch.zeros(256, 4096, dtype=torch.bfloat16), torch.zeros(256)
    tokens = logits, torch.zeros(256, dtype=torch.int64)
    for token_weight in (None, per_token):
        cross_entropy.losses(*tokens, token_weight, 4096, 15.0)


def _dump(cubin: bytes) -> tuple[str, dict[str, int]]:
    """The instructions of a kernel, and its resources."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [cuobjdump, "-res-usage", "-sass", f.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sass, {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", sass)}


def _inspect(kernel) -> dict:
    """Registers, stack and instructions of a compiled kernel; loops: how many of them are in each."""
    sass, numbers = _dump(kernel.asm["cubin"])
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass))
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/[^;\n]*\bBRA\b[^;\n]*\b0x([0-9a-f]+)", sass)
    exits = [int(at, 16) for at in re.findall(r"/\*([0-9a-f]{4,})\*/\s+EXIT\b", sass)]
    jumps = [(int(to, 16), int(at, 16)) for at, to in branches]
    # What waits is put behind the end of a kernel and jumps back: no loop. Of loops inside of each other the outermost.
    jumps = [(to, at) for to, at in jumps if not any(to < e < at for e in exits)]
    jumps = [j for j in jumps if not any(o != j and o[0] <= j[0] and j[1] <= o[1] for o in jumps)]
    loops = [(at - to) // 16 + 1 for to, at in jumps]  # an instruction has 16 bytes
    ptx = kernel.asm["ptx"]
    return {
        "registers": numbers["REG"],
        "stack": numbers["STACK"] + numbers["LOCAL"],
        "shared": kernel.metadata.shared,
        "tensor_memory": getattr(kernel.metadata, "tmem_size", None) or 0,
        "spills": opcodes["LDL"] + opcodes["STL"],
        "conversions": [ptx.count("cvt.rn.satfinite.e2m1x2.f32"), len(re.findall(r"F2FP\S*\.E2M1\.F32", sass))],
        "instructions": sum(opcodes.values()),
        "lost": 0 if numbers["STACK"] else len(re.findall(LOST, sass, re.M)),
        "loops": sorted((size for size in loops if size > 32), reverse=True),
        "warps": kernel.metadata.num_warps,
        "target": re.search(r"\.target (\w+)", ptx).group(1),
        "byte_loads": len(re.findall(r"ld\.global\S*\.[bu]8", ptx)),
        "products": sorted(set(re.findall(r"wgmma\.mma_async|tcgen05\.mma\b|mma\.sync", ptx))),
        "kinds": sorted(set(re.findall(r"(?:mma|mma\.sync)\.\S*(?:block_scale|mxf4nvf4)\S*", ptx))),
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "approximate_divisions": len(re.findall(r"div\.full\.f32|div\.approx", ptx)),
    }


def label(record: dict) -> str:
    """What a kernel of ELEMENTS makes of what."""
    constants = record["constants"]
    if record["kernel"] == "quantize_kernel":
        source = "ReLU^2" if "'SQUARE': True" in constants else "rows"
        source += " and 8 bits" if "'EIGHT': 448.0" in constants else ""
        made = {"'FOUR': True": "codes", "'DECODE': True": "BF16"}
        return f"quantize {source} to " + " and ".join(name for which, name in made.items() if which in constants)
    source = "requantize" if re.search("'FROM_(CODES|E4M3)': True", constants) else "rotate grad_output"
    source = "rotate gradient of ReLU^2" if "'FACTORS': True" in constants else source
    return f"{source} to {'codes' if 'STORE_CODES=True' in constants else 'BF16'}"


def per_element(record: dict) -> list[float]:
    """Instructions per element, of each loop over tiles."""
    elements = ELEMENTS[record["kernel"]]
    return [round(size / elements, 1) for size in record["loops"] or [record["instructions"]]]
