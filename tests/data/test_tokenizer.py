"""Training, the file format and what tampering leads to, encoding, and conversations with their loss masks."""

import json
import os
import pickle
import threading
import time

import pytest
import tiktoken
import torch

from nanochat_fp4.cli import UserError
from nanochat_fp4.data import tokenizer as tokenizer_module
from nanochat_fp4.data.tokenizer import (
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    RustBPETokenizer,
    get_token_bytes,
    get_tokenizer,
    save_token_bytes,
)

TEXTS = [
    "The tokenizer reads the text, and the text becomes tokens: 1, 23, 456, 7890.",
    "It's what they've said; we'll see. naïve café, 你好世界, 🌍!",
    "def add(a, b):\n    return a + b\n\n\tx = add(1,  22)\r\n",
] * 20


@pytest.fixture(scope="module")
def tok():
    return RustBPETokenizer.train_from_iterator(iter(TEXTS), 320)


@pytest.fixture
def saved(tok, tmp_path):
    tok.save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer" / "tokenizer.json"


def load(path):
    return RustBPETokenizer.from_directory(path.parent)


# ----------------------------------------------------------------------------------------------------------------------
# Training


def test_vocabulary(tok):
    assert tok.get_vocab_size() == 320 and tok.get_special_tokens() == set(SPECIAL_TOKENS)
    assert [tok.encode_special(name) for name in SPECIAL_TOKENS] == list(range(311, 320))
    assert tok.get_bos_token_id() == 311
    assert tok.encode("the text") == tok("the text") and len(tok.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])


def test_training_is_deterministic(tok):
    assert RustBPETokenizer.train_from_iterator(iter(TEXTS), 320).fingerprint() == tok.fingerprint()
    assert RustBPETokenizer.train_from_iterator(iter(TEXTS), 321).fingerprint() != tok.fingerprint()
    small = RustBPETokenizer.train_from_iterator(iter(["aaaa"]), 400)  # too little text
    assert 265 <= small.get_vocab_size() < 270 and small.decode(small.encode("bab")) == "bab"
    with pytest.raises(ValueError, match="--vocab-size=264 .*265"):
        RustBPETokenizer.train_from_iterator(iter(TEXTS), 264)


def test_numbers_are_split_in_pairs(tok):
    """The one difference from GPT-4's pattern."""
    assert tok.enc._pat_str == SPLIT_PATTERN
    import regex

    assert regex.findall(SPLIT_PATTERN, "12345 it's a  b\n") == ["12", "34", "5", " it", "'s", " a", " ", " b", "\n"]


@pytest.mark.parametrize("text", ["", " ", "Hello\n\n world 12345", "\x00\x01é😀", "<|bos|> is text here", "a" * 5000])
def test_every_text_comes_back(tok, text):
    assert tok.decode(tok.encode(text)) == text
    assert not set(tok.encode(text)) & set(range(311, 320))


