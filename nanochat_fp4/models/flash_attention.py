"""
Causal attention with a sliding window, by one of four backends.

    fa3    FlashAttention-3 from Hugging Face's `kernels` package, on Hopper GPUs, for FP16 or BF16
    flash  PyTorch's own flash kernel, called directly, because SDPA has no argument for a window. It needs sm_80 or
           newer, and FP16 or BF16.
    flex   torch's FlexAttention, for sliding windows of compiled models. Without a compiler it is not fused.
    sdpa   torch's scaled_dot_product_attention, which runs everywhere. A window needs an explicit mask.

FlashAttention-3 is taken where it runs. Otherwise a window takes the fastest backend that was measured on this kind of
GPU (FASTEST), or PyTorch's flash kernel where nobody has measured. Full context takes SDPA, which has cuDNN's kernel,
too.

The environment variable NANOCHAT_ATTENTION=fa3|flash|flex|sdpa forces a backend, and so does `use(...)` in a test. A
forced backend that cannot run raises an error, and no other backend is used instead.

A window is given by `left`. Position i sees the left + 1 keys from i - left to i. A negative left means no limit.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nanochat_fp4.cli import one_line
from nanochat_fp4.common import say_once
from nanochat_fp4.nvfp4.dispatch import constant_when_compiled

BACKENDS = ("fa3", "flash", "flex", "sdpa")
# The largest number of tokens in a call on sm_12x. With 65,536 tokens SDPA gave NaN on an RTX PRO 6000
# (pytorch#171389).
MOST_TOKENS = 65535
# Major version of sm -> the fastest backend for windows, forward and backward.
FASTEST = {9: "flex"}  # H200, T 2048, windows of 1024, D 128: flash 0.57 ms, flex 0.45, SDPA 1.07
FLEX_BLOCK = 128  # The number of queries, and of keys, in a block of FlexAttention's mask.
FA3_REPOSITORY = "varunneal/flash-attention-3"  # The package that nanochat uses on Hopper.

NOT_TRIED = "it is looked for only when a model is set up on a CUDA device"

fa3_module: ModuleType | None = None
fa3_reason: str | None = NOT_TRIED
forced_backend: str | None = None

# ----------------------------------------------------------------------------------------------------------------------
# Which backends can run here


def _load_fa3() -> tuple[ModuleType | None, str | None]:
    """Loads FlashAttention-3. Returns (its interface module, None), or (None, the reason why it cannot be used)."""
    if not torch.cuda.is_available():
        return None, "it needs a Hopper GPU, and there is no CUDA device"
    if torch.are_deterministic_algorithms_enabled():
        return None, "its backward pass is not deterministic"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return None, f"it needs a Hopper GPU (sm_90), and this is sm_{major}{minor}"
    package = importlib.util.find_spec("kernels")
    if package is None or package.origin is None:  # None: the folder of this repository that has the same name
        return None, "the package kernels is not installed; pip install kernels"
    try:
        from kernels import get_kernel

        return get_kernel(FA3_REPOSITORY).flash_attn_interface, None
    except Exception as e:  # A missing package, a failed download and a foreign binary raise different exceptions.
        return None, f"loading {FA3_REPOSITORY} failed: {type(e).__name__}: {one_line(e)}"


@functools.cache
def _flash_reason() -> str | None:
    """Returns the reason why PyTorch's flash kernel cannot be called here, or None."""
    if not torch.cuda.is_available():
        return "it needs a GPU, and there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"it needs sm_80 or newer, and this is sm_{major}{minor}"
    if torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without it"
    return None


