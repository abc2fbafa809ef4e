"""
The server of the web chat, on FastAPI. It has one page, and streams answers token by token. scripts/chat_web.py starts
it.

    GET  /                  the page (chat_page.html)
    POST /chat/completions  {"messages": [{"role", "content"}, ...], "temperature", "top_k", "max_tokens", "precision"}
                            -> server-sent events, below
    GET  /health            the model, the length of the line, and the reason why the last answer failed

    {"waiting": 2}          the number of answers before this one, again whenever it changes
    {"token": text}         the next piece of the answer
    {"done": true, "finish", "limit", "tokens", "tokens_per_second"}
                            the last event. finish is "end" (the model ended), "length" (limit is max_tokens), "context"
                            (limit is the model's context, which is full), or "failed: " and the reason

Requests and events have nanochat's form. A request beyond the Limits below is answered with 400, 408, 413, 429 or 503
and one line of JSON. The page connects only to its own origin. A request must be JSON, because a foreign page cannot
send JSON without permission. A request must name a known host, because another name of this address may belong to a
foreign page.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat_fp4.cli import one_line
from nanochat_fp4.generation.chat import AnswerText
from nanochat_fp4.generation.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The limits for one client, and for all clients together.

    - body: the bytes of a request
    - messages: the messages in a conversation
    - message: the characters in a message
    - conversation: the characters in a conversation
    - per_minute: the requests of one address in a minute, where 0 means no limit
    - connections: the connections that are open at a time
    - seconds: the seconds until the head of a request must be complete, and from then on until its body must be
    """

    body: int = 256 * 1024
    messages: int = 500
    message: int = 8_000
    conversation: int = 32_000
    per_minute: int = 60
    connections: int = 128
    seconds: int = 20


RANGES = {"temperature": (0.0, 2.0), "top_k": (0, 200), "max_tokens": (1, 4096)}


class Refused(Exception):
    """The error for a request that is not answered. It has an HTTP status and one line of text."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


def checked(body: Any, limits: Limits) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Returns the messages of a request's JSON, and its numbers of RANGES. Raises Refused for any other JSON."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "expected {'messages': [{'role': 'user', 'content': 'text'}, ...]}")
    if len(messages) > limits.messages:
        raise Refused(413, f"{len(messages)} messages, at most {limits.messages}; start a new conversation")
    length = 0
    for i, message in enumerate(messages):
        role = ("user", "assistant")[i % 2]
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or message.get("role") != role:
            raise Refused(400, f"message {i}: expected role {role!r} and a text; roles alternate, user first")
        if len(content) > limits.message:
            raise Refused(413, f"message {i} has {len(content)} characters, at most {limits.message}; shorten it")
        length += len(content)
    if len(messages) % 2 == 0 or not messages[-1]["content"].strip():
        raise Refused(400, "the last message must be the user's, and not empty")
    if length > limits.conversation:
        raise Refused(413, f"{length} characters, at most {limits.conversation}; start a new conversation")
    numbers = {}
    for name, (low, high) in RANGES.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if isinstance(low, int) else (int, float)):
            raise Refused(400, f"{name} is {value!r:.40}, expected a number from {low} to {high}")
        if not low <= value <= high:  # NaN is in no range.
            raise Refused(400, f"{name} is {value}, expected {low} to {high}")
        numbers[name] = value
    return messages, numbers


class PerMinute:
    """Counts the requests of each address within a minute. Raises Refused for requests beyond the limit, and 0 is no
    limit."""

    def __init__(self, limit: int):
        self.limit = limit
        self.recent: deque[tuple[float, str]] = deque()  # The times and addresses of the requests in the last minute.

    def count(self, address: str) -> None:
        """Counts a request of this address. Raises Refused beyond the limit."""
        now = time.monotonic()
        while self.recent and now - self.recent[0][0] > 60:
            self.recent.popleft()
        if self.limit and sum(known == address for _, known in self.recent) >= self.limit:
            raise Refused(429, f"more than {self.limit} requests in a minute; wait a little")
        self.recent.append((now, address))


async def _read(request: Request, limits: Limits) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > limits.body:
            raise Refused(413, f"the request has more than {limits.body} bytes; shorten the conversation")
    return data


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns the whole body of a request of type application/json. Raises Refused if the body is too long, late or
    incomplete."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refused(400, "expected a body of type application/json")
    try:
        return await asyncio.wait_for(_read(request, limits), limits.seconds)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body was incomplete after {limits.seconds} seconds; send the request again") from None
    except ClientDisconnect:
        raise Refused(400, "the client left before its body was complete") from None


def parsed(body: bytes) -> Any:
    """Returns the JSON of a body. Raises Refused if the body is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None


