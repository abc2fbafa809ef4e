"""The cached engine says what the uncached model says, calls the calculator, and always ends."""

from types import SimpleNamespace

import pytest
import torch
from _samples import byte_tokenizer

import nanochat_fp4 as nf
from nanochat_fp4.data.tokenizer import without_end
from nanochat_fp4.generation.chat import AnswerText, prepare
from nanochat_fp4.generation.engine import Engine, KVCache, sample_next_token
from nanochat_fp4.models.gpt import GPT, GPTConfig, autocast

TOKENIZER = byte_tokenizer()
BOS, ASSISTANT_END = (TOKENIZER.encode_special(f"<|{name}|>") for name in ("bos", "assistant_end"))


def make_engine(**changes):
    config = dict(sequence_len=32, vocab_size=262, n_layer=4, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SSSL")
    model = GPT(GPTConfig(**{**config, **changes}))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
        model.lm_head.weight[ASSISTANT_END] = 0  # hardly ever the most likely: rows run to the end
        model.lm_head.weight[BOS] = 0
    return Engine(model, TOKENIZER)


class ScriptedModel:
    """Says what it is told: after the prompt, row i's next tokens are script[i], then <|assistant_end|> forever."""

    def __init__(self, *script):
        self.script, self.calls = script, 0
        self.config = SimpleNamespace(n_head=1, n_kv_head=1, n_embd=2, n_layer=1, sequence_len=64)

    def get_device(self):
        return "cpu"

    def __call__(self, ids, kv_cache):
        kv_cache.advance(ids.size(1))
        logits = torch.zeros(ids.size(0), ids.size(1), 265)
        for row in range(ids.size(0)):
            says = self.script[row if ids.size(0) > 1 else 0]
            logits[row, -1, says[self.calls] if self.calls < len(says) else ASSISTANT_END] = 50.0
        self.calls += 1
        return logits


def say(text):
    """Ids of text with [x] for special tokens: 'a[python_start]1+1[python_end]'."""
    out = []
    for part in text.replace("[", "]<").split("]"):
        out += [TOKENIZER.encode_special(f"<|{part[1:]}|>")] if part.startswith("<") else list(part.encode())
    return out


# ----------------------------------------------------------------------------------------------------------------------
# The same as without a cache


@torch.inference_mode()
def uncached(model, prompt, max_tokens, temperature, seed=42):
    """The new tokens, each from a forward pass over all tokens before it."""
    ids, rng = torch.tensor([prompt]), torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        logits = model(ids)[:, -1]
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)
        else:
            token = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, token), 1)
    return ids[0, len(prompt) :].tolist()


# Short windows are 16, and decoding crosses them.
@pytest.mark.parametrize("prompt_len, kv_heads, temperature", [(1, 4, 0.0), (20, 2, 0.0), (3, 2, 0.8)])
def test_one_row_is_the_uncached_models(prompt_len, kv_heads, temperature):
    engine = make_engine(n_kv_head=kv_heads)
    prompt = torch.randint(0, 256, (prompt_len,)).tolist()
    expected = uncached(engine.model, prompt, max_tokens=24, temperature=temperature, seed=7)
    columns = list(engine.generate(prompt, max_tokens=24, temperature=temperature, seed=7))
    assert [column[0] for column, _ in columns] == expected
    assert all(masks == [1] for _, masks in columns)
    assert len(set(expected)) > 5  # not a model that says one thing


def test_a_row_does_not_depend_on_the_other_rows():
    engine = make_engine()
    kwargs = dict(max_tokens=6, temperature=1.0, seed=3)
    eight, _ = engine.generate_batch([9, 8], num_samples=8, **kwargs)
    three, _ = engine.generate_batch([9, 8], num_samples=3, **kwargs)
    assert eight[:3] == three
    assert len({tuple(row) for row in eight}) == 8
    assert engine.generate_batch([9, 8], num_samples=3, **{**kwargs, "seed": 99})[0] != three


def test_sample_i_of_any_prompt_has_the_seed_plus_i():
    """So a sample can be drawn again alone, and the number of prompts beside it changes nothing."""
    engine, prompts = make_engine(), [[9, 8], [7, 6]]
    many = engine.generate_many(prompts, num_samples=3, max_tokens=6, temperature=1.0, seed=3)
    for prompt, samples in zip(prompts, many):
        alone = [engine.generate_batch(prompt, max_tokens=6, temperature=1.0, seed=3 + i)[0][0] for i in range(3)]
        assert samples == alone


