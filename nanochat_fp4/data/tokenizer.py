"""
The byte-pair tokenizer. rustbpe trains it and tiktoken runs it, with nanochat's special tokens and split pattern.

On disk the tokenizer is <base dir>/tokenizer/tokenizer.json, which is plain data with a checksum and cannot run code.
nanochat stores a pickle there (tokenizer.pkl), and loading a pickle can run a program of its author. A pickle is read
only with allow_pickle, and by an unpickler that accepts tiktoken's Encoding and nothing else.

    python -m nanochat_fp4.data.tokenizer --allow-pickle    convert nanochat's tokenizer.pkl to tokenizer.json, once
"""

import base64
import contextlib
import hashlib
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import tiktoken
import torch

from nanochat_fp4.cli import STAGE, ArgumentParser, UserError, one_line, run_main
from nanochat_fp4.common import base_dir_variable, get_base_dir, print0
from nanochat_fp4.data.sources import within
from nanochat_fp4.files import atomic_open, atomic_write
from nanochat_fp4.locks import locked

SPECIAL_TOKENS = [
    "<|bos|>",  # It begins every document.
    # The other special tokens occur only in conversations, from mid-training on.
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",  # The assistant calls the calculator between these two.
    "<|python_end|>",
    "<|output_start|>",  # The calculator answers between these two.
    "<|output_end|>",
]

# This is GPT-4's pattern with \p{N}{1,2} in place of \p{N}{1,3}. With a small vocabulary, fewer tokens are spent on
# numbers.
SPLIT_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)

# These are the patterns that a file may have: this one, and GPT-4's, which nanochat had before. tiktoken silently drops
# text that a pattern does not match, and aborts if a pattern matches the empty string. Other patterns are therefore not
# accepted.
KNOWN_PATTERNS = (SPLIT_PATTERN, SPLIT_PATTERN.replace(r"\p{N}{1,2}", r"\p{N}{1,3}"))

# The pattern steps back over trailing white space, one character at a time. About half a million characters exhaust the
# stack of both Rust libraries, which then abort the process.
MAX_WHITE_SPACE = 100_000
# The look-behind makes the search begin once in a run of white space, and not at each of its characters.
_LONG_WHITE_SPACE = re.compile(rf"(?<!\s)\s{{{MAX_WHITE_SPACE},}}")

Token = int | str | None  # An id, the name of a special token, or none.

FILE_NAME = "tokenizer.json"
PICKLE_NAME = "tokenizer.pkl"
FORMAT = "nanochat_fp4 tokenizer, version 1"


def digest_of(pattern: str, ranks: list[bytes], special_tokens: dict[str, int]) -> str:
    """Returns the SHA-256, in hex, of everything that decides which ids a text becomes."""
    digest = hashlib.sha256(json.dumps([pattern, sorted(special_tokens.items(), key=lambda kv: kv[1])]).encode())
    for token in ranks:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


def _in_parts(text: str) -> list[str]:
    """Cuts the text where more than MAX_WHITE_SPACE characters of white space follow one another."""
    runs = (match.span() for match in _LONG_WHITE_SPACE.finditer(text))
    cuts = [0, *(cut for a, b in runs for cut in range(a + MAX_WHITE_SPACE, b + 1, MAX_WHITE_SPACE)), len(text)]
    return [text[a:b] for a, b in zip(cuts, cuts[1:])]


def without_end(tokens: list[int], tokenizer: Any) -> list[int]:
    """Returns the tokens of an answer without the <|assistant_end|> or <|bos|> at its end. An answer that was cut
    off has none."""
    ends = (tokenizer.encode_special("<|assistant_end|>"), tokenizer.get_bos_token_id())
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


