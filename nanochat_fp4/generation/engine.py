"""
Text generation with a key/value cache, and with the calculator that a chat model calls.

A call of the calculator lies between <|python_start|> and <|python_end|>. The engine works on token ids.

The tokens of a row do not depend on the other rows of the batch. Two things could make them depend on each other:

- Sampling. Each row therefore draws from a generator of its own, which is seeded by seed + row. Row i of num_samples=8
  is the same as row i of num_samples=16.
- NVFP4. Training quantizes an activation with one scale per tensor, made from the tensor's amax. In generation the amax
  of another row would change every row's codes, and a prompt read at once would differ from the same prompt read token
  by token. The caller therefore enters nvfp4's per_token_scale around generation with a quantized forward pass. One
  context covers prompt and answer, because both go through model(ids, kv_cache=...).

The order of floating-point sums may still depend on the number of rows.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_fp4.data.tokenizer import without_end
from nanochat_fp4.generation.calculator import use_calculator
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.nvfp4.contexts import per_token_scale, quantize_weights_once


class KVCache:
    """
    The keys and values of all layers, filled from the left.

    These are two tensors of shape (num_layers, batch_size, seq_len, num_heads, head_dim), in FlashAttention-3's layout.
    Attention writes into them in place. All rows are at the same position. dtype must be the dtype of the model's
    attention.
    """

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        seq_len: int,
        head_dim: int,
        num_layers: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.batch_size, self.max_seq_len, self.n_layers = batch_size, seq_len, num_layers
        self.n_heads, self.head_dim = num_heads, head_dim
        shape = (num_layers, batch_size, seq_len, num_heads, head_dim)
        self.k_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.v_cache = torch.zeros(shape, device=device, dtype=dtype)
        # The position is stored twice, on the device for FlashAttention and as a number. Reading it from the device
        # would stall.
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._position = 0

    def get_pos(self) -> int:
        """Returns the number of positions that are filled, which is the same in every row."""
        return self._position

    def get_layer_cache(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Returns views of one layer's keys and values, each (batch_size, seq_len, num_heads, head_dim)."""
        return self.k_cache[layer_idx], self.v_cache[layer_idx]

    def advance(self, num_tokens: int) -> None:
        """Counts num_tokens more positions as filled. The last layer of a forward pass calls this method."""
        self.cache_seqlens += num_tokens
        self._position += num_tokens

    def prefill(self, other: "KVCache") -> None:
        """Copies the cache of a prompt into this empty cache, which must be at least as long. `other` has one row,
        which is then repeated, or as many rows as this cache."""
        position = other.get_pos()
        self.k_cache[:, :, :position] = other.k_cache[:, :, :position]
        self.v_cache[:, :, :position] = other.v_cache[:, :, :position]
        self.advance(position)


def check_finite(values: Tensor, model: Any, what: str = "logits") -> Tensor:
    """
    Returns `values`, which `model` computed. Code that makes them into a choice or a result calls this first, because
    the argmax of NaN is token 0, and the first of four answers.

    Raises ValueError if any of them is NaN or infinite, and names the first weight of the model that is.
    """
    if not torch.isfinite(values).all():
        weights = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
        bad = next((name for name, weight in weights if not torch.isfinite(weight).all()), None)
        cause = f"the weight {bad} is not" if bad else "its weights are, so its activations have overflowed"
        raise ValueError(f"the model's {what} are not finite: {cause}; choose an earlier checkpoint with --step")
    return values


COLDEST = 1e-6  # Below this temperature, logits / temperature could overflow.


@torch.inference_mode()
def sample_next_token(
    logits: Tensor, rngs: list[torch.Generator], temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """
    Samples one token id for each row of logits (B, vocab_size). Returns the ids (B, 1). Row i draws from rngs[i].

    Temperature 0 takes the most likely token, the lowest id among equals, and draws nothing. top_k limits the choice to
    the top_k most likely tokens, and None or 0 is no limit. Raises ValueError for a negative temperature or top_k.
    """
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k {top_k} is negative; use 0 for all tokens")
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} is negative; use 0 for the most likely token, or a positive one")
    if temperature < COLDEST:
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    if top_k:
        logits, ids = torch.topk(logits, min(top_k, logits.size(-1)), dim=-1)
    probs = F.softmax(logits / temperature, dim=-1)
    choice = torch.stack([torch.multinomial(row, 1, generator=rng) for row, rng in zip(probs, rngs)])
    return choice if ids is None else ids.gather(1, choice)


