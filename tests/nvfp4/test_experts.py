"""Experts in stacked parameters: every slice is computed as a QuantLinear with it, to the bit."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, silu

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.convert import uncalled
from nanochat_fp4.nvfp4.experts import stacked_linears

EXPERTS, WIDTH, HIDDEN = 6, 32, 48
COUNTS = (0, 1, 15, 17, 2, 5)  # tokens of each expert: none, one, a block less and more than one


class Experts(nn.Module):
    """As transformers 5 has them, with its forward in plain PyTorch."""

    def __init__(self, transposed: bool = False, bias: bool = False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape):
            return nn.Parameter(0.2 * torch.randn(*shape, generator=generator))

        up, down = (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
        self.is_transposed = transposed
        self.gate_up_proj = parameter(EXPERTS, *(up[::-1] if transposed else up))
        self.down_proj = parameter(EXPERTS, *(down[::-1] if transposed else down))
        if bias:
            self.gate_up_proj_bias, self.down_proj_bias = parameter(EXPERTS, up[0]), parameter(EXPERTS, down[0])

    def _apply_gate(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = (y[..., ::2], y[..., 1::2]) if self.is_transposed else y.chunk(2, dim=-1)  # gpt-oss interleaves
        return silu(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for e in range(EXPERTS):
            token, choice = (top_k_index == e).nonzero(as_tuple=True)
            y = self.product(e, hidden_states[token])
            result = result.index_add(0, token, y * top_k_weights[token, choice, None])
        return result

    def product(self, e: int, x: torch.Tensor, compute=linear) -> torch.Tensor:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(self, name)[e]
            x = compute(x, weight.T if self.is_transposed else weight)
            if hasattr(self, f"{name}_bias"):
                x = x + getattr(self, f"{name}_bias")[e]
            x = self._apply_gate(x) if name == "gate_up_proj" else x
        return x


class GroupedExperts(nn.Module):
    """As torchtitan had them before release 0.3."""

    names = ("w1", "w2", "w3")

    def __init__(self):
        super().__init__()
        for name, shape in zip(self.names, ((HIDDEN, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))):
            setattr(self, name, nn.Parameter(0.2 * torch.randn(EXPERTS, *shape)))

    def forward(self, x, num_tokens_per_expert):
        outputs, start = [], 0
        gate, down, up = (getattr(self, name) for name in self.names)
        for e, count in enumerate(num_tokens_per_expert.tolist()):
            rows = x[start : (start := start + count)]
            outputs.append(linear(silu(linear(rows, gate[e])) * linear(rows, up[e]), down[e]))
        return torch.cat([*outputs, torch.zeros_like(x[start:])])


class NamedByShape(GroupedExperts):
    """As torchtitan 0.3 has them."""

    names = ("w1_EFD", "w2_EDF", "w3_EFD")

    def forward(self, x_RD, num_tokens_per_expert_E):
        return super().forward(x_RD, num_tokens_per_expert_E)


class Model(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.router = nn.Linear(WIDTH, 16 * EXPERTS)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts
        self.lm_head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = x + self.experts(x, chosen, weights)
        return self.lm_head(y + self.router(y)[:, :WIDTH])


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states, top_k_index, top_k_weights of two choices a token, so that each expert has its COUNTS."""
    torch.manual_seed(1)
    tokens = sum(COUNTS) // 2
    index = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(COUNTS)).view(2, tokens).T.contiguous()
    return torch.randn(tokens, WIDTH), index, torch.rand(tokens, 2)


def quant_linear(weight: torch.Tensor, method: str) -> nf.QuantLinear:
    layer = nf.QuantLinear(weight.shape[1], weight.shape[0], method=method)
    layer.weight = nn.Parameter(weight.detach().clone())
    return layer


def converted(experts: nn.Module, method: str) -> nn.Module:
    return nf.convert(Model(experts), method, verbose=False).experts


def test_an_expert_without_tokens_counts_as_called():
    torch._dynamo.utils.counters.clear()
    model = nf.convert(Model(Experts()), "clover", skip=["router"], verbose=False)
    model.experts(*routed())
    assert not uncalled(model)
    other = nf.convert(nn.Sequential(Model(Experts()), Model(Experts())), "clover", verbose=False)
    other[0].experts(*routed())
    assert "1.experts" in uncalled(other) and "0.experts" not in uncalled(other)


def test_an_adapter_around_one_expert_is_refused():
    """As peft sets it for target_modules="all-linear"."""
    slices = nf.convert(Model(Experts()), "clover", verbose=False).experts.expert_linears["down_proj"]
    with pytest.raises(ValueError, match="target_modules"):
        slices.expert_2 = nn.Identity()
    assert copy.deepcopy(slices)["expert_2"].out_features == WIDTH


