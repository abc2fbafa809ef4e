"""
The web chat's worker: one thread, one answer at a time, first come, first served.

    worker = Worker(Engine(model, tokenizer))
    reply = worker.submit(Question(tokens, max_tokens=100), events.put)   # events: a queue.SimpleQueue
    worker.cancel(reply)
    worker.close()

A reply is a sequence of events, dictionaries as the server sends them:

    {"waiting": 2}                                     answers before this one; again whenever the number changes
    {"token": text}                                    the next piece of the answer
    {"done": True, "finish", "tokens", "tokens_per_second"}   the last event; finish: "end" (the model's own), "length",
                                                       "cancelled", or "failed: " and the reason
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanochat_fp4.errors import one_line
from nanochat_fp4.generation.engine import AnswerText, Engine

log = logging.getLogger(__name__)


class Busy(Exception):
    """The line is full, or nobody serves it."""


@dataclass(frozen=True)
class Question:
    """tokens: ids of the prompt. max_tokens: limit of the answer. precision: a name of Worker's contexts."""

    tokens: list[int]
    max_tokens: int
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 42
    precision: str = ""


@dataclass(eq=False)
class Reply:
    """A Question in the line. tell(event) is called by any thread, and must not wait."""

    question: Question
    tell: Callable[[dict[str, Any]], None]
    cancelled: bool = False

    def end(self, finish: str, tokens: int = 0, speed: float | None = None) -> None:
        self.tell({"done": True, "finish": finish, "tokens": tokens, "tokens_per_second": speed})


class Worker:
    """
    Answers Questions in a thread of its own; up to `waiting` of them may wait.

    contexts: for each precision a function that returns the context manager in which the model computes. The thread
    enters the context for each answer.
    """

    def __init__(
        self,
        engine: Engine,
        waiting: int = 32,
        contexts: Mapping[str, Callable[[], contextlib.AbstractContextManager]] | None = None,
    ):
        self.engine, self.max_waiting = engine, waiting
        self.contexts = dict(contexts or {"": contextlib.nullcontext})
        self.context_len = engine.model.config.sequence_len  # prompt and answer together
        self.trouble = ""  # why the last answer failed; empty if the last answer did not fail
        self._line: deque[Reply] = deque()  # its first reply is being answered
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def submit(self, question: Question, tell: Callable[[dict[str, Any]], None]) -> Reply:
        """Puts the question at the end of the line. Raises Busy if the line is full or the worker has ended, and
        ValueError for an unknown precision."""
        if question.precision not in self.contexts:
            known = ", ".join(self.contexts)
            raise ValueError(f"precision {question.precision!r} is unknown here; use one of: {known}")
        reply = Reply(question, tell)
        with self._changed:
            if self._stopping or not self.alive:
                raise Busy("the server is shutting down" if self.alive else "the server's worker has ended; restart it")
            if len(self._line) > self.max_waiting:
                raise Busy(f"{self.max_waiting} requests are waiting already; try again in a moment")
            self._line.append(reply)
            if len(self._line) > 1:
                tell({"waiting": len(self._line) - 1})
            self._changed.notify()
        return reply

    def cancel(self, reply: Reply) -> None:
        """Ends the reply: at once if it waits, else after the next token."""
        reply.cancelled = True
        with self._changed:
            if reply in self._line and self._line[0] is not reply:
                self._leave(reply)
                reply.end("cancelled")

    @property
    def load(self) -> tuple[int, int]:
        """(requests being answered, requests that wait)."""
        with self._changed:
            return min(len(self._line), 1), max(len(self._line) - 1, 0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Cancels every reply and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _leave(self, reply: Reply) -> None:
        """Takes a reply out of the line and tells those behind it their new place. The caller holds the lock."""
        place = self._line.index(reply)
        self._line.remove(reply)
        for i in range(place, len(self._line)):
            self._line[i].tell({"waiting": i})

    # ------------------------------------------------------------------------------------------------------------------
    # The thread

    def _run(self) -> None:
        finish = "failed: the server's worker has ended; its log says why"
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._line or self._stopping)
                    if self._stopping:
                        finish = "cancelled"
                        return
                    reply = self._line[0]
                end = self._answer(reply)
                with self._changed:
                    self._leave(reply)
                reply.end(*end)
        except BaseException as e:
            log.error("the worker has ended: %s: %s", type(e).__name__, one_line(e))
        finally:
            with self._changed:
                self._stopping = True
                for reply in self._line:
                    reply.end(finish)
                self._line.clear()

    def _answer(self, reply: Reply) -> tuple[str, int, float | None]:
        """Tells the answer piece by piece; (finish, tokens, tokens per second after the first)."""
        question, text = reply.question, AnswerText(self.engine.tokenizer)
        finish, tokens, started, now = "length", 0, 0.0, 0.0
        trouble = ""
        try:
            with self.contexts[question.precision]():
                for column, _ in self.engine.generate(
                    question.tokens, max_tokens=question.max_tokens, temperature=question.temperature,
                    top_k=question.top_k, seed=question.seed,
                ):  # fmt: skip
                    if reply.cancelled or self._stopping:
                        finish = "cancelled"
                        break
                    if column[0] in self.engine.terminal:
                        finish = "end"
                        break
                    tokens, now = tokens + 1, time.monotonic()
                    started = started or now
                    if piece := text.add(column[0]):
                        reply.tell({"token": piece})
                if piece := text.rest():
                    reply.tell({"token": piece})
        except Exception as e:  # one answer's failure must not end the thread
            finish = trouble = f"failed: {type(e).__name__}: {one_line(e)}"
            log.error("an answer %s", finish)
        self.trouble = trouble
        return finish, tokens, (tokens - 1) / (now - started) if now > started else None
