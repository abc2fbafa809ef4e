"""
The web chat's server: one page, and an answer streamed token by token (FastAPI; scripts/chat_web.py starts it).

    GET  /                  the page (chat_page.html)
    POST /chat/completions  {"messages": [{"role", "content"}, ...], "temperature", "top_k", "max_tokens", "precision"}
                            -> server-sent events: {"token": text} ..., then {"done": true, "finish", "tokens", ...}
    GET  /health            what the model is, and how many conversations are answered and wait

Requests and events have nanochat's form. Limits (Limits below) end in 400, 413, 429 or 503 with one line of JSON. The
page talks to its own origin only: requests must be JSON, which a page from elsewhere cannot send unasked, and must name
a host that this server was told it is, which keeps other names for this address out.
"""

import asyncio
import json
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanochat_fp4.generation import batching


@dataclass(frozen=True)
class Limits:
    """body: bytes of a request; messages, message, conversation: how many, and characters; per_minute: requests of one
    address, 0 for no limit."""

    body: int = 256 * 1024
    messages: int = 500
    message: int = 8_000
    conversation: int = 32_000
    per_minute: int = 60


RANGES = {"temperature": (0.0, 2.0), "top_k": (0, 200), "max_tokens": (1, 4096)}


class Refused(Exception):
    """A request that is not answered: HTTP status and one line."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


def checked(body: Any, limits: Limits) -> tuple[list[dict[str, str]], dict[str, float]]:
    """(messages, the numbers of RANGES that are there) of a request's JSON. Raises Refused."""
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
        if not low <= value <= high:  # NaN is in no range
            raise Refused(400, f"{name} is {value}, expected {low} to {high}")
        numbers[name] = value
    return messages, numbers


def create_app(
    batcher: batching.Batcher,
    info: dict[str, Any],
    *,
    defaults: dict[str, float],
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]"),
    limits: Limits = Limits(),  # noqa: B008  frozen
) -> FastAPI:
    """The application. info: what the page shows of the model ("model", "method", "device", "precisions"); defaults: of
    RANGES, where a request says nothing; hosts: names by which this server may be called, "*" for any."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    tokenizer = batcher.engine.tokenizer
    recent: dict[str, deque[float]] = defaultdict(deque)

    def count(address: str) -> None:
        now = time.monotonic()
        for known in [a for a, times in recent.items() if not times or now - times[-1] > 60]:
            del recent[known]
        times = recent[address]
        while times and now - times[0] > 60:
            times.popleft()
        if limits.per_minute and len(times) >= limits.per_minute:
            raise Refused(429, f"more than {limits.per_minute} requests in a minute; wait a little")
        times.append(now)

    async def read(request: Request) -> Any:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(400, "expected a body of type application/json")
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > limits.body:
                raise Refused(413, f"the request has more than {limits.body} bytes; shorten the conversation")
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None

    def submit(messages: list[dict[str, str]], numbers: dict[str, float], precision: str) -> batching.Reply:
        options = defaults | numbers
        conversation = {"messages": [*messages, {"role": "assistant", "content": "-"}]}
        tokens = tokenizer.render_for_completion(conversation, max_tokens=10 * limits.conversation)
        room = batcher.context_len - len(tokens)
        if room < 1:
            raise Refused(
                413, f"the conversation has {len(tokens)} tokens and the model's context is {batcher.context_len}; "
                "start a new one"
            )  # fmt: skip
        try:
            return batcher.submit(
                batching.Request(
                    tokens,
                    max_tokens=min(int(options["max_tokens"]), room),
                    temperature=float(options["temperature"]),
                    top_k=int(options["top_k"]),
                    seed=secrets.randbits(31),
                    precision=precision,
                )
            )
        except batching.Busy as e:
            raise Refused(503, str(e)) from None
        except ValueError as e:
            raise Refused(400, str(e)) from None

    async def events(reply: batching.Reply) -> AsyncIterator[str]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        reply.on_piece(lambda: loop.call_soon_threadsafe(news.set))
        started = None
        try:
            more = True
            while more:
                await news.wait()
                news.clear()
                text, more = reply.poll()
                if text:
                    started = started or time.monotonic()
                    yield event({"token": text})
            seconds = time.monotonic() - started if started else 0.0
            speed = (reply.num_tokens - 1) / seconds if seconds > 0 and reply.num_tokens > 1 else None
            yield event({"done": True, "finish": reply.finish, "tokens": reply.num_tokens, "tokens_per_second": speed})
        finally:
            reply.cancel()  # also where nobody listens any more: the tab was closed, or "stop" pressed

    @app.exception_handler(Refused)
    async def refused(_: Request, e: Refused) -> JSONResponse:
        return JSONResponse({"error": str(e)}, status_code=e.status)

    @app.post("/chat/completions")
    async def completions(request: Request) -> StreamingResponse:
        count(request.client.host if request.client else "")
        body = await read(request)
        messages, numbers = checked(body, limits)
        precision = body.get("precision") or next(iter(batcher.contexts))
        reply = await asyncio.to_thread(submit, messages, numbers, str(precision))
        return StreamingResponse(events(reply), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        active, waiting = batcher.load
        return info | {"status": "ok", "answering": active, "waiting": waiting, "rows": batcher.rows}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        text = files("nanochat_fp4").joinpath("chat_page.html").read_text(encoding="utf-8").replace("NONCE", nonce)
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        headers = {
            "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return HTMLResponse(text, headers=headers)

    return app


def event(data: dict[str, Any]) -> str:
    """One server-sent event; JSON has no line breaks, so it is one line."""
    return f"data: {json.dumps(data)}\n\n"
