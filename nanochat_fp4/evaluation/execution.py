"""
Sandboxed execution of Python code that a language model wrote (HumanEval).

`execute_code` runs a program in a process of its own. A second process, the judge, tests the program's function.
The program reaches neither the tests nor the verdict: arguments and results pass between the two as plain values.
GUARANTEES lists the promises and who keeps each of them. docs/sandbox.md has the same table with the tests.

- namespaces: own mount, process, network and IPC namespaces. The root folder lies in memory, with Python's folders
  read-only. The program is user `nobody` without capabilities. Process 1 ends all others when it ends. Needs Linux 5.12
  and either root or unprivileged user namespaces.
- landlock (Linux 5.13): for containers, which usually refuse namespaces. Always with seccomp.
- seccomp (x86_64 and aarch64): a list of allowed system calls. Always with both of the above.
- audit: Python's hooks, used only without namespaces and landlock (old kernels, macOS). They stop careless code but no
  attack on the interpreter. Run such code in a container or a virtual machine.

`sandbox_layers` finds the strongest set that this machine accepts, once per process. All processes share the kernel: a
kernel bug is a way out. Windows is not supported.
"""

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).resolve().with_name("sandbox")

MAX_OUTPUT_BYTES = 64 * 1024  # Of stdout and of stderr. More is read and dropped.
FILE_BYTES = 16 * 1024 * 1024  # Of one file.
DISK_BYTES = 64 * 1024 * 1024  # All files together, where the folder lies in memory (namespaces).
MAX_PROCESSES = 16  # Processes and threads beside those that the user has already.
MAX_FILES = 4096  # Files, folders and links in the program's folder.
NOBODY = 65534  # The user of a program in namespaces, where root starts it.
SETUP_SECONDS = 30.0  # The limit for setting up in sandbox/__main__.py. The deadline follows.
GRACE_SECONDS = 5.0  # A supervisor that has not reported this long after its deadline is killed.
CLEANING_SECONDS = 5.0  # After this a supervisor that removes files goes on in the background.

# Strongest first. A machine of x86_64 or aarch64 without seccomp is not known, so namespaces are not tried alone.
LAYER_SETS = (
    ("namespaces", "seccomp"),
    ("landlock", "seccomp"),
    ("seccomp", "audit"),
    ("audit",),
)


# The keepers of each promise: namespaces + seccomp, landlock + seccomp, neither.
# "kernel" and "supervisor" hold whatever the code does. "hooks" (Python's) hold until the code attacks the interpreter.
GUARANTEES = {
    "the deadline; what it writes as a result or prints is never an error of the evaluation": ("supervisor",) * 3,
    "processor seconds, open files, size of a file, address space (the last on Linux)": ("kernel",) * 3,
    "a program reaches neither the tests that judge it nor the verdict": ("kernel", "kernel", "hooks"),
    "no memory beside it: memfds, files in flight, large pipes, locks": ("kernel", "kernel", "no"),
    "number and size of all files together": ("kernel", "supervisor", "supervisor"),
    "number of threads": ("kernel", "supervisor", "supervisor"),
    "no file outside its folder is changed": ("kernel", "kernel", "hooks"),
    "no file outside is read but Python's own": ("kernel", "kernel", "no"),
    "names, sizes and owners of files and processes are not seen": ("kernel", "no", "no"),
    "no network, no socket of another process": ("kernel", "kernel", "hooks"),
    "no signal to another process, by kill() or by descriptor": ("kernel", "kernel", "hooks"),
    "no process or program is started": ("kernel", "kernel", "hooks"),
    "nothing runs on when it is over or the trainer is killed": ("kernel", "kernel", "hooks"),
    "no capabilities and no way back to them": ("kernel", "kernel", "no"),
    "no system call but those a program needs; no foreign ABI": ("kernel", "kernel", "no"),
    "no inherited environment and files; its folder is empty and goes": ("supervisor",) * 3,
}

_cleaning: list[subprocess.Popen] = []  # supervisors that still remove files


@dataclass
class ExecutionResult:
    """What came of one program. sys.exit(), an exception or a kill is no success."""

    success: bool
    stdout: str
    stderr: str
    error: str | None = None  # one line
    timeout: bool = False
    memory_exceeded: bool = False


class SandboxError(RuntimeError):
    """The sandbox could not be set up; nothing was run."""


def execute_code(
    code: str,
    timeout: float = 5.0,
    maximum_memory_bytes: int | None = 256 * 1024 * 1024,
    layers: tuple[str, ...] | None = None,
    *,
    tests: str = "",
    function: str = "",
) -> ExecutionResult:
    """
    Run `code` in the sandbox, then `tests` against it in another process of the sandbox, and wait for both.

    timeout: wall-clock seconds. maximum_memory_bytes: address space of each process (Linux), None for no limit.
    layers: the layers to use, for tests. None takes sandbox_layers().
    tests: Python code that knows the code's `function` as `candidate`, which takes and returns numbers, text and
    collections of them (sandbox/judge.py's encode). Without tests, success is the code's own word.
    Raises SandboxError where no sandbox can be made: code is never run without one.
    """
    if os.name != "posix":
        raise SandboxError("model-written code can be run on Linux and macOS only; use WSL2 or leave HumanEval out")
    layers = sandbox_layers() if layers is None else layers
    try:
        return run_in_sandbox(
            {"code": code, "tests": tests, "function": function}, timeout, maximum_memory_bytes, layers
        )
    except OSError as e:  # no processes, files or disk space to be had here; nothing that the program could cause
        raise SandboxError(f"{type(e).__name__}: {e}") from e


