"""The benchmarks: budgets, predictions, refusal to time what is wrong, tables and JSON. Times themselves need a GPU."""

import dataclasses
import json
import time

import pytest
import torch
from _rows import METHOD_TABLE

from lab.measure import bench_common as common
from lab.measure import bench_linear, bench_quantize
from lab.predict import step_time
from lab.predict.machines import MACHINES, Machine, machine_of
from nanochat_fp4.errors import UserError
from nanochat_fp4.nvfp4 import linear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import get_rounding

PASSES = list(bench_linear.PASSES)
TINY = {"tiny": {"up": (128, 256), "down": (256, 128)}}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


# --------------------------------------------------------------------------------------------------------------------
# Budgets and predictions.


def test_layer_sets_are_the_papers_table_6():
    assert step_time.TOKENS == 16384
    qkv, out, upgate, down = bench_linear.LAYER_SETS["3B"].values()
    assert (qkv, out, upgate, down) == ((3072, 9216), (3072, 3072), (3072, 16384), (8192, 3072))
    for layers in bench_linear.LAYER_SETS.values():
        assert all(size % 128 == 0 for shape in layers.values() for size in shape)


def test_the_byte_budget_of_clover():
    """Per element, as the design's table: forward 2 + 2 + 0.56 + 2 for the input; grad_output is read once for both."""
    steps = {s.name: s for s in step_time.layer_steps(get_recipe("clover"), 128, 256, 384, backward=True, native=False)}
    elements = 128 * 256
    assert steps["input: amax"].num_bytes + steps["input: four_over_six"].num_bytes == elements * (2 + 2 + 0.5625 + 2)
    e = steps["grad_output: ms_eden and ms_eden"].num_bytes / (128 * 384)
    assert e == 2 + 2 * (2 + 2 / 16 + 4 / 128)
    assert "grad_output: amax" not in steps  # post hoc range alignment
    assert steps["weight^T: ms_eden"].num_bytes == 256 * 384 * (0.5625 + 2 + 2 / 16 + 4 / 128)
    native = step_time.layer_steps(get_recipe("clover"), 128, 256, 384, backward=True, native=True)
    assert sum(s.fp4_flops for s in native) == 3 * 2 * 128 * 256 * 384 and not any(s.bf16_flops for s in native)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_method_does_the_flops_of_its_gemms(native, backward):
    flops = (3 if backward else 1) * 2 * 128 * 256 * 384
    for method in METHOD_TABLE:
        steps = step_time.layer_steps(get_recipe(method), 128, 256, 384, backward=backward, native=native)
        assert sum(s.bf16_flops + s.fp4_flops + s.fp8_flops for s in steps) == flops, method
        assert all(s.num_bytes > 0 for s in steps), method


def test_the_slowest_resource_decides():
    machine = Machine("m", bandwidth=1000, bf16=1, fp4=None, instructions=1, source="")
    assert step_time.predicted_ms(step_time.Step("bytes", 1e9, 1e8, 1e8), machine) == pytest.approx(1.0)
    assert step_time.predicted_ms(step_time.Step("instructions", 1e8, 1e9, 1e8), machine) == pytest.approx(1.0)
    assert step_time.predicted_ms(step_time.Step("flops", 1e8, 1e8, 1e9), machine) == pytest.approx(1.0)
    longer = dataclasses.replace(machine, longer=20)
    assert step_time.predicted_ms(step_time.Step("instructions", 1e8, 1e8, 1e8), longer) == pytest.approx(2.0)


@pytest.mark.parametrize("module, machine", [(bench_linear, "h200"), (bench_quantize, "rtx5090")])
def test_roofline_is_labelled_as_a_prediction(module, machine, base_dir, capsys):
    module.main(["--roofline", machine, *["--methods=all", "--models=800M"] * (module is bench_linear)])
    out, target = capsys.readouterr().out, base_dir / "bench" / f"{module.__name__[12:]}_{machine}_predicted.json"
    assert out.startswith(f"PREDICTION for {MACHINES[machine].name}, not a measurement")
    content = json.loads(target.read_text())
    assert content["settings"]["prediction_for"]["name"] == MACHINES[machine].name
    assert len(content["records"]) >= 20 and str(target) in out and "torch" in json.dumps(content["environment"])
    if module is bench_linear:
        assert {r["mode"] for r in content["records"]} == {"predicted"}
        assert {r["method"] for r in content["records"]} == set(METHOD_TABLE)


NAMES = {
    "RTX 5090": "RTX 5090", "RTX 5090 Laptop GPU": None, "RTX 5090 D v2": None, "GB200": "GB200", "B200": "B200",
    "B300 SXM6 AC": "B300", "GB10": "GB10", "GB300": None, "H200 MIG 1g.18gb": None, "GeForce RTX 5080": "RTX 5080",
    "GeForce RTX 5070 Ti": "RTX 5070 Ti", "GeForce RTX 5070": None, "GeForce RTX 5060": "RTX 5060",
    "GeForce RTX 5060 Ti": None, "RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
}  # fmt: skip


