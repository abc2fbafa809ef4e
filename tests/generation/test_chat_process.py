"""The process of the chat page under requests that are slow, half or huge: of a seed; 60 of them with --soak."""

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _training import BASE, SFT

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240  # for anything that hangs, on any machine
TRAINED = [
    ("scripts.base_train", [*BASE, "--max-seq-len=256", "--total-batch-size=512", "--num-iterations=3"]),
    ("scripts.chat_sft", [*SFT, "--source=base", "--num-iterations=3"]),
]
HEAD = b"POST /chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory, fork_server, _tiny_base):
    """A base directory with a chat model of three steps."""
    base = tmp_path_factory.mktemp("chat_model")
    (base / "tokenizer").symlink_to(_tiny_base / "tokenizer")
    for module, argv in TRAINED:
        run = fork_server.run(module, [*argv, "--model-tag=tiny"], env={"NANOCHAT_BASE_DIR": str(base)})
        assert run.status == 0, run.log
    return base


class Server:
    """python -m scripts.chat_web, with one thread that asks for its health all the time."""

    def __init__(self, base: Path, log: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"NANOCHAT_BASE_DIR": str(base), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        argv = [f"--port={self.port}", "--rate=0", "--device-type=cpu", "--max-tokens=200"]
        self.log, self.statuses, self.slowest, self.over = log, [], 0.0, threading.Event()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.chat_web", *argv],
                env=environment,
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> "Server":
        end = time.monotonic() + DEADLINE
        while not self.up():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.process.kill()
        self.process.wait(DEADLINE)

    def up(self) -> bool:
        with contextlib.suppress(OSError):
            return self.health()[0] == 200
        return False

    def watch(self) -> None:
        while not self.over.is_set():
            began = time.monotonic()
            try:
                self.statuses.append(self.health()[0])
            except OSError as e:
                self.statuses.append(repr(e))
            self.slowest = max(self.slowest, time.monotonic() - began)
            time.sleep(0.05)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)
        client.sendall(data)
        return client

    def health(self) -> tuple[int, dict]:
        with self.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as client:
            status, body = answer(client)
        return status, json.loads(body)


def answer(client: socket.socket, size: int = 65536, pause: float = 0.0) -> tuple[int, bytes]:
    """The status and the rest of what the server sends until it closes the connection; status 0 if that is nothing."""
    data, end = b"", time.monotonic() + DEADLINE
    with contextlib.suppress(ConnectionError):
        while part := client.recv(size):
            assert time.monotonic() < end, data
            data += part
            time.sleep(pause)
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]) if head else 0, body


def request(content: object = "the color of gold", **options: object) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": content}], **options}).encode()
    return HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def whole(outcome: tuple[int, bytes]) -> None:
    """An answer that was streamed to its last event."""
    status, body = outcome
    assert status == 200 and b'"done": true' in body and b'"failed' not in body, outcome


# ----------------------------------------------------------------------------------------------------------------------
# The requests. Each gets (server, rng, patient) and checks what it is told. Who is not patient leaves after a second.

BAD_HEADS = (
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    HEAD + b"Content-Length: many\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
    b"POST /chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    HEAD + b"X: \0\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(200),
    b"\r\n" * 50 + b"nonsense\r\n\r\n",
)
BAD_BODIES = (b"", b"{", b"[" * 100_000, b"\xff\xfe{}", b"null", b'{"messages": 1}', b"{}" * 1000)


def asks(server, rng, patient):
    whole(answer(server.connect(request(seed=rng.randrange(99)))))


def sends_slowly(server, rng, patient):
    data, client = request(), server.connect()
    for start in range(0, len(data), 40):
        client.sendall(data[start : start + 40])
        time.sleep(0.1)
    whole(answer(client))


def never_ends(server, rng, patient):
    """A head, or the half of a body, and a byte now and then."""
    client = server.connect(request()[: rng.randrange(10, len(request()) - 1)])
    for _ in range(10 if patient else 1):
        time.sleep(1)
        client.sendall(b"x" * rng.randrange(2))
    assert not patient or answer(client)[0] in (0, 400, 408)