@functools.cache
def sandbox_layers() -> tuple[str, ...]:
    """The strongest set of layers that works here, e.g. ("namespaces", "seccomp"). Tried out once per process."""
    reasons = []
    for layers in LAYER_SETS:
        try:
            if execute_code("pass", layers=layers).success:
                return layers
            reasons.append(f"{'+'.join(layers)}: a program that does nothing fails")
        except SandboxError as e:
            reasons.append(f"{'+'.join(layers)}: {e}")
    raise SandboxError("no sandbox for model-written code works on this machine (" + "; ".join(reasons) + ")")


def missing_guarantees(layers: tuple[str, ...]) -> list[str]:
    """The promises of GUARANTEES that neither the kernel nor the supervisor keeps with these layers."""
    column = 0 if "namespaces" in layers else 1 if "landlock" in layers else 2
    return [promise for promise, kept_by in GUARANTEES.items() if kept_by[column] in ("no", "hooks")]


def describe_sandbox() -> str:
    """One line for logs and reports: which layers are in force and what cannot be guaranteed with them."""
    layers = sandbox_layers()
    kept_by = "Python hooks only: stops accidents, not attacks" if "audit" in layers else "kept by the kernel"
    line = f"sandbox: {' + '.join(layers)} ({kept_by})"
    missing = missing_guarantees(layers)
    return f"{line}. Not guaranteed here: {'; '.join(missing)}" if missing else line


def run_in_sandbox(task: dict, timeout: float, memory: int | None, layers: tuple[str, ...]) -> ExecutionResult:
    folder = tempfile.mkdtemp(prefix="nanochat_sandbox_")
    request = {
        "timeout": timeout,
        "memory": memory,
        "layers": layers,
        "folder": folder,
        "trainer": os.getpid(),
        "file_bytes": FILE_BYTES,
        "disk_bytes": DISK_BYTES,
        "files": MAX_FILES,
        "tasks": _count_tasks(NOBODY if "namespaces" in layers and os.geteuid() == 0 else os.geteuid()),
        "processes": MAX_PROCESSES,
    }
    process, captured = None, {name: bytearray() for name in ("report", "result", "stdout", "stderr")}
    try:
        with contextlib.ExitStack() as ours:
            fds: dict[int, str] = {}
            with contextlib.ExitStack() as theirs:
                ends = {}
                for name in captured:
                    read, ends[name] = os.pipe()
                    ours.callback(os.close, read)
                    theirs.callback(os.close, ends[name])
                    fds[read] = name
                request.update(report_fd=ends["report"], result_fd=ends["result"])
                task_file = theirs.enter_context(tempfile.TemporaryFile())
                task_file.write(json.dumps(task).encode())
                task_file.seek(0)
                # No preexec_fn: this process may have threads. The environment is made from nothing.
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", str(_CHILD), json.dumps(request)],
                    stdin=task_file,
                    stdout=ends["stdout"],
                    stderr=ends["stderr"],
                    pass_fds=(ends["report"], ends["result"]),
                    cwd="/",
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            _collect(process, fds, captured, time.monotonic() + SETUP_SECONDS + timeout + GRACE_SECONDS)
    finally:  # Ctrl-C, too: a supervisor whose report nobody reads any more ends the program
        _see_off(process, folder, reported=b"outcome" in captured["report"])
    return _verdict(captured, timeout)


def _collect(process: subprocess.Popen, fds: dict[int, str], captured: dict[str, bytearray], deadline: float) -> None:
    """Read the pipes until the supervisor reports the end, keeping the first MAX_OUTPUT_BYTES of each."""
    with selectors.DefaultSelector() as selector:
        for fd, name in fds.items():
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, name)
        while time.monotonic() < deadline:
            # Not until the end of the pipes: something that outlived the program could hold them open.
            ended = b"outcome" in captured["report"] or process.poll() is not None
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
                return


def _see_off(process: subprocess.Popen | None, folder: str, reported: bool) -> None:
    """Wait until the supervisor has removed the folder, but not long."""
    _cleaning[:] = [p for p in _cleaning if p.poll() is None]
    if process is not None:
        try:
            process.wait(CLEANING_SECONDS)
        except subprocess.TimeoutExpired:
            if reported:
                _cleaning.append(process)
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if os.path.exists(folder):  # the supervisor was killed, or never started
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            command = [sys.executable, "-I", "-B", str(_CHILD), "remove", folder]
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CLEANING_SECONDS)


def _verdict(captured: dict[str, bytearray], timeout: float) -> ExecutionResult:
    def text(name: str) -> str:
        data = bytes(captured[name])
        shown = data[:MAX_OUTPUT_BYTES].decode("utf-8", errors="replace")
        return shown + "\n[output cut here]" if len(data) > MAX_OUTPUT_BYTES else shown

    # The program can write neither the report nor the result.
    report: dict = {}
    for line in bytes(captured["report"]).splitlines():
        report.update(json.loads(line))
    if not report.get("ready"):
        said = " ".join(text("stderr").strip().splitlines()[-1:])
        raise SandboxError(report.get("setup_error", f"its supervisor ended before the program began. {said}".strip()))
    answer, outcome = bytes(captured["result"]), report.get("outcome", "its supervisor was killed")
    result = ExecutionResult(success=False, stdout=text("stdout"), stderr=text("stderr"))
    if outcome == "deadline":
        result.timeout, result.error = True, f"Execution timed out after {timeout:g} s"
    elif outcome != "ended":
        result.error = f"the program was ended: {outcome}"
    elif answer == b"memory":
        result.memory_exceeded, result.error = True, "Memory limit exceeded"
    elif answer == b"passed":
        result.success = True
    else:
        result.error = answer.decode("utf-8", errors="replace").removeprefix("error ") or "the judge was killed"
    return result


def _count_tasks(uid: int) -> int:
    """Threads of a user: RLIMIT_NPROC counts them all. 0 where /proc does not say (the limit is then tighter)."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count