class EncodingUnpickler(pickle.Unpickler):
    """Reads a pickled tiktoken.Encoding, and refuses every other class or function that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a tokenizer has no use for")
        return tiktoken.Encoding


class RustBPETokenizer:
    """A tiktoken Encoding with nanochat's methods for special tokens, batches and conversations."""

    def __init__(self, enc: tiktoken.Encoding, bos_token: str):
        self.enc = enc
        self.bos_token_id = self.encode_special(bos_token)

    # ------------------------------------------------------------------------------------------------------------------
    # Making, saving, loading

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int) -> "RustBPETokenizer":
        """
        Learns `vocab_size` tokens from the texts, special tokens included. Too little text gives fewer tokens.

        Raises ValueError if vocab_size is too small for the 256 bytes and the special tokens.
        """
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise ValueError(f"--vocab-size={vocab_size} is too small: at least {smallest} are needed")
        import rustbpe  # Only training needs rustbpe.

        tokenizer = rustbpe.Tokenizer()
        texts = (part for text in text_iterator for part in _in_parts(text))
        tokenizer.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in tokenizer.get_mergeable_ranks()}
        return cls.from_parts(tokenizer.get_pattern(), ranks)

    @classmethod
    def from_parts(
        cls, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int] | None = None
    ) -> "RustBPETokenizer":
        """Makes a tokenizer from a split pattern and the rank of each token. By default the special tokens are
        nanochat's."""
        if special_tokens is None:
            special_tokens = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        enc = tiktoken.Encoding(name="rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)
        return cls(enc, "<|bos|>")

    @classmethod
    def from_directory(cls, tokenizer_dir: str | os.PathLike, allow_pickle: bool = False) -> "RustBPETokenizer":
        """
        Loads the tokenizer that save() wrote. Raises UserError if it is missing, cut short or altered.

        With allow_pickle, nanochat's tokenizer.pkl is read if there is no tokenizer.json. A pickle is a program, so use
        this only for a file that you made yourself.
        """
        path, pickle_path = Path(tokenizer_dir) / FILE_NAME, Path(tokenizer_dir) / PICKLE_NAME
        variable = base_dir_variable(Path(tokenizer_dir).parent)
        if not path.exists() and pickle_path.is_file():
            if not allow_pickle:
                problem = f"{tokenizer_dir} holds only nanochat's {PICKLE_NAME}, and loading a pickle can run code"
                convert = f"{variable}python -m nanochat_fp4.data.tokenizer --allow-pickle"
                raise UserError(f"{problem} that somebody put into it; convert it, if you made this file: {convert}")
            path = pickle_path
        if not path.is_file():
            remedy = f"put the one there that the model was trained with, or make one: {variable}{STAGE}tok_train"
            raise UserError(f"there is no tokenizer in {tokenizer_dir}; {remedy}")
        try:
            with path.open("rb") as f:
                return cls._of_pickle(f) if path == pickle_path else cls._of_json(json.load(f))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            # Damaged input raises nearly anything, and a panic of tiktoken's Rust code is not an Exception.
            problem = f"{path} is not a tokenizer ({type(e).__name__}: {one_line(e)[:150]})"
            raise UserError(f"{problem}; train it again ({variable}{STAGE}tok_train) or copy it again") from e

    @classmethod
    def _of_json(cls, data: dict[str, Any]) -> "RustBPETokenizer":
        if data["format"] != FORMAT:
            raise ValueError(f"it has the format {str(data['format'])[:60]!r}, not {FORMAT!r}")
        tokens, special = [base64.b64decode(token, validate=True) for token in data["tokens"]], data["special_tokens"]
        if data["sha256"] != digest_of(data["pattern"], tokens, special):
            raise ValueError("it differs from its own checksum, so it was altered or damaged")
        if data["pattern"] not in KNOWN_PATTERNS:
            raise ValueError("it splits text by another pattern than nanochat's, which may lose text")
        return cls.from_parts(data["pattern"], {token: rank for rank, token in enumerate(tokens)}, special)

    @classmethod
    def _of_pickle(cls, file: BinaryIO) -> "RustBPETokenizer":
        enc = EncodingUnpickler(file).load()
        if not isinstance(enc, tiktoken.Encoding) or enc._pat_str not in KNOWN_PATTERNS:
            raise pickle.UnpicklingError("it holds no tiktoken Encoding, or one with another pattern than nanochat's")
        return cls(enc, "<|bos|>")

    def save(self, tokenizer_dir: str | os.PathLike, asked_tokens: int | None = None) -> None:
        """Writes tokenizer.json into the folder, which is made if necessary. The file is written completely or not
        at all. `asked_tokens` is the number of tokens that was asked for, because a small text yields fewer."""
        os.makedirs(tokenizer_dir, exist_ok=True)
        tokens = self.token_bytes_by_rank()
        data = {
            "format": FORMAT,
            "sha256": digest_of(self.enc._pat_str, tokens, self.enc._special_tokens),
            "pattern": self.enc._pat_str,
            "special_tokens": self.enc._special_tokens,
            "asked_tokens": asked_tokens,
            # The rank of a token is its place in the list.
            "tokens": [base64.b64encode(token).decode("ascii") for token in tokens],
        }
        path = os.path.join(tokenizer_dir, FILE_NAME)
        atomic_write(path, json.dumps(data, indent=0) + "\n")
        print0(f"Saved tokenizer to {path}")

    def token_bytes_by_rank(self) -> list[bytes]:
        """Returns the bytes of all tokens but the special ones, in the order of their ranks."""
        ranks = self.enc._mergeable_ranks
        return sorted(ranks, key=ranks.__getitem__)

    def fingerprint(self) -> str:
        """Returns 16 hex digits that name this tokenizer. Two tokenizers have the same ones only if every text gets
        the same ids."""
        return digest_of(self.enc._pat_str, self.token_bytes_by_rank(), self.enc._special_tokens)[:16]

    @classmethod
    def from_pretrained(cls, tiktoken_name: str, deadline: float = 30.0) -> "RustBPETokenizer":
        """
        Returns a tokenizer that tiktoken publishes ("gpt2", "cl100k_base"), which is downloaded when it is first used.

        Its "<|endoftext|>" takes the place of "<|bos|>". Raises UserError if it is unknown or cannot be had within
        `deadline` seconds.
        """
        try:  # tiktoken's download has no time limit of its own.
            enc = within(deadline, lambda: tiktoken.get_encoding(tiktoken_name))
        except Exception as e:  # Several libraries raise errors of the network, and tiktoken for an unknown name.
            raise UserError(f"tokenizer {tiktoken_name} cannot be had ({one_line(e)[:100]}); check the network") from e
        return cls(enc, "<|endoftext|>")

    # ------------------------------------------------------------------------------------------------------------------
    # Vocabulary

    def get_vocab_size(self) -> int:
        """Returns the number of tokens, special tokens included."""
        return self.enc.n_vocab

    def get_special_tokens(self) -> set[str]:
        """Returns the names of the special tokens."""
        return self.enc.special_tokens_set

    def encode_special(self, text: str) -> int:
        """Returns the id of a special token. Raises ValueError for another text."""
        if text not in self.enc._special_tokens:
            known = ", ".join(self.enc._special_tokens)
            raise ValueError(f"{text!r} is not a special token; this tokenizer has {known}")
        return self.enc._special_tokens[text]

    def get_bos_token_id(self) -> int:
        """Returns the id of the token that begins every document."""
        return self.bos_token_id

    def token_bytes(self) -> torch.Tensor:
        """
        Returns how many bytes of text each id stands for, int32 (vocab_size,), and 0 for special tokens. Bits per byte
        need it.

        Each part of a token that is not UTF-8 by itself counts as the 3 bytes of the replacement character. nanochat
        counts in the same way, so results are comparable.
        """
        special = self.get_special_tokens()
        strings = [self.enc.decode([i]) for i in range(self.get_vocab_size())]
        return torch.tensor([0 if s in special else len(s.encode("utf-8")) for s in strings], dtype=torch.int32)

    # ------------------------------------------------------------------------------------------------------------------
    # Text to ids and back

    def encode(
        self, text: str | list[str], prepend: Token = None, append: Token = None, num_threads: int = 8
    ) -> list[int] | list[list[int]]:
        """
        Returns the ids of a text, or a list of ids for each text of a list, with `num_threads` threads.

        prepend and append are a token id or the name of a special token. Special tokens that are written inside of the
        text are treated as ordinary text. Raises ValueError for anything but a string or a list.
        """
        before, after = (
            [t] if isinstance(t, int) else [self.encode_special(t)] if t else [] for t in (prepend, append)
        )
        if isinstance(text, str):
            return before + [i for part in _in_parts(text) for i in self.enc.encode_ordinary(part)] + after
        if isinstance(text, list):
            parts = [_in_parts(t) for t in text]
            rows = iter(self.enc.encode_ordinary_batch([p for ps in parts for p in ps], num_threads=num_threads))
            return [before + [i for _ in ps for i in next(rows)] + after for ps in parts]
        raise ValueError(f"encode takes a string or a list of strings, not {type(text).__name__}")

    def __call__(self, *args: Any, **kwargs: Any) -> list[int] | list[list[int]]:
        return self.encode(*args, **kwargs)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids. Bytes that are not UTF-8 become replacement characters."""
        return self.enc.decode(ids)

    # ------------------------------------------------------------------------------------------------------------------
    # Conversations

    def render_conversation(self, conversation: dict, max_tokens: int = 2048) -> tuple[list[int], list[int]]:
        """
        Returns the ids and the loss mask of {"messages": [{"role", "content"}, ...]}, both cut to `max_tokens`.

        Roles alternate, the user is first, and at least one message is from the assistant. A system message may come
        before them, and is put in front of the first user message. Content is a string, or for the assistant a list of
        parts {"type": "text" | "python" | "python_output", "text"}. The mask is 1 where the model is to learn: on the
        assistant's words and its closing token, but not on the answers of Python. Raises ValueError for anything else.
        """
        return self._render(checked_messages(conversation, answered=True), max_tokens)

    def _render(self, messages: list[dict], max_tokens: int) -> tuple[list[int], list[int]]:
        parts = list(self._parts(messages))
        ids = [token for tokens, _ in parts for token in tokens]
        mask = [learn for tokens, learn in parts for _ in tokens]
        return ids[:max_tokens], mask[:max_tokens]

    def _parts(self, messages: list[dict]) -> Iterator[tuple[list[int], int]]:
        """Yields (tokens, 1 where the model is to learn them) of the parts of the messages."""

        def between(name: str, text: str) -> list[int]:
            return self.encode(text, prepend=f"<|{name}_start|>", append=f"<|{name}_end|>")

        yield [self.get_bos_token_id()], 0
        for message in messages:
            content = message["content"]
            if message["role"] == "user":
                yield between("user", content), 0
                continue
            yield [self.encode_special("<|assistant_start|>")], 0
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                name, text = part["type"].removeprefix("python_"), part["text"]
                yield self.encode(text) if name == "text" else between(name, text), int(name != "output")
            yield [self.encode_special("<|assistant_end|>")], 1

    def render_for_completion(self, conversation: dict, max_tokens: int = 2048) -> list[int]:
        """
        Returns the ids of the conversation without its last message, followed by the token that opens the assistant's
        answer. The last message must be from the assistant (ValueError).

        The ids are cut to `max_tokens` before the assistant's opening token is added, as nanochat does.
        """
        messages = checked_messages(conversation)
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message must be from the assistant; it is the one to be completed")
        ids, _ = self._render(messages[:-1], max_tokens)
        return [*ids, self.encode_special("<|assistant_start|>")]


PARTS = ("text", "python", "python_output")  # The types of the parts of an answer.


def checked_messages(conversation: Any, answered: bool = False) -> list[dict]:
    """
    Checks the messages and returns them, with a system message in front of the first user message. The argument is not
    changed. With `answered`, at least one message must be from the assistant. Raises ValueError.
    """
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('a conversation is {"messages": [...]} with at least one message')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise ValueError(f'message {i} is not of the form {{"role": ..., "content": ...}}')
    if messages[0]["role"] == "system":
        contents = [message["content"] for message in messages[:2]]
        if len(messages) < 2 or messages[1]["role"] != "user" or not all(isinstance(c, str) for c in contents):
            raise ValueError("a system message must be followed by a user message, both with a string")
        messages = [{**messages[1], "content": "\n\n".join(contents)}, *messages[2:]]
    for i, message in enumerate(messages):
        content, expected = message["content"], ("user", "assistant")[i % 2]
        if message["role"] != expected:
            raise ValueError(f"message {i} is from {str(message['role'])!r} and should be from the {expected}")
        parts = content if isinstance(content, list) and i % 2 else [{"type": "text", "text": content}]
        typed = (isinstance(p, dict) and p.get("type") in PARTS and isinstance(p.get("text"), str) for p in parts)
        if not all(typed):
            form = f'a string, or from the assistant a list of {{"type": one of {PARTS}, "text": "..."}}'
            raise ValueError(f"message {i}: content must be {form}")
    if answered and len(messages) < 2:
        raise ValueError("the conversation has no message from the assistant, so there is nothing to train on")
    return messages


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer of the base directory


def get_tokenizer_dir() -> str:
    """Returns the folder of the tokenizer in the base directory."""
    return os.path.join(get_base_dir(), "tokenizer")


def tokenizer_lock() -> contextlib.AbstractContextManager[None]:
    """Returns the lock to have while the tokenizer is replaced, or while a run checks that it is still the run's
    own."""
    return locked(Path(get_base_dir(), "tokenizer.lock"))


def get_tokenizer(allow_pickle: bool = False) -> RustBPETokenizer:
    """Returns the tokenizer in the base directory (see RustBPETokenizer.from_directory)."""
    return RustBPETokenizer.from_directory(get_tokenizer_dir(), allow_pickle=allow_pickle)


def get_token_bytes(device: str | torch.device = "cpu") -> torch.Tensor:
    """Returns token_bytes() of the tokenizer in the base directory, on `device`."""
    return get_tokenizer().token_bytes().to(device)


def save_token_bytes(tokenizer: RustBPETokenizer, tokenizer_dir: str | os.PathLike) -> torch.Tensor:
    """Writes token_bytes.pt beside the tokenizer, for nanochat's own scripts. Returns the tensor."""
    token_bytes = tokenizer.token_bytes()
    with atomic_open(os.path.join(tokenizer_dir, "token_bytes.pt")) as f:
        torch.save(token_bytes, f)
    return token_bytes


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Show the tokenizer and write token_bytes.pt, or convert nanochat's")
    text = "read nanochat's tokenizer.pkl. Loading a pickle can run code: only for a file that you made yourself"
    parser.add_argument("--allow-pickle", action="store_true", help=text)
    args = parser.parse_args(argv)
    tokenizer_dir = get_tokenizer_dir()
    if args.allow_pickle and not os.path.isfile(os.path.join(tokenizer_dir, PICKLE_NAME)):
        raise UserError(f"{tokenizer_dir} has no {PICKLE_NAME} to convert; copy it there, or set NANOCHAT_BASE_DIR")
    tokenizer = get_tokenizer(allow_pickle=args.allow_pickle)
    if not os.path.exists(os.path.join(tokenizer_dir, FILE_NAME)):
        tokenizer.save(tokenizer_dir)
    if not os.path.exists(os.path.join(tokenizer_dir, "token_bytes.pt")):  # That of nanochat's tokenizer stays.
        save_token_bytes(tokenizer, tokenizer_dir)
    print0(f"{tokenizer_dir}: {tokenizer.get_vocab_size():,} tokens, fingerprint {tokenizer.fingerprint()}")


if __name__ == "__main__":
    run_main(main)
