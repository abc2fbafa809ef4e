"""Errors in one line, atomic files, progress, downloads from a bad server, devices, wandb without an account."""

import errno
import hashlib
import http.server
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from nanochat_fp4 import common
from nanochat_fp4.common import Progress, UserError, download_file

# ----------------------------------------------------------------------------------------------------------------------
# run_main


def run(raised, capsys, monkeypatch=None):
    """(exit status, stderr) of a main that raises."""

    def main():
        raise raised

    with pytest.raises(SystemExit) as e:
        common.run_main(main)
    return e.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "raised, status, text",
    [
        (UserError("no data;\n  set DATA_DIR"), 2, "error: no data; set DATA_DIR\n"),
        (ValueError("K=17 is not a multiple of 16"), 2, "error: K=17 is not a multiple of 16\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_user_errors_end_in_one_line(raised, status, text, capsys):
    assert run(raised, capsys) == (status, text)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_the_users_to_fix(number, capsys):
    status, err = run(OSError(number, os.strerror(number), "/some/file"), capsys)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and "/some/file" in err


@pytest.mark.parametrize("bug", [TypeError("bug"), KeyError("x"), OSError(errno.EBADF, "bug")])
def test_bugs_keep_their_traceback(bug):
    def main():
        raise bug

    with pytest.raises(type(bug)):
        common.run_main(main)


def test_out_of_gpu_memory_names_the_flag(capsys):
    status, err = run(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0"), capsys)
    assert status == 2 and "--device-batch-size" in err and err.count("\n") == 1


def test_other_ranks_name_themselves_and_tracebacks_come_on_request(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert run(UserError("bad"), capsys)[1] == "error (rank 3): bad\n"
    monkeypatch.setenv("NANOCHAT_TRACEBACK", "1")
    assert "Traceback" in run(UserError("bad"), capsys)[1]


def test_run_main_returns_when_all_is_well():
    assert common.run_main(lambda: 1) is None


# ----------------------------------------------------------------------------------------------------------------------
# Files


def test_base_dir_is_created(base_dir):
    assert common.get_base_dir() == str(base_dir) and base_dir.is_dir()


def test_base_dir_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="NANOCHAT_BASE_DIR"):
        common.get_base_dir()


def test_atomic_write_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.json"
    common.atomic_write(path, "old")
    common.atomic_write(path, b"n\xc3\xa9w")
    assert path.read_text(encoding="utf-8") == "néw"
    assert os.listdir(tmp_path) == ["a.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_atomic_open_keeps_the_old_content_on_an_exception(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(RuntimeError):
        with common.atomic_open(path) as f:
            f.write(b"half")
            raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_reader_never_sees_a_part(tmp_path):
    path, size = tmp_path / "a", 200_000
    common.atomic_write(path, b"0" * size)
    seen, done = set(), threading.Event()

    def read():
        while not done.is_set():
            data = path.read_bytes()
            seen.add((len(data), len(set(data))))

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(60):
        common.atomic_write(path, bytes([48 + i % 10]) * size)
    done.set()
    thread.join()
    assert seen == {(size, 1)}


def test_formats():
    assert [common.format_bytes(n) for n in (12, 1536, 5 << 20, 3 << 40)] == ["12 bytes", "1.5 KB", "5.0 MB", "3.0 TB"]
    assert [common.format_seconds(s) for s in (3, 75, 7500)] == ["3s", "1m15s", "2h05m"]
    assert common.one_line("a\n  b") == "a b" and common.one_line(KeyError()) == "KeyError"


# ----------------------------------------------------------------------------------------------------------------------
# Progress


def test_progress_in_a_log_is_plain_lines():
    out = io.StringIO()
    with Progress(total=200, desc="train", unit="step", every=0, file=out) as progress:
        progress.start -= 10  # as if ten seconds had passed
        progress.update(50, loss="2.31")
    first, last = out.getvalue().splitlines()
    assert re.fullmatch(r"train: 50/200 \(25%\) step \| [45][.\d]* step/s \| ETA 30s \| loss 2.31", first), first
    assert last.startswith("train: 50/200") and "\r" not in out.getvalue()


def test_progress_is_quiet_between_lines_and_on_other_ranks(monkeypatch):
    out = io.StringIO()
    with Progress(total=1000, every=60, file=out) as progress:
        for _ in range(1000):
            progress.update()
    assert len(out.getvalue().splitlines()) == 1
    monkeypatch.setenv("RANK", "1")
    with Progress(total=3, every=0, file=out) as progress:
        progress.update(3)
        progress.write("no")
    assert len(out.getvalue().splitlines()) == 1


def test_progress_on_a_terminal_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Progress(total=4, desc="work", file=out) as progress:
        progress.update(4, loss="1.0")
        progress.write("a line")
    assert "work" in out.getvalue() and "\r" in out.getvalue() and "a line\n" in out.getvalue()


def test_progress_counts_from_several_threads():
    progress = Progress(total=8000, every=1e9, file=io.StringIO())
    threads = [threading.Thread(target=lambda: [progress.update() for _ in range(1000)]) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert progress.n == 8000


def test_progress_iter():
    out = io.StringIO()
    assert list(common.progress_iter([1, 2, 3], desc="x", file=out)) == [1, 2, 3]
    assert out.getvalue().startswith("x: 3/3 (100%)")


# ----------------------------------------------------------------------------------------------------------------------
# Downloads: a server that misbehaves in every way that is asked of it


class Server(http.server.ThreadingHTTPServer):
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
        if wrong != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if wrong == "cut":
            body = body[: len(body) // 2]
        if wrong == "stall":
            self.wfile.write(body[:10])
            self.wfile.flush()
            time.sleep(1.5)
            return
        self.wfile.write(body)


class NoWait(threading.Event):
    """A stop event whose wait costs nothing, and notes how long it was to be."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        return False


DATA = random.Random(0).randbytes(300_000)


@pytest.fixture
def server():
    server = Server({"/f": DATA})
    yield server
    server.shutdown()
    server.server_close()


def test_download(server, tmp_path):
    progress = Progress(total=len(DATA), unit="bytes", every=1e9, file=io.StringIO())
    assert download_file(server.url("/f"), tmp_path / "f", progress=progress) == str(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA and progress.n == len(DATA) and os.listdir(tmp_path) == ["f"]


def test_download_continues_what_was_begun(server, tmp_path):
    (tmp_path / "f.part").write_bytes(DATA[:123_456])
    download_file(server.url("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert server.requests == [("/f", "bytes=123456-")]


def test_download_of_a_complete_part_fetches_nothing(server, tmp_path):
    (tmp_path / "f.part").write_bytes(DATA)
    download_file(server.url("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_drops_a_part_that_is_too_long(server, tmp_path):
    (tmp_path / "f.part").write_bytes(DATA + b"more")
    download_file(server.url("/f"), tmp_path / "f", stop=NoWait())
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_from_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    server.bad["/f"] = ["cut", "cut"]
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    progress = Progress(total=len(DATA), unit="bytes", every=1e9, file=io.StringIO())
    download_file(server.url("/f"), tmp_path / "f", stop=NoWait(), progress=progress)
    assert (tmp_path / "f").read_bytes() == DATA and progress.n == len(DATA)


def test_download_survives_cuts_and_errors(server, tmp_path):
    server.bad["/f"] = ["500", "cut", "cut", "500"]
    stop = NoWait()
    progress = Progress(total=len(DATA), unit="bytes", every=1e9, file=io.StringIO())
    download_file(server.url("/f"), tmp_path / "f", stop=stop, progress=progress)
    assert (tmp_path / "f").read_bytes() == DATA and progress.n == len(DATA)
    assert stop.waits == [1, 2, 4, 8]  # backs off
    assert [r for _, r in server.requests] == [None, None, "bytes=150000-", "bytes=225000-", "bytes=225000-"]


def test_download_checks_size_and_hash(server, tmp_path):
    with pytest.raises(UserError, match="300000 bytes arrived instead of 300001"):
        download_file(server.url("/f"), tmp_path / "f", size=300_001, attempts=2, stop=NoWait())
    with pytest.raises(UserError, match="SHA-256"):
        download_file(server.url("/f"), tmp_path / "g", sha256="0" * 64, attempts=2, stop=NoWait())
    assert not (tmp_path / "f").exists() and not (tmp_path / "g").exists()


def test_download_checks_the_hash_that_a_hub_publishes_when_it_redirects(server, tmp_path):
    server.headers["/f"] = {"X-Linked-ETag": f'"{hashlib.sha256(DATA).hexdigest()}"', "X-Linked-Size": str(len(DATA))}
    server.bad["/real/f"] = ["flip"]
    stop = NoWait()
    download_file(server.url("/f"), tmp_path / "f", stop=stop)
    assert (tmp_path / "f").read_bytes() == DATA and stop.waits == [1]  # the flipped one was thrown away


def test_download_rejected_by_the_caller(server, tmp_path):
    def validate(path):
        raise UserError("not parquet")

    with pytest.raises(UserError, match="not parquet.*2 attempts.*set DATA_DIR"):
        download_file(
            server.url("/f"), tmp_path / "f", validate=validate, attempts=2, stop=NoWait(), hint="set DATA_DIR"
        )
    assert os.listdir(tmp_path) == []


def test_download_gives_up_at_once_where_trying_again_is_no_use(server, tmp_path):
    with pytest.raises(UserError, match=r"404 Not Found \(1 attempt\); use --embedded"):
        download_file(server.url("/nothing"), tmp_path / "f", hint="use --embedded")


def test_download_with_nobody_there(tmp_path):
    stop = NoWait()
    with pytest.raises(UserError, match="could not download http://127.0.0.1:9/f: .*refused.*3 attempts"):
        download_file("http://127.0.0.1:9/f", tmp_path / "f", attempts=3, stop=stop)
    assert len(stop.waits) == 2


def test_download_has_a_deadline(server, tmp_path):
    server.bad["/f"] = ["stall"] * 9
    start = time.monotonic()
    with pytest.raises(UserError, match="not finished within 0.5 seconds"):
        download_file(server.url("/f"), tmp_path / "f", deadline=0.5, timeout=0.3, stop=NoWait())
    assert time.monotonic() - start < 10  # nine stalls take longer


def test_download_can_be_stopped(server, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(UserError, match="stopped"):
        download_file(server.url("/f"), tmp_path / "f", stop=stop)


def test_download_with_lock_downloads_once(server, base_dir):
    seen = []

    def fetch():
        common.download_file_with_lock(server.url("/f"), "words.txt", lambda path: seen.append(os.path.exists(path)))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(server.requests) == 1 and seen == [True]
    assert (base_dir / "words.txt").read_bytes() == DATA


def test_download_with_lock_forgets_a_file_whose_postprocessing_failed(server, base_dir):
    def fail(path):
        raise UserError("bad archive")

    with pytest.raises(UserError, match="bad archive"):
        common.download_file_with_lock(server.url("/f"), "bundle.zip", fail)
    assert not (base_dir / "bundle.zip").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Devices, ranks, seeds


def test_compute_init_returns_nanochats_tuple():
    assert common.compute_init("cpu") == (False, 0, 0, 1, torch.device("cpu"))
    a = torch.rand(4)
    common.compute_init("cpu")
    assert torch.equal(a, torch.rand(4))
    common.compute_cleanup()


def test_unknown_device_type():
    with pytest.raises(UserError, match="'tpu'.*cuda, mps or cpu"):
        common.compute_init("tpu")


@pytest.mark.parametrize("version, text", [("12.8", "sees no GPU"), (None, "built without CUDA")])
def test_cuda_without_a_gpu(monkeypatch, version, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(UserError, match=f"--device-type cuda.*{text}.*--device-type cpu"):
        common.compute_init("cuda")


def test_autodetect_prefers_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert common.autodetect_device_type() == "cuda"
    assert "cuda" in capsys.readouterr().out


@pytest.mark.parametrize(
    "env", [{"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}]
)
def test_bad_torchrun_variables(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun"):
        common.get_dist_info()


def test_seeds():
    def draw(*args):
        common.seed_everything(*args)
        return random.random(), *torch.rand(3).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert draw(1, 0) == draw(1, 0)
    assert len({draw(seed, rank) for seed in (1, 2) for rank in (0, 1, None)}) == 6


def test_two_processes_join_over_gloo():
    code = (
        "import torch, torch.distributed as dist\n"
        "from nanochat_fp4.common import *\n"
        "ddp, rank, local_rank, world_size, device = compute_init('cpu')\n"
        "same = torch.rand(1)\n"
        "seed_everything(42, rank)\n"
        "t = torch.cat([same, torch.rand(1)])\n"
        "out = [torch.empty(2) for _ in range(2)]\n"
        "dist.all_gather(out, t)\n"
        "assert out[0][0] == out[1][0] and out[0][1] != out[1][1]\n"
        "print0('rank', rank, 'of', world_size, dist.get_backend())\n"
        "compute_cleanup()\n"
    )
    outputs = run_ranks(code, 2)
    assert outputs == ["rank 0 of 2 gloo\n", ""]


def run_ranks(code, world_size, env=None):
    """stdout of `python -c code` as every rank of a gloo group; fails with stderr where one does not exit with 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common_env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common_env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    procs = []
    for rank in range(world_size):
        rank_env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        procs.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**common_env, **rank_env, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = [p.communicate(timeout=300) for p in procs]
    for p, (_, err) in zip(procs, results):
        assert p.returncode == 0, err
    return [out for out, _ in results]


# ----------------------------------------------------------------------------------------------------------------------
# wandb


class FakeWandb(types.ModuleType):
    """Records the modes of init; fails in those given."""

    def __init__(self, fail=()):
        super().__init__("wandb")
        self.fail, self.modes = fail, []

    @staticmethod
    def Settings(**kwargs):
        assert kwargs["init_timeout"] > 0
        return kwargs

    def init(self, mode, settings, **kwargs):
        self.modes.append(mode)
        if mode in self.fail:
            raise RuntimeError(f"{mode} failed")
        return types.SimpleNamespace(mode=mode, dir=os.path.join(kwargs["dir"], "wandb", "run-1", "files"))


@pytest.fixture
def no_account(monkeypatch, tmp_path, base_dir):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize("run", ["dummy", "", None])
def test_no_wandb_unless_asked_for(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wandb_run = common.setup_wandb(run, "nanochat", {})
    assert isinstance(wandb_run, common.DummyWandb)
    wandb_run.log({"loss": 1}, step=1)
    wandb_run.finish()


def test_other_ranks_do_not_log(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert isinstance(common.setup_wandb("run", "nanochat", {}), common.DummyWandb)


def test_without_an_account_wandb_is_offline(no_account, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    assert common.setup_wandb("run", "nanochat", {}).mode == "offline"
    assert fake.modes == ["offline"] and "wandb sync" in capsys.readouterr().out


def test_with_an_account_wandb_is_online(no_account, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assert common.setup_wandb("run", "nanochat", {}).mode == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    common.setup_wandb("run", "nanochat", {})
    assert fake.modes == ["online", "disabled"]


def test_wandb_that_does_not_answer_does_not_stop_the_run(no_account, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb(fail=["online"]))
    assert common.setup_wandb("run", "nanochat", {}).mode == "offline" and fake.modes == ["online", "offline"]
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail=["online", "offline"]))
    assert isinstance(common.setup_wandb("run", "nanochat", {}), common.DummyWandb)


def test_wandb_asked_for_but_not_installed(no_account, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        common.setup_wandb("run", "nanochat", {})


# ----------------------------------------------------------------------------------------------------------------------
# Hardware


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_peak_flops(name, tflops):
    assert common.get_peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_environment_info_can_be_stored():
    info = json.loads(json.dumps(common.environment_info()))
    assert info["torch"] == torch.__version__ and info["cpu"] and info["cpu_count"] >= 1
    assert (info["gpu"] is None) == (not torch.cuda.is_available())
    assert {"python", "triton", "driver", "commit", "gpu_count", "platform"} <= set(info)
