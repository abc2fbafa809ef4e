"""
Execution of Python code that a language model wrote (HumanEval) in a sandbox.

    execute_code("def f(x): return 2 * x", tests="assert candidate(3) == 6", function="f").success

**Processes.** `execute_code` runs in the trainer. It starts a supervisor, which starts a judge and the program. The
program has neither the tests nor the verdict: the judge reads the tests, and arguments and results pass between judge
and program as plain values (sandbox/judge.py). The supervisor keeps the deadline, and removes the folder at the end.

**What a program may do.** It computes, reads Python's own files, writes into an empty folder of its own, prints, starts
some threads, and uses pipes and pairs of sockets within itself. It may do this until its deadline, in the memory and on
the disk that it is given. Everything else is refused: other files, the network, other processes, signals to them, new
programs, devices, rights.

**Who refuses it.** There are three ways, and `sandbox_layers` takes the first that the machine accepts:

1. namespaces + seccomp. The kernel gives the program an own root folder in memory, own process, network and IPC
   namespaces, the user `nobody` without capabilities, and a list of allowed system calls. This needs Linux 5.12, and
   root or unprivileged user namespaces. All promises hold.
2. landlock + seccomp, for containers, which usually refuse namespaces. The kernel restricts files and system calls.
   This needs Linux 5.13. The program can see the names and sizes of foreign files and processes, and the supervisor,
   which looks every tenth of a second, counts its files and threads.
3. audit, alone or with seccomp, on old kernels and macOS. Python's own hooks refuse changes of foreign files, sockets,
   processes and signals, but no reading. They stop careless code, and not an attack on the interpreter. Run such code
   in a container or a virtual machine.

GUARANTEES says for each promise who keeps it in each of the three cases: the "kernel" against any code; the
"supervisor", which the kernel protects in the first two; or the "hooks", against accidents (docs/sandbox.md).
`describe_sandbox` prints the promises that are not kept on this machine.

**What no layer refuses.** The program shares the processor, the disk and the kernel, so a bug of the kernel is a way
out. Windows is not supported: there no code is run.
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

MAX_OUTPUT_BYTES = 64 * 1024  # The limit for each of stdout and stderr. Further output is read and dropped.
FILE_BYTES = 16 * 1024 * 1024  # The limit for one file.
DISK_BYTES = 64 * 1024 * 1024  # The limit for all files together, if the folder is in memory (namespaces).
MAX_PROCESSES = 16  # The number of processes and threads besides those that the user already has.
MAX_FILES = 4096  # The number of files, folders and links in the program's folder.
NOBODY = 65534  # The user of a program in namespaces, if root starts it.
SETUP_SECONDS = 30.0  # The limit for the set-up in sandbox/__main__.py. The program's deadline begins after it.
GRACE_SECONDS = 5.0  # A supervisor that has not reported so long after its deadline is killed.
CLEANING_SECONDS = 5.0  # After this time a supervisor that removes files goes on in the background.

# The strongest set comes first. Namespaces are not tried alone, because every machine of x86_64 or aarch64 is expected
# to have seccomp.
LAYER_SETS = (
    ("namespaces", "seccomp"),
    ("landlock", "seccomp"),
    ("seccomp", "audit"),
    ("audit",),
)

# For each promise who keeps it: with namespaces + seccomp, with landlock + seccomp, with neither.
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

_cleaning: list[subprocess.Popen] = []  # These supervisors still remove files.


@dataclass
class ExecutionResult:
    """The result of one program. A program that ends by sys.exit(), an exception or a kill has no success. `error`
    is one line."""

    success: bool
    stdout: str
    stderr: str
    error: str | None = None
    timeout: bool = False
    memory_exceeded: bool = False


class SandboxError(RuntimeError):
    """The error for a sandbox that could not be set up. In this case no code has run."""


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
    Runs `code` in the sandbox, then `tests` against it in another process of the sandbox, and waits for both.

    - timeout: the limit in seconds of wall-clock time
    - maximum_memory_bytes: the address space of each process (Linux), or None for no limit
    - layers: the layers to use, which is for tests. None takes sandbox_layers().
    - tests: Python code that calls the code's `function` as `candidate`, which takes and returns numbers, text and
      collections of them (see encode in sandbox/judge.py). Without tests, code that ends normally is a success.

    Raises SandboxError if no sandbox can be made, because code is never run without one.
    """
    if os.name != "posix":
        raise SandboxError("model-written code can be run on Linux and macOS only; use WSL2 or leave HumanEval out")
    layers = sandbox_layers() if layers is None else layers
    task = {"code": code, "tests": tests, "function": function}
    try:
        return run_in_sandbox(task, timeout, maximum_memory_bytes, layers)
    except OSError as e:  # No processes, files or disk space can be had here. The program cannot be the cause of this.
        raise SandboxError(f"{type(e).__name__}: {e}") from e


