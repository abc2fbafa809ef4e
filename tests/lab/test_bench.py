"""The benchmarks on a CPU, and tiny: what they run, refuse, count and write. Times themselves need a GPU."""

import json
import re
import sys
import textwrap
import types
from dataclasses import replace

import pytest
import torch
from _graphs import record_graphs

from lab import ROOT
from lab.bench import common, layers, memory, step, steps
from lab.bench.step import GraphedSubject, Stopwatch, Subject, has_fp8
from nanochat_fp4.cli import UserError
from nanochat_fp4.models import gpt
from nanochat_fp4.nvfp4 import layer
from scripts import base_train

PASSES = list(layers.PASSES)
TINY = ["--depth=1", "--aspect-ratio=32", "--head-dim=32", "--seq-len=32", "--vocab-size=64", "--total-batch-size=128"]
TINY += ["--rounds=1", "--calls=1", "--micro-batch=2"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

REFUSED = [
    (layers, ["--models=3B,4B"], "--models is '3B,4B', .*800M, 3B"),
    (layers, ["--seconds=nan"], "--seconds positive"),
    (layers, ["--methods=clever"], "unknown method 'clever'"),
    pytest.param(layers, [], "no CUDA device", marks=no_gpu),
    (steps, ["--depth=20,x"], "--depth must be"),
    (steps, ["--methods=clever"], "--methods: unknown method 'clever'"),
    (steps, ["--methods=clover:"], "--methods: 'clover:'"),
    (steps, ["--methods=clover:3"], "6144 tokens .3 row.s. of 2048"),
    (steps, ["--recompute=some"], "--recompute is 'some', .*none, codes"),
    (steps, ["--micro-batch=0"], "'auto'"),
    (steps, ["--rounds=0"], "must be at least 1"),
    (steps, ["--nanochat=x"], "--micro-batch"),
    (steps, ["--methods=none"], "nothing to time"),
    (steps, [*TINY, "--methods=bf16", "--nanochat=/nowhere"], "nanochat.gpt .*/nowhere"),
    pytest.param(steps, [], "no CUDA device", marks=no_gpu),
    (memory, ["--methods=clever"], "unknown method 'clever'"),
    (memory, ["--depth=0"], "be at least 1"),
]


@pytest.mark.parametrize("module, argv, message", REFUSED)
def test_bad_arguments_are_one_line(module, argv, message):
    with pytest.raises((UserError, ValueError), match=message) as e:
        module.main(argv)
    assert "\n" not in str(e.value)


# ----------------------------------------------------------------------------------------------------------------------
# Layers


@pytest.fixture
def measured(tmp_path):
    """Measures a tiny set of layers: (problems, results)."""

    def measure() -> tuple[list[str], common.Results]:
        results = common.Results("x", str(tmp_path / "x.json"), {})
        return layers.measure(["tiny"], ["bf16", "clover"], 256, PASSES, 0.01, results, "eager"), results

    return measure


def test_every_layer_is_timed_beside_bf16(measured):
    problems, results = measured()
    assert problems == []
    assert [(r["pass"], r["method"]) for r in results.records] == [(p, m) for p in PASSES for m in ("bf16", "clover")]
    assert all(r["ms"] > 0 and r["tflops"] > 0 and "spread" in r for r in results.records)
    assert all(r["ratio"] == 1 for r in results.records if r["method"] == "bf16")
    assert json.loads(results.write().read_text())["records"] == results.records


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (lambda y: torch.zeros_like(y), "clover: output is all zeros"),
        # Only at the benchmark's shape, as after an overflow of an index: the small layer of the doctor is right.
        (lambda y: y * (torch.arange(len(y)) < 200).unsqueeze(1) if len(y) == 256 else y, "output is off BF16"),
    ],
)
def test_a_method_whose_result_is_wrong_is_not_timed(wrong, problem, measured, monkeypatch):
    real = layer.gemm
    monkeypatch.setattr(layer, "gemm", lambda a, b, **kw: wrong(real(a, b, **kw)))
    problems, results = measured()
    assert len(problems) == 1 and problem in problems[0]
    assert {r["method"] for r in results.records} == {"bf16"}


