"""Tensor and sequence parallelism: two gloo processes compute a layer as one does, code for code."""

import contextlib
import functools
import json

import _rows  # noqa: F401  # registers rows for a rank, which has no conftest
import pytest
import torch
import torch.distributed as dist
from _models import simulate_fp4_tensor_cores
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.common import compute_cleanup, compute_init
from nanochat_fp4.models.divided import divide
from nanochat_fp4.models.gpt import GPT, config_from_depth
from nanochat_fp4.nvfp4 import linear as linear_module
from nanochat_fp4.nvfp4 import tensor_parallel
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.makers import Quantization, quantize_operand
from nanochat_fp4.nvfp4.recipes import GRAD_OUTPUT, GRAD_OUTPUT_T, INPUT, INPUT_T, WEIGHT, WEIGHT_T
from nanochat_fp4.nvfp4.roundings import get_rounding
from nanochat_fp4.nvfp4.tensor_parallel import Part
from nanochat_fp4.parallel import is_sharded, losses_of

K, N, SEQUENCES, TOKENS = 256, 512, 2, 64


@contextlib.contextmanager
def recorded():
    """The operands that are made in a forward and a backward pass, by their stream of random numbers."""
    made, make, make_both = {}, linear_module.quantize_operand, linear_module.quantize_grad_output

    def operand(value, how, **kw):
        made[how.stream] = make(value, how, **kw)
        return made[how.stream]

    def both(*args):
        made[GRAD_OUTPUT], made[GRAD_OUTPUT_T] = make_both(*args)
        return made[GRAD_OUTPUT], made[GRAD_OUTPUT_T]

    linear_module.quantize_operand, linear_module.quantize_grad_output = operand, both
    try:
        yield made
    finally:
        linear_module.quantize_operand, linear_module.quantize_grad_output = make, make_both


# The share of values that may differ where something is rotated: BLAS may sum the rotation of a part in another order
# than that of the whole. With another scale or other noise it is some 10% and more.
ROTATED = 1e-3


def differing(a, b):
    return (a != b).float().mean().item()


def part_of(tensor, dim, rank):
    return tensor if dim is None else tensor.chunk(2, dim)[rank]


