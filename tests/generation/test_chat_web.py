"""The web chat: what it answers, what it refuses, and the page in a real browser where there is one."""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch
from _assertions import wait_until

from nanochat_fp4 import cli
from nanochat_fp4.cli import UserError
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, GPTConfig
from scripts import chat_web
from tests._browser import CHROMIUM, Browser

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from nanochat_fp4.generation import chat_server  # noqa: E402
from nanochat_fp4.generation.chat_server import Limits, Worker, create_app, make_server  # noqa: E402

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & ]]> \u202e"


class Says:
    """A model that answers every question with one text, a token a call, as fast as `gate` lets it."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.gate = tokenizer, threading.Event()
        self.gate.set()
        self.calls, self.certainty = 0, 50.0
        self.script = [*tokenizer.encode(text), tokenizer.encode_special("<|assistant_end|>")]
        self.config = GPTConfig(n_head=1, n_kv_head=1, n_embd=2, n_layer=1, sequence_len=512)

    def get_device(self):
        return "cpu"

    def __call__(self, ids, kv_cache):
        assert self.gate.wait(120)
        self.calls += 1
        logits = torch.zeros(*ids.shape, self.tokenizer.get_vocab_size())
        if ids.size(1) > 1:
            self.prompt, self.prompt_end = ids[0].tolist(), ids.size(1)
        said = kv_cache.get_pos() + ids.size(1) - self.prompt_end
        logits[0, -1, self.script[min(said, len(self.script) - 1)]] = self.certainty
        kv_cache.advance(ids.size(1))
        return logits


@pytest.fixture(scope="module")
def tokenizer():
    return RustBPETokenizer.train_from_iterator(["ask and be answered, one word after another " * 50], 300)


@pytest.fixture
def serve(tokenizer):
    """serve(model or text, limits) -> a running Served."""
    stops = []

    def start(says="an answer in words", limits=Limits(), contexts=None, **line):  # noqa: B008
        model = Says(tokenizer, says) if isinstance(says, str) else says
        contexts = contexts or {name: torch.no_grad for name in ("nvfp4", "bf16")}
        worker = Worker(Engine(model, tokenizer), contexts=contexts, **line)
        defaults = {"temperature": 0.0, "top_k": 0, "max_tokens": 100}
        info = {"model": "a test", "method": "clover", "device": "cpu", "defaults": defaults}
        info["note"] = "a model of tests"
        info["precisions"] = {"nvfp4": "NVFP4 (clover)", "bf16": "BF16"}
        app = create_app(worker, info, defaults=defaults, limits=limits)
        listener = socket.create_server(("127.0.0.1", 0))
        server = make_server(app, limits=limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        port = listener.getsockname()[1]

        def stop():
            model.gate.set() if isinstance(model, Says) else None
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server does not end"
            worker.thread.shutdown(cancel_futures=True)

        stops.append(stop)
        return Served(port, worker, model)

    yield start
    for stop in stops:
        stop()


class Served:
    def __init__(self, port, worker, model):
        self.port, self.worker, self.model = port, worker, model
        self.url = f"http://127.0.0.1:{port}/"

    def post(self, body, path="/chat/completions", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection.request("POST", path, body if isinstance(body, bytes | str) else json.dumps(body), headers)
        return connection.getresponse()

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def send(self, data):
        """A connection that has sent these bytes."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        client.sendall(data)
        return client

    def ask(self, text="ask", **options):
        response = self.post({"messages": [{"role": "user", "content": text}], **options})
        assert response.status == 200, response.read()
        events = events_of(response)
        return "".join(e.get("token", "") for e in events), events[-1]


def events_of(response):
    """The events up to the end of the stream; the limit is for an answer that never comes, as pings go on for ever."""
    end, events = time.monotonic() + 120, []
    while line := response.readline():
        assert time.monotonic() < end
        if line.startswith(b"data: "):
            events.append(json.loads(line[6:]))
    return events


