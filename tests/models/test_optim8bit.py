"""--state=lean: what rounds is right on average, and a run is the same after a resume and on two processes."""

import copy
import functools
import gc
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from _training import MATRICES, OTHERS, make, parameters
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanochat_fp4 as nf
from nanochat_fp4 import parallel
from nanochat_fp4.common import compute_cleanup, compute_init
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.models import optim8bit
from nanochat_fp4.models.gpt import GPT, config_from_depth
from nanochat_fp4.models.llama import Llama, LlamaConfig
from nanochat_fp4.models.optim import PretrainingOptions
from nanochat_fp4.training.checkpoint_manager import save_checkpoint
from nanochat_fp4.training.load_model import build_model
from nanochat_fp4.training.memory import update_bytes
from nanochat_fp4.training.step import TrainingStep
from scripts import base_train
from scripts.base_train import make_model

SEED = torch.tensor(12345)


# ----------------------------------------------------------------------------------------------------------------------
# Rounding


def test_the_mean_of_many_roundings_is_the_number():
    """Errors fall as 1 / sqrt(draws); to nearest they would stay a quarter of an ulp."""
    x = torch.randn(8, 64) * torch.exp(3 * torch.randn(8, 1))
    ulp = torch.exp2(x.abs().log2().floor() - 7)
    total, draws = torch.zeros(8, 64, dtype=torch.float64), 1024
    for stream in range(draws):
        into = torch.empty(8, 64, dtype=torch.bfloat16)
        optim8bit.round_into(into, x, SEED, torch.tensor(stream))
        assert ((into.float() - x).abs() < ulp).all()
        total += into
    error = (total / draws - x).abs() / ulp
    assert error.mean() < 1 / draws**0.5  # a draw's deviation is at most half an ulp
    assert error.max() < 3 / draws**0.5


def test_updates_below_half_an_ulp_add_up():
    """The ulp below 1 is 2^-8. To nearest, BF16 would stay at 1 for ever."""
    weight, nearest = torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    update = torch.full((64, 64), -1e-4)
    for step in range(1000):
        optim8bit.round_into(weight, update, SEED, torch.tensor(step), add=True)
        nearest += update
    assert (nearest == 1).all()
    assert weight.float().mean() == pytest.approx(0.9, abs=5e-4)


@pytest.mark.parametrize("stream", [optim8bit.MOMENT, optim8bit.SECOND_MOMENT])
def test_moments_in_8_bits(stream):
    x = torch.randn(3, 4, 96) * torch.exp(2 * torch.randn(3, 4, 1))
    x = x if stream == optim8bit.MOMENT else x.square()
    x[1, 2] = 0
    seeds = torch.tensor([5, -7, 2**60])
    codes, scales = optim8bit.encode(x, seeds, 0, stream)
    assert codes.element_size() == 1 and scales.shape == (3, 4, 1)
    once = optim8bit.decode(codes, scales)
    assert (once - x).norm() < 0.015 * x.norm() and (once[1, 2] == 0).all()
    mean = sum(optim8bit.decode(*optim8bit.encode(x, seeds + 10 * i, 0, stream)) for i in range(256)) / 256
    assert (mean - x).norm() < 0.15 * (once - x).norm()  # 1 / 16, and its deviation
    # A part of the rows has the numbers that it has in the whole.
    part = optim8bit.encode(x[:, 2:], seeds, 2, stream)
    assert torch.equal(part[0], codes[:, 2:]) and torch.equal(part[1], scales[:, 2:])


def test_a_second_moment_does_not_become_zero():
    x = torch.tensor([[[1.0, 1e-12, 0.0, 1e-30]]])
    for i in range(8):
        value = optim8bit.decode(*optim8bit.encode(x, torch.tensor([i]), 0, optim8bit.SECOND_MOMENT))[0, 0]
        assert (value[[0, 1, 3]] > 0).all() and value[2] == 0