def unavailable_reason(backend: str) -> str | None:
    """Returns the reason why a backend cannot run on this machine, or None. For fa3 the answer is right after setup.
    Raises ValueError for an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; use one of {', '.join(BACKENDS)}")
    return {"fa3": fa3_reason, "flash": _flash_reason()}.get(backend)


def available(backend: str) -> bool:
    return unavailable_reason(backend) is None


def _force(backend: str | None) -> None:
    global forced_backend
    if backend is not None and (reason := unavailable_reason(backend)):
        raise ValueError(f"attention backend {backend} cannot run: {reason}; use NANOCHAT_ATTENTION=sdpa, or unset it")
    forced_backend = backend


@contextlib.contextmanager
def use(backend: str | None) -> Iterator[None]:
    """Forces a backend for all calls inside this context, for tests and comparisons. With None the backend is chosen
    automatically. Raises ValueError for a backend that cannot run."""
    before = forced_backend
    _force(backend)
    try:
        yield
    finally:
        _force(before)


def setup(device_type: str, windowed: bool = False) -> str:
    """
    Loads FlashAttention-3, and reads NANOCHAT_ATTENTION. Returns a line that names the backend and its cost, and prints
    it once.

    The model calls setup in init_weights, because compiled code can neither load nor print. `windowed` says whether the
    model has sliding windows. Raises ValueError for a forced backend that cannot run.
    """
    global fa3_module, fa3_reason
    wanted = os.environ.get("NANOCHAT_ATTENTION") or None
    if device_type == "cuda" and wanted in (None, "fa3") and fa3_reason == NOT_TRIED:
        fa3_module, fa3_reason = _load_fa3()
    if wanted is not None:
        _force(wanted)
    masked = "SDPA with a T x T mask for sliding windows: such a layer costs as much as a full one"
    if forced_backend is not None:
        line = f"{forced_backend}, as asked for"
    elif device_type != "cuda":
        line = f"{masked if windowed else 'SDPA'} ({device_type})"
    elif fa3_module is not None:
        line = "FlashAttention-3"
    else:
        compiled = {
            "flash": "PyTorch's flash kernel for sliding windows",
            "flex": "FlexAttention for sliding windows where compiled",
            "sdpa": masked,
        }
        line = f"{compiled[backend_for_windows(True)]}, SDPA for full context" if windowed else "SDPA"
        line += f" (FlashAttention-3: {fa3_reason})"
    line = f"attention: {line}"
    say_once(line)
    return line


# ----------------------------------------------------------------------------------------------------------------------
# The backends. They take q `(B, Tq, H, D)`, and k and v `(B, Tk, H_kv, D)` with H a multiple of H_kv. The queries are
# the last Tq of the Tk positions. Results are `(B, Tq, H, D)`.


def _mask(num_q: int, num_k: int, left: int, device: torch.device) -> Tensor:
    """Which keys a query sees, bool (num_q, num_k)."""
    back = torch.arange(num_k - num_q, num_k, device=device).unsqueeze(1) - torch.arange(num_k, device=device)
    return (back >= 0) & (back <= left) if left >= 0 else back >= 0


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    num_q, num_k = q.size(2), k.size(2)
    if num_q == 1 and left >= 0:  # A single new token needs no mask, because the keys that it sees are a slice.
        k, v = k[:, :, -(left + 1) :], v[:, :, -(left + 1) :]
        num_k = k.size(2)
    # These are made plain bools. If the compiler has symbols for sizes, a comparison is a symbol, which SDPA refuses.
    grouped, causal = (True if found else False for found in (q.size(1) != k.size(1), num_q > 1))
    narrow = 0 <= left < num_k - 1
    if num_q == 1 or (num_q == num_k and not narrow):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return y.transpose(1, 2)
    mask = _mask(num_q, num_k, left, q.device)
    # Keys and values are repeated for grouped heads, because CUDA has no fused kernel for grouped heads with a mask.
    # The unfused one would keep T x T scores.
    if grouped:
        repeats = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, ...]:
    """Returns the result and the tensors that torch's operator for the backward pass needs, and a debug mask."""
    # SDPA calls this operator, too, but cannot pass a window to it. torch has the operator's backward pass.
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.size(1), k.size(1), 0.0, True, False, **_window(q, left)
    )


def _window(q: Tensor, left: int) -> dict[str, int]:
    return {"window_size_left": left, "window_size_right": 0} if 0 <= left < q.size(1) - 1 else {}


def flex_blocks(length: int, left: int, device: torch.device) -> list[Tensor]:
    """Returns the eight tensors of FlexAttention's BlockMask for a window. They say which blocks of 128 keys a block of
    128 queries sees in part, and which ones it sees whole, and the same for the queries that see a block of keys.

    create_block_mask makes the same tensors of a mask of length x length. In a graph of torch.compile it takes a
    second to trace, and its four sorts are kernels of their own in each layer of each step.
    """
    blocks = -(-length // FLEX_BLOCK)
    number = torch.arange(blocks, device=device)
    first = number * FLEX_BLOCK
    last = (first + FLEX_BLOCK - 1).clamp_max(length - 1)
    least, most = first[:, None] - last, last[:, None] - first  # the distances from the queries back to the keys
    whole = (least >= 0) & (most <= left) & (first + FLEX_BLOCK <= length)[:, None]
    partly = (most >= 0) & (least <= left) & ~whole
    result = []
    for seen in (partly, whole, partly.T, whole.T):
        # The seen blocks in ascending order, and then the others.
        key = torch.where(seen, number, number + blocks)
        rank = (key[..., None] > key[..., None, :]).sum(-1)
        order = torch.where(rank[:, None] == number[:, None], number, 0).sum(-1)
        result += [t.to(torch.int32)[None, None] for t in (seen.sum(-1), order)]
    return result


def _flex(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    def visible(_batch, _head, query, key):
        return (key <= query) & (query - key <= left) if left >= 0 else key <= query

    length = q.size(1)
    blocks = flex_blocks(length, left if left >= 0 else length, q.device)
    mask = BlockMask((length, length), *blocks, BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK), mask_mod=visible)
    y = flex_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=q.size(2) != k.size(2)
    )
    return y.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(_flex, dynamic=False, fullgraph=True)