def one_layer(mesh, method, style, sequence):
    """A layer by itself: operands, output and gradients of two processes are those of one."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = QuantLinear(K, N, bias=True, method=method)
    x = torch.randn(SEQUENCES, TOKENS, K)
    x[0, TOKENS - 1, 3] = 9.0  # the largest of all, in the second process's part
    g = torch.randn(SEQUENCES, TOKENS, N)
    g[1, 2, N - 1] = 7.0
    layer = QuantLinear(K, N, bias=True, method=method)
    layer.load_state_dict(alone.state_dict())
    parallelize_module(layer, mesh, getattr(nf, style)(sequence_parallel=sequence))
    assert layer.weight.shape == alone.weight.shape and layer.weight.to_local().numel() == K * N // 2
    column, tokens = style == "ColwiseParallel", 1 if sequence else None
    where_x, where_y = (tokens, 2) if column else (2, tokens)
    results = []
    for module, at_x, at_y in ((alone, None, None), (layer, where_x, where_y)):
        mine = part_of(x, at_x, rank).clone().requires_grad_()
        torch.manual_seed(7)
        with recorded() as made:
            y = module(mine)
            y.backward(part_of(g, at_y, rank))
        results.append((y, mine.grad, module.weight.grad, module.bias.grad, made))
    (y, dx, dw, db, whole), (y2, dx2, dw2, db2, parts) = results

    # Products are FP32 sums of 64 to 512 terms, in another order.
    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    close(y2, part_of(y, where_y, rank))
    close(dx2, part_of(dx, where_x, rank))
    close(dw2.full_tensor(), dw)
    close(db2.full_tensor(), db)
    with torch.no_grad():
        for inside in (nf.per_token_scale, nf.full_precision):
            with inside(alone), inside(layer):
                close(layer(part_of(x, where_x, rank)), part_of(alone(x), where_y, rank))
    if method == "bf16":
        return
    # By rows and by columns: which part of each operand this process has.
    n, k = (rank, None) if column else (None, rank)
    where = {
        INPUT: (None, k), WEIGHT: (n, k),
        GRAD_OUTPUT: (None, n), WEIGHT_T: (k, n),
        GRAD_OUTPUT_T: (n, None), INPUT_T: (k, None),
    }  # fmt: skip
    assert whole.keys() == parts.keys() == where.keys()
    for stream, (rows, columns) in where.items():
        values, got = whole[stream].dequantize(), parts[stream].dequantize()
        values = part_of(part_of(values, None if rows is None else 0, rank), None if columns is None else 1, rank)
        if stream == INPUT and column and sequence and got.shape != values.shape:  # before it is gathered
            values = values.view(SEQUENCES, TOKENS, K).chunk(2, 1)[rank].reshape(-1, K)
        assert differing(got, values) <= (0 if stream < GRAD_OUTPUT else ROTATED), (method, style, sequence, stream)


def layers_of_one_rank(methods):
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (2,))
        for method in methods:
            for style in ("ColwiseParallel", "RowwiseParallel"):
                for sequence in (True, False):
                    one_layer(mesh, method, style, sequence)
    finally:
        dist.destroy_process_group()


def test_two_ranks_make_the_codes_of_one(run_ranks):
    methods = ["bf16", "clover", "nvidia_fixed_signs"]
    run_ranks(f"import test_tensor_parallel; test_tensor_parallel.layers_of_one_rank({methods!r})")


def layers_of_one_rank_in_tiles():
    global TOKENS
    products = simulate_fp4_tensor_cores()
    dist.init_process_group("gloo")
    try:
        for TOKENS, forward in ((256, 1), (128, 2)):  # of which a process has 128 and 64
            for style in ("ColwiseParallel", "RowwiseParallel"):
                products.clear()
                one_layer(init_device_mesh("cpu", (2,)), "clover", style, True)
                of_input = forward if style == "ColwiseParallel" else 1
                assert products == [(1, 1)] * 3 + [(of_input, 1)] + [(1, 1)] * 2, (TOKENS, style, products)
    finally:
        dist.destroy_process_group()


def test_operands_of_two_ranks_have_their_scales_in_tiles(run_ranks):
    """Of sequences that are whole tiles in each process; other inputs are brought into tiles by the GEMM."""
    run_ranks("import test_tensor_parallel; test_tensor_parallel.layers_of_one_rank_in_tiles()")


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize(("rounding", "rht_dim"), [("ms_eden", 128), ("sr", 32), ("sr", 0)])
def test_parts_of_operands_are_rounded_as_the_whole(monkeypatch, kernels, rounding, rht_dim):
    """By rows and by columns, in both directions, as codes and decoded: what the second process makes. The reduction is
    stood in for: what is largest in the whole is remembered."""
    largest = []

    def reduce(amax, group):
        if group == "whole":
            largest[:] = [amax.clone()]
        return largest[0].clone()

    monkeypatch.setenv("NVFP4_KERNELS", kernels)
    monkeypatch.setattr(tensor_parallel, "largest_over_ranks", reduce)
    value = torch.randn(32, 256)
    value[:, :150] *= 1e-4  # scales that end in E4M3's subnormal range, by a largest magnitude that is elsewhere
    seed = torch.tensor(5)
    how = Quantization(get_rounding(rounding), seed, 3, rht_dim, seed, 2)
    for transpose in (False, True) if kernels == "reference" else (rounding == "sr",):
        x = value.T.contiguous() if transpose else value
        made = functools.partial(quantize_operand, transpose=transpose, keep_codes=not transpose)
        rows, columns = value.shape
        whole = made(x, how._replace(part=Part("whole"))).dequantize()
        for dim, place in ((0, Part("part", row=rows // 2)), (1, Part("part", column=columns // 2, columns=columns))):
            got = made(part_of(x, 1 - dim if transpose else dim, 1), how._replace(part=place)).dequantize()
            assert differing(got, part_of(whole, dim, 1)) <= (ROTATED if rht_dim else 0), (transpose, dim)


def models_of_one_rank(methods):
    """A GPT of one layer, two steps: losses and weights of two processes are those of one. Of four: two and two."""
    compute_init("cpu")
    world_size = dist.get_world_size()
    rates = dict(unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, weight_decay=0.1)
    rows = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))
    rows = rows[dist.get_rank() // 2 :: world_size // 2]  # of the group
    for method in methods:
        runs = []
        for divided in (1, 2):
            torch.manual_seed(0)
            model = GPT(config_from_depth(1, 256, 64, 128, 256, "SL"))
            model.init_weights()
            for block in model.transformer.h:  # zeros make gradients zero that AdamW would divide by
                for layer in (block.attn.c_proj, block.mlp.c_proj):
                    nn.init.normal_(layer.weight, std=0.02)
            nf.convert(model, method, verbose=False)
            if divided > 1:
                divide(model, divided)
            optimizers, schedule = model.setup_finetuning(rates, 0.1, lambda progress: 1.0)
            losses = []
            for step in range(2):
                schedule(step, 0.0)
                torch.manual_seed(step)
                with nf.quantize_weights_once(model), nf.accumulate_gradients(model):
                    loss = model(rows[:, :-1], rows[:, 1:])
                    loss.backward()
                assert model.clip_gradients().isfinite()
                if step == 0:
                    matrices = [p.grad for p in model.transformer.h.parameters()]
                    grads = [g.full_tensor() / losses_of(g) if is_sharded(g) else g.clone() for g in matrices]
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad(set_to_none=True)
                loss = loss.detach()
                dist.all_reduce(loss)
                losses.append(loss.item() / world_size)
            weights = [p.full_tensor() if is_sharded(p) else p.detach() for p in model.parameters()]
            runs.append((losses, grads, weights))
        (losses, *tensors), (divided_losses, *divided_tensors) = runs
        # q, k and v draw other noise, ReLU^2's 8 bits have steps of their own: some 1e-3 of a gradient's noise.
        bound = 1e-4 if method == "bf16" else 2e-3
        assert divided_losses == pytest.approx(losses, rel=bound), (method, losses, divided_losses)
        if method == "bf16":
            # The order of sums; of weights, AdamW makes a whole step of a gradient that is next to nothing.
            for some, divided_ones, limit in zip(tensors, divided_tensors, (1e-5, 1e-3)):
                for a, b in zip(some, divided_ones, strict=True):
                    assert (a - b).norm() <= limit * a.norm(), (a.shape, limit)
    compute_cleanup()


@pytest.mark.parametrize(
    ("ranks", "methods"), [(2, ["bf16", "clover"]), pytest.param(4, ["bf16"], marks=pytest.mark.slow)]
)
def test_a_gpt_trains_as_on_one_rank(run_ranks, ranks, methods):
    run_ranks(f"import test_tensor_parallel; test_tensor_parallel.models_of_one_rank({methods!r})", ranks=ranks)


def test_bytes_are_those_of_the_cost_model(run_ranks, tmp_path):
    """Counted on two gloo processes, where activations are FP32; two micro-batches a step."""
    path = tmp_path / "rows.jsonl"
    for method in ("clover", "bf16"):  # each in processes of its own: a process joins a group once
        shape = "mode='tp', depth=1, width=256, head_dim=128, rows=2"
        run_ranks(f"import _communication as c; c.write_counted_step({str(path)!r}, method={method!r}, {shape})")
    clover, bf16 = (json.loads(line) for line in path.read_text().splitlines())
    for row in (clover, bf16):
        assert row["mode"] == "tp" and row["micro_batches"] == 2 and row["sent_bytes"] == row["predicted_bytes"], row
    # Inputs of q, k, v and of c_fc in two micro-batches: 4.5 bits an element instead of 32, half of it sent.
    inputs = 2 * 2 * (2 * 32 * 256) / 2
    assert bf16["sent"]["all_gather"] - clover["sent"]["all_gather"] == inputs * (4 - 4.5 / 8)
    # In squares of the width, FP32: weights and gradients of half a block of 12, of head and embedding; moments of
    # Muon, which pads the two wide matrices to two each, and two of AdamW, half of each here.
    squares = 2 * (12 / 2 + 1 + 1) + (4 + 2 * 4 + 2 * 4) / 2 + 2 * (1 + 1) / 2
    assert clover["state_gib"] == pytest.approx(4 * squares * 256**2 / 2**30, rel=0.01)


def refusals_of_one_rank():
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (2,))
        for method, features, text in (
            ("clover", 384, "in_features is 384, .*2 x 128"),
            ("nvidia", 48, "in_features is 48, .*2 x 16"),
            ("clover_feedback", 256, "clover_feedback has feedback"),
        ):
            with pytest.raises(ValueError, match=text):
                parallelize_module(QuantLinear(features, 512, method=method), mesh, nf.RowwiseParallel())
        layer = QuantLinear(256, 256, method="clover")
        with pytest.raises(ValueError, match="nanochat_fp4.convert .*got Linear"):
            parallelize_module(nn.Linear(256, 256), mesh, nf.ColwiseParallel())
        parallelize_module(layer, mesh, nf.ColwiseParallel())
        with pytest.raises(ValueError, match="parallel already"):
            parallelize_module(layer, mesh, nf.ColwiseParallel())
        row = parallelize_module(QuantLinear(256, 256, method="bf16"), mesh, nf.RowwiseParallel())
        with pytest.raises(ValueError, match="7 tokens"):
            row(torch.ones(7, 128))
        with pytest.raises(ValueError, match="clover_feedback has feedback"):
            layer.set_recipe(nf.get_recipe("clover_feedback"))
        for depth, size, text in ((13, 2, "13 attention heads"), (2, 3, "=3 ")):
            with torch.device("meta"):
                model = GPT(config_from_depth(depth, 256, 64, 128, 128))
            with pytest.raises(UserError, match=text):
                divide(model, size)
    finally:
        dist.destroy_process_group()


def test_what_is_not_divided(run_ranks):
    run_ranks("import test_tensor_parallel; test_tensor_parallel.refusals_of_one_rank()")
