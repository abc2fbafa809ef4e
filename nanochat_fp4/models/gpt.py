"""
The GPT of nanochat at revision f5425245f. With the same state dict it computes the same function.

- Positions are rotary. Queries and keys are normalized after the rotation.
- RMSNorm has no weights. It follows the embedding, and precedes attention, the MLP and the head.
- The MLP has ReLU^2. There are no biases. Embedding and head are untied, and the vocabulary is padded to a multiple
  of 64.
- Key and value heads may be grouped. A pattern over the layers gives their windows: S is half the context and L all of
  it.
- A layer's input is resid_lambda * x + x0_lambda * x0, where x0 is the normalized embedding.
- Logits are softly capped at +-15.

All matrices are plain nn.Linear layers, so that nanochat_fp4.convert can turn them into quantized layers.

The model keeps few tensors for the backward pass (docs/memory.md has the table). The logits are not kept
(cross_entropy.py). ReLU^2 keeps its output, which the next layer keeps anyway, or 8 bits an element. Queries and keys
are kept only once.

Parameters are FP32, and on CUDA the embedding is BF16, as in nanochat. Run the model inside `autocast(device_type)`,
which makes matrix products BF16 on CUDA and FP32 elsewhere.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat_fp4.common import say_once
from nanochat_fp4.models import flash_attention, optim
from nanochat_fp4.models.cross_entropy import Head
from nanochat_fp4.models.elementwise import ReluSquared, apply_rotary_emb, norm, rotary_tables
from nanochat_fp4.models.optim8bit import LeanState, drawn
from nanochat_fp4.models.recompute import MixedNorm, attention_part, can_recompute
from nanochat_fp4.nvfp4.dispatch import stays_eager, triton_problem
from nanochat_fp4.nvfp4.epilogue import fused_linear, relu_squared_linear

SOFTCAP = 15.0  # Logits lie in (-15, 15).
ROTARY_BASE = 10000.0
ROTARY_FACTOR = 10  # The length of the rotary tables, in units of the sequence length.
REFERENCE_BATCH_SIZE = 2**19  # nanochat's learning rates are tuned for this number of tokens.
Recompute = Literal["none", "codes", "codes-mlp", "mlp", "all"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
REFERENCE_DEPTH = 12  # nanochat's weight decay is tuned for this depth.


@dataclass
class GPTConfig:
    sequence_len: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    # The pattern is repeated over the layers. "L" sees all positions of sequence_len, and "S" half of them. The last
    # layer is always L.
    window_pattern: str = "L"
    # An option for runs as in the paper, which nanochat does not have: c_q, c_k and c_v are quantized as three layers
    # with a tensor_scale each.
    separate_qkv: bool = False

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise ValueError(
                f"n_embd {self.n_embd} over n_head {self.n_head} is not an even head dimension; 64 and 128 are usual"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}; change one of them"
            )
        if not self.window_pattern or set(self.window_pattern.upper()) - set("SL"):
            raise ValueError(f"window pattern {self.window_pattern!r} is not made of S and L; write for example SSSL")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def config_from_depth(
    depth: int,
    vocab_size: int,
    sequence_len: int = 2048,
    head_dim: int = 128,
    aspect_ratio: int = 64,
    window_pattern: str = "SSSL",
) -> GPTConfig:
    """
    Returns the configuration that nanochat derives from the depth: the width is depth * aspect_ratio, rounded up to
    whole heads of head_dim. Heads are not grouped.

    With the defaults and an even depth, the shape is exactly that of the revision. At an odd depth the revision looks
    for another head dimension. The newest nanochat rounds the width up instead, and so does this function, because the
    rotations of the 4-bit backward pass need widths that are multiples of 128. Raises ValueError if an argument is
    below 1.
    """
    values = {"depth": depth, "vocabulary": vocab_size, "sequence length": sequence_len, "head dimension": head_dim}
    values["aspect ratio"] = aspect_ratio
    if wrong := [f"{name} {value}" for name, value in values.items() if value < 1]:
        raise ValueError(f"{' and '.join(wrong)} must be at least 1")
    n_head = -(-depth * aspect_ratio // head_dim)
    return GPTConfig(
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        n_layer=depth,
        n_head=n_head,
        n_kv_head=n_head,
        n_embd=n_head * head_dim,
        window_pattern=window_pattern,
    )


def autocast(device_type: str, dtype: torch.dtype | None = None) -> contextlib.AbstractContextManager:
    """Returns the context that models run in. Matrix products are in `dtype`: by default BF16 on CUDA, and FP32, which
    needs no autocast, on other devices."""
    if dtype is None:
        dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device_type, dtype=dtype)


class CausalSelfAttention(nn.Module):
    fused_linears = ("c_q", "c_k", "c_v")  # These layers read the same input and are computed as one layer.

    def __init__(self, config: GPTConfig, layer_idx: int):
        super().__init__()
        self.fused_linears = () if config.separate_qkv else CausalSelfAttention.fused_linears
        self.layer_idx = layer_idx
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        # Checkpoints and the optimizer have three matrices, as in nanochat.
        self.c_q = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)
        self.c_k = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_v = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def qkv(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Computes q `(B, T, H, D)` and k `(B, T, H_kv, D)`, rotated and normalized, and v `(B, T, H_kv, D)`, of x
        `(B, T, C)`."""
        layers = [self.c_q, self.c_k, self.c_v]
        if self.fused_linears:
            q, k, v = fused_linear(x, *layers, head_dim=self.head_dim)
            # Attention keeps v for the backward pass. A view of v would keep the memory of the unrotated q and k as
            # well, so v is copied.
            v = v.contiguous()
        else:
            q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        q, k = (norm(apply_rotary_emb(t, *cos_sin), keep_output=True) for t in (q, k))
        return q, k, v

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], window_size: tuple[int, int], kv_cache: Any) -> Tensor:
        y = flash_attention.attend(*self.qkv(x, cos_sin), kv_cache, self.layer_idx, window_size[0])
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        if getattr(self.c_proj, "quantizes_input", False):
            return relu_squared_linear(x, self.c_fc, self.c_proj, recompute)
        x = self.c_fc(x)
        x = ReluSquared.apply(x)
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer_idx: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        resid_lambda: Tensor,
        x0_lambda: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        window_size: tuple[int, int],
        kv_cache: Any,
        recompute: Recompute,
    ) -> Tensor:
        """Computes the layer. x is the residual stream, and x0 is the normalized embedding, both `(B, T, C)`. Returns
        the new residual stream `(B, T, C)`."""

        def attention(x: Tensor) -> Tensor:
            return x + self.attn(norm(x), cos_sin, window_size, kv_cache)

        training = torch.is_grad_enabled()
        if training and recompute.startswith("codes") and kv_cache is None and can_recompute(self):
            x, normed = attention_part(self, x, x0, resid_lambda, x0_lambda, cos_sin, window_size[0])
            return x + self.mlp(normed, recompute == "codes-mlp")
        x = resid_lambda * x + x0_lambda * x0
        x = checkpoint(attention, x, use_reentrant=False) if training and recompute == "all" else attention(x)
        return self.with_mlp(x, recompute)

    def with_mlp(self, x: Tensor, recompute: Recompute) -> Tensor:
        def mlp(x: Tensor) -> Tensor:
            return x + self.mlp(norm(x))

        recomputes = torch.is_grad_enabled() and recompute in ("mlp", "all")
        return checkpoint(mlp, x, use_reentrant=False) if recomputes else mlp(x)

    # The parts of forward around attention, which are the same for all windows. compile_layers compiles them.

    def before_attention(
        self, x: Tensor, x0: Tensor, resid_lambda: Tensor, x0_lambda: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        # The compiler would keep the sum for the backward pass because it is a result of the graph.
        x, normed = MixedNorm.apply(x, x0, resid_lambda, x0_lambda)
        return x, *self.attn.qkv(normed, cos_sin)

    def after_attention(self, x: Tensor, y: Tensor, recompute: Recompute) -> Tensor:
        return self.with_mlp(x + self.attn.c_proj(y), recompute)


# Inductor's limits, in reads and operations, for recomputing a value at each use instead of writing it to memory. The
# defaults on a GPU are 4, 8 and 30. With the defaults the backward pass writes and reads an FP32 copy of the first
# norm's output, and it writes and reads the gradients of q and k once more than needed. The first limit must stay below
# 8, because the rotation of the forward pass has 8 reads and must not be recomputed.
COMPILER_OPTIONS = {
    "realize_reads_threshold": 6,
    "realize_acc_reads_threshold": 16,
    "realize_opcount_threshold": 64,
}


def compile_layers(model: nn.Module) -> Callable[..., Tensor]:
    """Returns model.forward with compiled layers (torch.compile with fullgraph=True). All layers share two graphs, one
    before attention and one after it. Attention runs between them, so that windows need no graphs of their own. A layer
    that computes tensors of attention again ("all", "codes" and "codes-mlp") is one graph, with attention in it, which
    layers with the same window share.

    The time to compile therefore does not depend on the depth. The norms before and after the layers are compiled as
    well: the backward pass of an eager norm moves 70 bytes an element in nine kernels, and the compiled one moves 6.
    Embedding and loss stay eager, because they are only a few launches. Each batch shape is compiled by itself. A model
    that is no GPT is compiled as a whole. Raises ValueError if the installed Triton is known to be wrong on this GPU.
    """
    if model.get_device().type == "cuda" and (problem := triton_problem()):
        raise ValueError(problem)
    if not isinstance(model, GPT):
        return torch.compile(model, dynamic=False)
    # `import torch` alone does not import these modules, and a model that is never compiled does not need them.
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # Layers are autograd functions of this package. Without this setting, graphs with such functions are not cached and
    # each process traces them anew.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # torch 2.11 caches graphs that switch autocast off, as norm does. Torch 2.13 does so only if it is told that these
    # two functions are safe. They are, because their arguments are in the graph.
    cacheable = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}
    torch._inductor.config.unsafe_marked_cacheable_functions |= cacheable
    # A function is compiled for each window, micro-batch size and method of a plan, with and without gradients.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    device_type = model.get_device().type
    options = COMPILER_OPTIONS if device_type == "cuda" else None
    whole = not stays_eager(device_type)
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=whole, options=options)
    whole, before, after, outer_norm = (
        compiled(f) for f in (Block.forward, Block.before_attention, Block.after_attention, norm)
    )

    def layer(block, x, x0, resid_lambda, x0_lambda, cos_sin, window_size, kv_cache, recompute):
        if torch.is_grad_enabled() and recompute not in ("none", "mlp"):
            return whole(block, x, x0, resid_lambda, x0_lambda, cos_sin, window_size, kv_cache, recompute)
        x, *qkv = before(block, x, x0, resid_lambda, x0_lambda, cos_sin)
        y = flash_attention.attend(*qkv, kv_cache, block.attn.layer_idx, window_size[0], compiled=True)
        return after(block, x, y, recompute)

    if not hasattr(model, "unshard"):  # FSDP adds this method.
        return functools.partial(model, layer=layer, outer_norm=outer_norm)
    # FSDP's hooks gather and free weights around a block. The hooks must not be part of a graph, so only the blocks'
    # forward is compiled.
    for block in model.transformer.h:
        block.forward = functools.partial(layer, block)
    return functools.partial(model, outer_norm=outer_norm)


