"""An HTTP server of this process that misbehaves in every way that is asked of it."""

import contextlib
import http.server
import re
import threading
import time


class Server(http.server.ThreadingHTTPServer):
    """
    Serves `files` (path -> content) at url(path). `bad` (path -> list) says what to do wrong, one a request:
    500; flip (every byte); cut (half of it); stall (ten bytes, then nothing for a while); no length (in the header);
    endless (more and more, until the client hangs up or 20 requests came).
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.requests = []  # (path, Range header)
        self.bad = {}  # path -> list of things to do wrong, one a request
        self.headers = {}  # path -> headers of the redirecting answer
        self.ranges = True
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.send_response(200 if self.path in self.server.files else 404)
        self.end_headers()

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        if self.path in server.headers:
            self.send_response(302)
            for name, value in server.headers[self.path].items():
                self.send_header(name, value)
            self.send_header("Location", "/real" + self.path)
            self.end_headers()
            return
        wrong = server.bad.get(self.path, [])
        wrong = wrong.pop(0) if wrong else ""
        data = server.files.get(self.path.removeprefix("/real"))
        if data is None or wrong == "500":
            self.send_error(404 if data is None else 500)
            return
        start = 0
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if match and server.ranges:
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
        if wrong == "flip":
            body = bytes(b ^ 1 for b in body)
        if wrong not in ("no length", "endless"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if wrong == "cut":
            body = body[: len(body) // 2]
        if wrong == "endless":
            with contextlib.suppress(OSError):
                while len(server.requests) < 20:
                    self.wfile.write(bytes(1 << 20))
                    time.sleep(0.01)
            return
        if wrong == "stall":
            self.wfile.write(body[:10])
            self.wfile.flush()
            time.sleep(1.5)
            return
        self.wfile.write(body)
