"""What this machine can do: a GPU's peak FLOP/s, the bytes of memory."""

import os
import re

# Dense BF16 tensor-core peak with FP32 accumulation, FLOP/s, from the vendors' data sheets. First match wins, so
# longer names come first.
_PEAK_FLOPS = [
    (r"gb300|b300", 2.25e15),
    (r"gb200|grace blackwell", 2.5e15),
    (r"\bb200", 2.25e15),
    (r"\bb100", 1.8e15),
    (r"h200.*(nvl|pcie)", 836e12),
    (r"gh200|h200", 989e12),
    (r"h100.*nvl", 835e12),
    (r"h100.*pcie", 756e12),
    (r"h100", 989e12),
    (r"h800.*pcie", 756e12),
    (r"h800", 989e12),
    (r"\bh20\b", 148e12),
    (r"a100|a800", 312e12),
    (r"\ba40\b", 149.7e12),
    (r"\ba30\b", 165e12),
    (r"\ba10\b", 125e12),
    (r"\bl40s", 362e12),
    (r"\bl40\b", 181e12),
    (r"\bl4\b", 121e12),
    (r"mi355", 2.5e15),
    (r"mi325|mi300x", 1.3074e15),
    (r"mi300a", 980.6e12),
    (r"mi250x", 383e12),
    (r"mi250", 362.1e12),
    (r"rtx 5090", 209.5e12),
    (r"rtx 4090", 165.2e12),
    (r"rtx 3090", 71e12),
]


def get_peak_flops(device_name: str) -> float | None:
    """Dense BF16 peak of a GPU in FLOP/s from its name (torch.cuda.get_device_name); None where it is not known.

    The BF16 peak is the yardstick for every method, so that MFU above 100% is possible in FP4 on a Blackwell.
    A caller that gets None shows no MFU rather than a wrong one.
    """
    name = device_name.lower()
    for pattern, flops in _PEAK_FLOPS:
        if re.search(pattern, name):
            return flops
    return None


def physical_memory() -> int:
    """Bytes of memory in this machine; 8 GB where it does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