@constant_when_compiled
def backend_for_windows(compiled: bool) -> str:
    """Returns the backend for windows on this GPU, in a compiled graph or outside of one, without FlashAttention-3."""
    candidates = ["flash", "flex", "sdpa"]
    if not torch.are_deterministic_algorithms_enabled():
        candidates.insert(0, FASTEST.get(torch.cuda.get_device_capability()[0], "flash"))
    return next(b for b in candidates if available(b) and (compiled or b != "flex"))


def chosen_backend(q: Tensor, left: int, compiled: bool = False) -> str:
    if forced_backend is not None or not q.is_cuda:
        return forced_backend or "sdpa"
    half, width = q.dtype in (torch.bfloat16, torch.float16), q.size(-1)
    if fa3_module is not None and half:
        return "fa3"
    if not 0 <= left < q.size(1) - 1:
        return "sdpa"
    compiled = compiled or torch.compiler.is_compiling()
    backend = backend_for_windows(compiled)
    if backend != "flash" or (half and width % 8 == 0 and width <= 256):
        return backend
    return "flex" if compiled else "sdpa"


@constant_when_compiled
def limits_tokens(device_type: str) -> bool:
    return device_type == "cuda" and torch.cuda.get_device_capability()[0] == 12


def _parts(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Divides tensors `(B, T, ...)` into parts with as many rows as this GPU's attention can take in a call. Raises
    ValueError if a single row has too many tokens."""
    batch, length = tensors[0].shape[:2]
    if batch * length <= MOST_TOKENS or not limits_tokens(tensors[0].device.type):
        return [tensors]
    if length > MOST_TOKENS:
        raise ValueError(f"a row has {length} tokens, this GPU's attention takes {MOST_TOKENS}; shorten it")
    return list(zip(*(t.split(MOST_TOKENS // length) for t in tensors)))


# ----------------------------------------------------------------------------------------------------------------------
# Separate forward and backward functions, for a backward pass that computes q, k and v again


def _forward(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, ...]:
    """Returns the result and the tensors that _backward needs."""
    if q.is_cuda:
        return flash_kernel(q, k, v, left)[:-1]
    q, k, v, mask = _for_cpu(q, k, v, left)
    out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask
    )
    return out.transpose(1, 2), log_sum_exp


def _backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, kept: Sequence[Tensor], left: int
) -> tuple[Tensor, ...]:
    if q.is_cuda:
        log_sum_exp, *state = kept
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, log_sum_exp, None, None, q.size(1), k.size(1), 0.0, True, *state, **_window(q, left)
        )
    groups = k.size(2)
    q, k, v, mask = _for_cpu(q, k, v, left)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.transpose(1, 2), q, k, v, out.transpose(1, 2), *kept, 0.0, mask is None, attn_mask=mask
    )
    of_q, *of_kv = (t.transpose(1, 2) for t in grads)
    return of_q, *(t if t.size(2) == groups else t.unflatten(2, (groups, -1)).sum(3) for t in of_kv)


def _for_cpu(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns q, k and v as `(B, H, T, D)`, and the mask of a window in q's dtype, or None for full context."""
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), dim=2) for t in (k, v))
    mask = None
    if 0 <= left < q.size(1) - 1:
        mask = torch.where(_mask(q.size(1), q.size(1), left, q.device), 0.0, -torch.inf).to(q.dtype)
    return *(t.transpose(1, 2) for t in (q, k, v)), mask


