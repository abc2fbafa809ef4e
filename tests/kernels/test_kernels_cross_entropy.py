"""The kernels of the loss against PyTorch's functions, on a CPU in Triton's interpreter."""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels import cross_entropy as kernels
from nvfp4_kernels import quantize

from nanochat_fp4.models import cross_entropy
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS, WEIGHTS = [4, -1, 0, 189, 7], [0.5, 1, 0.25, 2, 1e-3]


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def logits(request) -> torch.Tensor:
    """(5, 200), of which 190 columns count; beyond the cap, equal, and at both ends of what there is."""
    x = 8 * torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    x[2], x[4, :8], x[3, :4] = 0, 1e4, torch.tensor([3e38, -3e38, 60, -60])
    x[:, 190:] = torch.nan  # padding
    return x.to(request.param).to(DEVICE)


def expected(logits: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient in FP64 from torch's own operators."""
    x = logits[:, :190].double().requires_grad_()
    z = softcap * torch.tanh(x / softcap)
    targets, weights = torch.tensor(TARGETS, device=DEVICE), torch.tensor(WEIGHTS, device=DEVICE)
    losses = torch.nn.functional.cross_entropy(z, targets, ignore_index=-1, reduction="none")
    (grad,) = torch.autograd.grad((losses * weights).sum(), x)
    return losses.detach(), torch.nn.functional.pad(grad, (0, 10))


def arguments(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return logits, torch.tensor(TARGETS, device=DEVICE), torch.tensor(WEIGHTS, device=DEVICE)


@pytest.mark.parametrize("softcap, block", [(15.0, 4096), (15.0, 32), (60.0, 4096)])
def test_losses_and_gradient_in_place(logits, softcap, block, monkeypatch):
    monkeypatch.setattr(kernels, "ROW_BLOCK", block)
    losses, grad = expected(logits, softcap)
    before = logits.clone()
    only = kernels.losses(logits, arguments(logits)[1], None, 190, softcap)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))  # they stay where no gradient is wanted
    found = kernels.losses(*arguments(logits), 190, softcap)
    assert torch.equal(found, only) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=softcap * 2e-6)
    ulp = 2**-8 if logits.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(logits.double(), grad, rtol=ulp + softcap * 4e-6, atol=1e-7)  # GPUs approximate
    assert not logits[:, 190:].any() and not logits[1].any()


CASES = [("bf16", (70, 64, 50), []), ("fp8", (70, 64, 50), [32, 32]), ("fp8", (76, 160, 150), [32, 32, 12])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("head, shape, rounded", CASES)
def test_the_loss_through_the_kernels_is_the_loss_without(head, shape, rounded, reduction, dtype, monkeypatch):
    """Tokens in chunks of 24 or 32 and a short one, which has no kernel where four rows are not a word (`rounded` has
    the rows of those with one); a vocabulary that fills no tile. The numbers of FP8 are the reference's of what the
    kernel of the loss leaves in the place of the logits."""
    torch.manual_seed(1)
    tokens, rows, vocab = shape
    x, weight = torch.randn(tokens, 16).to(dtype), torch.randn(rows, 16).to(dtype)
    targets = torch.randint(-1, vocab, (tokens,))
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_TOKENS", 24)
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cuda": 1})
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS_ELSEWHERE", 1)
    called, made, results = [], [], []
    original, real = kernels.losses, quantize.quantize_both
    monkeypatch.setattr(kernels, "losses", lambda *a: called.append(len(a[0])) or original(*a))
    monkeypatch.setattr(quantize, "quantize_both", lambda *a: made.append((*a, *real(*a))) or made[-1][2:])
    for how in ("reference", "triton"):
        monkeypatch.setenv("NVFP4_KERNELS", how)
        leaves = [v.clone().to(DEVICE).requires_grad_() for v in (x, weight)]
        loss = cross_entropy.linear_cross_entropy(*leaves, targets.to(DEVICE), vocab, 15.0, reduction, head)
        results.append([loss.detach(), *torch.autograd.grad((loss * loss.detach()).sum(), leaves)])
        assert bool(called) == (how == "triton")
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(results[1][1:], results[0][1:]):
        assert (got - want).norm() <= (2e-3 if head == "fp8" or dtype == torch.bfloat16 else 1e-5) * want.norm()
    assert [len(grad) for grad, *_ in made] == rounded
    for grad, amax, *both, scale in made:
        want = quantize_reference(grad.cpu(), Quantization(ROUNDINGS["e5m2"], amax=amax.cpu()))
        assert_same_bits("scale", scale.cpu(), want.tensor_scale)
        for got, codes in zip(both, (want.codes, want.codes.T.contiguous())):
            assert_same_bits("codes", got.cpu(), codes)
    called.clear()
    cross_entropy.linear_cross_entropy(*leaves, targets.to(DEVICE), vocab, 1e4, head=head)
    assert not called  # a Llama's cap, at which exponents would overflow
