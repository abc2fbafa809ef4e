"""
Sandboxed execution of Python code that a language model wrote (HumanEval).

`execute_code` runs a program in a process of its own and says whether it ran to its end without an exception. What
holds it back, and where that is guaranteed:

| promise                                              | Linux: namespaces      | Linux: landlock         | elsewhere |
|------------------------------------------------------|------------------------|-------------------------|-----------|
| wall-clock deadline, CPU seconds, size of a file,    | kernel                 | kernel                  | kernel    |
| open files, captured output, no inherited environment|                        |                         |           |
| or files, own session, empty folder removed after    |                        |                         |           |
| memory                                               | kernel                 | kernel                  | Linux only|
| no network                                           | kernel                 | kernel                  | hooks     |
| no file outside the folder is written or removed     | kernel                 | kernel                  | hooks     |
| no file but Python's own is read                     | kernel                 | kernel                  | no        |
| total size of what is written                        | kernel (DISK_BYTES)    | no (only each file's)   | no        |
| no signal to other processes                         | kernel                 | kernel                  | hooks     |
| no process is started; what is started anyway is dead| kernel                 | kernel                  | hooks, and|
| when execute_code returns                            |                        |                         | the group |

"kernel": Linux enforces it, whatever the Python code does. "hooks": Python's audit hooks refuse it, which stops
careless code but not code that attacks the interpreter; run such code in a container or a virtual machine.

- namespaces: own mount, process, network and IPC namespaces, root folder in memory with Python's folders read-only,
  the program is user `nobody` without capabilities and process 1 (it takes its children along). Linux 5.12 or newer,
  root or unprivileged user namespaces.
- landlock (Linux 5.13 or newer): for containers, where namespaces are usually refused. Always with seccomp.
- seccomp (x86_64 and aarch64): a filter on system calls, added to both of the above wherever it is available.
- audit: Python's hooks, used only where neither namespaces nor landlock is available: old kernels, macOS.

The strongest set that this machine accepts is found once per process (`sandbox_layers`). The kernel itself is shared,
so a kernel bug is a way out. A completion that wants to cheat shares a process with the tests that judge it and can
forge their result; that is a property of the benchmark. Windows is not supported.
"""

import contextlib
import functools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("execution_child.py")

MAX_OUTPUT_BYTES = 64 * 1024  # of stdout and of stderr; more is read and dropped
FILE_BYTES = 16 * 1024 * 1024  # of one file
DISK_BYTES = 64 * 1024 * 1024  # of all files together, where the folder lies in memory (namespaces)
MAX_PROCESSES = 16  # processes and threads beside those the user has already
EXIT_DEADLINE = 124  # execution_child.py's exit status when it had to kill the program
GRACE_SECONDS = 5.0  # a supervisor that has not ended this long after its deadline is killed from here

# Strongest first. Each is tried with seccomp added and then without, but landlock is never used alone.
_LAYER_SETS = (
    ("namespaces", "seccomp"),
    ("landlock", "seccomp"),
    ("namespaces",),
    ("seccomp", "audit"),
    ("audit",),
)


@dataclass
class ExecutionResult:
    """What came of one program. `success`: it ran to its end; sys.exit(), an exception or a kill is no success."""

    success: bool
    stdout: str
    stderr: str
    error: str | None = None  # one line
    timeout: bool = False
    memory_exceeded: bool = False

    def __repr__(self) -> str:
        shown = {"success": self.success, "timeout": self.timeout, "memory_exceeded": self.memory_exceeded}
        shown.update(error=self.error, stdout=self.stdout, stderr=self.stderr)
        always = ("success",)
        return f"ExecutionResult({', '.join(f'{k}={v!r}' for k, v in shown.items() if v or k in always)})"


class SandboxError(RuntimeError):
    """The sandbox could not be set up; nothing was run."""


def execute_code(
    code: str,
    timeout: float = 5.0,
    maximum_memory_bytes: int | None = 256 * 1024 * 1024,
    layers: tuple[str, ...] | None = None,
) -> ExecutionResult:
    """
    Run `code` in the sandbox and wait for it.

    timeout: wall-clock seconds. maximum_memory_bytes: address space of the process (Linux), None for no limit.
    layers: the layers to use (tests); None takes sandbox_layers().
    Raises SandboxError where no sandbox can be made: code is never run without one.
    """
    if os.name != "posix":
        raise SandboxError("model-written code can be run on Linux and macOS only; use WSL2 or leave HumanEval out")
    layers = sandbox_layers() if layers is None else layers
    folder = tempfile.mkdtemp(prefix="nanochat_sandbox_")
    try:
        return _run(code, timeout, maximum_memory_bytes, layers, folder)
    finally:
        _remove_folder(folder)


