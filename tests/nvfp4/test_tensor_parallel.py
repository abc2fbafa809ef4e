"""Tensor and sequence parallelism: two gloo processes compute a layer together."""

import _rows  # noqa: F401  # registers rows for a rank, which has no conftest
import pytest
import torch
import torch.distributed as dist
from _assertions import relative_square_error
from _models import simulate_fp4_tensor_cores
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import tensor_parallel
from nanochat_fp4.nvfp4.epilogue import fused_linear
from nanochat_fp4.nvfp4.layer import QuantLinear

K, N, SEQUENCES, TOKENS = 256, 512, 2, 64
STYLES = [(style, sequence) for style in ("ColwiseParallel", "RowwiseParallel") for sequence in (True, False)]


def part_of(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    return tensor if dim is None else tensor.chunk(2, dim)[dist.get_rank()]


def in_two(function, *args):
    """Calls function(mesh, *args) in one of two processes."""
    dist.init_process_group("gloo")
    try:
        function(init_device_mesh("cpu", (2,)), *args)
    finally:
        dist.destroy_process_group()


def divided(mesh, layers, style, sequence):
    copies = []
    for layer in layers:
        copy = QuantLinear(layer.in_features, layer.out_features, layer.bias is not None, layer.recipe)
        copy.load_state_dict(layer.state_dict())
        copies.append(parallelize_module(copy, mesh, getattr(nf, style)(sequence_parallel=sequence)))
        assert copy.weight.shape == layer.weight.shape and copy.weight.to_local().numel() == layer.weight.numel() // 2
    return copies


def one_layer(mesh, method, limit):
    """The output is that of one process, and the gradients are up to a relative square error."""
    torch.manual_seed(0)
    alone = QuantLinear(K, N, bias=True, method=method)
    x, g = torch.randn(SEQUENCES, TOKENS, K), torch.randn(SEQUENCES, TOKENS, N)
    # The largest of all are in the second process's parts, so that the other's own amaxes would be too small.
    x[0, TOKENS - 1, K - 1], g[1, TOKENS - 1, N - 1], alone.weight.data[N - 1, K - 1] = 9.0, 7.0, 0.5
    for style, sequence in STYLES:
        (layer,) = divided(mesh, [alone], style, sequence)
        tokens = 1 if sequence else None
        at_x, at_y = (tokens, 2) if style == "ColwiseParallel" else (2, tokens)
        for once in (False, True):
            results = []
            for module, parts in ((alone, (None, None)), (layer, (at_x, at_y))):
                mine = part_of(x, parts[0]).clone().requires_grad_()
                module.zero_grad()
                torch.manual_seed(7)
                if once:
                    with nf.quantize_weights_once(module), nf.accumulate_gradients(module):
                        y = module(mine)
                        y.backward(part_of(g, parts[1]))
                else:
                    y = module(mine)
                    y.backward(part_of(g, parts[1]))
                results.append((y, mine.grad, module.weight.grad, module.bias.grad))
            (y, dx, dw, db), (y2, dx2, dw2, db2) = results
            torch.testing.assert_close(y2, part_of(y, at_y), rtol=1e-4, atol=1e-4)  # sums in another order
            torch.testing.assert_close(db2.full_tensor(), db, rtol=1e-4, atol=1e-4)
            assert relative_square_error(dx2, part_of(dx, at_x)) < limit, (style, sequence)
            assert relative_square_error(dw2.full_tensor(), dw) < limit, (style, sequence)
        for inside in (nf.per_token_scale, nf.full_precision):
            with torch.no_grad(), inside(alone), inside(layer):
                torch.testing.assert_close(layer(part_of(x, at_x)), part_of(alone(x), at_y), rtol=1e-4, atol=1e-4)


# Rounding to nearest: a rotation that is summed in another order tips one code in a thousand. MS-EDEN draws anew.
@pytest.mark.parametrize("method, limit", [("bf16", 1e-10), ("nvidia_no_sr", 1e-4), ("fp8", 1e-10), ("clover", 0.1)])
def test_two_ranks_compute_the_layer_of_one(run_ranks, method, limit):
    run_ranks(f"import test_tensor_parallel as t; t.in_two(t.one_layer, {method!r}, {limit})")


def fused_layers(mesh):
    """q, k, v of a column-parallel block: their input is gathered once, as codes."""
    gathered, gather = [], tensor_parallel.collectives.all_gather_tensor

    def all_gather(t, *args):
        gathered.append(t.nbytes)
        return gather(t, *args)

    tensor_parallel.collectives.all_gather_tensor = all_gather
    torch.manual_seed(0)
    layers = [QuantLinear(K, n, method="clover") for n in (256, 128, 128)]
    x = torch.randn(SEQUENCES, TOKENS, K)
    x[0, 0, 0] = 9.0
    parts = divided(mesh, layers, "ColwiseParallel", True)
    for y, part in zip(fused_linear(x, *layers), fused_linear(part_of(x, 1), *parts)):
        torch.testing.assert_close(part, part_of(y, 2), rtol=1e-4, atol=1e-4)
    assert gathered == [SEQUENCES * TOKENS // 2 * K * 4.5 / 8]
    products = simulate_fp4_tensor_cores()
    y = parts[0](part_of(x, 1))
    torch.testing.assert_close(y, part_of(layers[0](x), 2), rtol=1e-4, atol=1e-4)
    assert len(products) == 2  # Row-major scales that were gathered are brought into tiles.


def test_layers_that_are_computed_as_one_gather_codes_once(run_ranks):
    run_ranks("import test_tensor_parallel as t; t.in_two(t.fused_layers)")


def refusals(mesh):
    for method, features, text in (("clover", 264, "in_features is 264, .*2 x 16"), ("nvidia", 48, "48, .*2 x 16")):
        layer = QuantLinear(32, 512, method=method)
        layer.in_features = features
        with pytest.raises(ValueError, match=text):
            parallelize_module(layer, mesh, nf.RowwiseParallel())
    layer = QuantLinear(256, 256, method="clover")
    with pytest.raises(ValueError, match="nanochat_fp4.convert .*got Linear"):
        parallelize_module(nn.Linear(256, 256), mesh, nf.ColwiseParallel())
    parallelize_module(layer, mesh, nf.ColwiseParallel())
    with pytest.raises(ValueError, match="parallel already"):
        parallelize_module(layer, mesh, nf.ColwiseParallel())
    row = parallelize_module(QuantLinear(256, 256, method="bf16"), mesh, nf.RowwiseParallel())
    with pytest.raises(ValueError, match="7 tokens"):
        row(torch.ones(7, 128))


def test_what_is_not_divided(run_ranks):
    run_ranks("import test_tensor_parallel as t; t.in_two(t.refusals)")
