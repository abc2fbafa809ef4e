"""
Generation's inner loop: one token a row through GPT or Llama, by a few fused kernels a layer. On a GPU: one CUDA graph.

At one token, a layer's time is the time of reading its weights and of launching its kernels. Quantized weights are read
as codes, 4.5 bits an element (nvfp4_kernels/decode_step.py). One kernel does all work between two products. The
position is a number on the device, so one captured graph serves every position.

The result is that of model(ids, kv_cache=cache) inside per_token_scale, rounded at the same places. Sums are in another
order.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_fp4.models import elementwise, gpt, llama
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.nvfp4.dispatch import kernels_unavailable_reason
from nanochat_fp4.nvfp4.fused import can_be_fused, groups_computed_as_one, quantized_weights
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.operands import Codes

MAX_ROWS = 64  # limit of decode_step.codes_matmul


class Product(NamedTuple):
    """One product of a layer. rounding: of its input, in decode_step.row's form. None: neither operand is quantized."""

    weight: Tensor | Codes
    rounding: tuple[float, float, tuple[float, ...]] | None
    dtype: torch.dtype

    def __call__(self, values: Tensor, scales: Tensor | None) -> Tensor:
        """The product's parts (P, B, N), from values (B, K) and scales (B, 1)."""
        from nvfp4_kernels.decode_step import codes_matmul

        if self.rounding is None:
            return F.linear(values, self.weight).unsqueeze(0)
        w = self.weight
        return codes_matmul(values, scales, w.codes, w.scales, w.tensor_scale, self.dtype)


def _quantizes(layer: torch.nn.Module) -> bool:
    return isinstance(layer, QuantLinear) and layer.quantizes


def unsupported_reason(model: Any, cache: Any) -> str | None:
    """The reason why Decoder cannot take this model and engine.KVCache, or None."""
    if reason := kernels_unavailable_reason():
        return reason
    if not isinstance(model, GPT | Llama):
        return f"it is for GPT and Llama, and this is a {type(model).__name__}"
    if cache.batch_size > MAX_ROWS:
        return f"there are {cache.batch_size} rows, and it takes up to {MAX_ROWS}"
    if cache.max_seq_len > model.cos.shape[1]:
        return f"the cache has {cache.max_seq_len} positions and the rotary tables {model.cos.shape[1]}"
    config = model.config
    half = config.head_dim // 2
    if half < 8 or half & (half - 1) or config.n_embd % 16:
        return f"heads of {config.head_dim} of {config.n_embd} columns are not for its kernels"
    for block in model.transformer.h:
        for layers in _products(block):
            if not layers:
                return "q, k and v are computed one by one"
            if not can_be_fused(layers):
                return "a layer has a bias, hooks or a forward of its own"
            if _quantizes(layers[0]) and (reason := _unsupported_layer(layers[0])):
                return reason
            if not _quantizes(layers[0]) and getattr(layers[0], "gathered", None) is not None:
                return "FSDP has gathered the weights themselves"
    device = cache.k_cache.device
    if device.type == "cuda" and any(map(_quantizes, model.modules())):
        from nvfp4_kernels.decode_step import product_problem

        return product_problem(device)
    return None


def _products(block: torch.nn.Module) -> list[list[torch.nn.Linear]]:
    """The layers of a block's four products, in order. The first product is that of q, k and v together."""
    attention, mlp = block.attn, block.mlp
    into = getattr(mlp, "fused_linears", ("c_fc",))
    qkv, into = ([getattr(m, n) for n in names] for m, names in ((attention, attention.fused_linears), (mlp, into)))
    return [qkv, [attention.c_proj], into, [mlp.c_proj]]


def _unsupported_layer(layer: QuantLinear) -> str | None:
    output, name = layer.recipe.output, layer.recipe.name
    rounding = output.a.rounding
    if not layer.context.per_token:
        return "it scales activations per token; enter nf.per_token_scale(model)"
    if not layer.recipe.fixed_weight or output.rht_dim:
        return f"{name} has another kind of weight than codes"
    plain = output.a.terms == output.b.terms == 1
    if rounding is None or not rounding.has_kernels or rounding.random or rounding.block_rows > 1 or not plain:
        return f"{name} has another kind of input than codes"
    return None


def compute_dtype(device: torch.device, wanted: str = "bfloat16") -> torch.dtype:
    """The dtype to generate in: BF16 on CUDA unless "float32" is wanted, FP32 on other devices."""
    return torch.bfloat16 if device.type == "cuda" and wanted != "float32" else torch.float32