def test_a_machine_is_known_by_its_whole_name():
    found = {gpu: machine_of(f"NVIDIA {gpu}") for gpu in NAMES}
    assert {gpu: machine and machine.name for gpu, machine in found.items()} == NAMES


# --------------------------------------------------------------------------------------------------------------------
# Bad input.


@pytest.mark.parametrize(
    "module, argv, message",
    [
        (bench_linear, ["--models", "3B,4B"], "--models is '3B,4B', expected some of 800M, 3B"),
        (bench_linear, ["--seconds", "nan"], "--seconds positive"),
        (bench_linear, ["--methods", "clever"], "unknown method 'clever'"),
        (bench_quantize, ["--rows", "100"], "multiples of 128"),
        (bench_quantize, ["--only", "nothing"], "matches none of: amax"),
        *(pytest.param(m, [], "no CUDA device; .* --roofline", marks=no_gpu) for m in (bench_linear, bench_quantize)),
    ],
)
def test_bad_arguments_are_one_line(module, argv, message):
    with pytest.raises((UserError, ValueError), match=message) as e:
        module.main(argv)
    assert "\n" not in str(e.value)


# --------------------------------------------------------------------------------------------------------------------
# The measuring itself, with a CPU's clock in place of CUDA's events.


@pytest.fixture
def on_a_cpu(monkeypatch):
    def timed(function) -> float:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3

    cpu = torch.device("cpu")
    monkeypatch.delenv("NVFP4_KERNELS", raising=False)
    monkeypatch.setattr(common, "need_cuda", lambda script: cpu)
    monkeypatch.setattr(bench_linear, "LAYER_SETS", TINY)
    monkeypatch.setattr(common, "timed", lambda function, calls: [timed(function) for _ in range(calls)])
    monkeypatch.setattr(bench_quantize, "median_ms", timed)
    return cpu


def test_steady_times_each_function_in_the_state_that_it_brings_about(monkeypatch):
    """On a clock of its own, which slows down while `hot` is called."""
    now, heat, log = 0.0, 0.0, []

    def function(name: str, change: float):
        def run() -> float:
            nonlocal now, heat
            heat = min(1.0, max(0.0, heat + change))
            log.append(name)
            now += 0.01 * (1 + heat)
            return 10 * (1 + heat)

        return run

    monkeypatch.setattr(common.time, "perf_counter", lambda: now)
    monkeypatch.setattr(common, "timed", lambda function, calls: [function() for _ in range(calls)])
    found = common.steady({"hot": function("hot", 0.02), "cool": function("cool", -0.02)}, 2.0)
    assert found["hot"]["ms"] == pytest.approx(20) and found["cool"]["ms"] == pytest.approx(10)
    assert found["hot"]["spread"] == pytest.approx(0) and found["hot"]["mhz"] is None
    order = [a for a, b in zip(log, [*log[1:], None]) if a != b]
    assert order == ["hot", "cool", "hot"]  # the second time in the opposite order
    assert log.count("cool") * 0.01 > 7  # twice to warm up, twice timed
    drifting = common.steady({"drifting": function("drifting", -0.001)}, 1.0)
    assert drifting["drifting"]["spread"] > 0.05


@pytest.mark.parametrize("fails", [None, 1])
def test_monitor_reads_nvml(fails):
    asked = []

    def question(index: int, answer: int):
        def ask(reference) -> int:
            asked.append(index)
            reference._obj.value = answer
            return 999 if index == fails else 0

        return ask

    monitor = common.Monitor(interval=0.001)
    monitor._questions = [question(i, answer) for i, answer in enumerate((1500, 699_500, 0x4))]
    deadline = time.monotonic() + 60
    with monitor:
        while len(asked) < 4 and time.monotonic() < deadline:  # a whole sample was taken
            time.sleep(0.001)
    known = {"mhz": 1500.0, "watts": 699.5, "limit": "power 100%"}
    assert monitor.summary() == (known if fails is None else dict.fromkeys(known))
    assert not monitor._thread.is_alive()
    monitor.samples = [(1000.0, 500.0, 0x0), (1200.0, 700.0, 0x4), (1400.0, 600.0, 0x4 | 0x40), (1200.0, 600.0, 0x1)]
    assert monitor.summary() == {"mhz": 1200.0, "watts": 600.0, "limit": "power 50%, heat 25%"}


@pytest.fixture
def results(tmp_path):
    return common.Results("x", str(tmp_path / "x.json"), {})


def measure(methods: list[str], results: common.Results) -> list[str]:
    return bench_linear.measure(["tiny"], methods, 256, PASSES, 0.01, results, "eager")


def test_measure_layers(on_a_cpu, results):
    methods, so_far = ["bf16", "clover"], []
    results.write = lambda: so_far.append(len(results.records))
    assert measure(methods, results) == []
    records = results.records
    assert so_far == [2, 4]  # whenever a pass is through
    assert [(r["pass"], r["method"]) for r in records] == [(p, m) for p in PASSES for m in methods]
    assert all(r["ms"] > 0 and r["tflops"] > 0 and "spread" in r for r in records)
    assert all(r["ratio"] == 1 for r in records if r["method"] == "bf16")
    assert "x BF16" in common.show(records, bench_linear.COLUMNS)


