"""A headless Chromium driven through its own protocol over a pipe: no driver, no package.

docs/pictures/ are made with it: python tests/_browser.py URL docs/pictures/report 760 900, and for the chat page
python tests/_browser.py URL docs/pictures/chat 760 900 "Hello! Who are you?"
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """with Browser(folder, width=..., dark=...) as page: page.open(url); page.run("1 + 1") == 2. A browser that does
    not answer within `seconds` is killed."""

    seconds = 120

    def __init__(self, folder, width=1100, height=800, dark=False):
        self.folder, self.size, self.dark = folder, (width, height), dark
        self.number, self.session = 0, None

    def __enter__(self):
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio",
            "--no-first-run", "--disable-extensions", "--remote-debugging-pipe", f"--user-data-dir={self.folder}",
            "about:blank",
        ]  # fmt: skip

        # Chromium reads commands from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec 3<&{to_read} 4>&{to_write}; exec "$@"', "chromium", *command]
        self.process = subprocess.Popen(
            shell, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.buffer = b""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        width, height = self.size
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)

    def send(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.seconds
        while True:
            while b"\0" not in self.buffer:
                if not select.select([self.read], [], [], max(0.0, end - time.monotonic()))[0]:
                    self.process.kill()
                    raise AssertionError(f"the browser does not answer {message}")
                part = os.read(self.read, 1 << 16)
                assert part, "the browser has gone"
                self.buffer += part
            line, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url):
        self.send("Page.navigate", url=url)

    def run(self, javascript):
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=javascript, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, javascript, seconds=120):
        """Until the expression is true; the limit is for what hangs."""
        end = time.monotonic() + seconds
        while not (value := self.run(javascript)):
            assert time.monotonic() < end, f"never true: {javascript}; the page: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def type(self, text):
        """Into whatever has the focus, as a keyboard does."""
        self.send("Input.insertText", text=text)

    def press(self, key):
        code = {"Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def screenshot(self):
        """PNG, base64."""
        return self.send("Page.captureScreenshot")["data"]


def pictures(url, name, width, height, question=""):
    """<name>_light.png and <name>_dark.png of a page; of the chat page after the answer to a question."""
    for scheme in ("light", "dark"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            with Browser(folder, int(width), int(height), scheme == "dark") as page:
                page.open(url)
                page.wait("document.readyState === 'complete'")
                time.sleep(1)
                if question:
                    page.wait("!document.querySelector('#send').disabled")
                    page.run("document.querySelector('textarea').focus()")
                    page.type(question)
                    page.press("Enter")
                    time.sleep(2)
                    page.wait("!document.querySelector('#send').disabled")
                    page.run("document.activeElement.blur()")
                with open(f"{name}_{scheme}.png", "wb") as f:
                    f.write(base64.b64decode(page.screenshot()))


if __name__ == "__main__":
    pictures(*sys.argv[1:])