def test_a_moment_that_decays_by_less_than_a_step_decays():
    """0.95 of a second moment is less than a step below it in all its lower codes; to nearest they would stay."""
    x = torch.rand(1, 64, 64) ** 4
    x[..., 0] = 1.0  # the block's largest stays
    before, value = x[..., 1:].mean(), x
    for i in range(60):
        value = optim8bit.decode(*optim8bit.encode(value, torch.tensor([i]), 0, optim8bit.SECOND_MOMENT))
        value[..., 1:] *= 0.95
    assert value[..., 1:].mean() / before == pytest.approx(0.95**60, rel=0.1)


def test_block_sizes():
    assert [optim8bit.block_size(n) for n in (1280, 1664, 2048, 2560, 40, 33, 257)] == [256, 208, 256, 256, 40, 33, 1]


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers


class Holder(nn.Module):
    """Parameters as a model, for LeanState."""

    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)

    def get_device(self):
        return torch.device("cpu")


def made(seed=0):
    params = parameters(MATRICES + OTHERS)
    for p in params:
        p.data = p.data.bfloat16() if p.ndim == 2 else p.data
    state = optim8bit.LeanState(Holder(params), seed)
    return params, make(params, lean=state), state


def steps(params, optimizers, state, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if state is not None:
            state.begin(step)
        for optimizer in optimizers:
            optimizer.step()


def test_optim8bit_follows_fp32_and_saves_all_that_it_needs():
    params, optimizers, state = made()
    exact = [nn.Parameter(p.detach().float()) for p in params]
    steps(exact, make(exact), None, 0, 4)
    steps(params, optimizers, state, 0, 2)
    saved = copy.deepcopy([o.state_dict() for o in optimizers])
    again, others, restored = made()
    for p, q in zip(again, params):
        p.data = q.data.clone()
    for optimizer, part in zip(others, saved):
        optimizer.load_state_dict(part)
    steps(params, optimizers, state, 2, 4)
    steps(again, others, restored, 2, 4)
    assert all(torch.equal(p, q) for p, q in zip(params, again))
    for p, q in zip(params, exact):
        # A BF16 ulp is 2^-8 of the number; four roundings, and updates that differ by some percent.
        assert (p.float() - q).norm() < 0.02 * q.norm()
    kinds = {k: v.dtype for o in optimizers for s in o.state.values() for k, v in s.items() if v.ndim > 1}
    assert kinds["momentum_buffer"] == kinds["exp_avg"] == torch.int8 and kinds["exp_avg_sq"] == torch.uint8
    assert kinds["second_momentum_buffer"] == torch.float32
    assert optimizers[1].state[params[-1]]["exp_avg"].dtype == torch.float32  # a vector


def test_states_of_either_kind_go_on_in_the_other():
    params, optimizers, state = made()
    exact = [nn.Parameter(p.detach().float()) for p in params]
    plain = make(exact)
    steps(exact, plain, None, 0, 2)
    for ours, theirs in zip(optimizers, plain):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    back = make([nn.Parameter(p.detach().clone()) for p in exact])
    for there, ours in zip(back, optimizers):
        there.load_state_dict(copy.deepcopy(ours.state_dict()))
    for before, after in zip(plain, back):
        was, now = before.state_dict()["state"], after.state_dict()["state"]
        for index in was:
            assert was[index].keys() == now[index].keys()
            for key, value in was[index].items():
                assert now[index][key].dtype == value.dtype
                assert (now[index][key] - value).norm() <= 0.02 * value.norm(), key
    steps(params, optimizers, state, 2, 3)


def one_rank(results):
    dist.init_process_group("gloo")
    try:
        params, optimizers, state = made()
        steps(params, optimizers, state, 0, 3)
        saved = [[p.detach() for p in params], [o.state_dict() for o in optimizers]]
        torch.save(saved, f"{results}/{dist.get_rank()}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_do_what_one_does(run_ranks, tmp_path):
    """The same gradient on both is its own average, so that only batched products could differ by a bit."""
    run_ranks(f"import test_optim8bit; test_optim8bit.one_rank({str(tmp_path)!r})")
    ranks = [torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1)]
    params, optimizers, state = made()
    steps(params, optimizers, state, 0, 3)
    for p, q, r in zip(params, *(rank[0] for rank in ranks)):
        assert torch.equal(q, r)
        assert (p != q).float().mean() < 0.01  # a sum in another order may cross a rounding's threshold
        torch.testing.assert_close(p.detach(), q, rtol=2**-7, atol=1e-3)
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(optimizer.resharded([rank[1][number] for rank in ranks]))
    state.begin(3)
    steps(params, optimizers, state, 3, 4)


# ----------------------------------------------------------------------------------------------------------------------
# Models


def small(method, state, cls=GPT, layers=1, sharded=False, width=128, orthogonalizer="polar_express"):
    torch.manual_seed(0)
    if cls is GPT:
        model = GPT(config_from_depth(layers, 256, 32, 64, width, "L"))
    else:
        model = Llama(LlamaConfig(sequence_len=32, vocab_size=256, n_layer=layers, n_head=2, n_kv_head=2, n_embd=128))
    model.init_weights()
    optim8bit.set_state(model, state)
    nf.convert(model, method, verbose=False)
    if sharded:
        parallel.shard(model)
    rates = dict(unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, weight_decay=0.1)
    made = optim8bit.LeanState(model, seed=1) if state == "lean" else None
    how = {"orthogonalizer": orthogonalizer, "lean": made}
    optimizers, schedule = model.setup_finetuning(rates, 1.0, lambda progress: 1.0, **how)
    schedule(0, 0.0)
    # On a CPU lean computes in BF16, as a GPU does in either state.
    return TrainingStep(model, optimizers, dtype=torch.bfloat16, lean=made)


def train(step: TrainingStep, count: int, micro_batches: int = 2, period: int = 4) -> list[float]:
    """Losses of steps on a text of few rows again and again."""
    losses = []
    text = torch.randint(256, (period, 33), generator=torch.Generator().manual_seed(1))
    for i in range(count):
        torch.manual_seed(i)
        with step.micro_batches(micro_batches, i):
            for j in range(micro_batches):
                rows = text[(2 * (i * micro_batches + j)) % period :][:2]
                losses.append(float(step.micro_batch(rows[:, :-1], rows[:, 1:], count=micro_batches)))
        step.update()
    return losses


@pytest.mark.parametrize("cls, method", [(GPT, "nvidia"), (Llama, "clover_fp8_forward")])
def test_methods_train(cls, method):
    step = small(method, "lean", cls)
    before = [p.detach().clone() for p in step.model.parameters()]
    losses = train(step, 2)
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() and not torch.equal(p, q) for p, q in zip(step.model.parameters(), before))
    assert all(optim8bit.is_lean(p) == (p.ndim == 2) for p in step.model.parameters())