@functools.cache
def sandbox_layers() -> tuple[str, ...]:
    """Returns the strongest set of layers that works here, for example ("namespaces", "seccomp"). The sets are tried
    once in each process. Raises SandboxError if no set works."""
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
    """Returns the promises of GUARANTEES that neither the kernel nor the supervisor keeps with these layers."""
    column = 0 if "namespaces" in layers else 1 if "landlock" in layers else 2
    return [promise for promise, kept_by in GUARANTEES.items() if kept_by[column] in ("no", "hooks")]


def describe_sandbox() -> str:
    """Returns one line for logs and reports, which names the layers in use and the promises that they do not keep."""
    layers = sandbox_layers()
    kept_by = "Python hooks only: stops accidents, not attacks" if "audit" in layers else "kept by the kernel"
    line = f"sandbox: {' + '.join(layers)} ({kept_by})"
    missing = missing_guarantees(layers)
    return f"{line}. Not guaranteed here: {'; '.join(missing)}" if missing else line


def run_in_sandbox(task: dict, timeout: float, memory: int | None, layers: tuple[str, ...]) -> ExecutionResult:
    """Runs a task (code, tests and function) with these layers, and returns its result. Raises SandboxError if the
    layers cannot be set up."""
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
        with contextlib.ExitStack() as own_ends:
            fds: dict[int, str] = {}
            with contextlib.ExitStack() as child_ends:
                write_ends = {}
                for name in captured:
                    read, write_ends[name] = os.pipe()
                    own_ends.callback(os.close, read)
                    child_ends.callback(os.close, write_ends[name])
                    fds[read] = name
                request.update(report_fd=write_ends["report"], result_fd=write_ends["result"])
                task_file = child_ends.enter_context(tempfile.TemporaryFile())
                task_file.write(json.dumps(task).encode())
                task_file.seek(0)
                # There is no preexec_fn, because this process may have threads. The environment does not inherit any
                # variable.
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", str(_CHILD), json.dumps(request)],
                    stdin=task_file,
                    stdout=write_ends["stdout"],
                    stderr=write_ends["stderr"],
                    pass_fds=(write_ends["report"], write_ends["result"]),
                    cwd="/",
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            _collect(process, fds, captured, time.monotonic() + SETUP_SECONDS + timeout + GRACE_SECONDS)
    finally:
        # This is also done after Ctrl-C. When nobody reads the supervisor's report any more, the supervisor ends the
        # program.
        _see_off(process, folder, reported=b"outcome" in captured["report"])
    return _verdict(captured, timeout)


def _collect(process: subprocess.Popen, fds: dict[int, str], captured: dict[str, bytearray], deadline: float) -> None:
    """Reads the pipes until the supervisor reports the end. Keeps the first MAX_OUTPUT_BYTES of each pipe."""
    with selectors.DefaultSelector() as selector:
        for fd, name in fds.items():
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, name)
        while time.monotonic() < deadline:
            # The end of the pipes is not awaited, because a process that outlives the program could hold them open.
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
                # One more byte shows that the output was cut.
                buffer += data[: max(0, MAX_OUTPUT_BYTES - len(buffer) + 1)]
            if ended and not ready:
                return


def _see_off(process: subprocess.Popen | None, folder: str, reported: bool) -> None:
    """Waits until the supervisor has removed the folder, but only for a limited time."""
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
    if os.path.exists(folder):  # The supervisor was killed, or never started.
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            command = [sys.executable, "-I", "-B", str(_CHILD), "remove", folder]
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CLEANING_SECONDS)


def _verdict(captured: dict[str, bytearray], timeout: float) -> ExecutionResult:
    """Returns the result of a program from the content of the pipes. Raises SandboxError if the sandbox could not be
    set up."""

    def text(name: str) -> str:
        data = bytes(captured[name])
        shown = data[:MAX_OUTPUT_BYTES].decode("utf-8", errors="replace")
        return shown + "\n[output cut here]" if len(data) > MAX_OUTPUT_BYTES else shown

    # The program cannot write to the pipes of the report and the result.
    report: dict = {}
    for line in bytes(captured["report"]).splitlines():
        report.update(json.loads(line))
    if not report.get("ready"):
        ended = " ".join(["its supervisor ended before the program began.", *text("stderr").strip().splitlines()[-1:]])
        raise SandboxError(report.get("setup_error", ended))
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
    """Returns the number of a user's threads, because RLIMIT_NPROC counts all of them. It is 0 if /proc does not
    tell, and then the limit is tighter."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count
