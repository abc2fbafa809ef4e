"""
What every test runs under: no GPU code without a GPU, no home directory, no network, fixed seeds, poisoned memory.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections import Counter

# A shell starts its background jobs with SIGINT ignored, and programs inherit that. Tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP, which bash cannot trap then. With a handler this process still outlives its terminal.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Before anything imports torch or triton: without a GPU, Triton kernels run in the interpreter.
# One thread: tensors this small are faster without a second one, and much faster on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_BASE_DIR = tempfile.mkdtemp(prefix="nanochat_fp4_tests_")
_OF_A_USER = "QAT_METHOD RECIPES DATA_DIR WANDB_RUN RANK LOCAL_RANK WORLD_SIZE NANOCHAT_TRACEBACK"
for _name in _OF_A_USER.split():
    os.environ.pop(_name, None)
os.environ.update(NANOCHAT_BASE_DIR=_BASE_DIR, WANDB_MODE="disabled", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
os.environ["NVFP4_COMPILE"] = "1"  # graphs of the reference, which are those of a GPU but for the kernels
os.environ.setdefault("MPLCONFIGDIR", os.path.join(_BASE_DIR, "matplotlib"))  # one list of fonts for all workers

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import random  # noqa: E402

import _rows  # noqa: E402, F401  registers them
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from _interpreter import language_replaced_once  # noqa: E402, F401

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")
    parser.addoption("--soak", action="store_true", help="also run soak tests: many random faults, tens of minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: many random faults; run with --soak")


def pytest_collection_modifyitems(config, items):
    for item in items:
        for option in ("slow", "soak"):
            if item.get_closest_marker(option) and not config.getoption(f"--{option}"):
                item.add_marker(pytest.mark.skip(reason=f"needs --{option}"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped, in one line."""
    reports = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.write_line("skipped: " + "; ".join(f"{n} {reason}" for reason, n in reasons.most_common()))


def pytest_unconfigure(config):
    shutil.rmtree(_BASE_DIR, ignore_errors=True)


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def frozen_garbage():
    """What is there before a module's tests is not looked through again by each gc.collect(): modules, most of all."""
    gc.collect()
    gc.freeze()


def _switches():
    """The environment variables by which this project is told what to do."""
    ours, others = ("NVFP4_", "NANOCHAT_"), ("QAT_METHOD", "TRITON_INTERPRET")
    return {name: value for name, value in os.environ.items() if name.startswith(ours) or name in others}


@pytest.fixture(autouse=True)
def environment_kept():
    """A test that leaves one of them changed fails: with NVFP4_KERNELS=triton, say, all that its process runs after it
    would be slow. What uses monkeypatch for every test asks for this first, so that monkeypatch is undone before."""
    before = _switches()
    yield
    after = _switches()
    if after != before:
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(before)
        what = ", ".join(f"{n} (was {before.get(n, 'not set')}, is {after.get(n, 'not set')})" for n in changed)
        pytest.fail(f"the test leaves the environment changed: {what}; use monkeypatch.setenv", pytrace=False)


@pytest.fixture(autouse=True)
def no_power_cuts(environment_kept, monkeypatch):
    """A killed process, unlike a power cut, loses nothing that was written: fsync only takes time here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(autouse=True)
def nothing_said(environment_kept, monkeypatch):
    """What a process says once, each test can see."""
    monkeypatch.setattr("nanochat_fp4.common.SAID", set())


@pytest.fixture
def base_dir(tmp_path, monkeypatch):
    """A NANOCHAT_BASE_DIR of its own for one test."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


# ----------------------------------------------------------------------------------------------------------------------
# Poisoned memory: whatever asks for uninitialized memory gets the worst, so that an element nobody wrote is noticed.
# NaN in floating point (0x7F is NaN in both float8 formats), 0xFF in uint8 (codes of -6), -1 in other integers.

_EMPTY = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
_NEW_EMPTY = {name: getattr(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")}

# `with torch.device(...)` collects the functions it redirects at its first use; it must see the real ones.
with torch.device("cpu"):
    torch.empty(0)


def poison(t):
    """Fill `t` with NaN or 0xFF, in place; meta and special tensors are left alone."""
    if torch.compiler.is_compiling() or type(t) is not torch.Tensor or t.layout != torch.strided:
        return t
    if t.device.type == "meta" or t.is_quantized or not t.numel():
        return t
    with torch.no_grad():
        if t.dtype.is_floating_point and t.element_size() == 1:
            t.view(torch.uint8).fill_(0x7F)
        elif t.dtype.is_floating_point or t.dtype.is_complex:
            t.fill_(float("nan"))
        elif t.dtype == torch.bool:
            t.fill_(True)
        elif t.dtype == torch.uint8:
            t.fill_(0xFF)
        elif not t.dtype.is_signed:
            t.view(torch.uint8).fill_(0xFF)
        else:
            t.fill_(-1)
    return t


def _poisoned(function):
    def wrapper(*args, **kwargs):
        return poison(function(*args, **kwargs))

    return wrapper


@pytest.fixture(autouse=True)
def poisoned_empty(environment_kept, monkeypatch):
    for name, function in _EMPTY.items():
        monkeypatch.setattr(torch, name, _poisoned(function))
    for name, function in _NEW_EMPTY.items():
        monkeypatch.setattr(torch.Tensor, name, _poisoned(function))


@pytest.fixture
def shards(tmp_path):
    """A folder of three shards with ten documents each."""
    from _samples import write_shard

    folder = tmp_path / "shards"
    folder.mkdir()
    for s in range(3):
        write_shard(folder / f"shard_{s:05d}.parquet", [f"document {s}.{i}" for i in range(10)])
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# A base directory with a little text and a tokenizer of 300 tokens, for tests that train.

_WORDS = "the of capital gold planets hot day color France opposite symbol was tomorrow number cat dog runs".split()


@pytest.fixture(scope="session")
def _tiny_base(tmp_path_factory):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nanochat_fp4.data.tokenizer import RustBPETokenizer, save_token_bytes

    base = tmp_path_factory.mktemp("tiny_base")
    rng = random.Random(0)
    documents = [" ".join(rng.choice(_WORDS) for _ in range(rng.randint(20, 200))) + "." for _ in range(600)]
    (base / "text").mkdir()
    for i in range(2):
        table = pa.table({"text": documents[i * 300 : (i + 1) * 300]})
        pq.write_table(table, base / "text" / f"shard_{i:05d}.parquet", row_group_size=30)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(documents), 300)
    tokenizer.save(base / "tokenizer")
    save_token_bytes(tokenizer, base / "tokenizer")
    return base


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory, _tiny_base):
    """Forks runs of the scripts, to be killed or given odd arguments: see _forking.py."""
    from _forking import ForkServer

    # Without Triton's interpreter, which cannot be switched off again: there is no kernel to run, but some to compile.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_") and k != "TRITON_INTERPRET"}
    environment["DATA_DIR"] = str(_tiny_base / "text")
    with ForkServer(tmp_path_factory.mktemp("forked"), environment) as server:
        yield server


@pytest.fixture
def run_ranks(fork_server):
    """run_ranks(code, ranks=2, env={}): what each rank of a gloo group prints that executes `code`."""
    return fork_server.run_ranks


@pytest.fixture
def tiny_base(_tiny_base, tmp_path, monkeypatch):
    """NANOCHAT_BASE_DIR with text (DATA_DIR) and a tokenizer, to be trained in."""
    base = tmp_path / "tiny"
    shutil.copytree(_tiny_base / "tokenizer", base / "tokenizer")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    monkeypatch.setenv("DATA_DIR", str(_tiny_base / "text"))
    return base
