"""FSDP2 with weights that travel as codes: two gloo processes do what one does, to the bit, and send 4.5 bits."""

import _rows  # noqa: F401  # registers rows for a rank, which has no conftest
import pytest
import torch
import torch.distributed as dist
from _communication import counted
from _models import simulate_fp4_tensor_cores
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.epilogue import fused_linear
from nanochat_fp4.nvfp4.layer import QuantLinear

WIDTH = 64


class Block(nn.Module):
    fused_linears = ("q", "k", "v")

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.k.weight.mul_(3)  # the largest of the three, all in one rank's rows
            self.v.weight[: WIDTH // 2].mul_(0.5)

    def forward(self, x):
        q, k, v = fused_linear(x, self.q, self.k, self.v)
        return x + self.o(torch.tanh(q[..., :WIDTH] + q[..., WIDTH:] + k) * v)


def made(method, shard=False, **gather):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, WIDTH), Block(), Block(), nn.Linear(WIDTH, 32, bias=False))
    nf.convert(model, method, skip="3", verbose=False)
    if shard:
        from torch.distributed.fsdp import fully_shard

        for block in model[1:3]:
            fully_shard(block)
        fully_shard(model)
        raw = nf.gather_codes(model, **gather)
        assert bool(raw) == (method == "bf16"), raw
    return model


def trained(model, rows, fused=False):
    """Losses of three steps. fused: AdamW's kernel, whose changes PyTorch does not count (_version)."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True) if fused else sgd, []
    for step in range(3):
        nf.set_progress(model, step / 2)
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_rank(methods):
    dist.init_process_group("gloo")
    try:
        rows = torch.randint(32, (4, 33), generator=torch.Generator().manual_seed(5))  # the same on both ranks
        for method in methods:
            alone, sharded = made(method), made(method, shard=True)
            # The mean of two equal gradients is exact, so every bit is the same, update after update.
            assert trained(sharded, rows) == trained(alone, rows), method
            with torch.no_grad():
                y = sharded(rows)
                assert torch.equal(y, alone(rows)), method
                with nf.full_precision(alone), nf.full_precision(sharded):
                    assert torch.equal(sharded(rows), alone(rows)), method
                assert torch.equal(sharded(rows), y), f"{method}: codes are gathered again"
        alone, sharded = made("clover"), made("clover", shard=True)
        assert trained(alone, rows, fused=True) == trained(sharded, rows, fused=True)
        nothing_stays(made("clover", shard=True), rows)
        counts(made("clover", shard=True), rows)
        refusals()
    finally:
        dist.destroy_process_group()


def one_rank_in_tiles():
    """Each rank writes its rows' scales in tiles where they are whole ones, and then no pass of its own does so."""
    from torch.distributed.fsdp import fully_shard

    products = simulate_fp4_tensor_cores()
    dist.init_process_group("gloo")
    try:
        for method, rows in (("clover", 512), ("nvidia", 256), ("clover_search", 256), ("clover", 128)):
            results = []
            for shard in (False, True):
                torch.manual_seed(0)
                model = nf.convert(nn.Sequential(nn.Linear(WIDTH, rows, bias=False)), method, verbose=False)
                x = torch.randn(32, WIDTH)
                if shard:
                    fully_shard(model)
                    nf.gather_codes(model)
                products.clear()
                results.append(model(x).detach())
                assert products == [(1, 2 if shard and rows < 256 else 1)], (method, rows, products)
            assert torch.equal(*results), (method, rows)
    finally:
        dist.destroy_process_group()


def test_gathered_scales_are_in_tiles(run_ranks):
    run_ranks("import test_sharding; test_sharding.one_rank_in_tiles()")


def nothing_stays(model, rows):
    """After the forward pass FSDP's buffers are freed, although they are saved for the backward pass; and no tensor of
    a weight's size is kept beside them."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = model(rows).square().mean()
    layers = [m for m in model[1:3].modules() if isinstance(m, QuantLinear)]
    of_weights = {t.untyped_storage().data_ptr() for m in layers for t in (m.gathered.codes, m.gathered.scales)}
    assert all(t.untyped_storage().size() == 0 for m in layers for t in (m.gathered.codes, m.gathered.scales))
    freed = [t for t in saved if t.untyped_storage().size() == 0]
    assert len(freed) == 2 * len(layers) and len(of_weights) == 1, "codes and scales of each, and they alone"
    assert not [t for t in saved if t.shape[-2:] in {m.weight.shape for m in layers} and t.untyped_storage().size()]
    loss.backward()
    for name, m in model[1:3].named_modules():
        if isinstance(m, QuantLinear):
            assert m.weight.grad is not None and m.weight.grad.to_local().isfinite().all(), name


def counts(model, rows):
    """Counted: 4.5 bits an element, of which each of two ranks sends half; gradients in FP32."""
    head = sum(p.numel() * 4 for m in (model[0], model[3]) for p in m.parameters())
    biases = sum(m.o.bias.numel() * 4 for m in model[1:3])
    weights = sum(m.weight.numel() for m in model[1:3].modules() if isinstance(m, QuantLinear))
    for _ in range(2):  # the first makes the codes
        with counted() as sent:
            model(rows).square().mean().backward()
        codes = 2 * sent["all_gather"] - head - 2 * biases  # what is not in the blocks is gathered once
        assert codes == 2 * weights * 4.5 / 8, "forward and backward"
        assert 2 * sent["reduce_scatter"] == 4 * weights + head + biases
    assert not sent["all_reduce"], "amaxes are reduced after a change only"


def refusals():
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError, match="fully_shard"):
        nf.gather_codes(made("clover"))
    for method, rows, text in (
        ("clover", 33 * 16 + 1, "529 rows of 0"),
        ("nvidia", 48, "48 rows of 0 in blocks of 16"),
    ):
        layer = nn.Linear(64, 48, bias=False)
        model = nf.convert(nn.Sequential(layer), method, verbose=False)
        layer.weight = nn.Parameter(torch.randn(rows, 64))
        fully_shard(model)
        with pytest.raises(ValueError, match=f"{text} .*2 processes"):
            nf.gather_codes(model)


def test_two_ranks_train_as_one_and_send_codes(run_ranks):
    methods = ["clover", "nvidia", "bf16", "clover_late"]
    run_ranks(f"import test_sharding; test_sharding.one_rank({methods!r})")
