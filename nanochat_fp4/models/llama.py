"""
The Llama-like models of the paper's Tables 3 and 4, which its Figures 1, 2 and 4 need.

A block is that of Llama 2: RMSNorm with weights, rotary positions, SwiGLU, and no biases. Embedding and head are
untied, and attention heads have 128 dimensions. AdamW trains the model with a cosine schedule. A size is named by its
number of parameters without embeddings, which is also the number in tokens per parameter.

The paper leaves out some details, which come from its published code:

- q, k and v are one layer with one tensor_scale, and so are up and gate.
- The MLP's width is 2/3 of four times the model's width, rounded up to a multiple of 256.
- Weights are drawn from a normal distribution with std 0.02, or 0.02 / sqrt(2 layers) in layers that add to the
  residual stream.
- AdamW's betas are 0.9 and 0.95. The embedding and the norms have no weight decay.
- The eps of the norms is 1e-5. The schedule is torch's OneCycleLR with cosines.

A step has 512 sequences of 512 tokens, in micro-batches of 128 sequences. The text is C4 (allenai/c4 on the hub, whose
.json.gz files are read as they are), with a vocabulary of 32,000 tokens. Two things differ from the published code. It
rotates pairs of neighbouring dimensions of q and k, and here the pairs are half a head apart, which only permutes the
rows of c_q and c_k. Checkpoints here store the fused matrices separately.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import is_ddp_initialized
from nanochat_fp4.models import flash_attention
from nanochat_fp4.models.cross_entropy import Head
from nanochat_fp4.models.elementwise import apply_rotary_emb, rotary_tables
from nanochat_fp4.models.gpt import ROTARY_BASE, ROTARY_FACTOR
from nanochat_fp4.models.optim import AdamW, PretrainingOptions, Schedule, gradient_norm, set_learning_rates
from nanochat_fp4.models.optim8bit import LeanState, drawn
from nanochat_fp4.nvfp4.collectives import local
from nanochat_fp4.nvfp4.epilogue import fused_linear
from nanochat_fp4.parallel import is_sharded

NORM_EPS = 1e-5
HIDDEN_MULTIPLE = 256
INIT_STD = 0.02
# linear_cross_entropy always caps logits softly. A cap of 1e5 changes a logit of 30 by 1e-6, which is less than FP32's
# rounding of the loss.
NO_SOFTCAP = 1e5
WEIGHT_DECAY, CLIP_NORM = 0.1, 1.0  # Source: Table 4 of the paper.
# The warm-up begins at FIRST_LR times the size's rate, and the cosine ends at FINAL_LR times this rate. In OneCycleLR
# these are div_factor 100 and final_div_factor 0.1, because the final rate is the first rate divided by 0.1. The
# warm-up takes a tenth of the steps, rounded down.
FIRST_LR, FINAL_LR, WARMUP_SHARE = 0.01, 0.1, 10


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    learning_rate: float


# The sizes of the paper's Table 3, and "tiny" for tests and CPUs.
SIZES = {
    "30M": Size(6, 640, 5, 0.0012),
    "50M": Size(7, 768, 6, 0.0012),
    "100M": Size(8, 1024, 8, 0.0009),
    "200M": Size(10, 1280, 10, 0.00072),
    "tiny": Size(2, 128, 1, 0.003),
}


@dataclass
class LlamaConfig:
    sequence_len: int = 512
    vocab_size: int = 32768
    n_layer: int = 6
    n_head: int = 5
    n_kv_head: int = 5
    n_embd: int = 640
    rope_base: int = int(ROTARY_BASE)
    family: str = "llama"

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        """The width of the MLP."""
        return -(-(8 * self.n_embd // 3) // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


def config_from_size(size: str, vocab_size: int, sequence_len: int = 512) -> LlamaConfig:
    """Returns the configuration of a size. Raises UserError for a size that is not in SIZES."""
    if size not in SIZES:
        raise UserError(f"--llama={size!r} is not a size of the family; use one of {', '.join(SIZES)}")
    layers, width, heads, _ = SIZES[size]
    return LlamaConfig(sequence_len, vocab_size, layers, heads, heads, width)


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension. Statistics are in FP32, and the result is in x's dtype."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return (F.rms_norm(x.float(), (x.size(-1),), eps=NORM_EPS) * self.weight).to(x.dtype)


class Attention(nn.Module):
    fused_linears = ("c_q", "c_k", "c_v")  # These are computed as one layer, as in the published code.

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        for name in (*Attention.fused_linears, "c_proj"):
            out = config.n_kv_head * config.head_dim if name in ("c_k", "c_v") else config.n_embd
            setattr(self, name, nn.Linear(config.n_embd, out, bias=False))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Any) -> Tensor:
        q, k, v = fused_linear(x, *(getattr(self, name) for name in self.fused_linears), head_dim=self.head_dim)
        q, k = (apply_rotary_emb(t.float(), *cos_sin).to(v.dtype) for t in (q, k))
        return self.c_proj(flash_attention.attend(q, k, v, kv_cache, self.layer_idx))


class MLP(nn.Module):
    fused_linears = ("c_gate", "c_fc")  # These are computed as one layer, as in the published code.

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.c_gate = nn.Linear(config.n_embd, config.hidden, bias=False)
        self.c_fc = nn.Linear(config.n_embd, config.hidden, bias=False)
        self.c_proj = nn.Linear(config.hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused_linear(x, *(getattr(self, name) for name in self.fused_linears))
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__()
        self.ln_1, self.attn = RMSNorm(config.n_embd), Attention(config, layer_idx)
        self.ln_2, self.mlp = RMSNorm(config.n_embd), MLP(config)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), cos_sin, kv_cache)
        return x + self.mlp(self.ln_2(x))


class Llama(nn.Module):
    """A Llama-like model. It is built like gpt.GPT: on the meta device, then to_empty, then init_weights."""

    muon_trains_blocks = False
    bf16_embedding_on_gpu = False

    def __init__(self, config: LlamaConfig, pad_vocab_size_to: int = 64):
        super().__init__()
        self.config = config
        padded_vocab_size = -(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded_vocab_size, config.n_embd),
                "h": nn.ModuleList([Block(config, i) for i in range(config.n_layer)]),
                "ln_f": RMSNorm(config.n_embd),
            }
        )
        self.lm_head = Head(config.n_embd, padded_vocab_size)
        self.rotary_seq_len = config.sequence_len * ROTARY_FACTOR
        for name, table in zip(("cos", "sin"), self._rotary_tables()):
            self.register_buffer(name, table, persistent=False)

    def _rotary_tables(self) -> tuple[Tensor, Tensor]:
        return rotary_tables(self.rotary_seq_len, self.config.head_dim, self.config.rope_base, self.get_device())

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws all weights from torch's default generator."""
        for name, p in self.named_parameters():
            if p.ndim < 2:
                nn.init.ones_(p)
                continue
            depth_scale = (2 * self.config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0
            drawn(p, nn.init.normal_, 0.0, INIT_STD * depth_scale)
        self.prepare()

    def prepare(self) -> None:
        """Makes the rotary tables and sets up the attention backend for the device of the weights."""
        self.cos, self.sin = self._rotary_tables()
        if self.get_device().type != "meta":
            flash_attention.setup(self.get_device().type)

    def get_device(self) -> torch.device:
        return self.transformer.wte.weight.device

    def num_scaling_params(self) -> int:
        """Returns the number of parameters of the blocks, which is the paper's N in tokens per parameter."""
        return sum(p.numel() for p in self.transformer.h.parameters())

    def estimate_flops(self) -> int:
        """Returns the FLOPs of training per token, counted as in gpt.GPT.estimate_flops."""
        matrix_weights = self.num_scaling_params() + self.lm_head.weight.numel()
        return 6 * matrix_weights + 12 * self.config.n_layer * self.config.n_embd * self.config.sequence_len

    def setup_optimizers(self, lr: float, lean: LeanState | None = None) -> list[torch.optim.Optimizer]:
        """Returns [AdamW], with weight decay for the matrices of the blocks and the head. Each group stores its rate as
        "initial_lr" for the schedules."""
        decayed = [p for n, p in self.named_parameters() if p.ndim == 2 and "wte" not in n]
        others = [p for n, p in self.named_parameters() if p.ndim < 2 or "wte" in n]
        groups = [dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
        adamw = AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, lean=lean)
        for group in adamw.param_groups:
            group["initial_lr"] = group["lr"]
        return [adamw]

    def setup_pretraining(
        self,
        options: PretrainingOptions,
        total_batch_size: int,
        num_iterations: int,
        lean: LeanState | None = None,
    ) -> tuple[list[torch.optim.Optimizer], Schedule]:
        """Returns the paper's optimizer and schedule for num_iterations steps, with the learning rate of the model's
        size.

        The other options are nanochat's and are ignored. Raises ValueError for a shape that is not in SIZES, and if an
        orthogonalizer is chosen, because AdamW has none.
        """
        check_no_orthogonalizer(options.orthogonalizer)
        config = self.config
        shape = (config.n_layer, config.n_embd, config.n_head)
        rates = [size.learning_rate for size in SIZES.values() if size[:3] == shape]
        if not rates:
            raise ValueError(f"there is no learning rate for {shape} (layers, width, heads); use a size of the family")
        optimizers = self.setup_optimizers(rates[0], lean)

        def schedule(step: int, progress: float) -> float:
            lrm = lr_multiplier(step, num_iterations)
            set_learning_rates(optimizers, lrm)
            return lrm

        return optimizers, schedule

    def setup_finetuning(
        self,
        rates: dict[str, float],
        init_lr_frac: float,
        lr_multiplier: Callable[[float], float],
        momentum: Callable[[int], float] | None = None,
        orthogonalizer: str = "polar_express",
        lean: LeanState | None = None,
    ) -> tuple[list[torch.optim.Optimizer], Schedule]:
        """Returns AdamW for all parameters, with the rate rates["unembedding_lr"] times init_lr_frac times
        lr_multiplier(progress), and the schedule that sets this rate.

        "unembedding_lr" is used because it is the rate of AdamW for a matrix in GPT. The other rates and the momentum
        are ignored. Raises ValueError if an orthogonalizer is chosen, because AdamW has none.
        """
        check_no_orthogonalizer(orthogonalizer)
        optimizers = self.setup_optimizers(rates["unembedding_lr"] * init_lr_frac, lean)

        def schedule(step: int, progress: float) -> float:
            lrm = lr_multiplier(progress)
            set_learning_rates(optimizers, lrm)
            return lrm

        return optimizers, schedule

    @torch.no_grad()
    def clip_gradients(self) -> Tensor:
        """Averages the gradients over the ranks and scales them to a norm of at most CLIP_NORM, in place. Returns their
        norm before the scaling, ().

        The gradients are averaged first, because clipping is not linear. The average that the optimizer computes later
        then changes nothing.
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if is_ddp_initialized():
            for grad in (g for g in grads if not is_sharded(g)):
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
        norm = gradient_norm(self)
        scale = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            local(grad).mul_(scale)
        return norm

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: Any = None, loss_reduction: str = "mean"
    ) -> Tensor:
        """Computes the model for tokens idx `(B, T)`. Returns the logits `(B, T, vocab_size)`, FP32, or with targets
        the loss in nats. Arguments, results and errors are those of gpt.GPT.forward."""
        start = 0 if kv_cache is None else kv_cache.get_pos()
        end = start + idx.size(1)
        if end > self.rotary_seq_len:
            raise ValueError(f"position {end} is beyond the {self.rotary_seq_len} of this model; shorten the input")
        cos_sin = self.cos[:, start:end], self.sin[:, start:end]
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, cos_sin, kv_cache)
        x = self.transformer.ln_f(x)
        if targets is not None:
            return self.lm_head.losses(x, targets, self.config.vocab_size, NO_SOFTCAP, loss_reduction)
        return self.lm_head(x)[..., : self.config.vocab_size].float()


def check_no_orthogonalizer(name: str) -> None:
    """Raises ValueError if the name of the orthogonalizer is not the default."""
    if name != PretrainingOptions.orthogonalizer:
        raise ValueError(f"orthogonalizer {name}: a Llama model trains with AdamW, which has none; leave it out")


def lr_multiplier(step: int, num_iterations: int) -> float:
    """Returns the multiplier of the learning rate in a step, as torch's OneCycleLR computes it: half a cosine from
    FIRST_LR up to 1 over the warm-up, and then another half down to FINAL_LR."""

    def cosine(start: float, end: float, done: float) -> float:
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))

    peak, last = num_iterations // WARMUP_SHARE - 1, num_iterations - 1
    if step <= peak:
        return cosine(FIRST_LR, 1.0, step / max(1, peak))
    return cosine(1.0, FINAL_LR, min(1.0, (step - peak) / (last - peak)))
