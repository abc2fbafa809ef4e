"""--cuda-graph: bits with and without graphs, and the line that says why a run is left without."""

import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import seed_micro_batch
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.quantized_training import QuantizedTraining
from nanochat_fp4.training.graphed import GraphedStep
from nanochat_fp4.training.step import TrainingStep

ON_A_GPU = [pytest.mark.gpu]


def trained(kind: type[TrainingStep], device: str, method: str, count: int, phases: str = "", steps: int = 8) -> dict:
    """The weights after some steps of a small GPT."""
    torch.manual_seed(1)
    config = GPTConfig(sequence_len=64, vocab_size=256, n_layer=2, n_head=1, n_kv_head=1, n_embd=64)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    nf.convert(model, method, verbose=False)
    quantized = QuantizedTraining(model, MethodPlan.parse(method, "", phases), steps)
    step = kind(model, model.setup_optimizers(), None, quantized)
    for number in range(steps):
        quantized.set_progress(number)
        with step.micro_batches(count, number):
            for i in range(count):
                seed_micro_batch(1, number, i)
                ids = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(number * count + i))
                step.micro_batch(ids.to(device), ids.roll(-1, 1).to(device), count=count)
        step.update()
    return model.state_dict()


@pytest.mark.parametrize(
    "device, method, count, phases",
    [
        pytest.param("cpu", "clover", 2, ""),
        pytest.param("cuda", "clover", 2, "", marks=ON_A_GPU),
        pytest.param("cuda", "clover", 1, "", marks=ON_A_GPU),
        pytest.param("cuda", "clover", 2, "0.5=bf16", marks=ON_A_GPU),
    ],
)
def test_weights_are_those_without_graphs(device, method, count, phases):
    plain, graphed = (trained(kind, device, method, count, phases) for kind in (TrainingStep, GraphedStep))
    for name, weight in plain.items():
        assert torch.equal(weight, graphed[name]), name
