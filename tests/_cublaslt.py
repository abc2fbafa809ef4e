"""cuBLASLt as nvfp4_kernels.cublas calls it, on a CPU.

Every argument is checked, and the product is made of the bytes at the addresses that the call names. What the library
of a Blackwell does beyond that, no test here knows.
"""

import ctypes
from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4.format import decode, unswizzle_scales

NOT_SUPPORTED = 15  # cublasStatus_t
DTYPES = {0: torch.float32, 14: torch.bfloat16}  # cudaDataType_t of a result
FP4, E4M3, E5M2 = 33, 28, 29


def memory(address: ctypes.c_void_p, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an address, which may be written to."""
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address.value), dtype=torch.uint8).view(dtype)


class Form(NamedTuple):
    """Of operands: dtypes of what memory holds, elements in a byte, and elements that have one scale."""

    element: torch.dtype
    scale: torch.dtype
    in_byte: int
    block: int

    def bytes_of_scales(self, rows: int, k: int) -> int:
        """Of (rows, k) values, in tiles of 128x4."""
        return -(-rows // 128) * -(-k // (4 * self.block)) * 512


FORMS = {
    FP4: Form(torch.uint8, torch.float8_e4m3fn, 2, 16),
    E4M3: Form(torch.float8_e4m3fn, torch.float8_e8m0fnu, 1, 32),
    E5M2: Form(torch.float8_e5m2, torch.float8_e8m0fnu, 1, 32),
}


PAIRS = ((FP4, FP4), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))


def multiply(a, a_scales, b, b_scales, alpha):
    """FP32 (M, N) of codes (M, K/2), (N, K/2), flat scales in tiles, and alpha ()."""
    x, y = (
        decode(codes, unswizzle_scales(scales, codes.shape[0], codes.shape[1] // 8))
        for codes, scales in ((a, a_scales), (b, b_scales))
    )
    return alpha * (x @ y.T)


def multiply_8_bits(a, a_scales, b, b_scales, alpha):
    """FP32 (M, N) of 8-bit numbers (M, K), (N, K), and flat E8M0 scales in tiles."""
    x, y = (
        t.float() * unswizzle_scales(scales, len(t), t.shape[1] // 32).float().repeat_interleave(32, 1)
        for t, scales in ((a, a_scales), (b, b_scales))
    )
    return alpha * (x @ y.T)


class SimulatedCublasLt:
    """multiply: may be replaced by a faulty one. calls: (stream, (M, N, K), dtype, alpha, beta) of each product."""

    def __init__(self, multiply=multiply):
        self.multiply, self.calls, self.alive, self.made = multiply, [], {}, 0

    def _new(self, pointer, content) -> int:
        self.made += 1
        pointer._obj.value = self.made
        self.alive[self.made] = content
        return 0

    def cublasLtMatmulDescCreate(self, pointer, compute, scale):
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._new(pointer, {})

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size):
        assert size.value == ctypes.sizeof(value._obj) == (8 if attribute in (17, 18) else 4)
        self.alive[description.value][attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, pointer, kind, rows, columns, leading):
        return self._new(pointer, (kind, rows.value, columns.value, leading.value))

    def cublasLtMatmulPreferenceCreate(self, pointer):
        return self._new(pointer, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        assert attribute == 1 and size.value == 8 and value._obj.value > 0  # MAX_WORKSPACE_BYTES
        return 0

    def _destroy(self, pointer):
        del self.alive[pointer.value]
        return 0

    cublasLtMatmulPreferenceDestroy = cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = _destroy

    def _shape(self, description, b, a, c, d):
        """(M, N, K, dtype) of the layouts, which must be those of a product of rows."""
        attributes = self.alive[description.value]
        assert attributes[17] and attributes[18]  # no algorithm without the scales' addresses
        # Pointers on the device; the first operand transposed, the second not; FP4 has E4M3 scales of 16 values.
        assert {key: attributes[key] for key in (2, 3, 4)} == {2: 1, 3: 1, 4: 0}
        (kind_b, k, n, ld_b), (kind_a, k_a, m, ld_a) = self.alive[b.value], self.alive[a.value]
        assert (kind_a, kind_b) in PAIRS and ld_a == ld_b == k == k_a and c.value == d.value
        assert attributes[31] == attributes[32] == (1 if kind_a == FP4 else 2)  # E8M0 scales of 32 values for FP8
        kind, *out = self.alive[d.value]
        assert out == [n, m, n]
        return m, n, k, DTYPES[kind]

    def cublasLtMatmulAlgoGetHeuristic(self, handle, description, b, a, c, d, preference, asked, found, count):
        m, n, k, _ = self._shape(description, b, a, c, d)
        assert handle.value and preference.value in self.alive and asked == 1
        count._obj.value = int(n % 16 == 0 and k % 32 == 0)
        found._obj.workspace = 256
        return 0 if count._obj.value else NOT_SUPPORTED

    def cublasLtMatmul(
        self, handle, description, alpha, b, of_b, a, of_a, beta, c, of_c, d, of_d, algorithm, workspace, size, stream
    ):
        m, n, k, dtype = self._shape(description, of_b, of_a, of_c, of_d)
        assert c.value == d.value and size.value == algorithm._obj.workspace and workspace.value
        forms = [FORMS[self.alive[layout.value][0]] for layout in (of_a, of_b)]
        attributes = self.alive[description.value]
        operands = []
        for at, rows, scales, form in ((a, m, attributes[18], forms[0]), (b, n, attributes[17], forms[1])):
            values = memory(at, rows * k // form.in_byte, form.element).view(rows, -1)
            operands += [values, memory(ctypes.c_void_p(scales), form.bytes_of_scales(rows, k), form.scale)]
        alpha, beta = (memory(at, 1, torch.float32)[0].clone() for at in (alpha, beta))
        out = memory(d, m * n, dtype).view(m, n)
        product = (self.multiply if form.in_byte == 2 else multiply_8_bits)(*operands, alpha)
        out.copy_(product + beta * out.float() if beta else product)  # with beta 0 nothing is read, NaN neither
        self.calls.append((stream.value, (m, n, k), dtype, float(alpha), float(beta)))
        return 0
