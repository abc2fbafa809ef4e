"""What GPUs reach: rates for the predictions of step_time."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """GB/s and TFLOP/s (fp8: None is twice BF16's) as programs reach them, 10^12 instructions a second of all lanes.
    longer is of LONGER. launch is the microseconds of an empty kernel.
    multiprocessors: 0 where idle ones cost nothing (at 145 W power is the limit, and the others run faster).
    cublaslt is (expected, worst) of fp4 in the library that torch calls, where fp4 is another one's: the best case."""

    name: str
    bandwidth: float
    bf16: float
    fp4: float | None
    instructions: float
    source: str = field(repr=False)
    longer: float = 1.0
    fp8: float | None = None
    launch: float = 0.0
    multiprocessors: int = 132
    cublaslt: tuple[float, float] | None = None


# Instructions over sm_90's: the largest ratio of clover's kernels (`python -m lab.measure.instructions`, Triton 3.7.1).
LONGER = {100: 0.68, 120: 0.9}
# Achieved on an H200: 4250 of 4800 GB/s, 700 of 989 TFLOP/s. The same shares are assumed of a B200.
COPY_SHARE, GEMM_SHARE = 4250 / 4800, 700 / 989
# `python -m lab.predict.blackwell` fits these (GB/s, BF16 and FP4 TFLOP/s, microseconds) and compares.
RTX5090_FIT, PRO4000_FIT = (1262, 238, 1510, 5.1), (609, 85, 340, 14.3)
# Of the RTX 5090: data sheet (GB/s, dense BF16 and FP4 TFLOP/s); FP4 of cuBLASLt (xinyang-zhou/sm120_nvfp4_ops) and of
# Triton's dot_scaled (vllm#38338). The fit's FP4 is cuDNN's, as Quartet II calls it.
RTX5090_SHEET, RTX5090_LIBRARIES = (1792, 209.5, 1676), (1154, 874)
B300_RATIO = 3.48  # FP4 over BF16 GEMMs of a 5B model on a B300 (TransformerEngine#2863)
FITTED = "fitted to published times (lab/predict/blackwell.py)"


def _geforce(name: str, bandwidth: float, fp4: float, multiprocessors: int, ghz: float, **known) -> Machine:
    """A card of sm_12x by its data sheet (GB/s, dense FP4 TFLOP/s; BF16 has an eighth), at the RTX 5090's shares."""
    of_5090, share = fp4 / RTX5090_SHEET[2], [fit / sheet for fit, sheet in zip(RTX5090_FIT, RTX5090_SHEET)]
    rates = {"bandwidth": bandwidth * share[0], "bf16": fp4 / 8 * share[1], "fp4": fp4 * share[2]}
    rates |= {"cublaslt": tuple(v * of_5090 for v in RTX5090_LIBRARIES), "multiprocessors": multiprocessors}
    rest = {"source": "data sheet, at the RTX 5090's shares", "longer": LONGER[120], "launch": RTX5090_FIT[3]}
    return Machine(name, **{**rest, **rates, "instructions": multiprocessors * 128 * ghz / 1e3, **known})


def _datacenter(name: str, bf16: float, fp4: float, cublaslt: tuple[float, float], multiprocessors: int) -> Machine:
    """A card of sm_100 by its data sheet (dense TFLOP/s), at the shares of it that an H200 reaches."""
    rates = bf16 * GEMM_SHARE, fp4 * GEMM_SHARE, multiprocessors * 128 * 1.85e9 / 1e12
    source = f"data sheet (8000 GB/s, {bf16} and {fp4} TFLOP/s dense) times an H200's achieved shares"
    more = {"multiprocessors": multiprocessors, "cublaslt": tuple(v * GEMM_SHARE for v in cublaslt)}
    return Machine(name, 8000 * COPY_SHARE, *rates, source, LONGER[100], None, 5.0, **more)


MACHINES = {
    "h200": Machine("H200", 4250, 700, None, 132 * 128 * 1.755e9 / 1e12, "measured copy and GEMM"),
    "b200": _datacenter("B200", 2250, 9000, (9000, B300_RATIO * 2250), 148),
    "gb200": _datacenter("GB200", 2500, 10000, (10000, B300_RATIO * 2500), 148),
    "b300": _datacenter("B300", 2250, 13500, (B300_RATIO * 2250,) * 2, 148),
    "rtx5090": Machine(
        "RTX 5090", *RTX5090_FIT[:3], 170 * 128 * 2.41e9 / 1e12, FITTED, LONGER[120], None, RTX5090_FIT[3], 170,
        cublaslt=RTX5090_LIBRARIES,
    ),
    "rtx5080": _geforce("RTX 5080", 960, 900.5, 84, 2.617),
    "rtx5070ti": _geforce("RTX 5070 Ti", 896, 703, 70, 2.452),
    "rtx5060": _geforce("RTX 5060", 448, 307, 30, 2.497, bf16=32, cublaslt=(237, 160),
        source="data sheet at the RTX 5090's shares; BF16 and cuBLAS FP4 as Not4right/nvfp4-training measured them"),
    "rtxpro4000": Machine(
        "RTX PRO 4000", *PRO4000_FIT[:3], 70 * 128 * 2.41e9 / 1e12, FITTED, LONGER[120], None, PRO4000_FIT[3], 0,
    ),
    # The same chip as the RTX 5090 with 188 of its multiprocessors and the same memory. cuBLASLt: 1,010 to 1,137
    # TFLOP/s, where CUTLASS has 1,420 to 1,595 (Infatoshi/nvfp4-pretrain).
    "rtxpro6000": Machine(
        "RTX PRO 6000", RTX5090_FIT[0], *(188 / 170 * v for v in RTX5090_FIT[1:3]), 188 * 128 * 2.41e9 / 1e12,
        "the RTX 5090's, times 188 / 170 multiprocessors where they count", LONGER[120], None, RTX5090_FIT[3], 188,
        cublaslt=(1073.5, 1010),
    ),
    # BF16 (87 to 98 TFLOP/s) and TransformerEngine's FP4 GEMM (117 to 133) as apstenku123/nanochat measured them.
    "gb10": _geforce("GB10", 273, 500, 48, 2.418, bf16=92.5, cublaslt=(125, 117),
        source="data sheet at the RTX 5090's shares; BF16 and FP4 GEMMs as apstenku123/nanochat measured them"),
}  # fmt: skip


def machine_of(gpu: str) -> Machine | None:
    """The machine that a GPU's name (torch.cuda.get_device_name) is; None where there are no numbers for it."""
    # "RTX 5090 Laptop GPU" and "RTX 5090 D" are other chips, or the same with less power; "MIG" is a part of one.
    other = r"(?!.*\b(Laptop|Max-Q|MIG|Ti|SUPER|D)\b)"
    return next((m for m in MACHINES.values() if re.search(rf"\b{m.name}\b{other}", gpu)), None)
