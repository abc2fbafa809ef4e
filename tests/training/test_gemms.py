"""Which implementation multiplies each GEMM of a model: the choice, its table, and what a checkpoint keeps of it."""

import json
import re
from collections import Counter

import pytest
import torch
from _assertions import assert_same, final_state
from _training import BASE

from nanochat_fp4.cli import UserError
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4 import dispatch, probe
from nanochat_fp4.nvfp4.convert import convert
from nanochat_fp4.training import gemms
from nanochat_fp4.training.checkpoint_manager import load_checkpoint
from nanochat_fp4.training.gemms import ProductShape, choose
from scripts import base_train

FORWARD, WGRAD = ProductShape(4096, 1024, 512, "bfloat16"), ProductShape(1024, 512, 4096, "float32")
PRODUCTS = Counter({FORWARD: 2, WGRAD: 1})
SPEEDS = {"BF16": 2.0, "FP8": 1.0, "emulated": 4.0}
SPEEDS |= {"cublaslt": 0.9, "scaled_mm": 0.8, "dot_scaled": 0.7, "flashinfer": 0.5}


@pytest.fixture
def speeds(monkeypatch):
    """What each name takes, milliseconds or a problem; a (name, product) is more special than a name."""
    times: dict = dict(SPEEDS)

    def measured(device, name, product):
        found = times.get((name, product), times[name])
        return (None, found) if isinstance(found, str) else (found, "")

    def in_child(module, call, timeout=600):
        assert module == "nanochat_fp4.training.gemms" and call.startswith("run_jobs('cuda:0', ")
        found = []
        for result in eval(call, {"run_jobs": gemms.run_jobs}):
            if result[1] == "dies":
                return found, "ended its process with status -11 (Segmentation fault)"
            found.append(json.loads(json.dumps(result)))
        return found, ""

    monkeypatch.setattr(gemms, "measured", measured)
    monkeypatch.setattr(probe, "in_child", in_child)
    monkeypatch.setattr(dispatch, "missing_reason", lambda device, name: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "RTX")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    return times


def test_the_fastest_is_taken_for_each_product(speeds):
    choice = choose(PRODUCTS, "RTX", "cuda:0")
    assert choice.taken == {FORWARD: "flashinfer", WGRAD: "dot_scaled"}  # flashinfer makes no FP32
    speeds["emulated", WGRAD] = 0.1
    assert choose(PRODUCTS, "RTX", "cuda:0").taken[WGRAD] == "emulated"


def test_the_table(speeds):
    lines = choose(PRODUCTS, "RTX", "cuda:0").lines()
    assert "RTX" in lines[0]
    assert lines[1].split()[-9:-1] == ["times", "BF16", "FP8", "emulated", *dispatch.IMPLEMENTATIONS]
    assert lines[2].split() == "4096 x 1024 x 512 2 2 4 1 5 5 6 9 flashinfer".split()  # TFLOP/s: 4.29 GFLOP in 2 ms ...
    assert lines[3].split() == "1024 x 512 x 4096 FP32 1 2 4 1 5 5 6 - dot_scaled".split()
    assert [re.findall(r"[\d.]+ ms|\w+$", line) for line in lines[4:6]] == [
        ["1.70 ms", "6.00 ms", "BF16"],
        ["1.70 ms", "3.00 ms", "FP8"],
    ]
    # Which path ran: one that scales afterwards or adds outside moves more bytes.
    assert [line.split(":")[0] for line in lines[6:]] == ["dot_scaled", "flashinfer"]


def test_fp4_that_is_not_faster_is_said(speeds):
    speeds["FP8", FORWARD] = 0.4
    assert re.search("1.70 ms, 1.80 ms in FP8; .*: 4096 x 1024 x 512$", choose(PRODUCTS, "RTX", "cuda:0").lines()[5])


def test_a_refused_product_runs_emulated_and_loudly(speeds):
    for name in dispatch.IMPLEMENTATIONS:
        speeds[name, WGRAD] = "returns zeros"
    choice = choose(PRODUCTS, "RTX", "cuda:0")
    assert choice.taken == {FORWARD: "flashinfer", WGRAD: "emulated"}
    warning = choice.lines()[-1]
    assert re.match("WARNING: 1024 x 512 x 4096 FP32 .*4.00 ms .*2.00 in BF16", warning) and warning.count("zeros") == 3


