"""The benchmark of whole models, on a CPU and tiny: what it runs, counts and writes. A GPU's figures are made up."""

import json
import re
import types
import weakref

import pytest
import torch

from lab import ROOT
from lab.measure import bench_step, bench_train
from lab.measure.bench_step import Subject, Variant
from nanochat_fp4.errors import UserError
from nanochat_fp4.models.gpt import config_from_depth
from nanochat_fp4.nvfp4.linear import QuantLinear

SIZES = ["--depth", "1", "--aspect-ratio", "32", "--head-dim", "32", "--seq-len", "32", "--vocab-size", "64"]
SIZES += ["--total-batch-size", "128", "--rounds", "1", "--calls", "1"]
TINY = [*SIZES, "--micro-batch", "2"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def tiny_trainer(compiled=False) -> Subject:
    config = config_from_depth(1, 64, sequence_len=32, head_dim=32, aspect_ratio=32)
    return Subject(config, torch.device("cpu"), compiled)


# ----------------------------------------------------------------------------------------------------------------------
# A run


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU micro-batches are measured")
def test_one_command_measures_everything(base_dir, capsys):
    """Also with a micro-batch of its own for a method."""
    bench_train.main([*TINY, "--methods", "clover:4", "--recompute", "none,all"])
    out = capsys.readouterr().out
    content = json.loads((base_dir / "bench" / "bench_train.json").read_text())
    assert content["settings"]["hardware"] == out.splitlines()[0] and "PyTorch reference" in out.splitlines()[0]
    assert content["settings"]["micro_batch"] == 2 and "torch" in content["environment"]
    records = [r for r in content["records"] if "tokens_per_second" in r]
    names = ["bf16", "clover, 4 rows", "bf16, all again", "clover, 4 rows, all again"]
    assert [r["variant"] for r in records] == names
    for r, rows in zip(records, (2, 4, 2, 4)):
        assert (r["depth"], r["micro_batch"], r["micro_batches"], r["recompiles"]) == (1, rows, 4 // rows, 0)
        step = r["micro_batches"] * r["micro_batch_ms"] + r["codes_ms"] + r["update_ms"]
        assert r["tokens_per_second"] == pytest.approx(128 / step * 1e3)
        assert r["ratio"] == pytest.approx(r["tokens_per_second"] / records[0]["tokens_per_second"])
        assert r["mfu"] is None and r["peak_bytes"] is None and f"{round(r['tokens_per_second'])}" in out
    operations = {(r["variant"], r["phase"], r["kind"]) for r in content["records"] if "kind" in r}
    for variant in names[0], names[3]:
        for work in (("forward", "GEMM"), ("forward", "LM head and loss"), ("backward", "GEMM"), ("update", "GEMM")):
            assert (variant, *work) in operations
    assert "recompilations after the warm-up: 0" in out
    assert "Time by operation, d1, clover, 4 rows, micro-batch 4" in out


def test_variants_are_what_they_say():
    trainer = tiny_trainer()
    layers = [m for m in trainer.model.modules() if isinstance(m, QuantLinear)]
    assert len(layers) == 6
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda m, args, y: seen.append(m.recipe.name))
    for variant in (Variant("clover"), Variant("bf16", "all"), Variant("nvidia", "mlp")):
        trainer.become(variant)
        seen.clear()
        trainer.passes(1)
        # Two passes of six layers, and what is computed again: c_fc, or q, k and v too. Both c_proj come last, and
        # what they keep is their input.
        again = {"none": 0, "mlp": 1, "all": 4}[variant.recompute]
        assert seen == [variant.method] * 2 * (6 + again)


@pytest.mark.slow
def test_recompilations_are_counted(monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **kw: real(model, **{**kw, "backend": "eager"}))
    torch._dynamo.reset()
    trainer = tiny_trainer(compiled=True)

    def run(rows=1, methods=("bf16", "fig2_1x16_rtn")):
        before = bench_step.compiled_graphs()
        for method in methods:
            trainer.become(Variant(method))
            bench_step.run_steps(trainer, rows, 1, bench_step.Stopwatch(trainer.device))
        return bench_step.compiled_graphs() - before

    assert run() >= 2
    assert run() == 0  # the variants take turns without compiling anything again
    assert run(2, ["bf16"]) >= 1  # another shape


# ----------------------------------------------------------------------------------------------------------------------
# Memory


FAKE = types.SimpleNamespace(sequence_len=10)


def fake_peaks(constant, per_row, memory, update=0):
    """Memory of `constant` and `per_row` bytes; the sizes that are tried."""
    tried = []

    def peaks(subject, rows):
        tried.append(rows)
        if constant + per_row * rows > memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return constant + per_row * rows, update

    return peaks, tried


def test_the_largest_micro_batch_is_tried_out():
    peaks, tried = fake_peaks(1000, 100, memory=2700, update=1500)
    assert bench_step.find_micro_batch(FAKE, 64, 2700, peaks) == (16, {1: 1100, 2: 1200, 16: 2600}, 1500)
    assert tried == [1, 1, 2, 16]  # the first step makes the optimizers' states
    peaks, tried = fake_peaks(1000, 100, memory=2000)  # less than the budget promises: fragments
    size, passes, _ = bench_step.find_micro_batch(FAKE, 64, 2700, peaks)
    assert size == 8 and tried[-2:] == [16, 8] and 16 not in passes
    assert bench_step.find_micro_batch(FAKE, 64, 2700, fake_peaks(1000, 100, memory=1150)[0]) == (1, {1: 1100}, 0)
    for rows in (64, 1):
        assert bench_step.find_micro_batch(FAKE, rows, 10**6, fake_peaks(1000, 100, memory=10**6)[0])[0] == rows
    with pytest.raises(UserError, match="not even one row of 10 tokens fits into"):
        bench_step.find_micro_batch(FAKE, 64, 1000, fake_peaks(1000, 100, memory=1000)[0])


def test_amounts_of_memory():
    known = {"32GiB": 32 << 30, "24GB": 24 * 10**9, "1.5 gib": 3 << 29, "512M": 512 * 10**6}
    assert {text: bench_train.parse_bytes(text) for text in known} == known
    for text in ("32", "GiB", "-1GiB", "0GiB", "1..5GiB", "32PiB"):
        with pytest.raises(Exception, match="is not an amount of memory"):
            bench_train.parse_bytes(text)


# ----------------------------------------------------------------------------------------------------------------------
# Time by operation


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_kernels_belong_to_what_launched_them():
    """A trace as a GPU's profile exports it: kernels run later than they are launched, in another row."""
    trace = [
        event("user_annotation", "phase: forward", 0, 100),
        event("user_annotation", "phase: backward", 100, 100),
        event("user_annotation", "phase: update", 200, 50),
        event("cpu_op", "nanochat_fp4::linear_cross_entropy_sum", 60, 30),
        event("cpu_op", "aten::mm", 65, 10),
        event("cuda_runtime", "cudaLaunchKernel", 10, 2, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 20, 2, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 70, 2, correlation=3),
        event("cuda_driver", "cuLaunchKernelEx", 150, 2, tid=2, correlation=4),
        event("cuda_runtime", "cudaMemcpyAsync", 210, 2, correlation=5),
        event("cuda_runtime", "cudaLaunchKernel", 300, 2, correlation=6),  # after all phases
        event("kernel", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 400, 5000, tid=7, correlation=1),
        event("kernel", "quantize_kernel", 5400, 2000, tid=7, correlation=2),
        event("kernel", "nvjet_tst_192x192", 7400, 3000, tid=7, correlation=3),
        event("kernel", "rotate_quantize_kernel", 10400, 4000, tid=7, correlation=4),
        event("gpu_memcpy", "Memcpy DtoD", 14400, 1000, tid=7, correlation=5),
        event("kernel", "nvjet_tst_192x192", 15400, 9000, tid=7, correlation=6),
        {"ph": "M", "name": "process_name"},
    ]
    records = bench_step.summarize(trace)
    assert {(r["phase"], r["kind"]): r["ms"] for r in records} == {
        ("forward", "GEMM"): 5.0,
        ("forward", "quantize"): 2.0,
        ("forward", "LM head and loss"): 3.0,
        ("backward", "rotate and quantize"): 4.0,
        ("update", "communication and copies"): 1.0,
    }
    text = bench_step.show_table_7("d26", records)
    # 14 ms of forward and backward, 5 of them in the GEMMs of layers
    assert "forward 10.0 ms, backward 4.0 ms, update 1.0 ms; 64% of forward and backward is not" in text
    assert "GEMM 36% 5.00 rotate and quantize 29% 4.00" in " ".join(text.split())


def test_without_kernels_operators_count_for_themselves():
    trace = [
        event("user_annotation", "phase: forward", 0, 100),
        event("cpu_op", "aten::linear", 10, 50),
        event("cpu_op", "aten::mm", 20, 30),
        event("cpu_op", "aten::relu", 70, 10),
        event("cpu_op", "aten::mm", 20, 5, tid=2),
    ]
    records = bench_step.summarize(trace)
    expected = {"GEMM": 0.035, "other element-wise": 0.02, "ReLU^2": 0.01}
    assert {r["kind"]: r["ms"] for r in records} == pytest.approx(expected)


# Names of a kernel and of the operators that launched it, inside out.
OF_KIND = {
    "abs-max": ["amax_kernel"],
    "quantize": ["quantize_16x16_kernel", "swizzle_kernel nvfp4::scaled_mm", "a_kernel_of_no_kind nvfp4::unnamed"],
    "rotate and quantize": ["rotate_quantize_kernel", "repair_kernel"],
    "decode": ["decode_kernel"],
    "GEMM": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNT nvfp4::mm_alpha",
        "cublasLt::splitKreduce_kernel<32,16,int,float,__nv_bfloat16> nvfp4::mm_alpha",
        "cutlass3x_sm100_bstensorop_s256x256x64gemm_block_scaled aten::_scaled_mm_v2 nvfp4::scaled_mm",
    ],
    "LM head and loss": ["nvjet_sm90_tst_192x192 aten::mm nanochat_fp4::linear_cross_entropy_sum"],
    "attention": [
        "cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>",
        "triton_tem_fused_flex_attention_2",
    ],
    "RMSNorm": ["triton_red_fused__fused_rms_norm_add_mul_quantize_view_0"],
    "ReLU^2": ["triton_red_fused__to_copy_add_amax_clamp_max_div_quantize_rand_relu_view_6", "nvfp4::relu_squared"],
    "other element-wise": ["triton_poi_fused__to_copy_mul_rotate_quantize_view_3", "triton_poi_fused_add_mul_1"],
}