class Worker:
    """
    Computes answers in a thread, one at a time, in the order of the requests. Up to `waiting` requests may wait.

    `contexts` has for each precision a function that returns the context in which the model computes.
    """

    def __init__(
        self,
        engine: Engine,
        waiting: int = 32,
        contexts: Mapping[str, Callable[[], contextlib.AbstractContextManager]] | None = None,
    ):
        self.engine, self.max_waiting = engine, waiting
        self.contexts = dict(contexts or {"": contextlib.nullcontext})
        self.trouble = ""  # The reason why the last answer failed, or an empty text if it did not fail.
        self.line: list[Answer] = []  # The answers in order. The first one is being computed.
        self.thread = ThreadPoolExecutor(1, "worker")

    def encode(self, messages: list[dict[str, str]], limits: Limits) -> list[int]:
        """Returns the tokens of the conversation. Raises Refused if the model's context is too short."""
        conversation = {"messages": [*messages, {"role": "assistant", "content": "-"}]}
        tokens = self.engine.tokenizer.render_for_completion(conversation, max_tokens=10 * limits.conversation)
        if len(tokens) >= (context := self.engine.model.config.sequence_len):
            raise Refused(413, f"{len(tokens)} tokens, and the model's context is {context}; start a new conversation")
        return tokens

    def answer(self, reply: "Answer", tokens: list[int], precision: str, numbers: dict[str, float]) -> None:
        """Computes an answer and tells the reply its events. It runs in the thread."""
        text, count, started, now, trouble = AnswerText(self.engine.tokenizer), 0, 0.0, 0.0, ""
        max_tokens, context = int(numbers["max_tokens"]), self.engine.model.config.sequence_len
        room = context - len(tokens)
        finish, limit = ("length", max_tokens) if max_tokens < room else ("context", context)
        try:
            with self.contexts[precision]():
                sampling = {"temperature": float(numbers["temperature"]), "top_k": int(numbers["top_k"])}
                answer = self.engine.generate(
                    tokens, max_tokens=min(max_tokens, room), seed=secrets.randbits(31), **sampling
                )
                for column, _ in answer:
                    if reply.left:
                        return
                    if column[0] in self.engine.terminal:
                        finish = "end"
                        break
                    count, now = count + 1, time.monotonic()
                    started = started or now
                    reply.tell({"token": text.add(column[0])})
                reply.tell({"token": text.rest()})
        except BaseException as e:  # This answer's failure is reported, and the next answer is computed.
            finish = trouble = f"failed: {type(e).__name__}: {one_line(e)}"
            log.error("an answer %s", finish)
        self.trouble = trouble
        speed = (count - 1) / (now - started) if now > started else None
        reply.tell({"done": True, "finish": finish, "limit": limit, "tokens": count, "tokens_per_second": speed})

    def leave(self, reply: "Answer") -> None:
        """Takes a reply out of the line, and tells all replies behind it their new place."""
        place = self.line.index(reply)
        self.line.remove(reply)
        for i in range(place, len(self.line)):
            self.line[i].news.put_nowait({"waiting": i})