@pytest.mark.parametrize("name", dispatch.IMPLEMENTATIONS)
def test_what_is_asked_for_by_name_is_taken_or_refused(speeds, monkeypatch, name):
    monkeypatch.setenv("NVFP4_GEMM", name)
    speeds["emulated"] = 0.01
    taken = choose(PRODUCTS, "RTX", "cuda:0").taken
    assert taken == {FORWARD: name, WGRAD: "dot_scaled" if name == "flashinfer" else name}
    speeds[name, FORWARD] = "returns zeros with subnormal scales"
    with pytest.raises(ValueError, match=f"NVFP4_GEMM={name}, .*4096 x 1024 x 512: {name} returns .*unset"):
        choose(PRODUCTS, "RTX", "cuda:0")


def test_what_ends_its_process_is_asked_no_more(speeds):
    speeds["scaled_mm"] = "dies"
    choice = choose(PRODUCTS, "RTX", "cuda:0")
    assert choice.taken == {FORWARD: "flashinfer", WGRAD: "dot_scaled"}
    assert all("Segmentation" in choice.results["scaled_mm", p][1] for p in PRODUCTS)


def test_no_memory_to_measure_is_no_fault(speeds):
    """The product is then made as before the choice."""
    for name in dispatch.IMPLEMENTATIONS:
        speeds[name, FORWARD] = "raises CUDA out of memory"
    choice = choose(PRODUCTS, "RTX", "cuda:0")
    assert FORWARD not in choice.taken and "was not measured" in choice.lines()[-1]
    stored = {"gpu": "RTX", "gemms": [[*FORWARD, "scaled_mm"]]}
    assert choose(PRODUCTS, "RTX", "cuda:0", stored).taken[FORWARD] == "scaled_mm"


def test_a_dead_gpu_ends_the_child(monkeypatch):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setattr(gemms, "measured", lambda *a: (None, "raises CUDA error: an illegal memory access"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(SystemExit, match="illegal memory access"):
        list(gemms.run_jobs("cuda:0", [("scaled_mm", *FORWARD)]))


def test_a_resume_keeps_its_gemms(speeds):
    stored = json.loads(json.dumps(choose(PRODUCTS, "RTX", "cuda:0").record))
    speeds["scaled_mm"] = 0.1  # would be taken now
    choice = choose(PRODUCTS, "RTX", "cuda:0", stored)
    assert choice.taken == {FORWARD: "flashinfer", WGRAD: "dot_scaled"} and not choice.notes
    assert choice.record == stored


def test_another_gpu_chooses_anew_and_says_so(speeds):
    stored = choose(PRODUCTS, "RTX", "cuda:0").record
    speeds["scaled_mm"] = 0.1
    choice = choose(PRODUCTS, "B200", "cuda:0", stored)
    assert set(choice.taken.values()) == {"scaled_mm"}
    assert re.search("RTX .* B200.* bits change", choice.lines()[-1])


def test_a_stored_gemm_that_is_wrong_now_is_replaced(speeds, monkeypatch):
    stored = choose(PRODUCTS, "RTX", "cuda:0").record
    speeds["flashinfer"] = "returns zeros"
    choice = choose(PRODUCTS, "RTX", "cuda:0", stored)
    assert choice.taken == dict.fromkeys(PRODUCTS, "dot_scaled")
    (note,) = choice.notes
    assert re.match("WARNING: 4096 x 1024 x 512 .*flashinfer .*dot_scaled .*returns zeros", note)
    monkeypatch.setenv("NVFP4_GEMM", "scaled_mm")
    choice = choose(PRODUCTS, "RTX", "cuda:0", stored)
    assert set(choice.taken.values()) == {"scaled_mm"} and "(NVFP4_GEMM=scaled_mm)" in choice.notes[0]


# --------------------------------------------------------------------------------------------------------------------
# In a run


@pytest.fixture
def tensor_cores(monkeypatch):
    """A machine that seems to have FP4 tensor cores. The reference makes products, dot_scaled's in two sums."""

    def mm(a, b, out_dtype, name):
        a, b = a.dequantize(), b.dequantize()
        half = a.shape[1] // 2 if name == "dot_scaled" else 0
        return (a[:, :half] @ b[:, :half].T + a[:, half:] @ b[:, half:].T).to(out_dtype)

    monkeypatch.setattr(dispatch, "no_tensor_cores_reason", lambda device_type: None)
    monkeypatch.setattr(dispatch, "mm", mm)
    monkeypatch.setattr(dispatch, "mm_add", lambda a, b, into, name: into.add_(dispatch.mm(a, b, into.dtype, name)))
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    dispatch.native_choice.cache_clear()
    dispatch.verdict.cache_clear()
    yield
    dispatch.native_choice.cache_clear()
    dispatch.verdict.cache_clear()


@pytest.fixture
def model(tensor_cores):
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=32, vocab_size=64, n_layer=2, n_head=1, n_kv_head=1, n_embd=64))
    model.init_weights()
    convert(model, "clover")
    return model