@torch.no_grad()
def prepare(model: torch.nn.Module, dtype: torch.dtype, both: bool = False) -> torch.nn.Module:
    """
    Reduces the weights to those that generation needs, in place; returns the model.

    Layers that quantize at the moment keep the codes of their forward alone, 4.5 bits a weight. Other linear layers
    keep their weights in dtype if that is smaller, because autocast multiplies in dtype. With `both`, quantizing layers
    also keep their weights in dtype, for full_precision. Afterwards the state dict is not one to save, and the layers
    cannot be trained.
    """
    rounded_each_time: set[torch.nn.Module] = set()
    for layers in groups_computed_as_one(model):
        operand = layers[0].made_weight(len(layers)) or quantized_weights([layers])[0]
        if operand is None:
            rounded_each_time.update(layers)
            continue
        layers[0].packed = {len(layers): operand}
        for layer in layers:
            _replace_weight(layer, layer.weight.to(dtype) if both else layer.weight.to("meta"))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module not in rounded_each_time:
            if not module.weight.is_meta and module.weight.element_size() > dtype.itemsize:
                _replace_weight(module, module.weight.to(dtype))
    return model


def _replace_weight(module: torch.nn.Module, weight: Tensor) -> None:
    module.weight = torch.nn.Parameter(weight, requires_grad=False)


class Decoder:
    """
    logits = Decoder(model, cache)(ids): the tokens ids (B,) follow the cache's; logits float32 (B, vocab_size).

    The weights and the precision are the model's when the Decoder is made (full_precision, quantize_weights_once). On
    CUDA the first call captures a graph, and the next call overwrites the logits. Raises ValueError if
    unsupported_reason has one, and if the cache is full.
    """

    def __init__(self, model: GPT | Llama, cache: Any):
        if reason := unsupported_reason(model, cache):
            raise ValueError(f"Decoder: {reason}; use the model itself")
        self.model, self.cache = model, cache
        self.dtype = cache.k_cache.dtype
        self.layers = [[self._product(*layers) for layers in _products(block)] for block in model.transformer.h]
        self.head = model.lm_head.weight.to(self.dtype)
        self.ids = torch.zeros(cache.batch_size, dtype=torch.long, device=cache.k_cache.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def _product(self, *layers: torch.nn.Linear) -> Product:
        first = layers[0]
        if not _quantizes(first):
            weights = [layer.weight.to(self.dtype) for layer in layers]
            return Product(weights[0] if len(weights) == 1 else torch.cat(weights), None, self.dtype)
        operand = first.made_weight(len(layers))
        r = first.recipe.output.a.rounding
        rounding = (r.grid_max, r.scale_cap, tuple(r.candidates))
        operand = operand or quantized_weights([layers])[0]
        return Product(operand.row_major(), rounding, self.dtype)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        position = self.cache.get_pos()
        if position >= self.cache.max_seq_len:
            raise ValueError(f"the KV cache holds {position} positions and one more is needed; make it longer")
        self.ids.copy_(ids)
        if not self.ids.is_cuda:
            logits = self._step()
        else:
            if self.graph is None:
                self._capture()
            self.graph.replay()
            logits = self.logits
        self.cache._position += 1
        return logits

    def _capture(self) -> None:
        before = self.cache.cache_seqlens.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles the kernels; the graph writes the same position again
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.cache.cache_seqlens.copy_(before)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = self._step()

    def _step(self) -> Tensor:
        from nvfp4_kernels.decode_step import attention, row

        model, cache, dtype = self.model, self.cache, self.dtype
        is_gpt = isinstance(model, GPT)
        eps, activation = (elementwise.NORM_EPS, "relu2") if is_gpt else (llama.NORM_EPS, "silu")
        cos, sin = (table[0, :, 0] for table in (model.cos, model.sin))
        x0 = model.transformer.wte(self.ids)
        x0 = gpt.norm(x0) if is_gpt else x0
        x, y = x0.clone(), torch.zeros(1, *x0.shape, dtype=dtype, device=x0.device)
        for i, (block, (qkv, attention_out, mlp_in, mlp_out)) in enumerate(zip(model.transformer.h, self.layers)):
            mix = (x0, model.resid_lambdas[i], model.x0_lambdas[i]) if is_gpt else None
            weights = (None, None) if is_gpt else (block.ln_1.weight, block.ln_2.weight)
            inputs = row(y, x, mix, dtype=dtype, add=True, norm_eps=eps, norm_weight=weights[0], rounding=qkv.rounding)
            y = attention(
                qkv(*inputs), cos, sin, *cache.get_layer_cache(i), cache.cache_seqlens,
                model.config.n_head, model.window_sizes[i][0] if is_gpt else -1, eps if is_gpt else None,
            )  # fmt: skip
            inputs = row(y, dtype=dtype, rounding=attention_out.rounding) if attention_out.rounding else (y[0], None)
            y = attention_out(*inputs)
            inputs = row(y, x, dtype=dtype, add=True, norm_eps=eps, norm_weight=weights[1], rounding=mlp_in.rounding)
            y = mlp_out(*row(mlp_in(*inputs), dtype=dtype, activation=activation, rounding=mlp_out.rounding))
        norm_weight = None if is_gpt else model.transformer.ln_f.weight
        x, _ = row(y, x, dtype=dtype, add=True, norm_eps=eps, norm_weight=norm_weight)
        logits = F.linear(x, self.head)[:, : model.config.vocab_size].float()
        cache.cache_seqlens += 1
        return gpt.SOFTCAP * torch.tanh(logits / gpt.SOFTCAP) if is_gpt else logits