def test_gradients_add_up_in_bf16():
    """64 micro-batches whose gradients are 1 / 64 each. To nearest, sums of BF16 stop growing far below 64 of them."""
    step = small("bf16", "lean")
    exact = small("bf16", "fp32")
    for trained in (step, exact):
        x = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
        for module in trained.model.modules():  # the gradients of zero weights would be zero
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.05, generator=torch.Generator().manual_seed(2))
        with trained.micro_batches(64, 0):
            for _ in range(64):
                trained.micro_batch(x, x, count=64)
    for p, q in zip(step.model.parameters(), exact.model.parameters()):
        assert p.grad.dtype == p.dtype
        if p.ndim == 2:  # the lengths agree better than single elements
            assert (p.grad - q.grad).norm() < 0.03 * q.grad.norm()
            assert p.grad.float().norm() / q.grad.norm() == pytest.approx(1.0, abs=0.01)


SUMS = """
from test_optim8bit import nn, small, torch
from nanochat_fp4.common import compute_init
compute_init("cpu")
step, x = small("bf16", "lean"), torch.arange(64).view(2, 32)
nn.init.normal_(step.model.lm_head.weight, std=0.05)
with step.micro_batches(3, 0):
    for _ in range(3):
        step.micro_batch(x, x, count=3)
print(step.model.lm_head.weight.grad.float().sum(0).tolist())
"""


def test_ranks_round_their_sums_with_numbers_of_their_own(run_ranks):
    """The same text on both: their errors are then independent, and the average over ranks has a part of them."""
    first, second = (torch.tensor(eval(out.splitlines()[-1])) for out in run_ranks(SUMS))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, rtol=0.05, atol=1e-2)