def leaves_half_way(server, rng, patient):
    client = server.connect(request()[: rng.randrange(1, len(request()) - 1)])
    if rng.random() < 0.5:  # with a reset
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def sends_too_much(server, rng, patient):
    chunked = rng.random() < 0.5
    client = server.connect(HEAD + (b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000000000"))
    with contextlib.suppress(ConnectionError):
        client.sendall(b"\r\n\r\n")
        for _ in range(256):
            client.sendall((b"10000\r\n" if chunked else b"") + b" " * 65536 + (b"\r\n" if chunked else b""))
    assert answer(client)[0] in (0, 413)  # 0: reset, for what the server did not read


def has_a_huge_head(server, rng, patient):
    assert answer(server.connect(HEAD + b"X: " + b"x" * rng.randrange(100_000, 300_000)))[0] in (0, 400, 431)


def has_a_bad_head(server, rng, patient):
    client = server.connect(rng.choice(BAD_HEADS))
    client.shutdown(socket.SHUT_WR)
    assert answer(client)[0] in (0, 400)


def has_a_bad_body(server, rng, patient):
    body = rng.choice(BAD_BODIES)
    status, text = answer(server.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    assert status == 400 and json.loads(text)["error"]


def asks_too_much(server, rng, patient):
    status, text = answer(server.connect(request(content="gold " * rng.choice((100, 1600, 20_000)))))
    assert status == 413 and json.loads(text)["error"]


def reads_slowly(server, rng, patient):
    client = server.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.sendall(request())
    whole(answer(client, size=64, pause=0.01))


def reads_nothing(server, rng, patient):
    """Hundreds of pages, each of some KB, so that the server must stop to write."""
    client = server.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.settimeout(1)
    with contextlib.suppress(OSError):
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
    time.sleep(1)


def aborts_its_stream(server, rng, patient):
    client = server.connect(request())
    assert client.recv(rng.randrange(1, 400))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def says_nothing(server, rng, patient):
    clients = [server.connect() for _ in range(5)]
    assert not patient or {answer(client) for client in clients} == {(0, b"")}


KINDS: tuple[Callable[[Server, random.Random, bool], None], ...] = (
    asks, sends_slowly, never_ends, leaves_half_way, sends_too_much, has_a_huge_head, has_a_bad_head, has_a_bad_body,
    asks_too_much, reads_slowly, reads_nothing, aborts_its_stream, says_nothing,
)  # fmt: skip


def attack(server: Server, number: int, patient: bool) -> None:
    rng = random.Random(number)
    time.sleep(rng.random() * 2)
    try:
        KINDS[number % len(KINDS)](server, rng, patient)
    except BaseException as e:
        raise AssertionError(f"request {number}, who {KINDS[number % len(KINDS)].__name__}: {e!r}") from e


def test_a_server_under_requests_that_are_slow_half_or_huge(model, tmp_path, request_count):
    """Who asks gets the whole answer, the server is well all the time, its log has no traceback, its line is empty in
    the end, and with connections that are open it ends within seconds."""
    with Server(model, tmp_path / "log.txt") as server:
        with ThreadPoolExecutor(16) as pool:
            jobs = [pool.submit(attack, server, i, request_count > len(KINDS)) for i in range(request_count)]
            problems = [repr(e) for job in jobs if (e := job.exception(DEADLINE))]
        assert not problems and set(server.statuses) == {200}, (problems, server.log.read_text())
        end = time.monotonic() + DEADLINE
        while (health := server.health()[1])["answering"] or health["waiting"]:
            assert time.monotonic() < end, health
        assert health["status"] == "ok"
        asks(server, random.Random(0), True)
        open_ones = [server.connect(data) for data in (request(), HEAD, b"", request()[:-5]) for _ in range(8)]
        server.over.set()
        server.thread.join(DEADLINE)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(DEADLINE)
        seconds, log = time.monotonic() - began, server.log.read_text()
        print(
            f"{request_count} requests, {len(server.statuses)} times well, at most {server.slowest:.1f} s; "
            f"{len(open_ones)} open, ended in {seconds:.1f} s with {status}\n{log}"
        )
        assert "Traceback" not in log and "never retrieved" not in log and seconds < 15, (seconds, log)
        assert status in (143, -signal.SIGTERM)


@pytest.fixture
def request_count(request):
    return 60 if request.config.getoption("--soak") else len(KINDS)
