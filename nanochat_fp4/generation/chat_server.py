"""
The server of the web chat, on FastAPI. It has one page, and streams answers token by token. scripts/chat_web.py starts
it.

    GET  /                  the page (chat_page.html)
    POST /chat/completions  a Question as JSON -> server-sent events, below
    GET  /health            the model, the length of the line, and the reason why the last answer failed

    {"waiting": 2}          the number of answers before this one, again whenever it changes
    {"token": text}         the next piece of the answer
    {"done": true, "finish", "limit", "tokens", "tokens_per_second"}
                            the last event. finish is "end" (the model ended), "length" (limit is max_tokens), "context"
                            (limit is the model's context, which is full), or "failed: " and the reason
    : ping                  a comment every PING_SECONDS, so that no proxy takes a long wait for the end

Requests and events have nanochat's form. A request that is not answered gets 400, 408, 413, 429 or 503 and one line of
JSON. The page connects only to its own origin. A request must be JSON, because a foreign page cannot send JSON without
permission. A request must name a known host, because another name of this address may belong to a foreign page.
"""

import asyncio
import contextlib
import json
import re
import secrets
import shlex
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import h11
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat_fp4.cli import logger, one_line
from nanochat_fp4.generation.chat import AnswerText
from nanochat_fp4.generation.engine import Engine

PING_SECONDS = 15  # nginx closes a connection that is silent for a minute.


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


class Refused(HTTPException):
    """The error for a request that is not answered. It has an HTTP status and one line of text (detail)."""