@pytest.mark.parametrize("method", nf.METHODS)
def test_an_expert_is_a_quant_linear_of_its_tokens(method):
    """Outputs and all gradients, to the bit, of 0, 1, 15 and 17 tokens."""
    experts, (x, index, weights) = converted(Experts(), method), routed()
    x, grad = x.requires_grad_(), torch.randn_like(x)
    torch.manual_seed(2)
    y = experts(x, index, weights)
    y.backward(grad)
    got = y.detach(), x.grad, experts.gate_up_proj.grad, experts.down_proj.grad

    plain = Experts()
    recipe, names = nf.get_recipe(method), ("gate_up_proj", "down_proj")
    layers = {n: [quant_linear(w, recipe) for w in getattr(plain, n)] for n in names}
    x = x.detach().requires_grad_()
    order = index.flatten().argsort(stable=True)
    token, chosen = order // 2, index.flatten()[order]
    torch.manual_seed(2)
    rows = x[token].split(COUNTS)
    hidden = [plain._apply_gate(layer(r)) if len(r) else r[:, :0] for layer, r in zip(layers["gate_up_proj"], rows)]
    parts = [layer(h) for layer, h in zip(layers["down_proj"], hidden) if len(h)]
    want = torch.zeros_like(x).index_add_(0, token, torch.cat(parts) * weights.flatten()[order, None])
    want.backward(grad)
    assert chosen.bincount(minlength=EXPERTS).tolist() == list(COUNTS)
    zeros = torch.zeros_like(plain.gate_up_proj[0]), torch.zeros_like(plain.down_proj[0])
    grads = [
        torch.stack([zero if layer.weight.grad is None else layer.weight.grad for layer in some])
        for some, zero in zip(layers.values(), zeros)
    ]
    for a, b in zip(got, (want.detach(), x.grad, *grads)):
        assert torch.equal(a, b)
    assert experts.gate_up_proj.grad[0].count_nonzero() == 0 and experts.gate_up_proj.grad[1].count_nonzero()


@pytest.mark.parametrize("transposed, bias", [(False, False), (True, True)])
def test_in_full_precision_it_is_the_module_as_it_was(transposed, bias):
    plain, inputs = Experts(transposed, bias), routed()
    experts = converted(copy.deepcopy(plain), "clover")
    results = []
    for module, model in ((plain, nn.Module()), (experts, experts)):
        with nf.full_precision(model):
            y = module(*inputs)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in module.parameters())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    y = experts(*inputs)
    assert 0.01 < (y - results[0][0]).norm() / results[0][0].norm() < 0.5


@pytest.mark.parametrize("kind", [GroupedExperts, NamedByShape])
def test_torchtitans_experts(kind):
    """With rows of padding at the end."""
    torch.manual_seed(0)
    plain = kind()
    x, counts = torch.randn(sum(COUNTS) + 3, WIDTH), torch.tensor(COUNTS)
    experts = converted(copy.deepcopy(plain), "four_over_six")
    want = plain(x, counts)
    with nf.full_precision(experts):
        torch.testing.assert_close(experts(x, counts), want)
    y = experts(x, counts)
    assert 0.01 < (y - want).norm() / want.norm() < 0.5 and y[sum(COUNTS) :].count_nonzero() == 0
    gate = getattr(experts, kind.names[0])
    first = stacked_linears(experts)[kind.names[0]][3]
    start, end = sum(COUNTS[:3]), sum(COUNTS[:4])
    layer = quant_linear(gate[3], "four_over_six")
    assert torch.equal(first(x[start:end], gate[3]), layer(x[start:end]))


def test_the_model_stays_what_it_was():
    """Names, state dict, copies; the report counts the slices; routers and unknown experts stay in full precision."""
    model = Model(Experts())
    names, state = [n for n, _ in model.named_parameters()], set(model.state_dict())
    nf.convert(model, "clover", verbose=False)
    assert [n for n, _ in model.named_parameters()] == names and set(model.state_dict()) == state
    assert isinstance(model.experts, Experts)
    report = model.nf_report
    assert ("gate", "a router stays in full precision") in report.left_alone
    assert sum("expert_linears" in name for name in report.converted) == 2 * EXPERTS
    matrices = sum(p.numel() for n, p in model.named_parameters() if "bias" not in n)
    quantized = sum(p.numel() for p in model.experts.parameters()) + model.router.weight.numel()
    assert report.quantized == pytest.approx(quantized / matrices)
    copied = copy.deepcopy(model)
    linears = stacked_linears(copied.experts)["down_proj"]
    assert linears[0].weight is copied.experts.down_proj and copied.experts.down_proj is not model.experts.down_proj
    nf.convert(model, "clover", skip=["experts"], verbose=False)
    assert not any(layer.quantizes for some in stacked_linears(model.experts).values() for layer in some)
    model.experts.extra = nn.Parameter(torch.zeros(2, 16, 16))
    assert "experts of 1 layer(s)" in str(report)


