"""Models from elsewhere, converted: what docs/models.md says of them.

    pip install '.[examples]' timm torchvision
    NANOCHAT_DIR=nanochat NANOGPT_DIR=nanoGPT \\
        python -m pytest tests/models/test_models.py --slow -n 0 -s -k thirty     # prints it; ten minutes on one core

What is missing is skipped; _models.py names the checkouts. Without --slow three models of torch alone take two steps.
"""

import contextlib
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from _models import MODELS, OWN, Missing, Sample, package
from torch.utils._python_dispatch import TorchDispatchMode

import nanochat_fp4 as nf

METHODS = ("bf16", "clover", "clover_fp8_forward", "clover_late")
REAL = {  # models with experts -> (class of transformers, sizes that differ from its defaults)
    "Mixtral-8x7B": ("Mixtral", {}),
    "Qwen3-30B-A3B": ("Qwen3Moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "gpt-oss-120b": ("GptOss", {}),
    "DeepSeek-V3": ("DeepseekV3", {}),
    "OLMoE-1B-7B": ("Olmoe", {"intermediate_size": 1024}),
}
PRODUCTS = re.compile(r"(linear|addmm|mm|bmm|baddbmm|convolution|_grouped_mm|_scaled_mm)")


class Products(TorchDispatchMode):
    """The tensors that matrix products and convolutions take, whatever calls them."""

    def __init__(self):
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if PRODUCTS.fullmatch(function.__name__.split(".")[0]):
            self.seen |= {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def weights_in_products(sample: Sample) -> int:
    """Elements of the unconverted model's parameters that a forward pass multiplies with."""
    with torch.no_grad(), Products() as products:
        sample.output(sample.model)
    weights = {id(p): p for p in sample.model.parameters() if p.dim() > 1}.values()  # and no biases
    return sum(p.numel() for p in weights if p.untyped_storage().data_ptr() in products.seen)


def called(sample: Sample) -> set[str]:
    """Names of the layers that quantize in a forward pass."""
    seen: set[str] = set()
    layers = {n: m for n, m in sample.model.named_modules() if isinstance(m, nf.QuantLinear) and m.recipe.quantizes}
    hooks = [m.register_forward_pre_hook(lambda m, args, n=n: seen.add(n)) for n, m in layers.items()]
    try:
        sample.output(sample.model)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def train(sample: Sample, steps: int) -> list[float]:
    """Losses of a loop as a user of nf.convert writes it, for every method."""
    model = sample.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        nf.set_progress(model, step / steps)
        loss = sample.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def make(name: str) -> Sample:
    torch.manual_seed(0)
    try:
        return MODELS[name]()
    except Missing as e:
        pytest.skip(str(e))


@dataclasses.dataclass
class Row:
    name: str
    layers: int
    reported: float  # and counted
    losses: dict[str, list[float]]

    def __str__(self) -> str:
        first = self.losses["bf16"][0] if "bf16" in self.losses else float("nan")
        cells = [self.name, str(self.layers), f"{100 * self.reported:.1f}%"]
        cells += [f"{first:.3f}", *(f"{losses[-1]:.3f}" for losses in self.losses.values())]
        return f"| {' | '.join(cells)} |"


def examine(name: str, methods: tuple[str, ...], steps: int) -> Row:
    """One row; every promise that the table makes is asserted on the way."""
    plain = make(name)
    total, keys, losses, row = weights_in_products(plain), list(plain.model.state_dict()), {}, None
    for method in methods:
        sample = make(name)
        model = nf.convert(sample.model, method, verbose=False)
        report = model.nf_report
        losses[method] = train(sample, steps)
        assert all(map(float.__lt__, map(abs, losses[method]), [1e3] * steps)), losses[method]  # NaN is not less
        assert losses[method][-1] < (0.9 if steps > 2 else 1) * losses[method][0], (method, losses[method])
        model.eval()
        with torch.no_grad():
            if method != "bf16":
                assert called(sample) == set(report.converted)
                counted = sum(model.get_submodule(n).matrix.numel() for n in report.converted) / total
                assert report.quantized == pytest.approx(counted, abs=1e-9)
                row = Row(name, len(report.converted), report.quantized, losses)
            evaluated = sample.output(model)
            with nf.full_precision(model):
                exact = sample.output(model)
            with nf.per_token_scale(model):
                model.train()
                trained = sample.output(model)
            # What is evaluated is what was trained. In eval mode nn.MultiheadAttention sums in another order; a code
            # that this flips is a small part of what quantization does.
            assert distance(evaluated, trained) <= 0.1 * distance(evaluated, exact) + 1e-6
            assert (distance(evaluated, exact) < 1e-6) == (method == "bf16")
            assert list(model.state_dict()) == keys
            plain.model.load_state_dict(model.state_dict(), strict=True)
            # The products of transformers' Conv1D are summed in another order.
            assert torch.allclose(plain.output(plain.model.eval()), exact, rtol=1e-4, atol=1e-4)
    late, clover = losses.get("clover_late"), losses.get("clover")
    if late and clover:
        switch = next(step for step in range(steps + 1) if step == steps or step / steps >= 0.7)
        assert late[:switch] == clover[:switch] and late[switch:] != clover[switch:] or switch == steps
    return row


@pytest.mark.parametrize("name", OWN)
def test_two_steps(name):
    row = examine(name, ("clover", "clover_late"), 2)
    assert 0 < row.reported < 1 and row.losses["clover"] == row.losses["clover_late"]


@pytest.fixture(scope="module")
def table():
    rows: list[Row] = []
    yield rows
    if rows:
        print("", *rows, sep="\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps(name, table):
    table.append(examine(name, METHODS, 30))


def sharded(names: list[str]) -> None:
    """Two processes with the same rows train as one does: the mean of two equal gradients is exact."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        for name in names:
            alone, other = make(name), make(name)
            for sample in (alone, other):
                nf.convert(sample.model, "clover", verbose=False)
            fully_shard(other.model)
            if name.startswith("GPT-2"):
                with pytest.raises(ValueError, match="Conv1D"):
                    nf.gather_codes(other.model)
            else:
                nf.gather_codes(other.model)
            found = []
            for sample in (alone, other):
                torch.manual_seed(3)
                found.append(train(sample, 2))
            assert found[0] == found[1], name
            whole = {key: t.full_tensor() for key, t in other.model.state_dict().items() if hasattr(t, "full_tensor")}
            state = alone.model.state_dict()
            assert whole and all(torch.equal(t, state[key]) for key, t in whole.items()), name
            print(name, flush=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one(run_ranks):
    names = []
    for name, made in MODELS.items():
        with contextlib.suppress(Missing):
            made()
            names.append(name)
    for printed in run_ranks(f"import test_models; test_models.sharded({names!r})"):
        assert [line for line in printed.splitlines() if line in MODELS] == names


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if "nanochat" not in name])  # Dynamo would import nanochat
def test_compiled(name, monkeypatch):
    """Compiled, it trains as it does without. Of large models the quantized layers stand outside the graphs, as on any
    CPU."""
    monkeypatch.setenv("NVFP4_COMPILE", "1" if name in OWN else "")
    found = []
    for compiled in (False, True):
        sample = make(name)
        nf.convert(sample.model, "clover", verbose=False)
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            sample.model.compile(backend="aot_eager")  # Inductor takes minutes
        torch.manual_seed(3)
        found.append(train(sample, 3))
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_real_configurations():
    """On the meta device: the experts of real sizes are converted. Prints the shares of docs/models.md."""
    try:
        transformers = package("transformers")
    except Missing as e:
        pytest.skip(str(e))
    rows = [], [], []
    for name, sizes in REAL.values():
        config = getattr(transformers, f"{name}Config")(**sizes)
        with torch.device("meta"):
            model = getattr(transformers, f"{name}ForCausalLM")(config)
        report = nf.convert(model, verbose=False).nf_report
        numbers = sum(p.numel() for p in model.parameters()) / 1e9, report.quantized_without_heads, report.quantized
        for row, text in zip(rows, (f"{numbers[0]:.1f}", f"{numbers[1]:.3%}", f"{numbers[2]:.2%}")):
            row.append(text)
        assert report.quantized_without_heads > 0.99
    print("", *(f"| {' | '.join(row)} |" for row in (list(REAL), *rows)), sep="\n")