def test_cached_logits_of_any_split_are_the_uncached_ones():
    model = make_engine().model
    ids = torch.randint(0, 256, (2, 30))
    expected = model(ids)
    cache = KVCache(2, 2, 30, 16, 4, "cpu", dtype=torch.float32)
    with torch.no_grad():
        parts = [model(part, kv_cache=cache) for part in ids.split([11, 1, 1, 7, 10], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    assert cache.get_pos() == 30 and cache.cache_seqlens.tolist() == [30, 30]


def test_in_nvfp4_too_with_a_scale_per_token():
    engine = make_engine(n_head=2, n_kv_head=2, n_embd=128, n_layer=1)
    nf.convert(engine.model, "clover", verbose=False)
    prompt = torch.randint(0, 256, (20,)).tolist()
    with nf.per_token_scale(engine.model):
        expected = uncached(engine.model, prompt, max_tokens=8, temperature=0.0)
        assert [c[0] for c, _ in engine.generate(prompt, max_tokens=8, temperature=0.0)] == expected
        kwargs = dict(max_tokens=5, temperature=1.0, seed=3)
        four, _ = engine.generate_batch(prompt, num_samples=4, **kwargs)
        assert engine.generate_batch(prompt, num_samples=2, **kwargs)[0] == four[:2]
    with nf.full_precision(engine.model):  # and it was quantized: the unquantized model says something else
        assert uncached(engine.model, prompt, max_tokens=8, temperature=0.0) != expected


@pytest.mark.parametrize("quantized", [True, False])
def test_prepared_weights_take_less_memory_and_say_the_same(quantized):
    """Autocast would round a plain layer's weight for each token. Codes are those of the trained weights."""
    engine = make_engine(n_head=2, n_kv_head=2, n_embd=128, n_layer=1)
    model = nf.convert(engine.model, "clover", verbose=False)
    forward = nf.quantize_weights_once(model) if quantized else nf.full_precision(model)
    kwargs = dict(max_tokens=6, temperature=1.0, seed=3)
    with forward, nf.per_token_scale(model), autocast("cpu", torch.bfloat16):
        expected, _ = engine.generate_batch([1, 2, 3], **kwargs)
        prepare(model, torch.bfloat16)
        assert engine.generate_batch([1, 2, 3], **kwargs)[0] == expected
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.transformer.h[0].mlp.c_fc.weight.dtype == (torch.float32 if quantized else torch.bfloat16)


def test_bf16_models_get_a_bf16_cache():
    engine = make_engine()
    with autocast("cpu", torch.bfloat16):
        assert engine.new_cache(1, 4).k_cache.dtype == torch.bfloat16
        results, _ = engine.generate_batch([1, 2], max_tokens=5, temperature=0.0)
    assert len(results[0]) == 7
    assert engine.new_cache(1, 4).k_cache.dtype == torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# The tool


def run(*script, num_samples=1, **kwargs):
    model = ScriptedModel(*[say(s) for s in script])
    return Engine(model, TOKENIZER).generate_batch([BOS], num_samples, temperature=0.0, **kwargs), model


@pytest.mark.parametrize(
    "script, text",
    [  # While the result is put in, what the model says is not heard: x stands for that.
        ("a[python_start]12*3[python_end]xxxxb", "a[python_start]12*3[python_end][output_start]36[output_end]b"),
        ("[python_start]9[python_start]'aab'.count('a')[python_end]xxxb",
         "[python_start]9[python_start]'aab'.count('a')[python_end][output_start]2[output_end]b"),
        ("12*3[python_end]b", "12*3[python_end]b"),  # an end without a start
        *((f"[python_start]{call}[python_end]b",) * 2 for call in ("1/0", "import os", "", "9**9**9")),
        ("ab[assistant_end]cd", "ab"),
        ("ab[bos]cd", "ab"),
        ("x" * 1000, "x" * 63),  # to the model's 64 positions
    ],
)  # fmt: skip
def test_calls_of_the_calculator_and_ends(script, text):
    (results, masks), model = run(script)
    assert without_end(results[0][1:], TOKENIZER) == say(text)
    ended = len(text) != 63  # the end that the model chose is the answer's; nothing stands for an end that it did not
    assert results[0][1 + len(say(text)) :] == ended * [BOS if "[bos]" in script else ASSISTANT_END]
    assert masks[0][-1] == 1 and len(masks[0]) == len(results[0])
    put_in = say(text.partition("[python_end]")[2].partition("[output_end]")[0] + "[output_end]")
    assert masks[0].count(0) == 1 + (len(put_in) if "[output_end]" in text else 0)
    assert model.calls <= len(text) + 1  # nothing is computed after the end


def test_many_prompts_call_side_by_side():
    """While a longer prompt is read, what the model says is not heard: y stands for that."""
    model = ScriptedModel(say("a[python_start]2+2[python_end]xxxe"), say("yyahi"))
    got = Engine(model, TOKENIZER).generate_many([[BOS], [BOS, *b"pq"]], temperature=0.0, max_tokens=20)
    called = say("a[python_start]2+2[python_end][output_start]4[output_end]e")
    assert got == [[[BOS, *called, ASSISTANT_END]], [[BOS, *b"pqahi", ASSISTANT_END]]]


@pytest.mark.parametrize(
    "tokens, pieces",
    [
        ("a[python_start]12*3[python_end][output_start]36[output_end]b", "a|[|1|2|*|3|| = |3|6|]|b|"),
        ("[python_start]1/0[python_end]b", "[|1|/|0||]b|"),
        ("[python_start]1/0[python_end]", "[|1|/|0||]"),
        ("\N{SNOWMAN}!\N{SNOWMAN}", "||\N{SNOWMAN}|!|||\N{SNOWMAN}|"),
        ("a[user_end][assistant_start]b", "a|||b|"),  # said in the wrong place
        ("[python_start]1[python_end][user_start]b", "[|1||]|b|"),
        ("a<|python_end|>ab", "a|<|||p|y|t|h|o|n|_|e|n|d|||>|a|b|"),  # ordinary tokens, no call's end
    ],
)
def test_an_answer_is_text_with_readable_calls(tokens, pieces):
    text = AnswerText(TOKENIZER)
    assert "|".join([*map(text.add, say(tokens)), text.rest()]) == pieces


def test_rows_call_and_end_on_their_own():
    # The first token comes from the prompt, which the rows share.
    (results, masks), _ = run("a[python_start]2+2[python_end]xxxe", "ahi", num_samples=2)
    assert results[0][1:] == say("a[python_start]2+2[python_end][output_start]4[output_end]e[assistant_end]")
    assert results[1][1:] == say("ahi[assistant_end]")
    assert masks[1] == [0, 1, 1, 1, 1]


# ----------------------------------------------------------------------------------------------------------------------
# Sampling, cache, bad input


def test_top_k_and_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(400, -1)
    rngs = [torch.Generator().manual_seed(i) for i in range(400)]
    assert set(sample_next_token(logits, rngs, 0.0).flatten().tolist()) == {3}
    assert set(sample_next_token(logits, rngs, 5.0, top_k=2).flatten().tolist()) == {2, 3}
    assert set(sample_next_token(logits, rngs, 5.0, top_k=100).flatten().tolist()) == {0, 1, 2, 3}
    assert set(sample_next_token(logits, rngs, 0.01).flatten().tolist()) == {3}
    counts = sample_next_token(logits, rngs, 1.0).flatten().bincount(minlength=4) / 400
    expected = torch.softmax(logits[0], 0)
    assert (counts - expected).abs().max() < 0.1  # 4 standard deviations of 400 draws


def test_prefill_copies_one_row_to_all():
    one, many = KVCache(1, 2, 5, 4, 3, "cpu"), KVCache(3, 2, 9, 4, 3, "cpu")
    one.k_cache.normal_()
    one.advance(5)
    many.prefill(one)
    assert many.get_pos() == 5 and many.cache_seqlens.tolist() == [5, 5, 5]
    assert torch.equal(many.k_cache[:, 2, :5], one.k_cache[:, 0]) and not many.k_cache[:, :, 5:].any()


def test_as_many_tokens_as_are_asked_for():
    assert make_engine().generate_batch([1, 2], max_tokens=0)[0] == [[1, 2]]
    (results, _), model = run("x" * 1000, max_tokens=9)
    assert results[0][1:] == say("x" * 9) and model.calls == 9