# ----------------------------------------------------------------------------------------------------------------------
# Public functions


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, left: int = -1, compiled: bool = False) -> Tensor:
    """Computes causal attention over whole sequences, with gradients. q is `(B, T, H, D)`, and k and v are
    `(B, T, H_kv, D)`, all in one dtype. `compiled` says that FlexAttention may be taken and compiled, as it is inside
    of a compiled function. Returns `(B, T, H, D)`."""
    parts = _parts(q, k, v)
    if len(parts) > 1:
        return torch.cat([flash_attn_func(*part, left, compiled) for part in parts])
    backend = chosen_backend(q, left, compiled)
    if backend == "fa3":
        return fa3_module.flash_attn_func(q, k, v, causal=True, window_size=(left, 0))
    if backend == "flash":
        return flash_kernel(q, k, v, left)[0]
    if backend == "flex":
        return (_compiled_flex() if compiled else _flex)(q, k, v, left)
    return sdpa_attention(q, k, v, left)


def unkept_reason(device_type: str, head_dim: int) -> str | None:
    """Returns the reason why `forward` and `backward` cannot run on this machine, or None."""
    if device_type == "cuda" and (head_dim % 8 or head_dim > 256):
        return f"the head dimension is {head_dim}, PyTorch's flash kernel needs a multiple of 8 up to 256"
    if device_type == "cuda":
        return _flash_reason()
    return None if device_type in ("cpu", "meta") else f"PyTorch has no flash kernel for {device_type}"


def forward(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Computes flash_attn_func with PyTorch's flash kernels. Returns the result, and the tensors that `backward` needs
    besides the result and q, k, v."""
    parts = [_forward(*part, left) for part in _parts(q, k, v)]
    results = [out for out, *_ in parts]
    return results[0] if len(parts) == 1 else torch.cat(results), tuple(t for _, *more in parts for t in more)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, left: int, out: Tensor, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v. grad is the gradient of `out`, and `out` and `kept` are the results of
    `forward`."""
    parts = list(_parts(q, k, v, grad, out))
    each = len(kept) // len(parts)
    found = [_backward(*part, kept[each * i : each * (i + 1)], left) for i, part in enumerate(parts)]
    return tuple(found[0]) if len(found) == 1 else tuple(torch.cat(of_parts) for of_parts in zip(*found))


def flash_attn_with_kvcache(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, filled: Tensor, position: int, left: int = -1
) -> Tensor:
    """
    Computes attention of T new tokens to themselves and to the cached tokens, and writes k and v into the caches. There
    is no gradient.

    Args:
        q: `(B, T, H, D)`
        k, v: `(B, T, H_kv, D)`
        k_cache, v_cache: `(B, T_max, H_kv, D)` in q's dtype, which are changed in place
        filled: `(B,)` int32, the number of filled positions, which is the same for all rows
        position: the same number as an int, because reading it from a GPU would stall

    Returns `(B, T, H, D)`. Raises ValueError for a cache of another dtype, and for a full cache.
    """
    if k_cache.dtype != q.dtype:
        raise ValueError(
            f"the KV cache is {k_cache.dtype} but the model computes in {q.dtype}; make it KVCache(dtype=)"
        )
    end = position + q.size(1)
    if end > k_cache.size(1):
        raise ValueError(f"the KV cache holds {k_cache.size(1)} positions and {end} are needed; make it longer")
    if chosen_backend(q, left) == "fa3":
        return fa3_module.flash_attn_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=filled, causal=True, window_size=(left, 0)
        )
    k_cache[:, position:end] = k
    v_cache[:, position:end] = v
    return sdpa_attention(q, k_cache[:, :end], v_cache[:, :end], left)


def attend(
    q: Tensor, k: Tensor, v: Tensor, kv_cache: Any, layer_idx: int, left: int = -1, compiled: bool = False
) -> Tensor:
    """
    Computes a layer's attention by flash_attn_func, or by flash_attn_with_kvcache if there is a kv_cache
    (engine.KVCache).

    q is `(B, T, H, D)`, and k and v are `(B, T, H_kv, D)`. Returns `(B, T, H * D)`. The last layer advances the cache
    by T positions.
    """
    if kv_cache is None:
        return flash_attn_func(q, k, v, left, compiled).flatten(2)
    caches = kv_cache.get_layer_cache(layer_idx)
    y = flash_attn_with_kvcache(q, k, v, *caches, kv_cache.cache_seqlens, kv_cache.get_pos(), left)
    if layer_idx == kv_cache.n_layers - 1:
        kv_cache.advance(q.size(1))
    return y.flatten(2)
