"""An HTTP server of this process that misbehaves in every way that is asked of it."""

import contextlib
import hashlib
import http.server
import re
import shutil
import threading
import time
import types


class Server(http.server.ThreadingHTTPServer):
    """
    Serves `files` (path -> content) at url(path). `bad` (path -> list) says what to do wrong, one a request: 500; cut
    (half of it); stall (ten bytes, then nothing for a while); endless (more and more, until the client hangs up, 20
    requests came or the server is closed); chunked, cut chunks; to file (a redirection).
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.requests = []  # (path, Range header)
        self.closed = False
        self.bad = {}  # path -> list of things to do wrong, one a request
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.closed = True
        self.server_close()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        """As the hub answers for a large file."""
        data = self.server.files.get(self.path)
        self.send_response(404 if data is None else 200)
        if data is not None:
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        wrong = server.bad.get(self.path, [])
        wrong = wrong.pop(0) if wrong else ""
        data = server.files.get(self.path)
        if data is None or wrong == "500":
            self.send_error(404 if data is None else 500)
            return
        if wrong == "to file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        start = 0
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if match:
            start = int(match.group(1))
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        body = data[start:]
        chunked = wrong in ("chunked", "cut chunks")
        if not chunked and wrong != "endless":
            self.send_header("Content-Length", str(len(body)))
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
            half = len(body) // 2
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:]))
            body = chunks[: len(chunks) // 4] if wrong == "cut chunks" else chunks + b"0\r\n\r\n"
        self.end_headers()
        if wrong == "cut":
            body = body[: len(body) // 2]
        if wrong == "endless":
            with contextlib.suppress(OSError):
                while len(server.requests) < 20 and not server.closed:
                    self.wfile.write(bytes(1 << 20))
                    time.sleep(0.01)
            return
        if wrong == "stall":
            self.wfile.write(body[:10])
            self.wfile.flush()
            time.sleep(1.5)
            return
        self.wfile.write(body)


@contextlib.contextmanager
def hub(monkeypatch, files):
    """A hub with `files` (path in a dataset's repository -> content) of the training text, reachable in the block.
    The disk has room, whatever the real one has."""
    from huggingface_hub import constants

    from nanochat_fp4.data import dataset

    prefix = f"/datasets/{dataset.DATASET}/resolve/main/"
    server = Server({prefix + name: content for name, content in files.items()})
    server.prefix = prefix
    monkeypatch.setenv("HF_ENDPOINT", server.url(""))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # conftest set it before the import
    dataset.url_problem.cache_clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**12))
    with contextlib.closing(server):
        yield server
        server.shutdown()
    dataset.url_problem.cache_clear()
