"""Peak FLOP/s by a GPU's name; memory, usable CPUs and threads; what a measurement is recorded with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanochat_fp4 import common, hardware
from nanochat_fp4.common import set_cpu_threads
from nanochat_fp4.hardware import environment_info, get_peak_flops, usable_cpus


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
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("", None),
    ],
)
def test_peak_flops(name, tflops):
    assert get_peak_flops(name) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize(
    "files, quota",
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "damaged"}, None),
    ],
)
def test_quota_of_a_cgroup(tmp_path, monkeypatch, files, quota):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cpus(tmp_path) == (8 if quota is None else max(1, int(quota)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert usable_cpus(tmp_path) == 1


def test_memory_that_programs_can_take(tmp_path):
    assert hardware.available_memory(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4 kB\nMemFree:   1 kB\nMemAvailable:    3 kB\n")
    assert hardware.available_memory(tmp_path) == 3072


def test_threads_of_a_model(monkeypatch):
    """A narrow model has one thread, a wide one has the usable CPUs; OMP_NUM_THREADS wins."""
    monkeypatch.setattr(common, "usable_cpus", lambda: 5)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for width in (128, 2048):
        set_cpu_threads(torch.device("cpu"), width)
    set_cpu_threads(torch.device("meta"), 2048)
    assert taken == [1, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_cpu_threads(torch.device("cpu"), 128)
    assert taken == [1, 5]


def test_shell_scripts_ask_without_torch():
    command = [sys.executable, "-X", "importtime", hardware.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert int(done.stdout) == usable_cpus() and "torch" not in done.stderr


def test_environment_info_can_be_stored():
    info = json.loads(json.dumps(environment_info()))
    assert info["torch"] == torch.__version__ and info["cpu"] and info["cpu_count"] >= 1
    assert (info["gpu"] is None) == (not torch.cuda.is_available())
    assert {"python", "triton", "driver", "commit", "gpu_count", "platform"} <= set(info)


@pytest.mark.parametrize(
    "found, word",
    [
        ({"gpu": None, "torch": "2.13.0+cpu", "triton": None}, ""),
        ({"gpu": "H100", "torch": "2.11.0+cu130", "triton": "3.6.0"}, "are of this pair"),
        ({"gpu": "H100", "torch": "2.13.0", "triton": "3.7.1"}, "never run"),
        ({"gpu": "H100", "torch": "2.11.0", "triton": "3.7.1"}, "never run"),
        ({"gpu": "H100"}, "never run"),  # of a run of an older version
    ],
)
def test_versions_that_no_gpu_has_run_are_said(found, word):
    assert word in hardware.about_versions(found) and bool(word) == bool(hardware.about_versions(found))


def test_a_gpu_gets_the_versions_that_the_results_are_of():
    pins = (Path(__file__).parents[1] / "requirements-gpu.txt").read_text()
    assert all(f"\n{name}=={version}." in pins for name, version in hardware.GPU_RESULTS.items())
