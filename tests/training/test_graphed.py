"""CUDA graphs: bits with and without graphs, on a CPU with recorded operators in the place of CUDA's graphs."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from _graphs import Recorded, record_graphs
from torch._dynamo.utils import counters

import nanochat_fp4 as nf
from nanochat_fp4.common import seed_micro_batch
from nanochat_fp4.models import gpt
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.models.optim8bit import LeanState, set_state
from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.training import graphed, memory
from nanochat_fp4.training.graphed import GraphedStep, graphs_problem
from nanochat_fp4.training.step import TrainingStep

STEPS = 5


@pytest.fixture
def recorded(monkeypatch) -> list[Recorded]:
    """The graphs that are made in a test."""
    return record_graphs(monkeypatch)


def trained(
    kind: type[TrainingStep],
    device: str,
    method: str,
    count: int,
    steps: int,
    phases: str = "",
    state: str = "fp32",
    compiled: bool = False,
) -> dict:
    """The weights after so many steps of a small GPT."""
    torch.manual_seed(1)
    config = GPTConfig(sequence_len=64, vocab_size=256, n_layer=1, n_head=1, n_kv_head=1, n_embd=64)
    with torch.device("meta"):
        model = GPT(config)
    set_state(model, state)
    model.to_empty(device=device)
    model.init_weights()
    nf.convert(model, method, verbose=False)
    plan = MethodPlan.parse(method, "", phases)
    lean = LeanState(model, 1) if state == "lean" else None
    step = kind(model, model.setup_optimizers(lean=lean), gpt.compile_layers(model) if compiled else None, lean=lean)
    for number in range(steps):
        plan.apply(model, number / steps)
        with step.micro_batches(count, number):
            for i in range(count):
                seed_micro_batch(1, number, i)
                ids = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(number * count + i))
                ids = ids.to(device)
                step.micro_batch(ids, ids.roll(-1, 1), count=count)
        step.update()
    return model.state_dict()


def test_graphs_need_the_memory_of_the_gpu_or_of_a_cap(monkeypatch):
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=64, vocab_size=256, n_layer=1, n_head=1, n_kv_head=1, n_embd=64))
    monkeypatch.setattr(model, "get_device", lambda: torch.device("cuda"))
    need = memory.count(model, 2, "fp32", "none", 64).graphed_peak
    for gpu, cap, refused in ((2, None, False), (2, 2, False), (2, 1, True), (1, None, True)):
        monkeypatch.setattr(graphed, "gpu_memory", lambda device, gpu=gpu: (0, gpu * need))
        problem = graphs_problem(model, 2, 64, cap=cap and int(cap * need))
        assert bool(problem) == refused and "by count" in (problem or "by count"), (gpu, cap)


CASES = [
    ("clover", 1, STEPS, ""),
    ("clover", 2, STEPS, "0.5=bf16"),
    ("clover_fp8_forward", 2, STEPS, ""),
    ("clover", 1, STEPS, "", "lean"),
    ("clover", 3, STEPS, "", "lean"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_are_those_without_graphs(device, case, request):
    graphs = request.getfixturevalue("recorded") if device == "cpu" else None
    plain, graphed = (trained(kind, device, *case) for kind in (TrainingStep, GraphedStep))
    assert graphs is None or (graphs and all(graph.calls for graph in graphs))  # PyTorch warns of an empty one
    for name, weight in plain.items():
        assert torch.equal(weight, graphed[name]), name


@pytest.mark.parametrize("state", ["fp32", "lean"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_capture_compiles_nothing(device, state, monkeypatch):
    """A kernel of a reduction is timed at its first launch, which waits for the device and ends a capture."""
    if device == "cpu":  # PyTorch's compiler does not see what is recorded, so nothing is recorded here.
        graph = SimpleNamespace(replay=lambda: None, pool=lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: contextlib.nullcontext())
        for module in (dispatch, gpt):
            monkeypatch.setattr(module, "stays_eager", lambda *_: False)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = []
    monkeypatch.setattr(GraphedStep, "update", lambda step: compiled.append(counters["stats"]["unique_graphs"]))
    trained(GraphedStep, device, "fp8", 2, 3, state=state, compiled=True)
    assert compiled[0] and len(set(compiled)) == 1


def test_memory_that_ends_in_a_capture_is_not_another_error(recorded, monkeypatch):
    """The training loop then names the micro-batch that fits."""

    def capture(graph, **_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    with pytest.raises(torch.OutOfMemoryError):
        trained(GraphedStep, "cpu", "clover", 2, STEPS)


def test_what_a_step_keeps_is_given_back_when_memory_ends_in_the_update(recorded):
    """The advice is computed afterwards, and would say that no smaller batch fits."""
    kinds = []

    class Ending(GraphedStep):
        def update(self):
            kinds.append(self.captured is not None)
            if len(kinds) == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().update()

    made = []

    def kind(*args, **kwargs):
        made.append(Ending(*args, **kwargs))
        return made[-1]

    with pytest.raises(torch.OutOfMemoryError):
        trained(kind, "cpu", "clover", 2, STEPS)
    assert kinds == [False, True, True, True]
    assert made[0].drop_graphs() and not made[0].drop_graphs() and made[0].captured is None