@pytest.mark.slow
def test_a_thousand_steps_of_both_states_side_by_side():
    """64 rows again and again, clover: both states learn them by heart. They leave the first plateau at other steps."""
    both = {state: small("clover", state, width=64) for state in optim8bit.STATES}
    windows = {s: torch.tensor(train(step, 1000, period=64)).view(-1, 200).mean(1) for s, step in both.items()}
    print({state: of.tolist() for state, of in windows.items()})
    assert windows["fp32"][-1] < 0.2 * windows["fp32"][0]
    assert (windows["lean"][-1] - windows["fp32"][-1]).abs() < 0.05 * windows["fp32"][0]


def one_sharded_rank():
    """Two processes with the same rows, whole and in shards: the same losses and weights, to the bit."""
    rank = compute_init("cpu")[1]
    for method, orthogonalizer in (("clover", "polar_express"), ("bf16", "newton_schulz")):
        whole, shards = (small(method, "lean", sharded=s, orthogonalizer=orthogonalizer) for s in (False, True))
        assert train(whole, 3, micro_batches=1) == train(shards, 3, micro_batches=1)
        weights, others = (parallel.full_state_dict(step.model) for step in (whole, shards))
        assert others.keys() == (weights.keys() if rank == 0 else set())  # Rank 0 alone gets whole weights of shards.
        for name, value in others.items():
            assert torch.equal(value, weights[name]), (method, name)
        for step in whole, shards:
            step.update = lambda: None
            train(step, 1, micro_batches=2)
        for p, q in zip(whole.model.parameters(), shards.model.parameters()):
            # Averages of equal gradients are equal. The sum of two is rounded with other numbers, each time to one of
            # the two BF16 numbers around it: two ulps apart at most.
            grad = q.grad.full_tensor() if parallel.is_sharded(q.grad) else q.grad
            torch.testing.assert_close(grad, p.grad, rtol=2**-6 if p.ndim == 2 else 1e-5, atol=0.0)
    compute_cleanup()


def test_shards_train_alike(run_ranks):
    run_ranks("import test_optim8bit; test_optim8bit.one_sharded_rank()")


# ----------------------------------------------------------------------------------------------------------------------
# Bytes


def meta(depth):
    with torch.device("meta"):
        return GPT(config_from_depth(depth, 65536))


WIDTHS = [(20, 1280, 5.71), (26, 1664, 5.67), (32, 2048, 5.64), (40, 2560, 5.62)]


@pytest.mark.parametrize("depth, width, small", WIDTHS)
def test_bytes_a_parameter(depth, width, small):
    """Weight, gradient, moments (Muon's one, AdamW's two for embedding and head), codes; counted by hand."""
    model = meta(depth)
    matrices, others = 12 * depth * width**2, 2 * 65536 * width
    scale = 4 / optim8bit.block_size(width)
    fp32 = (4 + 4 + 4 + 0.5625) * matrices + (4 + 4 + 8) * others
    half = (2 + 2 + 1 + scale + 0.5625) * matrices + (2 + 2 + 2 * (1 + scale)) * others
    assert sum(optim8bit.state_bytes(model, "fp32").values()) == pytest.approx(fp32, rel=1e-3)
    assert sum(optim8bit.state_bytes(model, "lean").values()) == pytest.approx(half, rel=1e-3)
    assert half / (matrices + others) == pytest.approx(small, abs=0.01)


class Fp32Elements(TorchDispatchMode):
    """peak: FP32 elements in the memory that operations inside have made, at most at a time; without those of known."""

    def __init__(self, known):
        super().__init__()
        self.live, self.peak = {}, 0
        self.known = {t.untyped_storage()._cdata for t in tree_leaves(known) if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and t.device.type != "meta":
                storage = t.untyped_storage()
                if storage._cdata in self.known:
                    continue
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // 4
        self.live = {key: (ref, n) for key, (ref, n) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self.live.values()))
        return out


