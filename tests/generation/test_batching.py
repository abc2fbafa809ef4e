"""Answers made side by side are what each would have been alone."""

import threading

import pytest
import torch

from nanochat_fp4.generation.batching import Batcher, Busy, Request
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, GPTConfig

BOS, END = 256, 261
SPECIAL = ["bos", "python_start", "python_end", "output_start", "output_end", "assistant_end"]


class Tokenizer:
    """Ids 0-255 are bytes, then the special tokens."""

    def encode_special(self, text):
        return BOS + SPECIAL.index(text[2:-2])

    def get_bos_token_id(self):
        return BOS

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("latin-1")


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(1)
    config = dict(sequence_len=32, vocab_size=262, n_layer=4, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SSSL")
    model = GPT(GPTConfig(**config))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
        model.lm_head.weight[BOS:] = 0  # hardly ever the most likely: rows run to their length
    return Engine(model.float(), Tokenizer())


@pytest.fixture
def batcher(engine):
    made = []

    def make(**kw):
        made.append(Batcher(engine, **kw))
        return made[-1]

    yield make
    for b in made:
        b.close()


def alone(engine, request):
    generated = engine.generate(
        request.tokens, max_tokens=request.max_tokens, temperature=request.temperature, top_k=request.top_k,
        seed=request.seed,
    )  # fmt: skip
    return engine.tokenizer.decode([column[0] for column, _ in generated])


# FP32 on a CPU: another position in the cache moves logits by some 1e-6, which no choice here hangs on.
REQUESTS = [
    Request(list(b"a short one"), 12, temperature=0.0),
    Request(list(b"b"), 20, temperature=1.0, top_k=20, seed=3),
    Request(list(b"a rather long prompt, 30 of 32"), 2, temperature=0.0),
    Request(list(b"c" * 9), 5, temperature=0.7, seed=9),
    Request(list(b"what joins when others have left"[:16]), 16, temperature=0.0),
]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_each_answer_is_the_one_it_would_be_alone(engine, batcher, rows):
    b = batcher(rows=rows)
    replies = [b.submit(r) for r in REQUESTS]
    texts = ["".join(r) for r in replies]
    assert texts == [alone(engine, r) for r in REQUESTS]
    assert [r.num_tokens for r in replies] == [r.max_tokens for r in REQUESTS]
    assert all(r.finish == "length" for r in replies) and b.load == (0, 0)


def test_a_full_cache_drains_and_begins_again(engine, batcher):
    b = batcher(rows=2, capacity=50)  # from 32 on: the second answer of 16 has no room behind the first
    texts = ["".join(r) for r in [b.submit(REQUESTS[4]) for _ in range(4)]]
    assert texts == [alone(engine, REQUESTS[4])] * 4


def test_a_cancelled_answer_ends_and_leaves_its_row(engine, batcher):
    entered = threading.Event()
    gate = threading.Event()

    class Held:
        """A context that lets the batch begin only when the test has cancelled."""

        def __enter__(self):
            entered.set()
            assert gate.wait(60)

        def __exit__(self, *_):
            pass

    b = batcher(rows=1, contexts={"": Held})
    first, second = b.submit(REQUESTS[1]), b.submit(REQUESTS[0])
    assert entered.wait(60)
    first.cancel()
    gate.set()
    assert "".join(second) == alone(engine, REQUESTS[0])
    assert "".join(first) == "" and first.finish == "cancelled"


def test_both_precisions_take_turns(engine, batcher):
    inside = []

    class Named:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            inside.append(self.name)

        def __exit__(self, *_):
            pass

    b = batcher(rows=4, contexts={name: lambda name=name: Named(name) for name in ("nvfp4", "bf16")})
    asked = [Request(list(b"abc"), 3, precision=p) for p in ("nvfp4", "bf16", "nvfp4")]
    for reply in [b.submit(r) for r in asked]:
        assert len("".join(reply)) == 3
    assert inside == ["nvfp4", "bf16", "nvfp4"]


def test_what_does_not_fit_is_refused_in_words(batcher):
    b = batcher(rows=1, waiting=0)
    with pytest.raises(ValueError, match="do not fit into the model's context of 32; shorten"):
        b.submit(Request(list(b"x" * 30), 3))
    with pytest.raises(ValueError, match="needs a prompt"):
        b.submit(Request([], 3))
    with pytest.raises(ValueError, match="'fp8' is not to be had here"):
        b.submit(Request([1], 3, precision="fp8"))
    with pytest.raises(Busy, match="try again"):
        b.submit(Request([1], 3))


def test_an_answer_that_fails_says_so_and_the_next_one_comes(engine, batcher):
    b = batcher(rows=2)
    bad = b.submit(Request([10_000_000], 3))  # no such token
    assert "".join(bad) == "" and bad.finish.startswith("failed: IndexError")
    assert "".join(b.submit(REQUESTS[0])) == alone(engine, REQUESTS[0])


def test_closing_ends_everything(engine):
    b = Batcher(engine, rows=1)
    replies = [b.submit(REQUESTS[1]) for _ in range(3)]
    b.close()
    for reply in replies:
        list(reply)
    assert replies[-1].finish == "cancelled"
    with pytest.raises(Busy):
        b.submit(REQUESTS[0])