def test_the_products_are_the_models_own(model):
    """Recorded with one row and two; those of four rows follow. Nothing is left behind."""
    state = torch.get_rng_state()
    products = gemms.products_of(model, 4, 32, None)
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    recording = dispatch.RecordingLibraries()
    gemms.use(model, recording)
    gemms.try_micro_batch(model, 4, 32)
    recorded = recording.products
    model.zero_grad()
    assert recorded and products == Counter(ProductShape(*p[:3], str(p[3]).removeprefix("torch.")) for p in recorded)
    tokens = {product for product in products if 128 in product[:3]}
    assert tokens == set(products)  # of 4 x 32 tokens each


def test_a_run_uses_the_choice(model, speeds, capsys, monkeypatch):
    choice = gemms.choose_gemms(model, 4, 32, None, None)
    assert "GEMMs of a micro-batch on RTX" in capsys.readouterr().out
    wgrad = next(p for p in choice.taken if p.k == 128)
    asked, mm = set(), dispatch.mm
    monkeypatch.setattr(dispatch, "mm", lambda a, b, dtype, name: asked.add(name) or mm(a, b, dtype, name))
    gemms.try_micro_batch(model, 4, 32)
    assert asked == {"dot_scaled"}  # on a CPU all products are FP32
    stored = choice.record | {"gemms": [[*p, "scaled_mm" if p == wgrad else "emulated"] for p in choice.taken]}
    gemms.choose_gemms(model, 4, 32, None, stored)
    asked.clear()
    gemms.try_micro_batch(model, 4, 32)
    assert asked == {"scaled_mm"}


def test_a_run_saves_its_gemms_and_resumes_with_them(tensor_cores, speeds, tiny_base, capsys):
    """Another implementation is faster on the second day. The bits are those of a run without a break all the same."""

    def train(*flags):
        base_train.main([*BASE, "--method=clover", "--num-iterations=3", "--save-every=2", "--keep-last=-1", *flags])
        return "taken" in capsys.readouterr().out

    speeds["emulated"] = 9.0
    assert train()
    folder = tiny_base / "base_checkpoints"
    expected = final_state(folder / "d1_clover", 3)
    meta = load_checkpoint(folder / "d1_clover", 2, "cpu")[2]
    assert meta["gemms"]["gpu"] == "RTX" and {name for *_, name in meta["gemms"]["gemms"]} == {"dot_scaled"}
    speeds["scaled_mm"] = 0.1
    assert train("--model-tag=other")
    other = load_checkpoint(folder / "other", 3, "cpu")[2]["gemms"]["gemms"]
    assert {name for *_, name in other} == {"scaled_mm"}
    with pytest.raises(AssertionError):  # bits depend on the choice
        assert_same(final_state(folder / "other", 3), expected)
    assert train("--resume-from-step=2")
    assert_same(final_state(folder / "d1_clover", 3), expected)


def test_what_cannot_be_had_ends_the_run_in_one_line(model, speeds, monkeypatch):
    monkeypatch.setenv("NVFP4_GEMM", "scaled_mm")
    speeds["scaled_mm"] = "returns zeros"
    with pytest.raises(UserError, match="NVFP4_GEMM=scaled_mm, .*returns zeros; unset it"):
        gemms.choose_gemms(model, 4, 32, None, None)


WAITS = """
import datetime, time
import torch.distributed as dist
from nanochat_fp4.training import gemms

def measured():
    time.sleep(4)
    return dist.get_rank()

def refused():
    raise ValueError("returns zeros")

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
gemms.MEET_SECONDS = 0.5
print(gemms.from_rank_0(measured))
try:
    gemms.from_rank_0(refused)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_ranks_wait_for_as_long_as_the_libraries_are_measured(run_ranks):
    """Four seconds, where a rank that waits inside of one collective gives up after two."""
    assert [out.splitlines() for out in run_ranks(WAITS)] == 2 * [["0", "UserError returns zeros"]]


def test_without_fp4_tensor_cores_nothing_is_chosen(monkeypatch, capsys):
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    monkeypatch.setattr(gemms, "products_of", None)
    monkeypatch.setattr(dispatch, "native_gemm", lambda device_type: None)
    model = GPT(GPTConfig(sequence_len=32, vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=64))
    assert gemms.choose_gemms(model, 4, 32, None, None) is None
    assert gemms.choose_gemms(model, 4, 32, None, {"gpu": "RTX", "gemms": []}) is None
    assert "FP4 GEMMs on RTX" in capsys.readouterr().out