MESSAGE = {"messages": [{"role": "user", "content": "x"}]}
HEAD = b"POST /chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_BODY = HEAD + b"Content-Length: 100\r\n\r\n{"


def test_an_answer_is_streamed_and_counted(serve):
    served = serve()
    text, last = served.ask(precision="bf16")
    assert text == "an answer in words"
    assert last["done"] and last["finish"] == "end" and last["tokens"] == len(served.model.script) - 1
    cut_off = served.ask(max_tokens=2)[1]
    assert (cut_off["finish"], cut_off["limit"]) == ("length", 2)


def test_an_answer_without_room_says_so(serve):
    served = serve(says="word " * 200)  # more tokens than the context has
    served.model.config.sequence_len = 64
    text, last = served.ask(max_tokens=300)
    assert (last["finish"], last["limit"]) == ("context", 64)
    assert len(served.model.prompt) + last["tokens"] == 64 and text


def test_special_tokens_are_no_text(serve, tokenizer):
    served = serve()
    served.model.script[1:1] = [tokenizer.encode_special(f"<|{name}|>") for name in ("user_end", "assistant_start")]
    assert served.ask()[0] == "an answer in words"


def test_the_prompt_is_the_conversation_as_it_was_trained_on(serve, tokenizer):
    served = serve()
    contents = ("ask", "answered", "and <|user_end|> another")
    served.post(said(*contents)).read()
    special = tokenizer.encode_special
    tokens = [tokenizer.get_bos_token_id()]
    for role, content in zip(("user", "assistant", "user"), contents):
        tokens += [special(f"<|{role}_start|>"), *tokenizer.encode(content), special(f"<|{role}_end|>")]
    assert served.model.prompt == [*tokens, special("<|assistant_start|>")]


def said(*contents, **options):
    roles = ("user", "assistant", "user")
    return {"messages": [{"role": role, "content": c} for role, c in zip(roles, contents)], **options}


BAD_REQUESTS = [
    ("{", 400, "JSON"),
    ("[" * 100_000, 400, "JSON"),
    (" " * 200_000, 413, "150000 bytes"),
    ([], 400, "body"),
    ({}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "turns"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, 400, "messages.0.name"),
    (said(["x"]), 400, "messages.0.content"),
    (said("x", "y"), 400, "turns"),
    (said(" "), 400, "empty"),
    (said("x" * 101), 413, "101 characters"),
    (said("x" * 60, "x" * 60, "x" * 60), 413, "3 messages"),
    (said("x", temperature="hot"), 400, "temperature"),
    (said("x", temperature=1e9), 400, "temperature"),
    ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "temperature"),
    (said("x", max_tokens=0), 400, "max_tokens"),
    (said("x", top_k=True), 400, "top_k"),
    (said("x", seed=-1), 400, "seed"),
    (said("x", precision="fp8"), 400, "precision"),
    (said("x", stream=False), 400, "stream"),
    (said("x", top_p=0.9), 400, "top_p"),
]


def test_bad_requests_are_refused_in_one_line(serve):
    served = serve(limits=Limits(message=100, conversation=150, body=150_000))
    for body, status, says in BAD_REQUESTS:
        response = served.post(body)
        text = response.read().decode()
        assert response.status == status and says in json.loads(text)["error"] and "\n" not in text, (body, text)


def test_a_path_and_a_method_that_are_not_there_are_errors_of_the_same_form(serve):
    served = serve()
    for path, status in ("/v1/models", 404), ("/chat/completions", 405):
        got, text = served.get(path)
        assert got == status and json.loads(text).keys() == {"error"}, text


def test_other_sites_and_other_names_are_kept_out(serve):
    served, body = serve(), json.dumps(MESSAGE)
    assert served.post(body, Content_Type="text/plain").status == 400  # what a foreign form may send
    assert served.post(body, Host="attacker.example").status == 400
    assert served.post(body).status == 200


def test_an_answer_gets_through_a_proxy(serve, monkeypatch):
    """nginx buffers an answer without the header, and closes a connection that is silent (the case
    chat_behind_a_proxy)."""
    monkeypatch.setattr(chat_server, "PING_SECONDS", 0.05)
    served = serve()
    refused = served.post(MESSAGE, Host="chat.example.org")
    assert "--allow-host" in json.loads(refused.read())["error"]
    served.model.gate.clear()
    response = served.post(MESSAGE)
    assert response.getheader("X-Accel-Buffering") == "no"
    assert [response.readline() for _ in range(4)] == [b": ping\n", b"\n"] * 2
    served.model.gate.set()
    assert events_of(response)[-1]["finish"] == "end"