class WithIdentity(Experts):
    """As LongCat-Flash has them: numbers from EXPERTS on are experts that return their tokens."""

    def __init__(self):
        super().__init__()
        self.identity_expert = nn.Identity()


def test_experts_of_an_unknown_layout_are_named_with_their_share():
    """Never computed by a forward that leaves out what they do."""
    for experts, name in ((nn.Bilinear(16, 16, 64), "Bilinear.weight"), (WithIdentity(), "WithIdentity.gate_up_proj")):
        report = nf.convert(Model(experts), "clover", verbose=False).nf_report
        (share,) = (share for kind, share in report.others.items() if f"3-D weights ({name})" in kind)
        line = f"not converted, {100 * share:.1f}% of the weights in matrix products: 3-D weights ({name})"
        assert share > 0.1 and line in str(report)
        assert "warning: " in str(report) and type(experts) in (nn.Bilinear, WithIdentity)
    with pytest.raises(ValueError, match="Bilinear.weight"):
        nf.convert(nn.ModuleList([nn.Bilinear(16, 16, 64)]))


def test_contexts_know_experts():
    """Codes made once are the same bits; training lowers a loss."""
    experts, inputs = converted(Experts(), "clover"), routed()
    with torch.no_grad():
        want = experts(*inputs)
        with nf.quantize_weights_once(experts):
            assert torch.equal(experts(*inputs), want)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=3e-3)
    target, losses = torch.randn_like(inputs[0]), []
    for _ in range(30):
        loss = (experts(*inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def losses_of(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """Of a step on each batch."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, x in enumerate(batches):
        torch.manual_seed(step)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seeded(method: str) -> nn.Module:
    torch.manual_seed(0)
    return nf.convert(Model(Experts()), method, verbose=False)


@pytest.mark.slow
def test_compiled_and_not_compiled_again():
    """The code around the experts is compiled, and other numbers of tokens of an expert compile nothing anew."""
    batches = [torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    want, model = losses_of(seeded("clover"), batches), seeded("clover")
    compiled = torch.compile(model, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert losses_of(compiled, batches) == pytest.approx(want, rel=1e-3)
    torch._dynamo.reset()


def one_rank():
    """Two processes with the same tokens: FSDP2's mean of two equal gradients is exact, so every bit is the same."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        batches = [torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        for method in ("clover", "nvidia"):
            alone, sharded = seeded(method), seeded(method)
            fully_shard(sharded.experts)
            fully_shard(sharded)
            gathered = nf.gather_codes(sharded)
            assert sum("experts" in name for name in gathered) == 2 * EXPERTS, gathered
            assert sharded.experts.gate_up_proj.to_local().shape[0] == EXPERTS // 2
            assert losses_of(sharded, batches) == losses_of(alone, batches), method
            state = {name: t.full_tensor() for name, t in sharded.state_dict().items()}
            assert list(state) == list(alone.state_dict())
            alone.load_state_dict(state)  # and back
            for name, t in Model(Experts()).state_dict().items():
                assert state[name].shape == t.shape
            with torch.no_grad():
                assert torch.equal(sharded(batches[0]), alone(batches[0]))
    finally:
        dist.destroy_process_group()


def test_two_processes_train_as_one(run_ranks):
    run_ranks("import test_experts; test_experts.one_rank()")


def test_apply_visits_a_stacked_parameter_once():
    experts = nf.convert(nn.Sequential(Experts()), "clover", verbose=False)
    before = experts[0].gate_up_proj.detach().clone()

    def add_one(module: nn.Module) -> None:
        for name in ("weight", "gate_up_proj"):
            if isinstance(weight := getattr(module, name, None), nn.Parameter):
                weight.data += 1

    experts.apply(add_one)
    assert torch.equal(experts[0].gate_up_proj, before + 1)


def test_converted_experts_pickle():
    experts = nf.convert(Experts(), "clover", verbose=False)
    loaded = pickle.loads(pickle.dumps(experts))
    x, chosen = torch.randn(7, WIDTH), torch.arange(7)[:, None] % EXPERTS
    assert type(loaded) is type(experts)
    assert loaded.expert_linears["down_proj"]["expert_1"].weight is loaded.down_proj
    assert torch.equal(loaded(x, chosen, torch.ones(7, 1)), experts(x, chosen, torch.ones(7, 1)))
