"""The web chat: what it answers, what it refuses, and the page in a real browser where there is one."""

import base64
import http.client
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.errors import UserError
from nanochat_fp4.generation.batching import Batcher, Request
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, GPTConfig
from scripts import chat_web
from tests._browser import CHROMIUM, Browser

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
from nanochat_fp4.generation.chat_server import Limits, create_app  # noqa: E402

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & ]]> \u202e"


class Says:
    """A model that answers every question with one text, a token a call, as fast as `gate` lets it."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.gate = tokenizer, threading.Event()
        self.gate.set()
        self.calls = 0
        self.script = [*tokenizer.encode(text), tokenizer.encode_special("<|assistant_end|>")]
        self.config = GPTConfig(n_head=1, n_kv_head=1, n_embd=2, n_layer=1, sequence_len=512)
        self.begun = {}  # where a row began -> how many tokens it has

    def get_device(self):
        return "cpu"

    def __call__(self, ids, kv_cache):
        assert self.gate.wait(120)
        self.calls += 1
        logits = torch.zeros(*ids.shape, self.tokenizer.get_vocab_size())
        for row in range(ids.size(0)):
            if ids.size(1) > 1:
                self.prompt_end = kv_cache.get_pos() + ids.size(1)
                said = 0
            else:
                said = kv_cache.get_pos() + 1 - self.prompt_end
            logits[row, -1, self.script[min(said, len(self.script) - 1)]] = 50.0
        kv_cache.advance(ids.size(1))
        return logits


@pytest.fixture(scope="module")
def tokenizer():
    return RustBPETokenizer.train_from_iterator(["ask and be answered, one word after another " * 50], 300)


@pytest.fixture
def serve(tokenizer):
    """serve(model or text, limits) -> port of a running server; the model is .model of the returned object."""
    stops = []

    def start(says="an answer in words", limits=Limits(), **batch):  # noqa: B008
        model = Says(tokenizer, says) if isinstance(says, str) else says
        contexts = {name: torch.no_grad for name in ("nvfp4", "bf16")}
        batcher = Batcher(Engine(model, tokenizer), contexts=contexts, **{"rows": 1, **batch})
        defaults = {"temperature": 0.0, "top_k": 0, "max_tokens": 100}
        info = {"model": "a test", "method": "clover", "device": "cpu", "defaults": defaults}
        info["precisions"] = {"nvfp4": "NVFP4 (clover)", "bf16": "BF16"}
        app = create_app(batcher, info, defaults=defaults, limits=limits)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = listener.getsockname()[1]

        def stop():
            model.gate.set() if isinstance(model, Says) else None
            server.should_exit = True
            thread.join()
            batcher.close()

        stops.append(stop)
        return Served(port, batcher, model)

    yield start
    for stop in stops:
        stop()


class Served:
    def __init__(self, port, batcher, model):
        self.port, self.batcher, self.model = port, batcher, model
        self.url = f"http://127.0.0.1:{port}/"

    def post(self, body, path="/chat/completions", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection.request("POST", path, body if isinstance(body, bytes | str) else json.dumps(body), headers)
        return connection.getresponse()

    def ask(self, text="ask", **options):
        response = self.post({"messages": [{"role": "user", "content": text}], **options})
        assert response.status == 200, response.read()
        events = [json.loads(part[6:]) for part in response.read().decode().split("\n\n") if part]
        return "".join(e.get("token", "") for e in events), events[-1]


def test_an_answer_is_streamed_and_counted(serve):
    served = serve()
    text, last = served.ask(precision="bf16")
    assert text == "an answer in words"
    assert last["done"] and last["finish"] == "end" and last["tokens"] == len(served.model.script) - 1
    assert served.ask(max_tokens=2)[1]["finish"] == "length"


def test_the_prompt_is_the_conversation_as_it_was_trained_on(serve, tokenizer):
    config = GPTConfig(
        sequence_len=64, vocab_size=tokenizer.get_vocab_size(), n_layer=1, n_head=2, n_kv_head=2, n_embd=64
    )
    torch.manual_seed(0)
    model = GPT(config)
    model.init_weights()
    torch.nn.init.normal_(model.lm_head.weight)
    served = serve(model.float())
    turns = [("user", "ask"), ("assistant", "answered"), ("user", "and <|user_end|> another")]
    messages = [{"role": role, "content": content} for role, content in turns]
    body = served.post({"messages": messages, "max_tokens": 8}).read().decode()
    said = "".join(json.loads(part[6:]).get("token", "") for part in body.split("\n\n") if part)
    special = tokenizer.encode_special
    tokens = [tokenizer.get_bos_token_id()]
    for role, content in turns:
        tokens += [special(f"<|{role}_start|>"), *tokenizer.encode(content), special(f"<|{role}_end|>")]
    tokens.append(special("<|assistant_start|>"))
    expected = served.batcher.submit(Request(tokens, 8, temperature=0.0, top_k=0, precision="nvfp4"))
    assert said and said == "".join(expected)


@pytest.mark.parametrize(
    "body, status, says",
    [
        ("{", 400, "not JSON"),
        ("[" * 100_000, 400, "not JSON"),
        ({"messages": []}, 400, "expected {'messages'"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "message 0: expected role 'user'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 400, "message 0"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            400,
            "the last message",
        ),
        ({"messages": [{"role": "user", "content": "x"}] * 1}, 200, ""),
        ({"messages": [{"role": "user", "content": "x" * 101}]}, 413, "101 characters, at most 100"),
        (
            {"messages": [{"role": "user", "content": "ask and " * 12}], "temperature": "hot"},
            400,
            "temperature is 'hot'",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 1e9}, 400, "expected 0.0 to 2.0"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"messages": [{"role": "user", "content": "x"}], "top_k": True}, 400, "top_k is True"),
        ({"messages": [{"role": "user", "content": "x"}], "precision": "fp8"}, 400, "'fp8' is not to be had"),
        ("[" + " " * 5000 + "]", 413, "more than 4000 bytes"),
    ],
)
def test_bad_requests_are_refused_in_one_line(serve, body, status, says):
    response = serve(limits=Limits(message=100, body=200_000 if body == "[" * 100_000 else 4000)).post(body)
    text = response.read().decode()
    assert response.status == status, text
    assert status == 200 or (says in json.loads(text)["error"] and "\n" not in text)


def test_other_sites_and_other_names_are_kept_out(serve):
    served = serve()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    assert served.post(body, Content_Type="text/plain").status == 400  # what a foreign form may send
    assert served.post(body, Host="attacker.example").status == 400
    assert served.post(body).status == 200


def test_too_many_requests_and_too_many_at_once(serve):
    served = serve(limits=Limits(per_minute=3), waiting=1)
    served.model.gate.clear()
    message = {"messages": [{"role": "user", "content": "x"}]}
    first = served.post(message)  # answered: its row waits for the gate
    while served.batcher.load != (1, 0):
        time.sleep(0.01)
    second = served.post(message)
    third = served.post(message)
    assert third.status == 503 and "waiting already" in third.read().decode()
    fourth = served.post(message)
    assert fourth.status == 429 and "more than 3 requests" in fourth.read().decode()
    served.model.gate.set()
    assert b'"finish": "end"' in first.read() and b'"finish": "end"' in second.read()


def test_who_leaves_stops_the_answer(serve):
    served = serve(says="word " * 90)
    response = served.post({"messages": [{"role": "user", "content": "x"}]})
    assert response.read(10)
    served.model.gate.clear()
    response.close()
    calls = served.model.calls
    time.sleep(0.2)  # the server notices the closed connection between two tokens
    served.model.gate.set()
    while served.batcher.load != (0, 0):
        time.sleep(0.01)
    assert served.model.calls <= calls + 45  # of the 90 and more that it would have said


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


def keep(browser, name):
    """A picture of the page, for whoever sets NANOCHAT_SCREENSHOTS to a folder."""
    if folder := os.environ.get("NANOCHAT_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(browser.screenshot()))


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
    keep(browser, "chat_web")
    browser.run("location.reload()")
    browser.wait("document.body?.dataset.ready === 'yes' && !document.querySelector('.message')")


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
    keep(browser, "chat_web_phone")


def test_a_script_that_got_into_the_page_would_not_run(page):
    _, browser = page("x")
    browser.run("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title='owned'\">`)")
    browser.run(
        "var s = document.createElement('script'); s.textContent = \"document.title='owned'\"; document.body.append(s)"
    )
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert browser.run("document.title") == "nanochat_fp4"


def test_flags_out_of_range_are_refused():
    for wrong in ("--temperature=3", "--max-batch=0", "--top-k=-1", "--max-tokens=5000", "--port=65536"):
        with pytest.raises(UserError, match=wrong.partition("=")[0]):
            chat_web.main([wrong])


def test_a_model_without_4_bits_has_no_nvfp4_forward(monkeypatch, tokenizer):
    model = GPT(GPTConfig(sequence_len=8, vocab_size=300, n_layer=1, n_head=1, n_kv_head=1, n_embd=16))
    meta = {"step": 1, "user_config": {"method": "bf16"}}
    monkeypatch.setattr(chat_web, "load_model", lambda *_: (model, tokenizer, meta))
    with pytest.raises(UserError, match="--precision=nvfp4: .* --method=clover"):
        chat_web.main(["--precision=nvfp4", "--device-type=cpu"])


def test_a_port_that_is_taken_is_one_line(monkeypatch, tokenizer):
    model = Says(tokenizer, "x")
    batcher = Batcher(Engine(model, tokenizer))
    info = {"model": "m", "method": "bf16", "device": "cpu", "precisions": {"bf16": "BF16"}}
    monkeypatch.setattr(chat_web, "load", lambda args, device: (batcher, info))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="cannot listen at 127.0.0.1:.*; choose another --port"):
            chat_web.main([f"--port={taken.getsockname()[1]}", "--device-type=cpu"])