def test_a_seed_gives_the_same_answer_again(serve):
    served = serve()
    served.model.certainty = 0.0  # all tokens are equally likely
    answers = [served.ask(seed=seed, temperature=1, max_tokens=20)[0] for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_too_many_requests_and_a_full_line(serve):
    served = serve(limits=Limits(per_minute=3), waiting=1)
    served.model.gate.clear()
    first = served.post(MESSAGE)  # is answered as far as the gate lets it
    second = served.post(MESSAGE)
    assert len(served.worker.line) == 2
    third = served.post(MESSAGE)
    assert third.status == 503 and "waiting" in third.read().decode()
    fourth = served.post(MESSAGE)
    assert fourth.status == 429 and "3 requests" in fourth.read().decode()
    served.model.gate.set()
    assert "waiting" not in str(events_of(first))
    assert [e.get("waiting") for e in events_of(second)][:2] == [1, 0]


def test_who_leaves_stops_the_answer_and_makes_room(serve):
    served = serve(says="word " * 90)
    served.model.gate.clear()
    responses = [served.post(MESSAGE) for _ in range(3)]
    responses[1].close()  # while it waits
    wait_until(lambda: len(served.worker.line) == 2, 120)
    responses[0].close()  # while it is answered
    wait_until(lambda: served.worker.line[0].left, 120)
    calls = served.model.calls
    served.model.gate.set()
    assert [e.get("waiting") for e in events_of(responses[2])][:3] == [2, 1, 0]
    assert served.model.calls <= calls + 2 + len(served.model.script)


class Dies:
    def __contains__(self, token):
        raise SystemExit


def test_a_failing_answer_is_told_and_the_next_one_comes(serve):
    """A context that raises, a cache that cannot be made, and what would end a thread; others wait meanwhile."""
    broken = threading.Event()
    broken.set()

    def context():
        if broken.is_set():
            raise RuntimeError("no such\ncontext")
        return torch.no_grad()

    served = serve(contexts={"nvfp4": context})
    assert served.ask()[1]["finish"] == "failed: RuntimeError: no such context"
    assert json.loads(served.get("/health")[1])["status"] == "failed: RuntimeError: no such context"
    broken.clear()
    new_cache, served.worker.engine.new_cache = served.worker.engine.new_cache, None
    assert served.ask()[1]["finish"].startswith("failed: TypeError")
    served.worker.engine.new_cache = new_cache
    served.model.gate.clear()
    responses = [served.post(MESSAGE) for _ in range(3)]
    terminal, served.worker.engine.terminal = served.worker.engine.terminal, Dies()
    served.model.gate.set()
    for response in responses:
        assert events_of(response)[-1]["finish"] == "failed: SystemExit: SystemExit"
    served.worker.engine.terminal = terminal
    assert served.ask()[0] == "an answer in words"
    assert json.loads(served.get("/health")[1])["status"] == "ok"


def test_half_sent_requests_shut_nobody_out(serve, caplog):
    served = serve(limits=Limits(connections=40, per_minute=0))
    served.model.gate.clear()
    answered = served.post(MESSAGE)
    halves = [served.send(HEAD if i % 2 else HALF_BODY) for i in range(60)]
    assert served.get("/health")[0] == 200
    served.model.gate.set()
    assert events_of(answered)[-1]["finish"] == "end" and served.ask()[1]["finish"] == "end"
    for half in halves:
        half.close()
    served.get("/health")
    assert caplog.text == ""


def test_half_sent_bodies_do_not_count_as_requests(serve):
    """Behind a proxy all users have one address."""
    served = serve(limits=Limits(per_minute=3))
    halves = [served.send(HALF_BODY) for _ in range(10)]
    served.get("/health")
    assert [served.post(MESSAGE).status for _ in range(4)] == [200, 200, 200, 429] and len(halves) == 10


def test_a_storm_of_half_sent_bodies_shuts_nobody_out(serve):
    """New ones all the time: uvicorn counted the tasks of closed ones, and answered others with 503."""
    served, over = serve(limits=Limits(per_minute=0)), threading.Event()

    def storm():
        halves = []
        while not over.is_set():
            halves.append(served.send(HALF_BODY))
            if len(halves) > 400:
                halves.pop(0).close()
            time.sleep(0.004)
        for half in halves:
            half.close()

    threads = [threading.Thread(target=storm, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        statuses = [(time.sleep(0.02), served.get("/health")[0])[1] for _ in range(60)]
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert set(statuses) == {200}


def test_beyond_the_limit_of_connections_is_503(serve):
    served = serve(limits=Limits(connections=3, per_minute=0))
    served.model.gate.clear()
    answered = [served.post(MESSAGE) for _ in range(2)]
    assert served.get("/health")[0] == 503
    served.model.gate.set()
    assert [events_of(a)[-1]["finish"] for a in answered] == ["end", "end"]


def test_heads_and_bodies_have_a_deadline(serve):
    served = serve(limits=Limits(seconds=1))
    head, body = served.send(HEAD), served.send(HALF_BODY)
    assert head.recv(1000) == b""
    answer = b""
    while part := body.recv(1000):
        answer += part
    assert answer.startswith(b"HTTP/1.1 408") and b"incomplete after 1 seconds; send" in answer
    again = served.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert again.recv(10_000)
    with contextlib.suppress(ConnectionError):  # closed before, where this process had to wait for a second
        again.sendall(HEAD)  # a second request of the same connection
        while again.recv(1000):
            pass


def test_sixty_requests_that_are_slow_half_or_huge_wait_for_nothing(serve):
    """Each of them gets a refusal or is closed within its deadline, and others are answered meanwhile."""
    served = serve(limits=Limits(seconds=2, per_minute=0, body=10_000))
    huge = HEAD + b"Content-Length: 100000000\r\n\r\n" + b"[" * 60_000
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b"[" * 0x1000 + b"\r\n"
    long_head = HEAD + b"X: " + b"x" * 100_000
    clients = [served.send(data) for data in (HEAD, HALF_BODY, b"", huge, chunked, long_head) for _ in range(10)]
    assert served.ask()[1]["finish"] == "end"
    ended = 0
    for client in clients:
        client.settimeout(60)
        for slow in b"abc":  # a byte now and then extends no deadline
            with contextlib.suppress(OSError):
                client.send(bytes([slow]))
        with contextlib.suppress(ConnectionError):
            while client.recv(1000):
                pass
        ended += 1
    assert ended == 60 and served.ask()[1]["finish"] == "end"


def test_a_trouble_is_one_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "trouble\nof %s", ("somebody",), sys.exc_info())
    assert cli.StderrHandler().format(record).endswith(" error: trouble of somebody: ValueError: two lines")


@pytest.fixture
def page(serve, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")

    def start(says, **look):
        served = serve(says)
        browser = Browser(tmp_path, **look)
        browser.__enter__()
        opened.append(browser)
        browser.open(served.url)
        browser.wait("document.body?.dataset.ready === 'yes'")
        return served, browser

    opened = []
    yield start
    for browser in opened:
        browser.__exit__()


def test_a_browser_that_does_not_answer_is_no_endless_wait(page):
    _, browser = page("an answer")
    browser.seconds = 1
    os.kill(browser.process.pid, signal.SIGSTOP)
    with pytest.raises(AssertionError, match="does not answer"):
        browser.run("1 + 1")


ANSWERS = "[...document.querySelectorAll('.assistant')].map(e => e.textContent)"


def test_the_page_asks_streams_stops_and_asks_again(page):
    served, browser = page("the answer that is long enough to be stopped in the middle of it")
    browser.type("first question")
    browser.press("Enter")
    browser.wait("document.getElementById('status').textContent.includes('tokens/s')")
    assert browser.run(ANSWERS) == ["the answer that is long enough to be stopped in the middle of it"]
    assert "clover" in browser.run("document.getElementById('model').textContent")
    served.model.gate.clear()
    browser.type("second question")
    browser.press("Enter")
    browser.wait("document.getElementById('stop').disabled === false")
    browser.run("document.getElementById('stop').click()")
    browser.wait("document.getElementById('status').textContent === 'stopped'")
    served.model.gate.set()
    browser.wait("document.getElementById('again').disabled === false")
    browser.run("document.getElementById('again').click()")
    browser.wait("document.getElementById('status').textContent.includes('tokens/s')")
    assert browser.run(ANSWERS + ".length") == 2
    browser.run("location.reload()")
    browser.wait("document.body?.dataset.ready === 'yes' && !document.querySelector('.message')")


def test_an_answer_of_one_token_is_one(page):
    _, browser = page("a")
    browser.type("question")
    browser.press("Enter")
    browser.wait("/^1 token($|,)/.test(document.getElementById('status').textContent)")


def test_a_message_that_is_not_taken_goes_back_into_the_box(page):
    _, browser = page("an answer")
    browser.run("document.getElementById('temperature').value = 9")
    browser.type("a long question")
    browser.press("Enter")
    browser.wait("document.querySelector('.failed')?.textContent.includes('temperature')")
    assert browser.run("document.getElementById('text').value") == "a long question"
    assert browser.run("document.querySelectorAll('.user, .assistant').length") == 0
    browser.run("document.getElementById('temperature').value = 1")
    browser.press("Enter")
    browser.wait("document.getElementById('status').textContent.includes('tokens')")
    assert browser.run(ANSWERS) == ["an answer"] and browser.run("document.getElementById('text').value") == ""


@pytest.mark.parametrize("length, says", [(64, "no room is left in the 64 tokens"), (512, "cut off at 100 tokens")])
def test_the_page_says_why_an_answer_was_cut_off(page, length, says):
    served, browser = page("word " * 200)
    served.model.config.sequence_len = length
    browser.type("question")
    browser.press("Enter")
    browser.wait(f"document.getElementById('status').textContent.includes({says!r})")


def test_who_waits_sees_the_place_in_the_line(page):
    served, browser = page("an answer")
    served.model.gate.clear()
    responses = [served.post(MESSAGE) for _ in range(2)]
    browser.type("question")
    browser.press("Enter")
    browser.wait("document.getElementById('status').textContent === 'waiting, answers before yours: 2'")
    responses[1].close()
    browser.wait("document.getElementById('status').textContent === 'waiting, answers before yours: 1'")
    served.model.gate.set()
    browser.wait("document.getElementById('status').textContent.includes('tokens')")


def test_what_anybody_writes_is_text(page):
    served, browser = page(HOSTILE, width=380, height=700, dark=True)
    browser.type(HOSTILE)
    browser.press("Enter")
    browser.wait("document.getElementById('status').textContent.includes('tokens')")
    assert browser.run(ANSWERS) == [HOSTILE]
    assert browser.run("document.querySelector('.user').textContent").startswith("<img")
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert browser.run("document.title") == "nanochat_fp4"
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out of a phone
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    # A script that got into the page would not run.
    browser.run("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title='owned'\">`)")
    browser.run(
        "var s = document.createElement('script'); s.textContent = \"document.title='owned'\"; document.body.append(s)"
    )
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert browser.run("document.title") == "nanochat_fp4"


def test_a_model_without_4_bits_has_no_nvfp4_forward(monkeypatch, tokenizer):
    model = GPT(GPTConfig(sequence_len=8, vocab_size=300, n_layer=1, n_head=1, n_kv_head=1, n_embd=16))
    meta = {"step": 1, "user_config": {"method": "bf16"}, "model_tag": "d1"}
    monkeypatch.setattr("nanochat_fp4.training.load_model.load_model", lambda *_: (model, tokenizer, meta))
    with pytest.raises(UserError, match="--precision=nvfp4: .* --method=clover"):
        chat_web.main(["--precision=nvfp4", "--device-type=cpu"])


@pytest.mark.parametrize(
    "method, label", [("clover", "NVFP4"), ("nvidia", "NVFP4"), ("clover_fp8_forward", "FP8"), ("fp8", "FP8")]
)
def test_the_page_names_the_format_of_the_forward(monkeypatch, tokenizer, method, label):
    model = GPT(GPTConfig(sequence_len=8, vocab_size=320, n_layer=1, n_head=1, n_kv_head=1, n_embd=32))
    meta = {"step": 1, "user_config": {"method": method}, "model_tag": "d1"}
    monkeypatch.setattr("nanochat_fp4.training.load_model.load_model", lambda *_: (model, tokenizer, meta))
    worker, info = chat_web.load(chat_web.parse_args(["--device-type=cpu", "--dtype=float32"]), torch.device("cpu"))
    worker.thread.shutdown()
    assert info["precisions"] == {"nvfp4": f"{label} ({method})", "bf16": "FP32"}  # on a CPU


@pytest.mark.parametrize("host, says", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_port_that_is_taken_and_a_host_that_is_not_checked_are_one_line(monkeypatch, capsys, tokenizer, host, says):
    worker = Worker(Engine(Says(tokenizer, "x"), tokenizer))
    info = {"model": "m", "method": "bf16", "device": "cpu", "precisions": {"bf16": "BF16"}}
    monkeypatch.setattr(chat_web, "load", lambda args, device: (worker, info))
    with socket.create_server((host, 0)) as taken:
        with pytest.raises(UserError, match=f"cannot listen at {host}:.*; choose another --port"):
            chat_web.main([f"--port={taken.getsockname()[1]}", f"--host={host}", "--device-type=cpu"])
    out, err = capsys.readouterr()
    assert ("--host=0.0.0.0" in out) == says and "open http" not in out and "in use" not in err