def test_a_wrong_method_is_not_timed(on_a_cpu, monkeypatch, results):
    real = linear.gemm
    monkeypatch.setattr(linear, "gemm", lambda a, b, **kw: torch.zeros_like(real(a, b, **kw)))
    assert measure(["bf16", "clover"], results) == ["clover: output is all zeros"]
    assert {r["method"] for r in results.records} == {"bf16"}


def test_a_method_that_is_wrong_only_at_the_benchmarks_shape_is_not_timed(on_a_cpu, monkeypatch, results):
    """As after an overflow of an index: the small layer of the doctor is right."""
    real = linear.gemm

    def gemm(a, b, **kw):
        y = real(a, b, **kw)
        return y * (torch.arange(len(y)) < 200).unsqueeze(1) if len(y) == 256 else y

    monkeypatch.setattr(linear, "gemm", gemm)
    (problem,) = measure(["bf16", "clover"], results)
    assert {r["method"] for r in results.records} == {"bf16"} and "tiny up: output is off BF16" in problem


def test_measure_every_kernel_whose_check_agrees(on_a_cpu, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    problem = lambda device, rounding, rht_dim, shape: "codes differ" if rounding.ms_eden else None  # noqa: E731
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    monkeypatch.setattr(bench_quantize, "kernel_problem", problem)
    every = bench_quantize.kernels(128, 128).items()
    alike = ("search", "-> bf16", "tetrajet_v2", "16x16", "fp32")  # kernels of the same kinds as others
    chosen = {name: k for name, k in every if not any(part in name for part in alike)}
    wrong = [name for name, k in chosen.items() if k.checks[0][0] == "ms_eden"]
    problems = []
    found = dict(bench_quantize.measure(chosen, on_a_cpu, problems))
    assert [*found, *wrong] == sorted(chosen, key=lambda name: name in wrong) and len(wrong) == 3
    assert problems == [f"{name} (codes differ)" for name in wrong]
    num_bytes = sum(s.num_bytes for s in chosen["decode"].steps)
    assert num_bytes == 128 * 128 * (0.5 + 1 / 16 + 2) and found["decode"] > 0


def test_the_second_kernels_share():
    """One for each operand of grad_output, timed together with the first kernel and alone."""
    ms = {bench_quantize.SECOND_KERNEL: 0.1, "grad_output clover -> codes": 1.2}
    records = [{"kernel": name, "ms": value} for name, value in ms.items()]
    assert bench_quantize.second_kernel_share(records) == pytest.approx(0.2)
    assert bench_quantize.second_kernel_share(records[:1]) is None
    assert bench_quantize.second_kernel_share(records[1:]) is None


def test_what_was_measured_survives(on_a_cpu, monkeypatch, capsys, tmp_path):
    pytest.importorskip("triton")

    def problem(device, rounding, rht_dim, shape):
        if rounding == get_rounding("four_over_six"):
            raise KeyboardInterrupt

    target = tmp_path / "quantize.json"
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    monkeypatch.setattr(bench_quantize, "kernel_problem", problem)
    monkeypatch.setattr(bench_quantize, "copy_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    with pytest.raises(KeyboardInterrupt):
        bench_quantize.main(["--rows=128", "--columns=128", f"--json={target}"])
    records = json.loads(target.read_text())["records"]
    assert [r["kernel"] for r in records] == ["amax", "rtn bf16 + decode"]
    assert records[0]["bytes"] == 128 * 128 * 2
    assert records[0]["share_of_copy"] == pytest.approx(records[0]["bytes"] / records[0]["ms"] / 1e6 / 100)
    assert capsys.readouterr().out.splitlines()[-1].startswith("rtn bf16 + decode ")


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, results):
    monkeypatch.setattr(bench_linear, "LAYER_SETS", {"tiny": {"up": (512, 1024)}})
    for mode in ("eager", "graph"):
        assert not bench_linear.measure(["tiny"], ["bf16", "clover"], 1024, PASSES, 0.5, results, mode)
        records = results.records
        assert len(records) == 4 and all(0 < r["ms"] < 100 for r in records)
        assert all(100 < r["mhz"] < 4000 and 10 < r["watts"] < 2000 for r in records)


@pytest.mark.gpu
def test_a_graph_draws_fresh_randomness_at_each_replay():
    weight, x = torch.randn(256, 128, device="cuda"), torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    layer = bench_linear.Layer(
        "clover", 128, 256, weight, x.requires_grad_(), torch.randn(128, 256, device="cuda").bfloat16()
    )
    results = []
    replay = bench_linear.graphed(lambda: results.append(layer.forward_backward()))
    replay()
    first = [t.clone() for t in results[-1]]
    replay()
    assert torch.equal(results[-1][0], first[0])  # the forward pass draws nothing
    assert not torch.equal(results[-1][1], first[1]) and not torch.equal(results[-1][2], first[2])