def test_kinds_of_kernels():
    for kind, names in OF_KIND.items():
        assert {bench_step.kind_of(name.split()) for name in names} == {kind}


def test_every_kernel_of_ours_has_a_kind():
    """A kernel added later must not count as the model's own work."""
    names = {
        name
        for path in (ROOT / "kernels" / "nvfp4_kernels").glob("*.py")
        for name in re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", path.read_text())
    }
    assert len(names) > 5
    assert {n for n in names if bench_step.kind_of([n]) == bench_step.OTHER} == set()


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--depth", "20,x"], "--depth must be"),
        (["--methods", "clever"], "--methods: unknown method 'clever'"),
        (["--methods", "clover:"], "--methods: 'clover:', expected a method, or one with the rows"),
        (["--methods", "clover:3"], "not a multiple of 6144 tokens .3 rows of 2048"),
        (["--recompute", "some"], "--recompute is 'some', expected some of none, codes, codes-mlp, mlp, all"),
        (["--micro-batch", "0"], "expected 'auto' or a positive whole number"),
        (["--rounds", "0"], "must be at least 1"),
        (["--nanochat", "x"], "give --micro-batch a number"),
        ([*TINY, "--methods=bf16", "--nanochat", "/nowhere"], "no nanochat.gpt can be imported from /nowhere"),
        pytest.param([], "there is no CUDA device.*lab.predict.step_time predicts", marks=no_gpu),
        pytest.param([*TINY, "--memory-cap", "32GiB"], "there is no CUDA device", marks=no_gpu),
    ],
)
def test_bad_arguments_are_one_line(argv, message):
    with pytest.raises(UserError, match=message) as e:
        bench_train.main(argv)
    assert "\n" not in str(e.value)


