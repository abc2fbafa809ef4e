"""nf.distillation_loss on models of the project and of others, against the KL divergence of whole logits."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.models.llama import Llama, LlamaConfig

IDS = torch.arange(64).view(2, 32) % 50
TARGETS = torch.where(IDS % 5 == 0, -1, IDS)


def gpt() -> nn.Module:
    return GPT(GPTConfig(sequence_len=32, vocab_size=50, n_layer=1, n_head=2, n_kv_head=2, n_embd=32))


def llama() -> nn.Module:
    return Llama(LlamaConfig(sequence_len=32, vocab_size=50, n_layer=1, n_head=2, n_kv_head=2, n_embd=32))


class Other(nn.Module):
    """Named like peft's models, with a low-rank factor beside a layer, and a switch for it."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(50, 32), nn.Linear(32, 32)
        self.lora_A = nn.Linear(32, 32, bias=False)
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.adapted = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.lm_head(self.block(x) + self.adapted * self.lora_A(x))

    @contextlib.contextmanager
    def disable_adapter(self):
        self.adapted = False
        yield
        self.adapted = True


def built(make) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    if hasattr(model, "init_weights"):
        model.init_weights()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2) if p.ndim == 2 else None
    return model


@pytest.mark.parametrize("make", [gpt, llama, Other])
def test_equals_the_divergence_of_whole_logits(make):
    teacher = built(make).eval()
    model = nf.convert(copy.deepcopy(teacher), "clover", backward=False, verbose=False)
    torch.manual_seed(1)  # relu^2 keeps 8 bits for its derivative, rounded stochastically
    loss = nf.distillation_loss(model, teacher, IDS, TARGETS)
    loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    z, t = model(IDS).log_softmax(-1), teacher(IDS).detach().log_softmax(-1)
    want = F.kl_div(z, t, log_target=True, reduction="none").sum(-1)[TARGETS >= 0].mean()
    want.backward()
    assert want > 1e-4
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-6)
    for got, parameter in zip(found, model.parameters()):
        assert (got is None) == (parameter.grad is None)
        if got is not None:
            torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-5)
    assert all(p.grad is None for p in teacher.parameters())


def test_a_model_teaches_its_own_adapters():
    """Frozen weights: in full precision and without its adapters the model is the teacher."""
    model = nf.convert(built(Other), "clover", verbose=False)
    with pytest.raises(UserError, match="its own teacher, but weights besides adapters are trained"):
        nf.distillation_loss(model, model, IDS)
    model.requires_grad_(False).lora_A.requires_grad_(True)
    teacher = copy.deepcopy(model)
    nn.init.zeros_(teacher.lora_A.weight)
    with nf.full_precision(teacher):
        want = nf.distillation_loss(model, teacher, IDS)
    got = nf.distillation_loss(model, model, IDS)
    assert torch.equal(got, want) and got > 1e-4 and model.adapted
    got.backward()
    assert model.lora_A.weight.grad.any() and model.block.weight.grad is None


def test_models_that_do_not_fit_are_one_line():
    model = built(Other)
    wider = copy.deepcopy(model)
    wider.lm_head = nn.Linear(32, 64, bias=False)
    biased = copy.deepcopy(model)
    biased.lm_head = nn.Linear(32, 50)
    for teacher, message in ((wider, "the teacher has 64 tokens and the model 50"), (biased, "lm_head has a bias")):
        with pytest.raises(UserError, match=message):
            nf.distillation_loss(model, teacher, IDS)
