"""Peak FLOP/s by a GPU's name."""

import pytest

from nanochat_fp4.hardware import get_peak_flops


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_peak_flops(name, tflops):
    assert get_peak_flops(name) == (None if tflops is None else tflops * 1e12)