@pytest.mark.gpu
def test_a_graph_draws_fresh_randomness_at_each_replay():
    weight, x = torch.randn(256, 128, device="cuda"), torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    e = torch.randn(128, 256, device="cuda").bfloat16()
    layer = layers.Layer("clover", 128, 256, weight, x.requires_grad_(), e)
    results = []
    replay = layers.graphed(lambda: results.append(layer.forward_backward()))
    replay()
    first = [t.clone() for t in results[-1]]
    replay()
    assert torch.equal(results[-1][0], first[0])  # the forward pass draws nothing
    assert not torch.equal(results[-1][1], first[1]) and not torch.equal(results[-1][2], first[2])


# ----------------------------------------------------------------------------------------------------------------------
# Steps


def records_of(base_dir) -> list[dict]:
    content = json.loads((base_dir / "bench" / "bench_train.json").read_text())
    return [r for r in content["records"] if "tokens_per_second" in r]


@no_gpu
def test_one_command_measures_steps_and_operations(base_dir):
    """Also with a micro-batch of its own for a method."""
    steps.main([*TINY, "--methods=clover:4", "--recompute=none,all"])
    records = records_of(base_dir)
    names = ["bf16", "clover, 4 rows", "bf16, all again", "clover, 4 rows, all again"]
    assert [r["variant"] for r in records] == names
    for r, rows in zip(records, (2, 4, 2, 4)):
        assert (r["depth"], r["micro_batch"], r["micro_batches"], r["recompiles"]) == (1, rows, 4 // rows, 0)
        milliseconds = r["micro_batches"] * r["micro_batch_ms"] + r["codes_ms"] + r["update_ms"]
        assert r["tokens_per_second"] == pytest.approx(128 / milliseconds * 1e3)
        assert r["ratio"] == pytest.approx(r["tokens_per_second"] / records[0]["tokens_per_second"])
    content = json.loads((base_dir / "bench" / "bench_train.json").read_text())
    operations = {(r["variant"], r["phase"], r["kind"]) for r in content["records"] if "kind" in r}
    for variant in names[0], names[3]:
        for work in (("forward", "GEMM"), ("forward", "LM head and loss"), ("backward", "GEMM"), ("update", "GEMM")):
            assert (variant, *work) in operations


@pytest.mark.parametrize("part", ["passes", "run_steps", "time_by_operation"])
def test_one_variant_that_fails_leaves_the_others(part, base_dir, monkeypatch, capsys):
    where = Subject if part == "passes" else step
    real, become = getattr(where, part), Subject.become
    errors = iter([torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a bug")])

    def fails(subject, *args):
        if subject.now == "nvidia":
            raise next(errors)
        return real(subject, *args)

    monkeypatch.setattr(Subject, "become", lambda self, v: (become(self, v), setattr(self, "now", v.method))[0])
    monkeypatch.setattr(where, part, fails)
    with pytest.raises(UserError, match=r"2 of 4 variants .*out of memory; .*a bug"):
        flags = [] if part == "time_by_operation" else ["--no-table7"]
        steps.main([*TINY, "--methods=nvidia", "--recompute=none,all", *flags])
    for r in records_of(base_dir):
        assert (r["problem"] is None) == (r["method"] == "bf16")
        assert (r["tokens_per_second"] is None) == (r["method"] == "nvidia" and part != "time_by_operation")
    captured = capsys.readouterr()
    assert "nvidia FAILED" in captured.out and "RuntimeError: a bug" in captured.err


def test_what_was_measured_is_written_before_the_next_round(base_dir, monkeypatch):
    real, seen = step.run_steps, []

    def run_steps(*args):
        seen.append(records_of(base_dir))
        if len(seen) == 7:  # the fourth round of two variants: one to warm up, and two that were timed
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(step, "run_steps", run_steps)
    with pytest.raises(KeyboardInterrupt):
        steps.main([*TINY, "--methods=clover", "--rounds=9"])
    assert [(r["micro_batch"], r["tokens_per_second"]) for r in seen[0]] == [(2, None), (2, None)]
    assert [r["rounds"] for r in seen[-1]] == [2, 2] and all(r["tokens_per_second"] > 0 for r in seen[-1])


@pytest.fixture
def graphs(monkeypatch) -> list:
    """Recorded operators in the place of CUDA's graphs, of models on a CPU as well."""
    monkeypatch.setattr(steps, "has_graphs", lambda device: True)
    return record_graphs(monkeypatch)


@no_gpu
def test_replays_are_timed_and_a_variant_finds_no_graphs_of_another(graphs, base_dir, monkeypatch):
    replays, found = [], []
    time, become = Stopwatch.time, GraphedSubject.become

    def count(watch, name, function):
        before = sum(graph.replays for graph in graphs)
        time(watch, name, function)
        replays.append((name, sum(graph.replays for graph in graphs) - before))

    monkeypatch.setattr(Stopwatch, "time", count)
    monkeypatch.setattr(GraphedSubject, "become", lambda self, v: (found.append(self.captured), become(self, v)))
    steps.main([*TINY, "--methods=clover:4,fp8", "--cuda-graph", "--no-table7"])
    assert [r["variant"] for r in records_of(base_dir)] == ["bf16, graph", "clover, 4 rows, graph", "fp8, graph"]
    assert all(r["tokens_per_second"] > 0 and r["problem"] is None for r in records_of(base_dir))
    assert {(name, n) for name, n in replays if name != "codes"} == {("micro-batch", 1), ("update", 0)}
    assert [n for name, n in replays if name == "codes"] == [0, 1, 1] * 2  # bf16 makes no codes
    assert len(found) == 9 and not any(found)


@no_gpu
def test_graphs_are_for_variants_whose_memory_suffices_by_count(graphs, base_dir, monkeypatch):
    """As base_train chooses them; --no-cuda-graph has none."""
    asked = []

    def problem(model, rows, seq_len, cap):
        asked.append((rows, seq_len, cap))
        return "too large" if len(asked) == 2 else None

    monkeypatch.setattr(steps, "graphs_problem", problem)
    monkeypatch.setattr(step, "peaks_of_a_step", lambda subject, rows: (7, 8))
    steps.main([*TINY, "--methods=fp8,clover", "--no-table7"])
    assert [r["variant"] for r in records_of(base_dir)] == ["bf16, graph", "fp8", "clover, graph"]
    assert [(r["graph"], r["peak_bytes"]) for r in records_of(base_dir)] == [(True, 8), (False, None), (True, 8)]
    assert asked == [(2, 32, None)] * 3 and all(r["tokens_per_second"] for r in records_of(base_dir))
    assert sum(graph.replays for graph in graphs) > 0
    graphs.clear()
    steps.main([*TINY, "--methods=bf16", "--no-table7", "--no-cuda-graph"])
    assert not graphs and len(asked) == 3


@no_gpu
def test_each_method_has_the_head_that_base_train_gives_it(base_dir, monkeypatch):
    trained, run_steps = [], step.run_steps
    monkeypatch.setattr(
        step,
        "run_steps",
        lambda subject, *rest: (trained.append(subject.model.lm_head.bits), run_steps(subject, *rest)),
    )
    for flags, heads, bits in (
        ([], ["bf16", "fp8", "bf16"], [16, 8, 16]),
        (["--head=bf16"], ["bf16"] * 3, [16] * 3),
        (["--head=fp8"], ["fp8"] * 3, [8] * 3),
    ):
        trained.clear()
        steps.main([*TINY, "--methods=fp8,clover", "--no-table7", *flags])
        assert [r["head"] for r in records_of(base_dir)] == heads and trained == bits * 2
    ours, runs = steps.parse_args([]), base_train.parse_args([])
    for flag in ("head", "window_pattern", "cuda_graph", "orthogonalizer", "state", "total_batch_size"):
        assert getattr(ours, flag) == getattr(runs, flag), flag


@no_gpu
def test_a_variant_without_a_graph_says_why_and_leaves_the_others(graphs, base_dir, monkeypatch):
    become = GraphedSubject.become

    def refuse(graph, **_):
        raise RuntimeError("operation not permitted\nwhile a stream captures")

    def breaks(subject, variant):
        become(subject, variant)
        monkeypatch.setattr(torch.cuda, "graph", refuse if variant.method == "fp8" else lambda graph, **_: graph)

    monkeypatch.setattr(GraphedSubject, "become", breaks)
    with pytest.raises(UserError, match="1 of 3 variants .*fp8, graph: .*not be captured .*not permitted"):
        steps.main([*TINY, "--methods=clover,fp8", "--cuda-graph", "--no-table7"])
    for r in records_of(base_dir):
        assert (r["tokens_per_second"] is None) == (r["method"] == "fp8") and "\n" not in (r["problem"] or "")


@no_gpu
def test_graphs_on_a_cpu_are_a_line_and_nothing_else(base_dir, capsys):
    steps.main([*TINY, "--methods=bf16", "--cuda-graph", "--no-table7"])
    assert "no CUDA graphs: the model is on cpu" in capsys.readouterr().out
    assert [r["variant"] for r in records_of(base_dir)] == ["bf16"]


@no_gpu
def test_nanochat_alone_needs_no_memory_for_a_model_of_ours(base_dir, tmp_path, monkeypatch):
    """A checkout whose model is ours stands in for the real one. Its --fp8 converts a second model with the weights of
    the first."""
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").write_text("from nanochat_fp4.models.gpt import GPT, GPTConfig\n")
    fake = """
        converted = []
        def convert_to_float8_training(model, *, module_filter_fn):
            converted.append(model)
    """
    (tmp_path / "nanochat" / "fp8.py").write_text(textwrap.dedent(fake))
    for name in "nanochat", "nanochat.gpt", "nanochat.fp8":
        monkeypatch.setitem(sys.modules, name, None)  # and again after the test
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(Subject, "__init__", None)
    steps.main([*TINY, "--methods=none", f"--nanochat={tmp_path}"])
    records = records_of(base_dir)
    assert [(r["variant"], r["head"], r["problem"]) for r in records] == [
        ("nanochat", "bf16", None),
        ("nanochat --fp8", "fp8", None),
    ]
    assert all(r["ratio"] is None and r["tokens_per_second"] > 0 and r["flops_per_token"] > 0 for r in records)
    (model,) = sys.modules["nanochat.fp8"].converted
    assert model.transformer.h[0].mlp.c_proj.weight.any()  # It begins with zeros.
    linear = torch.nn.Linear
    taken = [has_fp8(m, "") for m in (linear(128, 256), linear(128, 64), linear(136, 256), torch.nn.GELU())]
    assert taken == [True, False, False, False]


FAKE = types.SimpleNamespace(sequence_len=10)


def fake_peaks(constant: int, per_row: int, limit: int, update: int = 0):
    """Memory of `constant` and `per_row` bytes; the sizes that are tried."""
    tried = []

    def peaks(subject, rows):
        tried.append(rows)
        if constant + per_row * rows > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return constant + per_row * rows, update

    return peaks, tried


def test_the_largest_micro_batch_is_tried_out():
    peaks, tried = fake_peaks(1000, 100, limit=2700, update=1500)
    assert step.find_micro_batch(FAKE, 64, 2700, peaks) == (16, {1: 1100, 2: 1200, 16: 2600}, 1500)
    assert tried == [1, 1, 2, 16]  # the first step makes the optimizers' states
    peaks, tried = fake_peaks(1000, 100, limit=2000)  # less than the budget promises: fragments
    size, passes, _ = step.find_micro_batch(FAKE, 64, 2700, peaks)
    assert size == 8 and tried[-2:] == [16, 8] and 16 not in passes
    with pytest.raises(UserError, match="one row of 10 tokens"):
        step.find_micro_batch(FAKE, 64, 1000, fake_peaks(1000, 100, limit=1000)[0])


@pytest.mark.parametrize("free, cap", [(31.4, 31.4), (80, 32)])
def test_the_cap_is_at_most_what_is_free(free, cap, monkeypatch):
    """An RTX 5090 has 31.4 GiB free where the cap is its 32."""
    args = steps.parse_args(["--memory-cap", "32GiB"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(steps, "gpu_memory", lambda: (int(free * 2**30), 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions := [].append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
    steps.set_up_device(args)
    assert args.budget == args.memory_cap == int(cap * 2**30)
    assert fractions.__self__ == [args.budget / (100 * 2**30)]


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
    assert {(r["phase"], r["kind"]): r["ms"] for r in step.summarize(trace)} == {
        ("forward", "GEMM"): 5.0,
        ("forward", "quantize"): 2.0,
        ("forward", "LM head and loss"): 3.0,
        ("backward", "rotate and quantize"): 4.0,
        ("update", "communication and copies"): 1.0,
    }


# Names of a kernel and of the operators that launched it, inside out.
OF_KIND = {
    "abs-max": ["amax_kernel"],
    "quantize": ["quantize_16x16_kernel", "swizzle_kernel nvfp4::scaled_mm", "a_kernel_of_no_kind nvfp4::unnamed"],
    "rotate and quantize": ["rotate_quantize_kernel", "repair_kernel"],
    "decode": ["decode_kernel"],
    "GEMM": [
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNT nvfp4::mm_alpha",
        "cutlass3x_sm100_bstensorop_s256x256x64gemm_block_scaled aten::_scaled_mm_v2 nvfp4::scaled_mm",
    ],
    "LM head and loss": ["nvjet_sm90_tst_192x192 aten::mm nanochat_fp4::linear_cross_entropy_sum"],
    "attention": ["cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>"],
    "RMSNorm": ["triton_red_fused__fused_rms_norm_add_mul_quantize_view_0"],
    "ReLU^2": ["triton_red_fused__to_copy_add_amax_clamp_max_div_quantize_rand_relu_view_6", "nvfp4::relu_squared"],
    "other element-wise": ["triton_poi_fused__to_copy_mul_rotate_quantize_view_3", "triton_poi_fused_add_mul_1"],
}


def test_every_kernel_has_its_kind():
    """A kernel of ours that is added later must not count as the model's own work."""
    for kind, names in OF_KIND.items():
        assert {step.kind_of(name.split()) for name in names} == {kind}
    names = {
        name
        for path in (ROOT / "kernels" / "nvfp4_kernels").glob("*.py")
        for name in re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", path.read_text())
    }
    assert len(names) > 5 and {n for n in names if step.kind_of([n]) == step.OTHER} == set()


@pytest.mark.gpu
def test_steps_on_a_gpu(base_dir):
    sizes = ["--depth=2", "--seq-len=256", "--vocab-size=512", "--total-batch-size=2048"]
    steps.main([*sizes, "--no-compile", "--rounds=1", "--calls=1", "--no-cuda-graph"])
    records = records_of(base_dir)
    assert all(r["peak_bytes"] > 0 and r["bytes_per_token"] > 0 and r["micro_batch"] == 8 for r in records)
    assert all(0 < r["kernel_ms"] <= r["wall_ms"] for r in records)
    steps.main([*sizes, "--no-compile", "--rounds=1", "--calls=1", "--cuda-graph"])
    graphed = records_of(base_dir)
    assert [r["variant"] for r in graphed] == [f"{r['variant']}, graph" for r in records]
    assert all(0 < r["kernel_ms"] <= r["wall_ms"] and r["problem"] is None for r in graphed)


def test_gaps_are_the_time_in_which_no_kernel_runs():
    """Two kernels beside each other count once."""
    spans = [("kernel", 10, 20), ("gpu_memcpy", 15, 10), ("kernel", 40, 5), ("cuda_runtime", 0, 90)]
    trace = [{"ph": "X", "cat": c, "name": "", "ts": t, "dur": d} for c, t, d in reversed(spans)]
    assert step.wall_and_kernels(trace) == {"wall_ms": 0.035, "kernel_ms": 0.025, "launches": 3}
    assert step.wall_and_kernels(trace[:1]) == {"wall_ms": None, "kernel_ms": None, "launches": None}


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def test_what_a_block_keeps():
    """In units of the width: 2 of a BF16 tensor, 9/16 of codes and scales; and FP32 numbers, one a row or head."""
    config = replace(gpt.config_from_depth(2, vocab_size=64), n_head=1)
    records = {(r["method"], r["recompute"]): r for r in memory.account(config, ["bf16", "clover"])}
    width = config.n_embd
    bf16, codes, number = 2 * width, width * 9 / 16, 4
    assert list(records["clover", "none"]["tensors"].values()) == [
        bf16,  # residual stream, for the gradient of its lambda
        bf16 + number,  # the same after the lambda, and 1 / rms
        codes,  # input of q, k, v
        2 * (bf16 + number),  # queries and keys
        2 * bf16 + number,  # values, result, log-sum-exp
        codes,  # input of c_proj
        bf16 + number,
        4 * width + number + 5 * codes,  # relu in 8 bits, its step, and the inputs of c_fc and the MLP's c_proj
    ]
    assert records["bf16", "none"]["block"] == 26 * width + 5 * number
    limits = {"none": 0.87, "mlp": 0.6, "codes": 0.5, "codes-mlp": 0.4, "all": 0.4}
    for recompute, limit in limits.items():
        assert records["clover", recompute]["ratio"] <= limit
    for r in records.values():
        assert set(r["tensors"]) <= set(memory.NAMES.values())  # every kept tensor has a name