@functools.cache
def sandbox_layers() -> tuple[str, ...]:
    """The strongest set of layers that works here, e.g. ("namespaces", "seccomp"). Tried out once per process."""
    reasons = []
    for layers in _LAYER_SETS:
        try:
            if execute_code("pass", layers=layers).success:
                return layers
            reasons.append(f"{'+'.join(layers)}: a program that does nothing fails")
        except SandboxError as e:
            reasons.append(f"{'+'.join(layers)}: {e}")
    raise SandboxError("no sandbox for model-written code works on this machine (" + "; ".join(reasons) + ")")


def describe_sandbox() -> str:
    """One line for logs and reports: which layers are in force and whether the kernel keeps the promises."""
    layers = sandbox_layers()
    kept_by = "Python hooks only: stops accidents, not attacks" if "audit" in layers else "kept by the kernel"
    return f"sandbox: {' + '.join(layers)} ({kept_by})"


def _run(code: str, timeout: float, memory: int | None, layers: tuple[str, ...], folder: str) -> ExecutionResult:
    request = {
        "code": code,
        "timeout": timeout,
        "memory": memory,
        "layers": layers,
        "folder": folder,
        "nonce": secrets.token_hex(16),  # os._exit(0) in the code, or a guess, is not taken for success
        "file_bytes": FILE_BYTES,
        "disk_bytes": DISK_BYTES,
        "processes": _count_tasks() + MAX_PROCESSES,
    }
    captured = {"stdout": bytearray(), "stderr": bytearray(), "result": bytearray()}
    result_read, result_write = os.pipe()
    with open(result_read, "rb", buffering=0), tempfile.TemporaryFile() as request_file:
        request_file.write(json.dumps(request).encode())
        request_file.seek(0)
        try:
            # No preexec_fn: this process may have threads. The environment is made from nothing.
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_CHILD), str(result_write)],
                stdin=request_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(result_write,),
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        finally:
            os.close(result_write)
        with process:
            try:
                fds = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr", result_read: "result"}
                status = _collect(process, fds, captured, time.monotonic() + timeout + GRACE_SECONDS)
            finally:  # Ctrl-C, too
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    return _judge(status, captured, request["nonce"], timeout)


def _collect(process: subprocess.Popen, fds: dict[int, str], captured: dict[str, bytearray], deadline: float):
    """Read the pipes until the supervisor has ended, keeping the first MAX_OUTPUT_BYTES of each. Its exit status."""
    with selectors.DefaultSelector() as selector:
        for fd, name in fds.items():
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, name)
        while True:
            # Not until the end of the pipes: something that outlived the program could hold them open.
            ended = process.poll() is not None
            ready = selector.select(0 if ended else 0.02)
            for key, _ in ready:
                try:
                    data = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    continue
                if not data:
                    selector.unregister(key.fd)
                buffer = captured[key.data]
                buffer += data[: max(0, MAX_OUTPUT_BYTES - len(buffer) + 1)]  # one more shows that it was cut
            if ended and not ready:
                return process.returncode
            if time.monotonic() > deadline:
                return None


def _judge(status: int | None, captured: dict[str, bytearray], nonce: str, timeout: float) -> ExecutionResult:
    def text(name: str) -> str:
        data = bytes(captured[name])
        shown = data[:MAX_OUTPUT_BYTES].decode("utf-8", errors="replace")
        return shown + "\n[output cut here]" if len(data) > MAX_OUTPUT_BYTES else shown

    answer = None
    for line in bytes(captured["result"]).splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            parsed = json.loads(line)
            if parsed.get("nonce") == nonce:
                answer = parsed
    if answer is not None and "setup_error" in answer:
        raise SandboxError(answer["setup_error"])
    result = ExecutionResult(success=False, stdout=text("stdout"), stderr=text("stderr"))
    if status is None or status == EXIT_DEADLINE:
        result.timeout, result.error = True, f"Execution timed out after {timeout:g} s"
    elif answer is None:
        result.error = "the program ended without finishing (killed by a limit, a crash, or os._exit)"
    elif answer.get("memory_exceeded"):
        result.memory_exceeded, result.error = True, "Memory limit exceeded"
    else:
        result.success = answer.get("success") is True
        result.error = None if result.success else str(answer.get("error", ""))[:1000]
    return result


def _count_tasks() -> int:
    """Threads of this user: RLIMIT_NPROC counts them all. 0 where /proc does not say (the limit is then tighter)."""
    count, uid = 0, os.geteuid()
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def _remove_folder(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # folders nested deeper than Python recurses, or something without rights
        subprocess.run(["rm", "-rf", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