def test_no_fp32_copy_of_more_than_a_stack(tiny_base, monkeypatch):
    """Of creation, update, save, load and resume, also from the state of FP32. One stack here is one matrix."""
    stack, folder = 256 * 1024, tiny_base / "base_checkpoints" / "d4"
    monkeypatch.setattr(optim8bit, "stack_that_fits", lambda model: stack)
    tokenizer = get_tokenizer()

    def peak_of(work, *known):
        with Fp32Elements(known) as counted:
            result = work()
        return counted.peak, result

    def optimizers_of(model, state):
        made = optim8bit.LeanState(model, seed=1) if state == "lean" else None
        optimizers, schedule = model.setup_pretraining(PretrainingOptions(), 2**19, 10, made)
        schedule(0, 0.0)
        return optimizers, made

    def step(model, optimizers):
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(p.dtype)
        return peak_of(lambda: [optimizer.step() for optimizer in optimizers])[0]

    flags = ["--depth=4", "--max-seq-len=32", "--device-type=cpu"]
    args = base_train.parse_args([*flags, "--state=lean"])
    made, model = peak_of(lambda: make_model(args, tokenizer.get_vocab_size(), torch.device("cpu"), "bf16"))
    assert made < 1.1 * stack < 0.1 * sum(p.numel() for p in model.parameters())
    optimizers, _ = optimizers_of(model, "lean")
    assert step(model, optimizers) < 11 * stack  # eagerly; compiled, STEP_BYTES are 8
    meta = {
        "model_config": asdict(model.config),
        "user_config": {"state": "lean"},
        "run_config": {"tokenizer": tokenizer.fingerprint()},
    }
    states = {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    saved, _ = peak_of(lambda: save_checkpoint(folder, 1, parallel.full_state_dict(model), states, meta))
    loaded, (again, _, _) = peak_of(lambda: build_model(folder, None, "cpu", "train"))
    assert saved < 0.1 * stack and loaded < 0.3 * stack  # rotary tables
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))

    exact = make_model(base_train.parse_args(flags), tokenizer.get_vocab_size(), torch.device("cpu"), "bf16")
    others, _ = optimizers_of(exact, "fp32")
    step(exact, others)
    for before, most in (optimizers, 0.1), (others, 11):
        states = [optimizer.state_dict() for optimizer in before]
        restored, _ = optimizers_of(again, "lean")
        load = [functools.partial(o.load_state_dict, s) for o, s in zip(restored, states)]
        assert peak_of(lambda: [one() for one in load], states)[0] < most * stack  # noqa: B023
        resharded = peak_of(lambda: [o.resharded([s]) for o, s in zip(restored, states)])[0]  # noqa: B023
        assert before is others or resharded < 0.3 * stack  # scales


def test_the_automatic_micro_batch_counts_the_state():
    of = {state: small("clover", state).model for state in optim8bit.STATES}
    assert update_bytes(of["lean"]) == 32 * sum(p.numel() for p in of["lean"].parameters() if p.ndim == 2)


@pytest.mark.parametrize("state", optim8bit.STATES)
def test_a_real_model_has_the_bytes_of_the_formula(state):
    torch.manual_seed(0)
    model = GPT(config_from_depth(2, 256, 64))
    model.init_weights()
    optim8bit.set_state(model, state)
    nf.convert(model, "clover", verbose=False)
    made = optim8bit.LeanState(model, seed=1) if state == "lean" else None
    optimizers, schedule = model.setup_pretraining(PretrainingOptions(), 2**19, 10, made)
    schedule(0, 0.0)
    step = TrainingStep(model, optimizers, dtype=torch.bfloat16, lean=made)
    x = torch.randint(256, (1, 16))
    with step.micro_batches(2):
        step.micro_batch(x, x)
    step.update()
    gc.collect()
    with step.micro_batches(2, 1):
        step.micro_batch(x, x)
        step.micro_batch(x, x)
        codes = [made.value for m in model.modules() for c in getattr(m, "contexts", ()) for made in c.weights]
        held = sum(t.numel() * t.element_size() for o in codes for t in vars(o).values() if isinstance(t, torch.Tensor))
    held += sum(t.numel() * t.element_size() for p in model.parameters() for t in (p, p.grad))
    moments = [t for o in optimizers for s in o.state.values() for t in s.values()]
    held += sum(t.numel() * t.element_size() for t in moments)
    assert held == pytest.approx(sum(optim8bit.state_bytes(model, state).values()), rel=0.03)