def test_peak_and_bytes_of_a_token_are_those_of_the_sizes_that_fit(monkeypatch):
    args, record = bench_train.parse_args(["--seq-len", "10", "--total-batch-size", "640"]), {}
    args.budget = 2700
    for passes, update, peak, of_a_token in (
        ({1: 1100, 2: 1200, 16: 2600}, 1500, 2600, 10),
        ({16: 900}, 1500, 1500, None),
    ):
        monkeypatch.setattr(bench_step, "find_micro_batch", lambda *of, found=(16, passes, update): found)
        record |= {"bytes_per_token": None}
        bench_train.find_memory(args, record, FAKE, "auto")
        assert record == {"micro_batch": 16, "peak_bytes": peak, "bytes_per_token": of_a_token}


@pytest.mark.parametrize("free, cap", [(31.4, 31.4), (80, 32)])
def test_the_cap_is_at_most_what_is_free(free, cap, monkeypatch, capsys):
    """An RTX 5090 has 31.4 GiB free where the cap is its 32."""
    args = bench_train.parse_args(["--memory-cap", "32GiB"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_train, "gpu_memory", lambda: (int(free * 2**30), 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions := [].append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
    bench_train.set_up_device(args)
    assert args.budget == args.memory_cap == int(cap * 2**30)
    assert fractions.__self__ == [args.budget / (100 * 2**30)]
    assert ("only 31.4 GB are free" in capsys.readouterr().out) == (free < 32)


# ----------------------------------------------------------------------------------------------------------------------
# Nothing that was measured is lost


def written(base_dir) -> dict[str, dict]:
    content = json.loads((base_dir / "bench" / "bench_train.json").read_text())
    return {r["variant"]: r for r in content["records"] if "tokens_per_second" in r}


def test_what_was_measured_is_written_before_the_next_thing_begins(base_dir, monkeypatch, capsys):
    """Sizes before anything is timed, times after each round; what computes nothing twice comes first."""
    real, seen = bench_step.run_steps, []

    def run_steps(*args):
        seen.append(written(base_dir))
        if len(seen) == 7:  # the fourth round of two variants: one to warm up, and two that were timed
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(bench_step, "run_steps", run_steps)
    with pytest.raises(KeyboardInterrupt):
        bench_train.main([*TINY, "--methods", "clover", "--recompute", "none,all", "--rounds", "9"])
    first, last = seen[0], seen[-1]
    assert list(first) == list(last) == ["bf16", "clover"]
    assert [(r["micro_batch"], r["tokens_per_second"]) for r in first.values()] == [(2, None), (2, None)]
    assert all(r["micro_batch"] == 2 and r["tokens_per_second"] > 0 and r["ratio"] > 0 for r in last.values())
    assert [r["rounds"] for r in last.values()] == [2, 2]
    assert "after round 2 of 9:" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["passes", "run_steps", "time_by_operation"])
def test_one_variant_that_fails_leaves_the_others(part, base_dir, monkeypatch, capsys):
    where = Subject if part == "passes" else bench_step
    real = getattr(where, part)
    errors = iter([torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a bug")])

    def fails(trainer, *args):
        if trainer.now == "nvidia":
            raise next(errors)
        return real(trainer, *args)

    become = Subject.become
    monkeypatch.setattr(Subject, "become", lambda self, v: (become(self, v), setattr(self, "now", v.method))[0])
    monkeypatch.setattr(where, part, fails)
    with pytest.raises(UserError, match=r"2 of 4 variants failed: d1 nvidia: .*: out of memory; .*RuntimeError: a bug"):
        flags = [] if part == "time_by_operation" else ["--no-table7"]
        bench_train.main([*TINY, "--methods", "nvidia", "--recompute", "none,all", *flags])
    records = written(base_dir)
    for name, r in records.items():
        assert (r["problem"] is None) == ("nvidia" not in name)
        assert (r["tokens_per_second"] is None) == ("nvidia" in name and part != "time_by_operation")
    captured = capsys.readouterr()
    assert "nvidia FAILED" in captured.out and "RuntimeError: a bug" in captured.err
    assert ("bf16, all again, micro-batch 2: forward" in captured.out) == (part == "time_by_operation")
    assert "nvidia, micro-batch 2: forward" not in captured.out


def test_a_variant_that_fails_leaves_nothing_in_memory(base_dir, monkeypatch):
    """Neither what its frames hold, which an error refers to and they to it, nor its gradients."""
    real, become, held = Subject.passes, Subject.become, []

    class Activations:
        pass

    def passes(self, rows):
        real(self, rows)
        if len(self.seen) == 2:
            activations = Activations()
            held.append(weakref.ref(activations))
            error = torch.OutOfMemoryError("CUDA out of memory")
            raise error

    def watched(self, variant):
        become(self, variant)
        self.seen = [*getattr(self, "seen", []), variant]
        assert all(ref() is None for ref in held)
        assert all(p.grad is None for p in self.model.parameters())

    monkeypatch.setattr(Subject, "passes", passes)
    monkeypatch.setattr(Subject, "become", watched)
    with pytest.raises(UserError, match="1 of 3 variants failed: d1 clover: micro-batch: out of memory"):
        bench_train.main([*TINY, "--methods", "clover,nvidia", "--no-table7"])
    assert len(held) == 1 and written(base_dir)["nvidia"]["tokens_per_second"] > 0


def test_a_wrong_method_and_a_depth_that_cannot_be_built_leave_the_others(base_dir, monkeypatch):
    def build(config, *args):
        if config.n_layer == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Subject(config, *args)

    problem = lambda device, method: "all zeros" if method == "nvidia" else None  # noqa: E731
    monkeypatch.setattr(bench_train, "layer_problem", problem)
    monkeypatch.setattr(bench_train, "Subject", build)
    failed = "2 of 3 variants failed: d2 bf16: out of memory; lower --depth; d1 nvidia: wrong result: all zeros"
    with pytest.raises(UserError, match=failed):
        bench_train.main([*TINY, "--methods", "nvidia", "--depth", "2,1", "--no-table7"])
    content = json.loads((base_dir / "bench" / "bench_train.json").read_text())
    timed = [(r["depth"], r["variant"]) for r in content["records"] if r.get("tokens_per_second")]
    assert timed == [(1, "bf16")] and written(base_dir)["nvidia"]["micro_batch"] is None


@pytest.mark.gpu
def test_on_a_gpu(base_dir, capsys):
    sizes = ["--depth", "2", "--seq-len", "256", "--vocab-size", "512", "--total-batch-size", "2048"]
    bench_train.main([*sizes, "--no-compile", "--rounds", "1", "--calls", "1"])
    content = json.loads((base_dir / "bench" / "bench_train.json").read_text())
    records = [r for r in content["records"] if "tokens_per_second" in r]
    assert all(r["peak_bytes"] > 0 and r["bytes_per_token"] > 0 and r["micro_batch"] == 8 for r in records)
    kinds = {(r["variant"], r["kind"]) for r in content["records"] if "kind" in r}
    assert {("clover", "quantize"), ("clover", "rotate and quantize"), ("bf16", "GEMM")} <= kinds