@pytest.mark.parametrize("character", [" ", "\u00a0", "\n"])
def test_a_million_characters_of_white_space(tok, character):
    """Half a million without a line's end abort tiktoken and rustbpe alike."""
    text = "before" + character * (1_000_000 // len(character)) + "after"
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.encode([TEXTS[0], text, TEXTS[1]]) == [tok.encode(TEXTS[0]), ids, tok.encode(TEXTS[1])]
    assert RustBPETokenizer.train_from_iterator(iter([text]), 266).get_vocab_size() == 266
    shorter = text[: len("before") + 90_000] + "after"  # nothing is cut that need not be
    assert tok.encode(shorter) == tok.enc.encode_ordinary(shorter)


def test_runs_of_white_space_that_are_not_cut_take_no_time(tok):
    text = (" " * 99_999 + "x") * 2
    started = time.perf_counter()
    assert tok.decode(tok.encode(text)) == text
    assert time.perf_counter() - started < 5  # 0.1 s; 27 s where each place of a run is tried


def test_encoding_of_batches(tok):
    texts = TEXTS[:7]
    rows = [tok.encode(t) for t in texts]
    assert tok.encode(texts, num_threads=2) == rows
    assert tok.encode(texts, prepend="<|bos|>", append=5) == [[311, *row, 5] for row in rows]
    assert tok.encode(texts[0], prepend=7, append="<|user_end|>") == [7, *rows[0], 313]
    with pytest.raises(ValueError, match="not tuple"):
        tok.encode(("a",))
    with pytest.raises(ValueError, match="nope.*bos"):
        tok.encode("a", prepend="<|nope|>")


def test_token_bytes(tok, tmp_path, base_dir):
    lengths = tok.token_bytes()
    assert lengths.dtype == torch.int32 and lengths.shape == (320,)
    assert (lengths[311:] == 0).all() and (lengths[:311] > 0).all()
    ids = tok.encode("plain ASCII text")
    assert int(lengths[ids].sum()) == len("plain ASCII text")
    tok.save(base_dir / "tokenizer")
    assert torch.equal(get_token_bytes(), lengths)
    save_token_bytes(tok, tmp_path)
    assert torch.equal(torch.load(tmp_path / "token_bytes.pt", weights_only=True), lengths)


# ----------------------------------------------------------------------------------------------------------------------
# The file


def test_save_and_load(tok, saved, base_dir):
    with pytest.raises(UserError, match="python -m scripts.tok_train"):
        get_tokenizer()
    tok.save(base_dir / "tokenizer")
    assert get_tokenizer().fingerprint() == tok.fingerprint()
    again = load(saved)
    assert again.fingerprint() == tok.fingerprint() and len(tok.fingerprint()) == 16
    assert [again.encode(t) for t in TEXTS[:3]] == [tok.encode(t) for t in TEXTS[:3]]
    assert os.listdir(saved.parent) == ["tokenizer.json"]
    assert set(json.loads(saved.read_text())) >= {"format", "sha256", "pattern", "special_tokens", "tokens"}


def swap_two_tokens(data):
    data["tokens"][300], data["tokens"][301] = data["tokens"][301], data["tokens"][300]


@pytest.mark.parametrize(
    "change, text",
    [
        (swap_two_tokens, "checksum.*altered"),
        (lambda d: d.update(pattern="."), "checksum"),
        (lambda d: d.pop("tokens"), "KeyError"),
        (lambda d: d["tokens"].append("!!"), "not a tokenizer"),
        (lambda d: d.update(format="nanochat_fp4 tokenizer, version 9"), "version 9"),
        (lambda d: d.update(format=["x"] * 10**5), "has the format"),
        (None, "RecursionError"),
    ],
)
def test_a_tampered_file_is_refused(saved, change, text):
    data = json.loads(saved.read_text())
    change(data) if change else None
    saved.write_text(json.dumps(data) if change else "[" * 200_000)
    with pytest.raises(UserError, match=text) as e:
        load(saved)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500 and "tok_train" in str(e.value)


@pytest.mark.parametrize(
    "tokens, special, pattern, text",
    [
        ([], {"<|eos|>": 256}, SPLIT_PATTERN, "is not a special token"),  # no BOS
        # Patterns that are none, that lose text in silence, that abort tiktoken, or that never end.
        *(([], None, p, "another pattern") for p in ("(", "a", r"[^q]", r"\w+", "", "(?=a)", "x*", "(a+)+$", 3)),
    ],
)
def test_a_file_that_is_wrong_with_a_right_checksum(saved, tokens, special, pattern, text):
    import base64

    data = json.loads(saved.read_text())
    raw = [bytes([b]) for b in range(256)] + [t.encode() for t in tokens]
    special = special or {"<|bos|>": len(raw)}
    data.update(pattern=pattern, special_tokens=special, tokens=[base64.b64encode(t).decode() for t in raw])
    data["sha256"] = tokenizer_module.digest_of(pattern, raw, special)
    saved.write_text(json.dumps(data))
    with pytest.raises(UserError, match=text):
        load(saved)


def test_nanochats_earlier_pattern_is_read(saved, tok):
    data = json.loads(saved.read_text())
    data["pattern"] = data["pattern"].replace("{1,2}", "{1,3}")
    data["sha256"] = tokenizer_module.digest_of(data["pattern"], tok.token_bytes_by_rank(), data["special_tokens"])
    saved.write_text(json.dumps(data))
    text = "12345 " + TEXTS[0]
    assert load(saved).decode(load(saved).encode(text)) == text


# ----------------------------------------------------------------------------------------------------------------------
# nanochat's pickle


@pytest.fixture
def pickled(tok, base_dir):
    path = base_dir / "tokenizer" / "tokenizer.pkl"
    os.makedirs(path.parent)
    path.write_bytes(pickle.dumps(tok.enc))
    return path


def test_a_pickle_is_converted_if_asked(pickled, tok, capsys):
    with pytest.raises(UserError, match=f"NANOCHAT_BASE_DIR={pickled.parents[1]} python -m .* --allow-pickle$"):
        tokenizer_module.main([])
    tokenizer_module.main(["--allow-pickle"])
    assert tok.fingerprint() in capsys.readouterr().out
    assert get_tokenizer().fingerprint() == tok.fingerprint()
    assert torch.equal(get_token_bytes(), tok.token_bytes())


def test_a_pickle_that_is_not_there_is_not_converted(pickled):
    """A user may have forgotten NANOCHAT_BASE_DIR, and the default folder has a tokenizer of its own."""
    tokenizer_module.main(["--allow-pickle"])
    pickled.unlink()
    with pytest.raises(UserError, match="has no tokenizer.pkl to convert; .* NANOCHAT_BASE_DIR"):
        tokenizer_module.main(["--allow-pickle"])


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_with_a_program_in_it_is_refused_and_not_run(pickled, tmp_path, protocol):
    pickled.write_bytes(pickle.dumps(Evil(tmp_path / "was_here"), protocol=protocol))
    with pytest.raises(UserError, match="posix.system"):
        get_tokenizer(allow_pickle=True)
    assert not (tmp_path / "was_here").exists()


def test_a_pickle_with_a_pattern_of_a_stranger_is_refused(pickled):
    ranks = {bytes([b]): b for b in range(256)}
    enc = tiktoken.Encoding("x", pat_str=r"\w+", mergeable_ranks=ranks, special_tokens={"<|bos|>": 256})
    pickled.write_bytes(pickle.dumps(enc))
    with pytest.raises(UserError, match="another pattern"):
        get_tokenizer(allow_pickle=True)


# ----------------------------------------------------------------------------------------------------------------------
# tiktoken's own


def test_pretrained_has_a_deadline(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: answer.wait(60))
    with pytest.raises(UserError, match="gpt2 .*0.2 seconds"):
        RustBPETokenizer.from_pretrained("gpt2", deadline=0.2)
    answer.set()


def test_pretrained(monkeypatch, tok):
    with pytest.raises(UserError, match="no-such-encoding"):
        RustBPETokenizer.from_pretrained("no-such-encoding")
    ranks = {bytes([b]): b for b in range(256)}
    enc = tiktoken.Encoding("x", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: enc)
    assert RustBPETokenizer.from_pretrained("gpt2").get_bos_token_id() == 256


# ----------------------------------------------------------------------------------------------------------------------
# Conversations


def user(text):
    return {"role": "user", "content": text}


def assistant(content):
    return {"role": "assistant", "content": content}


def expected(tok, *parts):
    """[(text or special token, mask), ...] to ids and mask."""
    ids, mask = [], []
    for text, learn in parts:
        tokens = [tok.encode_special(text)] if text in SPECIAL_TOKENS else tok.encode(text)
        ids += tokens
        mask += [learn] * len(tokens)
    return ids, mask


def test_render_conversation(tok):
    conversation = {"messages": [user("Hi there"), assistant("Hello."), user("2+2?"), assistant("4")]}
    assert tok.render_conversation(conversation) == expected(
        tok,
        ("<|bos|>", 0),
        ("<|user_start|>", 0), ("Hi there", 0), ("<|user_end|>", 0),
        ("<|assistant_start|>", 0), ("Hello.", 1), ("<|assistant_end|>", 1),
        ("<|user_start|>", 0), ("2+2?", 0), ("<|user_end|>", 0),
        ("<|assistant_start|>", 0), ("4", 1), ("<|assistant_end|>", 1),
    )  # fmt: skip


def test_tool_calls_are_learned_and_their_output_is_not(tok):
    parts = [
        {"type": "text", "text": "Let me see: "},
        {"type": "python", "text": "12*3"},
        {"type": "python_output", "text": "36"},
        {"type": "text", "text": "36."},
    ]
    assert tok.render_conversation({"messages": [user("12*3?"), assistant(parts)]}) == expected(
        tok,
        ("<|bos|>", 0), ("<|user_start|>", 0), ("12*3?", 0), ("<|user_end|>", 0), ("<|assistant_start|>", 0),
        ("Let me see: ", 1),
        ("<|python_start|>", 1), ("12*3", 1), ("<|python_end|>", 1),
        ("<|output_start|>", 0), ("36", 0), ("<|output_end|>", 0),
        ("36.", 1), ("<|assistant_end|>", 1),
    )  # fmt: skip


def test_a_system_message_goes_into_the_first_user_message(tok):
    conversation = {"messages": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Yo")]}
    before = json.dumps(conversation)
    plain = {"messages": [user("Be brief.\n\nHi"), assistant("Yo")]}
    assert tok.render_conversation(conversation) == tok.render_conversation(plain)
    assert json.dumps(conversation) == before


def test_long_conversations_are_cut(tok):
    conversation = {"messages": [user("word " * 500), assistant("word " * 500)]}
    whole_ids, whole_mask = tok.render_conversation(conversation, max_tokens=10**6)
    for max_tokens in (1, 50, len(whole_ids) + 1):
        ids, mask = tok.render_conversation(conversation, max_tokens=max_tokens)
        assert ids == whole_ids[:max_tokens] and mask == whole_mask[:max_tokens]
    assert max(len(x) for x in tok.render_conversation({"messages": [user("a b " * 4000), assistant("")]})) == 2048


def test_render_for_completion(tok):
    conversation = {"messages": [user("Hi"), assistant("Yo")]}
    ids, _ = expected(
        tok, ("<|bos|>", 0), ("<|user_start|>", 0), ("Hi", 0), ("<|user_end|>", 0), ("<|assistant_start|>", 0)
    )
    assert tok.render_for_completion(conversation) == ids and len(conversation["messages"]) == 2
    assert tok.render_for_completion(conversation, max_tokens=2) == ids[:2] + [ids[-1]]
    with pytest.raises(ValueError, match="last message"):
        tok.render_for_completion({"messages": [user("Hi")]})


@pytest.mark.parametrize(
    "messages, text",
    [
        ([user("Hi")], "no message from the assistant"),
        (None, "at least one message"),
        ("Hi", "at least one message"),
        ([assistant("Hi")], "message 0 is from 'assistant'"),
        ([user("a"), assistant("b"), assistant("c")], "message 2 is from 'assistant'"),
        ([user("a"), {"role": "tool", "content": "x"}], "message 1 is from 'tool'"),
        ([{"role": "system", "content": "x"}, assistant("y")], "followed by a user"),
        ([{"role": "system", "content": 1}, user("a"), assistant("y")], "with a string"),
        ([user("a"), {"role": "system", "content": "x"}], "message 1 is from 'system'"),
        ([user(["a"]), assistant("b")], "message 0: .*string"),
        ([user("a"), assistant(3)], "message 1: .*string"),
        ([user("a"), assistant([{"type": "image", "text": "x"}])], "list of"),
        ([user("a"), assistant([{"type": "text"}])], "list of"),
        ([user("a"), assistant(["x"])], "list of"),
        ([user("a"), {"role": "assistant"}], "message 1 is not"),
        ([user("a"), "b"], "message 1 is not"),
    ],
)
def test_bad_conversations_in_one_line(tok, messages, text):
    with pytest.raises(ValueError, match=text) as e:
        tok.render_conversation({"messages": messages} if messages is not None else None)
    assert "\n" not in str(e.value)