@dataclass
class RowState:
    """The state of one row during generation. `forced` has the tokens of a tool's result, which replace the next
    sampled tokens. `call` has the tokens of a tool call that has begun."""

    forced: deque[int] = field(default_factory=deque)
    call: list[int] | None = None
    completed: bool = False


class Engine:
    """
    Generates text from `model` (gpt.GPT, or anything with its config, get_device and call) with a key/value cache.

    `tokenizer` needs encode_special, get_bos_token_id, encode and decode. On CUDA generate inside gpt.autocast("cuda").
    """

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        names = ("python_start", "python_end", "output_start", "output_end", "assistant_end")
        self.special = {name: tokenizer.encode_special(f"<|{name}|>") for name in names}
        self.terminal = {self.special["assistant_end"], tokenizer.get_bos_token_id()}

    def new_cache(self, batch_size: int, seq_len: int) -> KVCache:
        """Returns an empty cache in the dtype of the model's attention."""
        config, device = self.model.config, torch.device(self.model.get_device())
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        else:
            dtype = self.model.lm_head.weight.dtype if hasattr(self.model, "lm_head") else torch.float32
        head_dim = config.n_embd // config.n_head
        return KVCache(batch_size, config.n_kv_head, seq_len, head_dim, config.n_layer, device, dtype)

    def generate(
        self,
        tokens: list[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """
        Continues the prompt `tokens` in num_samples independent rows. Yields (token of each row, mask of each row).

        A mask is 1 for a token that the model chose, and 0 for a token of a calculator's result. Generation ends after
        max_tokens tokens, or when every row has produced <|assistant_end|> or <|bos|>. The end token of a row is
        yielded, and yielded again until the other rows end. max_tokens=None generates up to the model's sequence
        length. Raises ValueError for an empty prompt, for fewer than one sample, for more positions than the model has,
        and for logits that are not finite.
        """
        column, masks = [0] * num_samples, [1] * num_samples
        for new_tokens in self._steps([tokens], num_samples, max_tokens, temperature, top_k, seed):
            for i, (token, mask) in new_tokens.items():
                column[i], masks[i] = token, mask
            yield list(column), list(masks)

    @torch.inference_mode()
    def _steps(
        self,
        prompts: list[list[int]],
        num_samples: int,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[dict[int, tuple[int, int]]]:
        """Yields for each position {row: (its new token, its mask)}, for the rows that go on. Each prompt has
        num_samples rows."""
        if not prompts or not all(prompts):
            raise ValueError("there is no prompt, or the prompt is empty; give at least one token (usually <|bos|>)")
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; ask for at least 1")
        # Without max_tokens a text ends with the model's sequence length. The rotary tables go on beyond it.
        config, device = self.model.config, torch.device(self.model.get_device())
        limit = config.sequence_len if max_tokens is None else getattr(self.model, "rotary_seq_len", math.inf)
        longest = max(map(len, prompts)) + (1 if max_tokens is None else max_tokens)
        if longest > limit:
            raise ValueError(f"a prompt and its answer take {longest} tokens, the model has {limit}; shorten them")
        shortest, single = min(map(len, prompts)), len(prompts) == 1
        prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        ends = [limit if max_tokens is None else len(prompt) + max_tokens for prompt in prompts]
        rngs = [torch.Generator(device=device).manual_seed(seed + row % num_samples) for row in range(len(prompts))]
        rows = [RowState() for _ in prompts]

        # A single prompt is read once. Its keys and values are then copied to all rows.
        cache = self.new_cache(1, shortest) if single else self.new_cache(len(rows), max(ends))
        ids = torch.tensor([p[:shortest] for p in prompts[: cache.batch_size]], dtype=torch.long, device=device)
        logits = self.model(ids, kv_cache=cache)[:, -1].expand(len(rows), -1)
        if single:
            prompt_cache, cache = cache, self.new_cache(len(rows), max(ends))
            cache.prefill(prompt_cache)
            del prompt_cache
        column = [prompt[-1] for prompt in prompts]
        for position in range(shortest, max(ends)):
            # A row draws from its generator for its own tokens only, so the lengths of the other prompts do not matter.
            active = [i for i, row in enumerate(rows) if not row.completed and len(prompts[i]) <= position < ends[i]]
            if active:
                chosen = check_finite(logits if len(active) == len(rows) else logits[active], self.model)
                sampled = sample_next_token(chosen, [rngs[i] for i in active], temperature, top_k)[:, 0].tolist()
                new_tokens = {}
                for i, token in zip(active, sampled):
                    new_tokens[i] = (rows[i].forced.popleft(), 0) if rows[i].forced else (token, 1)
                    column[i] = new_tokens[i][0]
                    self.follow(rows[i], column[i])
                yield new_tokens
            if all(row.completed or position + 1 >= end for row, end in zip(rows, ends)):
                return
            # A row that has ended repeats its last token, and its logits are not used.
            column = [p[position] if position < len(p) else token for p, token in zip(prompts, column)]
            ids = torch.tensor(column, dtype=torch.long, device=device).unsqueeze(1)
            logits = self.model(ids, kv_cache=cache)[:, -1]

    def follow(self, row: RowState, token: int) -> None:
        """Updates the state of a row by its next token. If the token ends a tool call, the result is put into
        `forced`."""
        if row.completed or token in self.terminal:
            row.completed = True
        elif token == self.special["python_start"]:
            row.call = []
        elif row.call is not None and token != self.special["python_end"]:
            row.call.append(token)
        elif row.call is not None:
            result = use_calculator(self.tokenizer.decode(row.call)) if row.call else None
            row.call = None
            if result is not None:
                output = self.tokenizer.encode(str(result))
                row.forced.extend([self.special["output_start"], *output, self.special["output_end"]])

    def generate_batch(
        self, tokens: list[int], num_samples: int = 1, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """
        Calls `generate` with these arguments. Returns (token sequences, masks), one of each for every sample.

        A sequence starts with the prompt (mask 0). The <|assistant_end|> or <|bos|> that the model chose is its last
        token (mask 1). A sequence that was cut off at max_tokens has no such end (see tokenizer.without_end).
        """
        results = [list(tokens) for _ in range(num_samples)]
        masks = [[0] * len(tokens) for _ in range(num_samples)]
        for new_tokens in self._steps([tokens], num_samples, **kwargs):
            for i, (token, mask) in new_tokens.items():
                results[i].append(token)
                masks[i].append(mask)
        return results, masks

    def generate_many(self, prompts: list[list[int]], num_samples: int = 1, **kwargs: Any) -> list[list[list[int]]]:
        """
        Generates from several prompts side by side, with the arguments of generate_batch. Returns num_samples sequences
        for each prompt.

        All rows stay at the same position. The first tokens, up to the length of the shortest prompt, are read at once.
        From there on a row with a longer prompt takes its next token from the prompt instead of sampling, so prompts of
        similar length waste the least time. max_tokens counts from the end of each prompt. Raises the errors of
        generate.
        """
        sequences = [list(prompt) for prompt in prompts for _ in range(num_samples)]
        for new_tokens in self._steps(prompts, num_samples, **kwargs):
            for i, (token, _) in new_tokens.items():
                sequences[i].append(token)
        return [sequences[i : i + num_samples] for i in range(0, len(sequences), num_samples)]


# ----------------------------------------------------------------------------------------------------------------------
# Samples

PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)


def draw_samples(
    model: torch.nn.Module, tokenizer: Any, prompts: Sequence[str] = PROMPTS, max_tokens: int = 16
) -> list[str]:
    """Returns each prompt with its greedy continuation, in the present precision of the model."""
    engine = Engine(model, tokenizer)
    device = model.get_device()
    samples = []
    with autocast(device.type), per_token_scale(model), quantize_weights_once(model):
        for prompt in prompts:
            tokens = tokenizer(prompt, prepend="<|bos|>")
            rows, _ = engine.generate_batch(tokens, num_samples=1, max_tokens=max_tokens, temperature=0)
            # The <|bos|> at the beginning is left out as well.
            samples.append(tokenizer.decode(without_end(rows[0][1:], tokenizer)))
    return samples