class Answer(StreamingResponse):
    """A reply as a stream of events. It is put at the end of the worker's line. The client may leave before the end
    of the stream. Raises Refused if the line is full."""

    def __init__(self, worker: Worker, *question: Any):
        if len(worker.line) > worker.max_waiting:
            raise Refused(503, f"{worker.max_waiting} requests are waiting already; try again in a moment")
        self.news, self.loop, self.left = asyncio.Queue(), asyncio.get_running_loop(), False
        if worker.line:
            self.news.put_nowait({"waiting": len(worker.line)})
        worker.line.append(self)
        self.job = worker.thread.submit(worker.answer, self, *question)
        self.job.add_done_callback(lambda _: self.call(worker.leave, self))
        super().__init__(self.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function in the server's event loop. Any thread may call this method."""
        with contextlib.suppress(RuntimeError):  # If the server has ended, the loop is closed.
            self.loop.call_soon_threadsafe(function, *args)

    def tell(self, event: dict[str, Any]) -> None:
        """Sends an event to the client. An empty piece of text is left out."""
        if event.get("token") != "":
            self.call(self.news.put_nowait, event)

    async def events(self) -> AsyncIterator[str]:
        """Yields the events in the form of server-sent events, up to the last one."""
        event: dict[str, Any] = {}
        while not event.get("done"):
            event = await self.news.get()
            yield f"data: {json.dumps(event)}\n\n"  # JSON has no line breaks.

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.left = True  # The answer ends after its next token.
            self.job.cancel()


def create_app(
    worker: Worker,
    info: dict[str, Any],
    *,
    defaults: dict[str, float],
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]"),
    limits: Limits = Limits(),  # noqa: B008  The default is frozen.
) -> FastAPI:
    """
    Makes the application.

    - info is the page's description of the model, with "model", "method", "device" and "precisions".
    - defaults are the values of RANGES for requests that do not have them.
    - hosts are the names by which this server may be called, and "*" means any name.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    requests = PerMinute(limits.per_minute)

    @app.exception_handler(Refused)
    async def refused(_: Request, e: Refused) -> JSONResponse:
        # The connection is closed, because a part of the body may not have been read.
        return JSONResponse({"error": str(e)}, status_code=e.status, headers={"Connection": "close"})

    @app.post("/chat/completions")
    async def completions(request: Request) -> StreamingResponse:
        data = await read_body(request, limits)
        # Incomplete bodies do not count. Behind a proxy all users have one address, and could be shut out by them.
        requests.count(request.client.host if request.client else "")
        body = parsed(data)
        messages, numbers = checked(body, limits)
        precision = str(body.get("precision") or next(iter(worker.contexts)))
        if precision not in worker.contexts:
            raise Refused(400, f"precision {precision!r} is unknown here; use one of: {', '.join(worker.contexts)}")
        tokens = await asyncio.to_thread(worker.encode, messages, limits)
        return Answer(worker, tokens, precision, defaults | numbers)

    @app.get("/health")
    async def health() -> JSONResponse:
        places = {"answering": min(len(worker.line), 1), "waiting": max(len(worker.line) - 1, 0)}
        return JSONResponse(info | places | {"status": worker.trouble or "ok"})

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        text = files("nanochat_fp4.generation").joinpath("chat_page.html").read_text(encoding="utf-8")
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        headers = {
            "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return HTMLResponse(text.replace("NONCE", nonce), headers=headers)

    return app


# ----------------------------------------------------------------------------------------------------------------------
# The HTTP server


class Connection(H11Protocol):
    """
    A connection of uvicorn, with a limit of connections and a deadline for the head of a request.

    At the limit, a new connection closes the oldest one whose client keeps the server waiting. Half-sent requests can
    therefore not shut out other clients. If the server keeps all clients waiting, the requests of the new connection
    are answered with 503. uvicorn's own limit is not used, because it also counts the task of a closed connection,
    which ends in a later turn of the loop.
    """

    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.since, self.head_deadline = self.loop.time(), None
        if len(self.connections) >= self.max_connections:
            waiting = [c for c in self.connections if c is not self and c.waits_for_client()]
            if waiting:
                oldest = min(waiting, key=lambda c: c.since)
                self.connections.discard(oldest)
                oldest.transport.abort()
            else:
                self.app = service_unavailable
        self.watch()

    def waits_for_client(self) -> bool:
        """Returns whether the client still has to send a part of its request, or does not read its answer."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.flow.write_paused

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def watch(self) -> None:
        """Sets the deadline for the head of a request, or cancels it when the head is complete."""
        if self.conn.their_state is not h11.IDLE:
            if self.head_deadline is not None:
                self.head_deadline.cancel()
            self.head_deadline = None
        elif self.head_deadline is None:
            self.head_deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.close)


def make_server(app: FastAPI, host: str = "127.0.0.1", port: int = 0, limits: Limits = Limits()) -> uvicorn.Server:  # noqa: B008
    """Returns uvicorn's server with these limits. asyncio accepts up to `backlog` connections before any of them can
    be closed."""
    limited = type("LimitedConnection", (Connection,), {"max_connections": limits.connections})
    return uvicorn.Server(
        uvicorn.Config(
            app, host, port, http=limited, ws="none", timeout_keep_alive=limits.seconds,
            backlog=max(1, limits.connections // 2), timeout_graceful_shutdown=2, log_config=None, log_level="error",
            access_log=False,
        )
    )  # fmt: skip


class OneLine(logging.Formatter):
    """Formats a record, with its exception, as one line."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        text = one_line(record.getMessage()) + (f": {type(error).__name__}: {one_line(error)}" if error else "")
        return f"{self.formatTime(record)} {text}"


def log_briefly() -> None:
    """Sends the errors of the server, asyncio and the worker to stderr, one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    for name in ("uvicorn.error", "asyncio", __name__):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
