"""
Several conversations answered at once: one batch whose rows begin and end on their own (continuous batching).

    batcher = Batcher(Engine(model, tokenizer), rows=8)
    reply = batcher.submit(Request(tokens, max_tokens=100))
    for text in reply: ...                               # or reply.cancel()

All rows of engine.KVCache are at the same position. A conversation that joins is put so that its prompt ends where the
others are: rotary embeddings know distances only, and attention does not see what lies before a row's beginning. A
prompt that is longer than that place, an answer that would run past the cache's end, and a request for the other
precision wait until the batch is empty; then it starts again at the beginning.

One thread computes. What a row says depends on its request alone, up to the order of floating-point sums: it draws from
a generator of its own, and quantized activations are scaled token by token (nvfp4's per_token_scale).
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from nanochat_fp4.errors import one_line
from nanochat_fp4.generation.engine import Engine, RowState, sample_next_token


class Busy(Exception):
    """As many requests as may wait are waiting."""


@dataclass(frozen=True)
class Request:
    """tokens: the prompt, ids; max_tokens: at most so many follow it; precision: a name of Batcher's contexts."""

    tokens: list[int]
    max_tokens: int
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 42
    precision: str = ""


class Reply:
    """The answer to a Request while it is made: iterating gives its text piece by piece, from any thread.

    finish: why it ended: "end" (the model's own), "length", "cancelled", or what went wrong. num_tokens: of the answer.
    """

    def __init__(self, request: Request):
        self.request = request
        self.finish = ""
        self.num_tokens = 0
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._listener: Callable[[], None] | None = None

    def cancel(self) -> None:
        """No more of it: its row is free after the next token."""
        self._cancelled.set()

    def on_piece(self, listener: Callable[[], None]) -> None:
        """listener() is called, by the thread that computes, whenever poll() has something new."""
        self._listener = listener
        listener()

    def poll(self) -> tuple[str, bool]:
        """(the text since the last call, whether there may be more); does not wait. For one reader."""
        text = []
        with contextlib.suppress(queue.Empty):
            while (piece := self._pieces.get_nowait()) is not None:
                text.append(piece)
            return "".join(text), False
        return "".join(text), True

    def __iter__(self) -> Iterator[str]:
        while (piece := self._pieces.get()) is not None:
            yield piece

    def _put(self, piece: str | None) -> None:
        self._pieces.put(piece)
        if self._listener is not None:
            self._listener()


class _Row:
    """A row of the batch: whose it is, and how far it is."""

    def __init__(self, reply: Reply, device: torch.device):
        self.reply, self.state = reply, RowState()
        self.rng = torch.Generator(device=device).manual_seed(reply.request.seed)
        self.answer: list[int] = []
        self.shown = ""

    def say(self, token: int, engine: Engine) -> str:
        """Takes the next token; why the answer ends with it, or ''."""
        reply = self.reply
        engine.follow(self.state, token)
        if self.state.completed:
            return "end"
        self.answer.append(token)
        reply.num_tokens = len(self.answer)
        whole = engine.tokenizer.decode(self.answer)
        if not whole.endswith("\ufffd"):  # a character whose bytes are spread over tokens is shown when complete
            if piece := whole[len(self.shown) :]:
                reply._put(piece)
            self.shown = whole
        return "length" if len(self.answer) >= reply.request.max_tokens else ""