class Message(BaseModel, extra="forbid", strict=True):
    """A turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str


class Question(BaseModel, extra="forbid", strict=True):
    """A request. The server has defaults for the fields that are None. Other fields are refused, because an answer that
    ignored them would not be what was asked for."""

    messages: list[Message] = Field(min_length=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, le=200)
    max_tokens: int | None = Field(None, ge=1, le=4096)
    seed: int | None = Field(None, ge=0, lt=2**63)
    precision: str | None = None
    stream: Literal[True] = True


def parsed(body: bytes, limits: Limits) -> Question:
    """Returns the question in the body of a request. Raises Refused if there is none, or if it is beyond the limits."""
    try:
        question = Question.model_validate_json(body)
    except ValidationError as e:
        problem = e.errors(include_url=False)[0]
        field, what = ".".join(map(str, problem["loc"])) or "the body", problem["msg"]
        if problem["type"] == "extra_forbidden":
            what = f"there is no such field; there are {', '.join(Question.model_fields)}"
        raise Refused(400, f"{field}: {one_line(what)}") from None
    contents = [message.content for message in question.messages]
    if any(m.role != ("user", "assistant")[i % 2] for i, m in enumerate(question.messages)) or len(contents) % 2 == 0:
        raise Refused(400, "messages: expected turns of 'user' and 'assistant', of which 'user' has the first and last")
    if not contents[-1].strip():
        raise Refused(400, "the last message is empty; write one")
    if len(contents) > limits.messages or sum(map(len, contents)) > limits.conversation:
        most = f"at most {limits.messages} messages and {limits.conversation} characters"
        raise Refused(413, f"{len(contents)} messages with {sum(map(len, contents))} characters, {most}; start anew")
    if (longest := max(map(len, contents))) > limits.message:
        raise Refused(413, f"a message has {longest} characters, at most {limits.message}; shorten it")
    return question


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


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns the whole body of a request of type application/json. Raises Refused if the body is too long, late or
    incomplete."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refused(400, "expected a body of type application/json")

    async def read() -> bytes:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > limits.body:
                raise Refused(413, f"the request has more than {limits.body} bytes; shorten the conversation")
        return data

    try:
        return await asyncio.wait_for(read(), limits.seconds)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body was incomplete after {limits.seconds} seconds; send the request again") from None
    except ClientDisconnect:
        raise Refused(400, "the client left before its body was complete") from None


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

    def encode(self, question: Question, limits: Limits) -> list[int]:
        """Returns the tokens of the conversation. Raises Refused if the model's context is too short."""
        conversation = question.model_dump(include={"messages"})
        conversation["messages"].append({"role": "assistant", "content": "-"})
        tokens = self.engine.tokenizer.render_for_completion(conversation, max_tokens=10 * limits.conversation)
        if len(tokens) >= (context := self.engine.model.config.sequence_len):
            raise Refused(413, f"{len(tokens)} tokens, and the model's context is {context}; start a new conversation")
        return tokens

    def answer(self, reply: "Answer", tokens: list[int], options: dict[str, Any]) -> None:
        """Computes an answer and tells the reply its events. It runs in the thread."""
        text, count, started, now, trouble = AnswerText(self.engine.tokenizer), 0, 0.0, 0.0, ""
        max_tokens, context = options["max_tokens"], self.engine.model.config.sequence_len
        room = context - len(tokens)
        finish, limit = ("length", max_tokens) if max_tokens < room else ("context", context)
        try:
            with self.contexts[options["precision"]]():
                sampling = {name: options[name] for name in ("temperature", "top_k", "seed")}
                answer = self.engine.generate(tokens, max_tokens=min(max_tokens, room), **sampling)
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
            logger.error(f"an answer {finish}")
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
        # nginx would otherwise send an answer when it is complete.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self.events(), media_type="text/event-stream", headers=headers)

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
            try:
                event = await asyncio.wait_for(self.news.get(), PING_SECONDS)
            except asyncio.TimeoutError:
                yield ": ping\n\n"
            else:
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
    defaults: dict[str, Any],
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]"),
    limits: Limits = Limits(),  # noqa: B008  The default is frozen.
) -> FastAPI:
    """
    Makes the application.

    - info is the page's description of the model, with "model", "method", "device", "precisions" and "note".
    - defaults are the values of a Question's fields for requests that do not have them.
    - hosts are the names by which this server may be called, and "*" means any name.
    """

    async def check_host(request: Request) -> None:
        name = re.sub(r":\d+$", "", request.headers.get("host", ""))
        if name not in hosts and "*" not in hosts:
            raise Refused(
                400, f"this server is not called {name}; start it with --allow-host={shlex.quote(name)} if it should be"
            )

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check_host)])
    requests = PerMinute(limits.per_minute)

    @app.exception_handler(HTTPException)  # Refused, and what starlette raises for a path that is not there.
    async def refused(_: Request, e: HTTPException) -> JSONResponse:
        # The connection is closed, because a part of the body may not have been read.
        return JSONResponse({"error": e.detail}, status_code=e.status_code, headers={"Connection": "close"})

    @app.post("/chat/completions")
    async def completions(request: Request) -> StreamingResponse:
        data = await read_body(request, limits)
        # Incomplete bodies do not count. Behind a proxy all users have one address, and could be shut out by them.
        requests.count(request.client.host if request.client else "")
        question = parsed(data, limits)
        options = {"seed": secrets.randbits(31), "precision": next(iter(worker.contexts))} | defaults
        options |= question.model_dump(exclude_none=True, exclude={"messages"})
        if options["precision"] not in worker.contexts:
            raise Refused(400, f"precision: there is no {options['precision']!r:.40}, but {', '.join(worker.contexts)}")
        tokens = await asyncio.to_thread(worker.encode, question, limits)
        return Answer(worker, tokens, options)

    @app.get("/health")
    async def health() -> JSONResponse:
        places = {"answering": min(len(worker.line), 1), "waiting": max(len(worker.line) - 1, 0)}
        return JSONResponse(info | places | {"status": worker.trouble or "ok"})

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        text = files("nanochat_fp4.generation").joinpath("chat_page.html").read_text(encoding="utf-8")
        policy = f"default-src 'none'; img-src data:; connect-src 'self'; script-src 'nonce-{nonce}'; "
        policy += f"style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        headers = {
            "Content-Security-Policy": policy,
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