def batch_scale(total_batch_size: int) -> float:
    """Returns the factor of learning rates that are meant for 2^19 tokens in a step, in steps of total_batch_size."""
    return (total_batch_size / REFERENCE_BATCH_SIZE) ** 0.5


class GPT(nn.Module):
    """
    nanochat's GPT. It is built in three steps, so that memory is allocated only once:

        with torch.device("meta"):
            model = GPT(config)            # shapes only
        model.to_empty(device=device)      # memory
        model.init_weights()               # values, rotary tables, attention backend

    recompute says which tensors the backward pass computes a second time instead of keeping them, which saves memory
    and costs time. The results have the same bits, except for the gradients of "codes-mlp" (recompute.py). Under
    torch.compile other random numbers of the same distribution are drawn.
        "none": none.
        "mlp": the second norm, c_fc, ReLU^2, and the quantization of their results. This costs a ninth of the layers'
            matrix products.
        "all": the tensors of "mlp", and queries, keys, values and attention. This costs a fifth of the products, and
            attention once more.
        "codes": the tensors that can be computed from kept codes (recompute.py). This costs a ninth of the products, in
            4 bits.
        "codes-mlp": the tensors of "codes", and c_fc. This costs two ninths of the products, in 4 bits.
    """

    recompute: Recompute = "none"
    muon_trains_blocks = True  # Otherwise AdamW trains the matrices of the blocks, too.
    bf16_embedding_on_gpu = True

    def __init__(self, config: GPTConfig, pad_vocab_size_to: int = 64):
        super().__init__()
        self.config = config
        self.window_sizes = self._compute_window_sizes(config)
        padded_vocab_size = -(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to
        table = padded_vocab_size, config.n_embd
        # On the device "meta" nn.Embedding would draw no numbers, and import the whole compiler for it.
        unfilled = torch.empty(table) if torch.get_default_device().type == "meta" else None
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(*table, _weight=unfilled),
                "h": nn.ModuleList([Block(config, layer_idx) for layer_idx in range(config.n_layer)]),
            }
        )
        self.lm_head = Head(config.n_embd, padded_vocab_size)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.rotary_seq_len = config.sequence_len * ROTARY_FACTOR
        for name, table in zip(("cos", "sin"), self._rotary_tables()):
            self.register_buffer(name, table, persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """
        Draws all weights from torch's default generator, in nanochat's order, so that the same seed gives nanochat's
        weights.

        wte is normal with std 1, and lm_head is normal with std 0.001. c_q, c_k, c_v and c_fc are uniform with std
        1/sqrt(n_embd), because a uniform distribution has no outliers. Both c_proj and x0_lambdas are 0, and
        resid_lambdas are 1.
        """
        drawn(self.transformer.wte.weight, nn.init.normal_)
        drawn(self.lm_head.weight, nn.init.normal_, 0.0, 0.001)
        bound = 3**0.5 * self.config.n_embd**-0.5  # A uniform distribution on (-b, b) has std b / sqrt(3).
        for block in self.transformer.h:
            for linear in (block.attn.c_q, block.attn.c_k, block.attn.c_v, block.mlp.c_fc):
                drawn(linear.weight, nn.init.uniform_, -bound, bound)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.zeros_(block.mlp.c_proj.weight)
        self.resid_lambdas.fill_(1.0)
        self.x0_lambdas.fill_(0.0)
        if self.get_device().type == "cuda":
            self.transformer.wte.to(dtype=torch.bfloat16)  # This halves the largest table. The optimizer takes BF16.
        if (padded := len(self.lm_head.weight)) != self.config.vocab_size:
            say_once(f"Padding vocab_size from {self.config.vocab_size} to {padded} for efficiency")
        self.prepare()

    def prepare(self) -> None:
        """Makes the rotary tables and sets up the attention backend for the device of the weights."""
        self.cos, self.sin = self._rotary_tables()
        device_type = self.get_device().type
        if device_type != "meta":
            left = min(left for left, _ in self.window_sizes)
            flash_attention.setup(device_type, 0 <= left < self.config.sequence_len - 1)

    def _rotary_tables(self) -> tuple[Tensor, Tensor]:
        if self.get_device().type == "meta":  # arange would import the whole compiler
            table = torch.empty(1, self.rotary_seq_len, 1, self.config.head_dim // 2, device="meta").bfloat16()
            return table, table.clone()
        # The tables are BF16 on every device, as in nanochat, because a checkpoint must be the same function
        # everywhere.
        cos, sin = rotary_tables(self.rotary_seq_len, self.config.head_dim, ROTARY_BASE, self.get_device())
        return cos.bfloat16(), sin.bfloat16()

    @staticmethod
    def _compute_window_sizes(config: GPTConfig) -> list[tuple[int, int]]:
        """Returns the window (left, 0) of each layer. For L left is sequence_len, and for S it is half of that. The
        last layer is always L."""
        left = {"L": config.sequence_len, "S": config.sequence_len // 2}
        pattern = config.window_pattern.upper()
        sizes = [(left[pattern[i % len(pattern)]], 0) for i in range(config.n_layer)]
        sizes[-1] = (left["L"], 0)
        return sizes

    def get_device(self) -> torch.device:
        return self.transformer.wte.weight.device

    def num_scaling_params(self) -> int:
        """Returns the number of all parameters, which Chinchilla uses for tokens per parameter and scaling laws."""
        return sum(p.numel() for p in self.parameters())

    def estimate_flops(self) -> int:
        """
        Returns the FLOPs of training per token, forward and backward, counted as in PaLM (arXiv 2204.02311, appendix
        B).

        A weight of a matrix counts 6. Attention counts 12 * heads * head_dim * keys in each layer, where the number of
        keys is at most the window's width. Look-ups, norms and elementwise operations are not counted.
        """
        not_matrices = (self.transformer.wte.weight, self.resid_lambdas, self.x0_lambdas)
        matrix_weights = self.num_scaling_params() - sum(p.numel() for p in not_matrices)
        longest = self.config.sequence_len
        keys = sum(longest if left < 0 else min(left, longest) for left, _ in self.window_sizes)
        return 6 * matrix_weights + 12 * self.config.n_embd * keys

    def setup_optimizers(
        self,
        unembedding_lr: float = 0.004,
        embedding_lr: float = 0.2,
        matrix_lr: float = 0.02,
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.8, 0.95),
        scalar_lr: float = 0.5,
        orthogonalizer: str = "polar_express",
        lean: LeanState | None = None,
    ) -> list[torch.optim.Optimizer]:
        """
        Returns [AdamW for head, embedding and the layers' scalars, Muon for the matrices of the blocks].

        AdamW's learning rates of head and embedding are given for a width of 768 and are multiplied by (width /
        768)^-0.5. The rate of resid_lambdas is a hundredth of scalar_lr, because their effects multiply over the
        layers. While c_proj is 0 the loss does not depend on resid_lambdas and x0_lambdas, so rounding decides the
        signs of their first step (docs/results.md). weight_decay applies to Muon only. Each group stores its rate as
        "initial_lr" for the schedules. In a process group of several ranks both optimizers average the gradients
        themselves.
        """
        scale = (self.config.n_embd / 768) ** -0.5
        adam_groups = [
            dict(params=[self.lm_head.weight], lr=unembedding_lr * scale),
            dict(params=[self.transformer.wte.weight], lr=embedding_lr * scale),
            dict(params=[self.resid_lambdas], lr=scalar_lr * 0.01),
            dict(params=[self.x0_lambdas], lr=scalar_lr),
        ]
        matrices = list(self.transformer.h.parameters())
        assert len(matrices) + len(adam_groups) == len(list(self.parameters())), "a parameter without an optimizer"
        adamw = optim.AdamW(adam_groups, betas=adam_betas, eps=1e-10, weight_decay=0.0, lean=lean)
        muon = optim.Muon(
            matrices, lr=matrix_lr, momentum=0.95, weight_decay=weight_decay, orthogonalizer=orthogonalizer, lean=lean
        )
        for group in adamw.param_groups + muon.param_groups:
            group["initial_lr"] = group["lr"]
        return [adamw, muon]

    def setup_pretraining(
        self,
        options: optim.PretrainingOptions,
        total_batch_size: int,
        num_iterations: int,
        lean: LeanState | None = None,
    ) -> tuple[list[torch.optim.Optimizer], optim.Schedule]:
        """
        Returns nanochat's optimizers and its schedule for num_iterations steps of total_batch_size tokens.

        The options' learning rates are for batches of 2^19 tokens. They are multiplied by the square root of
        total_batch_size / 2^19. The options' weight decay is for 12 layers. It is multiplied by (12 / depth)^2, and
        falls linearly to zero over the run.
        """
        scale, width = batch_scale(total_batch_size), self.config.n_embd
        say_once(f"Scaling the learning rates of AdamW by ({width}/768)^-0.5 = {(width / 768) ** -0.5:.6f}")
        weight_decay = options.weight_decay * (REFERENCE_DEPTH / self.config.n_layer) ** 2
        adamw, muon = self.setup_optimizers(
            unembedding_lr=options.unembedding_lr * scale,
            embedding_lr=options.embedding_lr * scale,
            matrix_lr=options.matrix_lr * scale,
            weight_decay=weight_decay,
            adam_betas=(options.adam_beta1, options.adam_beta2),
            scalar_lr=options.scalar_lr * scale,
            orthogonalizer=options.orthogonalizer,
            lean=lean,
        )

        def schedule(step: int, progress: float) -> float:
            lrm = optim.lr_multiplier(
                step, num_iterations, options.warmup_ratio, options.warmdown_ratio, options.final_lr_frac
            )
            optim.set_learning_rates([adamw, muon], lrm)
            for group in muon.param_groups:
                group["momentum"] = optim.muon_momentum(step)
                group["weight_decay"] = optim.weight_decay_at(step, num_iterations, weight_decay)
            return lrm

        return [adamw, muon], schedule

    def setup_finetuning(
        self,
        rates: dict[str, float],
        init_lr_frac: float,
        lr_multiplier: Callable[[float], float],
        momentum: Callable[[int], float] | None = None,
        orthogonalizer: str = "polar_express",
        lean: LeanState | None = None,
    ) -> tuple[list[torch.optim.Optimizer], optim.Schedule]:
        """
        Returns the optimizers and the schedule of a stage after pre-training.

        rates: keyword arguments of setup_optimizers. All learning rates are multiplied by init_lr_frac and by
            lr_multiplier(progress).
        momentum: a function from the step to Muon's momentum. None leaves the momentum constant.
        orthogonalizer: the name of Muon's orthogonalizer, one of optim.ORTHOGONALIZERS
        lean: the LeanState of a run with --state=lean, otherwise None
        """
        optimizers = self.setup_optimizers(**rates, orthogonalizer=orthogonalizer, lean=lean)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] = group["lr"] * init_lr_frac

        def schedule(step: int, progress: float) -> float:
            lrm = lr_multiplier(progress)
            optim.set_learning_rates(optimizers, lrm)
            for group in optimizers[-1].param_groups if momentum else ():
                group["momentum"] = momentum(step)
            return lrm

        return optimizers, schedule

    def clip_gradients(self) -> Tensor:
        """Returns the 2-norm of all gradients on this rank, (). The gradients stay as they are, because nanochat does
        not clip them."""
        return optim.gradient_norm(self)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        kv_cache: Any = None,
        loss_reduction: str = "mean",
        layer: Callable[..., Tensor] = nn.Module.__call__,
        outer_norm: Callable[[Tensor], Tensor] = norm,
    ) -> Tensor:
        """
        Computes the model for tokens idx `(B, T)`, int64.

        Without targets, the result is the capped logits `(B, T, vocab_size)`, FP32. With targets `(B, T)`, the result
        is the cross-entropy in nats, FP32. A target of -1 does not count. The shape is () for loss_reduction "mean" and
        "sum", and (B * T,) for "none".

        With a kv_cache (engine.KVCache), the tokens continue the cached ones and are added to the cache. compile_layers
        passes compiled functions as `layer` and as `outer_norm`, which is the norm before and after the layers. Raises
        ValueError for positions beyond the rotary tables, and if idx is on another device than the model.
        """
        start = 0 if kv_cache is None else kv_cache.get_pos()
        end = start + idx.size(1)
        if end > self.rotary_seq_len:
            raise ValueError(
                f"position {end} is beyond the {self.rotary_seq_len} positions of this model "
                f"({ROTARY_FACTOR} x sequence_len {self.config.sequence_len}); shorten the input"
            )
        if idx.device != self.cos.device:
            raise ValueError(f"tokens are on {idx.device} and the model on {self.cos.device}; move the tokens there")
        cos_sin = self.cos[:, start:end], self.sin[:, start:end]

        x0 = outer_norm(self.transformer.wte(idx))
        # x is a second object, because a call with the same tensor as two arguments would be compiled separately.
        x = x0.view_as(x0)
        lambdas = zip(self.resid_lambdas.unbind(), self.x0_lambdas.unbind())
        for block, scalars, window_size in zip(self.transformer.h, lambdas, self.window_sizes):
            x = layer(block, x, x0, *scalars, cos_sin, window_size, kv_cache, self.recompute)
        x = outer_norm(x)

        if targets is not None:
            return self.lm_head.losses(x, targets, self.config.vocab_size, SOFTCAP, loss_reduction)
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()
        return SOFTCAP * torch.tanh(logits / SOFTCAP)