class Batcher:
    """
    Answers Requests, up to `rows` at a time, in a thread of its own; up to `waiting` more may wait.

    contexts: for each name that Request.precision may have, a function that returns the context manager in which the
    model computes with it; entered in that thread when the batch changes to it. capacity: positions of the cache
    (default: three times the model's sequence length, as far as the model has them).
    """

    def __init__(
        self,
        engine: Engine,
        rows: int = 8,
        waiting: int = 32,
        contexts: Mapping[str, Callable[[], contextlib.AbstractContextManager]] | None = None,
        capacity: int | None = None,
    ):
        self.engine, self.rows, self.max_waiting = engine, rows, waiting
        self.contexts = dict(contexts or {"": contextlib.nullcontext})
        self.context_len = engine.model.config.sequence_len  # prompt and answer together
        positions = getattr(engine.model, "rotary_seq_len", 3 * self.context_len)
        self.capacity = min(capacity or 3 * self.context_len, positions)
        self._waiting: deque[Reply] = deque()
        self._active: dict[int, _Row] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Reply:
        """Raises Busy where too many wait, ValueError for an empty prompt, one that does not fit, or a precision that
        there is not."""
        if request.precision not in self.contexts:
            known = ", ".join(self.contexts)
            raise ValueError(f"precision {request.precision!r} is not to be had here; there are: {known}")
        if not request.tokens or request.max_tokens < 1:
            raise ValueError("a request needs a prompt and max_tokens of at least 1")
        if len(request.tokens) + request.max_tokens > self.context_len:
            raise ValueError(
                f"prompt ({len(request.tokens)} tokens) and answer ({request.max_tokens}) do not fit into the model's "
                f"context of {self.context_len}; shorten the conversation, or start a new one"
            )
        reply = Reply(request)
        with self._changed:
            if self._stopping:
                raise Busy("the server is shutting down")
            if len(self._waiting) >= self.max_waiting:
                raise Busy(f"{self.max_waiting} requests are waiting already; try again in a moment")
            self._waiting.append(reply)
            self._changed.notify()
        return reply

    @property
    def load(self) -> tuple[int, int]:
        """(rows that are answered, requests that wait)."""
        with self._changed:
            return len(self._active), len(self._waiting)

    def close(self) -> None:
        """Ends what runs as cancelled, and the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------------------------------------------------------------
    # The thread

    def _run(self) -> None:
        precision = None
        while True:
            with contextlib.ExitStack() as stack:
                if precision is not None:
                    stack.enter_context(self.contexts[precision]())
                    stack.enter_context(torch.inference_mode())
                    try:
                        self._drain(precision)
                    except Exception as e:  # a thread must not die of one answer; those who waited for it are told
                        for row in range(self.rows):
                            self._end(row, f"failed: {type(e).__name__}: {one_line(e)}")
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    for reply in self._waiting:
                        self._finish(reply, "cancelled")
                    self._waiting.clear()
                    return
                precision = self._waiting[0].request.precision

    def _drain(self, precision: str) -> None:
        """Answers what wants this precision until the batch is empty and nobody, or the other precision, is next."""
        cache = self.engine.new_cache(self.rows, self.capacity)
        cache.first = torch.zeros(self.rows, dtype=torch.int32, device=cache.k_cache.device)
        column = [0] * self.rows
        decoder = self.engine.decoder(cache)
        while True:
            for row in [r for r, state in self._active.items() if self._stopping or state.reply._cancelled.is_set()]:
                self._end(row, "cancelled")
            while (reply := self._next(cache.get_pos(), precision)) is not None:
                row = next(r for r in range(self.rows) if r not in self._active)
                if not self._active:  # nobody is in the way: any prompt that may still come has room before it
                    cache.move_to(self.context_len)
                with self._changed:
                    self._active[row] = _Row(reply, cache.k_cache.device)
                self._say(row, self._read(cache, row, reply.request.tokens), column)
            if not self._active:
                return
            logits = decoder(torch.tensor(column, dtype=torch.long, device=cache.k_cache.device))
            for row in list(self._active):
                self._say(row, logits[row : row + 1], column)

    def _next(self, position: int, precision: str) -> Reply | None:
        """The first of those who wait, if it can join now; those who gave up are passed over."""
        with self._changed:
            while self._waiting and (self._stopping or self._waiting[0]._cancelled.is_set()):
                self._finish(self._waiting.popleft(), "cancelled")
            if not self._waiting or len(self._active) == self.rows or self._waiting[0].request.precision != precision:
                return None
            request = self._waiting[0].request
            fits = len(request.tokens) <= position and position + request.max_tokens <= self.capacity
            return self._waiting.popleft() if fits or not self._active else None

    def _read(self, cache, row: int, tokens: list[int]) -> torch.Tensor:
        """Reads a prompt into its row, so that it ends at the batch's position; the logits of what follows, (1, V)."""
        position = cache.get_pos()
        view = cache.view_of_row(row, position - len(tokens))
        cache.first[row] = position - len(tokens)
        ids = torch.tensor([tokens], dtype=torch.long, device=cache.k_cache.device)
        return self.engine.model(ids, kv_cache=view)[:, -1]

    def _say(self, row: int, logits: torch.Tensor, column: list[int]) -> None:
        state = self._active[row]
        request = state.reply.request
        sampled = int(sample_next_token(logits, [state.rng], request.temperature, request.top_k))
        column[row] = state.state.forced.popleft() if state.state.forced else sampled
        if finish := state.say(column[row], self.engine):
            self._end(row, finish)

    def _end(self, row: int, finish: str) -> None:
        with self._changed:
            state = self._active.pop(row, None)
        if state is not None:
            self._finish(state.reply, finish)

    @staticmethod
    def _finish(reply: Reply, finish: str) -> None:
        reply.finish = finish
        reply._put(None)
