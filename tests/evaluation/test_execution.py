"""
The sandbox for model-written code against programs that want out, in every set of layers this machine offers.

Each hostile program also runs with its victim exposed (a world-writable file, a process, a listening socket of this
test), so that a layer that stops working shows as damage and not only as a missing exception.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from _assertions import wait_until

from nanochat_fp4.evaluation import execution
from nanochat_fp4.evaluation.execution import SandboxError, execute_code
from nanochat_fp4.evaluation.sandbox import layers as kernel

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs Linux or macOS")


def working_layers() -> list[tuple[str, ...]]:
    found = []
    for layers in execution.LAYER_SETS:
        try:
            if execute_code("pass", timeout=60, layers=layers).success:
                found.append(layers)
        except SandboxError:
            pass
    return found


LAYERS = working_layers() if os.name == "posix" else []
KERNEL = [layers for layers in LAYERS if "audit" not in layers]
# A layer is the same in every set: where stronger sets work, most tests leave out the one whose two layers others have.
EACH = [layers for layers in LAYERS if layers != ("seccomp", "audit") or not KERNEL]
every_layer = pytest.mark.parametrize("layers", EACH, ids="+".join)
# What the supervisor keeps, and the limits that each process sets for itself, are the same whatever the layers.
strongest_and_weakest = pytest.mark.parametrize("layers", sorted({*LAYERS[:1], *LAYERS[-1:]}), ids="+".join)
every_kernel_layer = pytest.mark.parametrize("layers", KERNEL, ids="+".join)


def run(code: str, layers: tuple[str, ...], timeout: float = 30.0, **kwargs) -> execution.ExecutionResult:
    return execute_code(code, timeout=timeout, layers=layers, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# What a benchmark needs


def test_some_sandbox_works_here_and_says_what_it_is():
    assert execution.sandbox_layers() == LAYERS[0]
    line = execution.describe_sandbox()
    assert "\n" not in line and all(layer in line for layer in LAYERS[0])
    assert ("hooks only" in line) == ("audit" in LAYERS[0])
    missing = execution.missing_guarantees(LAYERS[0])
    assert all(promise in line for promise in missing) and ("Not guaranteed" in line) == bool(missing)
    assert execution.missing_guarantees(("namespaces", "seccomp")) == []
    assert "no signal to another process, by kill() or by descriptor" in execution.missing_guarantees(("audit",))


@pytest.mark.skipif(sys.platform != "linux", reason="kernel layers are Linux only")
def test_every_layer_that_the_kernel_offers_is_used():
    """Asked independently of the code under test, so that a layer that broke cannot drop out unnoticed."""
    probe = "import ctypes; raise SystemExit(ctypes.CDLL(None).{} < {})"

    def offers(call: str, least: int) -> bool:
        return subprocess.run([sys.executable, "-c", probe.format(call, least)]).returncode == 0

    known = os.uname().machine in ("x86_64", "aarch64")
    # CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET, and CLONE_NEWUSER for an ordinary user
    if known and offers(f"unshare({0x60020000 if os.geteuid() == 0 else 0x70020000})", 0):
        assert LAYERS[0] == ("namespaces", "seccomp")
    if known and offers("syscall(444, None, 0, 1)", 1):
        assert ("landlock", "seccomp") in LAYERS


@pytest.mark.parametrize("layers", LAYERS, ids="+".join)
def test_ordinary_programs(layers):
    result = run("import math, sys\nprint('out', math.sqrt(16))\nprint('err', file=sys.stderr)", layers)
    assert result.success and result.error is None
    assert result.stdout == "out 4.0\n" and result.stderr == "err\n"


@pytest.mark.parametrize(
    "code, error",
    [
        ("assert False, 'candidate'", "AssertionError: candidate"),
        ("def f(:\n", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),  # what follows a completion must have run
        ("import os; os._exit(0)", "without finishing"),
        ("input()", "EOFError"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    ],
)
def test_a_program_that_fails_says_why_in_one_line(code, error):
    result = run(code, LAYERS[0])
    assert not result.success and not result.timeout and error in result.error and "\n" not in result.error, result


@every_layer
def test_the_working_folder_is_empty_and_nothing_is_inherited(layers, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONSTARTUP", "/nonexistent")
    code = """
import os, tempfile
assert os.listdir('.') == [], os.listdir('.')
assert os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd()
open('a.txt', 'w').write('x')
os.mkdir('d'); os.rename('a.txt', 'd/b.txt'); assert open('d/b.txt').read() == 'x'; os.remove('d/b.txt')
with tempfile.NamedTemporaryFile() as f: print(f.name)
fds = []
for fd in range(3, 200):
    try: fds.append(os.fstat(fd).st_ino)
    except OSError: pass
print(*fds)
print(sorted(os.environ))
print(os.getcwd())
"""
    with open(tmp_path / "secret", "w+") as secret:
        os.set_inheritable(secret.fileno(), True)
        result = run(code, layers)
    assert result.success, result
    *_, fds, inherited, folder = result.stdout.splitlines()
    assert "SECRET_TOKEN" not in inherited and "PYTHONSTARTUP" not in inherited
    libraries = {
        line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()
    }  # ctypes' libffi stays open
    assert len(set(fds.split()) - libraries) <= 2, "open files beside the standard ones"  # to the judge and back
    assert "namespaces" in layers or not os.path.exists(folder)  # in namespaces it is a name in another world


# ----------------------------------------------------------------------------------------------------------------------
# The filter of system calls


@every_kernel_layer
def test_the_kernel_refuses_every_other_system_call(layers):
    """Asked for each number, with arguments that make those which exist fail in another way or succeed."""
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    tables = [*kernel.ALLOWED_SYSCALLS.values(), kernel.SYS_TGKILL]
    tables += [rule[0] for rule in kernel.CONDITIONAL_SYSCALLS.values()]
    skipped = sorted(numbers[column] for numbers in tables if numbers[column] is not None)
    skipped += [335, 336]  # uretprobe and uprobe, which no filter sees and which end a process that has no probes
    code = f"""
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
for number in sorted(set(range(700)) - set({skipped})):
    ctypes.set_errno(0)
    if call(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != (1 if number < 424 else 38):
        print(number, ctypes.get_errno())
"""
    result = run(code, layers)
    assert result.success and result.stdout == "", result


HIGH = 1 << 32  # the kernel has 64 bits of an argument, and a filter that compares 32 of them lets this through
REFUSED = {  # of calls that are allowed for other arguments
    "fcntl": [(0, command) for command in (5, 6, 7, 8, 10, 15, 36, 37, 38, 1024, 1026, 1031, 1033)]
    + [(0, 4, 0o20000), (0, 4, 0o20000 | HIGH), (0, 8 | HIGH, 1)],
    "ioctl": [(1, request) for request in (0x5412, 0x5452, 0x8901, 0x8902, 0x8902 | HIGH, 0x40086602)],
    "socketpair": [(1, 2, 0, 0), (1, 5, 0, 0), (2, 1, 0, 0), (16, 3, 0, 0)],
    "sendto": [(3, 99, 1, 0, 99), (3, 99, 1, 0, HIGH), (3, 99, 1, 0, 99 | HIGH)],
    "prctl": [(option,) for option in (1, 4, 22, 38, 0x59616D61, 1 | HIGH)],
    "prlimit64": [(1, 0, 0, 0), (-1, 0, 0, 0)],
    "clone": [(flags, 0, 0, 0, 0) for flags in (0x11, 0x3D0F00 | 0x20000, 0x3D0F00 | 0x10000000, 0x4100)],
    "openat": [(-100, 99, flags, 0) for flags in (0o1000, 0o1003, 0o1000 | HIGH)],
    "tgkill": [(1, 1, 0), (-1, 1, 0), (0, 1, 0)],
}


@every_kernel_layer
def test_the_kernel_looks_at_the_arguments(layers):
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    numbers = {name.split()[0]: rule[0][column] for name, rule in kernel.CONDITIONAL_SYSCALLS.items()}
    numbers["tgkill"] = kernel.SYS_TGKILL[column]
    calls = [(name, numbers[name], args) for name, tried in REFUSED.items() for args in tried]
    code = f"""
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
for name, number, args in {calls}:
    if call(ctypes.c_long(number), *map(ctypes.c_long, args)) != -1 or ctypes.get_errno() != 1:
        print(name, *map(hex, args), ctypes.get_errno())
assert call(ctypes.c_long({numbers["prctl"]}), ctypes.c_long(16), ctypes.create_string_buffer(16)) == 0  # PR_GET_NAME
"""
    result = run(code, layers)
    assert result.success and result.stdout == "", result


# ----------------------------------------------------------------------------------------------------------------------
# Hostile programs


@strongest_and_weakest
def test_endless_programs(layers):
    stubborn = """
import signal, time
for s in range(1, 32):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try: time.sleep(60)
    except BaseException: pass
"""
    result = run(stubborn, layers, timeout=0.5)
    assert result.timeout and not result.success and "0.5 s" in result.error


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@strongest_and_weakest
def test_gigabyte_allocation(layers):
    large = "b = bytearray(100 << 20)"
    result = run(large, layers, maximum_memory_bytes=64 << 20)
    assert result.memory_exceeded and not result.success
    result = run("x = []\nwhile True: x.append('y' * 4096 + str(len(x)))", layers, maximum_memory_bytes=64 << 20)
    assert not result.success and (result.memory_exceeded or "without finishing" in result.error), result
    assert run(large, layers).success


@every_layer
def test_fork_bomb(layers):
    code = """
import os
forked = 0
try:
    for _ in range(10_000):
        if os.fork() == 0:
            while True:
                try: os.fork()
                except OSError: pass
        forked += 1
finally:
    print(forked)
"""
    result = run(code, layers)
    assert not result.success
    assert "PermissionError" in result.error and result.stdout == "0\n", result
    assert run("print('still here')", layers).success


@pytest.fixture
def open_folder():
    """A folder that any user may reach and change, so that a file in it is safe only if the sandbox keeps it safe."""
    folder = Path(tempfile.mkdtemp(prefix="open_to_all_"))
    (folder / "sub").mkdir()
    for path in (folder / "a.txt", folder / "sub" / "b.txt"):
        path.write_text("precious")
        path.chmod(0o666)
    for path in (folder, folder / "sub"):
        path.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@every_layer
def test_files_outside_stay(layers, open_folder):
    folder = open_folder
    attacks = [
        "os.remove(A)",
        "os.rename(A, 'mine')",
        "os.rename(A, A + '2')",
        "shutil.rmtree(F)",
        "shutil.move(A, 'mine')",
        "open(A, 'w').close()",
        "open(A, 'a').write('x')",
        "os.truncate(A, 0)",
        "os.close(os.open(A, os.O_RDONLY | os.O_TRUNC))",
        "open(F + '/new', 'w').close()",
        "os.symlink('/etc/passwd', F + '/link')",
        "os.symlink(F, 'here'); os.remove('here/a.txt')",
        "os.chmod(A, 0)",
        "os.utime(A, (0, 0))",
        "os.chdir(F); os.remove('a.txt')",
        "os.chdir(F); open('a.txt', 'w').close()",
        "os.remove('a.txt', dir_fd=os.open(F, os.O_RDONLY))",
        "os.close(os.open('a.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open(F, os.O_RDONLY)))",
        "subprocess.run(['rm', '-rf', F], check=True)",
        "if os.system('rm -rf ' + F): raise OSError",
    ]
    code = f"""
import os, shutil, subprocess
F = {str(folder)!r}; A = F + '/a.txt'; home = os.getcwd()
for attack in {attacks!r}:
    os.chdir(home)
    try: exec(attack)
    except (OSError, PermissionError): continue
    print('got through:', attack)
"""
    before = (folder / "a.txt").stat()
    result = run(code, layers)
    assert result.success and result.stdout == "", result
    run(f"import os; os.execv('/bin/rm', ['rm', '-rf', {str(folder)!r}])", layers)
    after = (folder / "a.txt").stat()
    assert sorted(p.name for p in folder.rglob("*")) == ["a.txt", "b.txt", "sub"]
    assert (folder / "a.txt").read_text() == (folder / "sub" / "b.txt").read_text() == "precious"
    assert (before.st_mode, before.st_mtime_ns, before.st_uid) == (after.st_mode, after.st_mtime_ns, after.st_uid)


@every_kernel_layer
def test_secrets_cannot_be_read(layers, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("hunter2")
    code = f"""
import os
for path in [{str(secret)!r}, '/etc/hostname', '/proc/self/environ', '/proc/%d/environ' % os.getppid(),
             '/proc/{os.getpid()}/environ', '/proc/{os.getpid()}/mem']:
    try: print(path, open(path, 'rb').read())
    except OSError: pass
"""
    result = run(code, layers)
    assert result.success and result.stdout == "", result


@every_kernel_layer
def test_what_is_visible_of_the_machine(layers, open_folder):
    """With landlock the metadata of others' files and the names of processes, and nothing that tells of changes."""
    code = f"""
import os
for look in (lambda: os.stat({str(open_folder)!r}).st_size, lambda: os.readlink('/proc/{os.getpid()}/exe'),
             lambda: os.stat('/proc/{os.getpid()}').st_uid):
    try: look(); print('seen')
    except OSError: pass
import ctypes
print(ctypes.CDLL(None).inotify_init(), ctypes.CDLL(None).fanotify_init(0, 0))
"""
    result = run(code, layers)
    assert result.success
    *seen, watches = result.stdout.splitlines()
    assert (seen == []) == ("landlock" not in layers), result
    assert watches == "-1 -1"


@every_layer
def test_no_network(layers):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        server.settimeout(0.2)
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(0.2)
        code = f"""
import socket
def tcp(): socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=1)
def udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))
def raw(): socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
def listen(): socket.create_server(('0.0.0.0', 0)); socket.create_connection(('127.0.0.1', 80), timeout=1)
for attack in (tcp, udp, raw, listen):
    try: attack()
    except (OSError, AttributeError): continue
    print(attack.__name__)
"""
        result = run(code, layers)
        assert result.success and result.stdout == "", result
        for waiting in (server.accept, lambda: udp.recv(1)):
            with pytest.raises(TimeoutError):
                waiting()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")
@every_layer
def test_no_socket_of_others_is_reached(layers, open_folder):
    """Not even from a pair of sockets, which send to an address as well as to each other, open files included."""
    path, abstract = str(open_folder / "socket"), f"\0nanochat-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        servers = []
        for address in (path, abstract):
            servers.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
            servers[-1].bind(address)
            servers[-1].settimeout(0.05)
        os.chmod(path, 0o777)
        code = f"""
import array, socket
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))]
def new(): return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def pair(): return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]
for opened in (new, pair):
    for address in ({path!r}, {abstract!r}):
        for send in (lambda s: s.sendto(b'x', address), lambda s: s.sendmsg([b'x'], rights, 0, address),
                     lambda s: (s.connect(address), s.send(b'x'))):
            try: send(opened())
            except OSError: pass
"""
        result = run(code, layers)
        assert result.success, result
        for server in servers:
            with pytest.raises(TimeoutError):
                server.recv(1)


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@every_layer
def test_others_cannot_be_signalled(layers, victim):
    code = f"""
import os, signal
for attack in (lambda: os.kill({victim.pid}, 9), lambda: os.kill(os.getppid(), 9), lambda: os.kill({os.getpid()}, 2),
               lambda: os.killpg(os.getpgid(os.getppid()), 9), lambda: os.killpg({os.getpgid(os.getpid())}, 2),
               lambda: os.kill({victim.pid}, 19)):
    try: attack()
    except OSError: pass
print('done')
"""
    result = run(code, layers)
    assert result.success and result.stdout == "done\n", result
    assert victim.poll() is None


SIGNAL_WITHOUT_KILL = """
import fcntl, os, socket, struct
def pipe():
    return os.pipe()
def pair():
    return [s.detach() for s in socket.socketpair()][::-1]
def own(fd): fcntl.fcntl(fd, 8, VICTIM)  # F_SETOWN
def own_ex(fd): fcntl.fcntl(fd, 15, struct.pack('ii', 1, VICTIM))  # F_SETOWN_EX
def own_group(fd): fcntl.fcntl(fd, 8, -VICTIM)
def fiosetown(fd): fcntl.ioctl(fd, 0x8901, struct.pack('i', VICTIM))
def siocspgrp(fd): fcntl.ioctl(fd, 0x8902, struct.pack('i', VICTIM))
def fioasync(fd): fcntl.ioctl(fd, 0x5452, struct.pack('i', 1))
def o_async(fd): fcntl.fcntl(fd, 4, fcntl.fcntl(fd, 3) | os.O_ASYNC)
for opened in (pipe, pair):
    for owner in (own, own_ex, own_group, fiosetown, siocspgrp):
        for arm in (o_async, fioasync):
            try:
                read, write = opened()
                owner(read)
                fcntl.fcntl(read, 10, 9)  # F_SETSIG, SIGKILL
                arm(read)
                os.write(write, b'x')
                print(opened.__name__, owner.__name__, arm.__name__)
            except OSError:
                pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' signals by descriptor")
@every_layer
def test_no_descriptor_signals_others(layers, victim):
    """A descriptor that becomes readable can have the kernel send its owner, any process of the user, a SIGKILL."""
    result = run(SIGNAL_WITHOUT_KILL.replace("VICTIM", str(victim.pid)), layers)
    assert result.success and result.stdout == "", result
    with pytest.raises(subprocess.TimeoutExpired):
        victim.wait(0.2)


@strongest_and_weakest
def test_closing_stdout_changes_nothing(layers):
    assert run("import os, sys\nsys.stdout.close(); os.close(1); os.close(2); sys.stderr = None", layers).success
    result = run("import os\nfor fd in range(100):\n    try: os.close(fd)\n    except OSError: pass", layers)
    assert not result.success and not result.timeout  # it closed the way back as well


@strongest_and_weakest
def test_printing_without_end(layers):
    """What is kept of 16 MB, counted in a process of its own: other tests' threads allocate, too."""
    code = "import sys\nline = 'x' * (1 << 20)\nfor _ in range(16): sys.stdout.write(line)\n"
    # By its path: importing the package would import torch.
    script = f"""
import json, runpy, tracemalloc
execute_code = runpy.run_path({execution.__file__!r})["execute_code"]
tracemalloc.start()
result = execute_code({code!r}, timeout=30, layers={layers!r})
print(json.dumps([tracemalloc.get_traced_memory()[1], result.success or result.timeout, result.stdout]))
"""
    peak, ended, stdout = json.loads(subprocess.check_output([sys.executable, "-c", script]))
    assert ended and peak < 4 << 20, f"{peak >> 20} MB of it were kept here"
    assert len(stdout) < execution.MAX_OUTPUT_BYTES + 100 and stdout.endswith("[output cut here]")


@strongest_and_weakest
def test_writing_a_gigabyte(layers):
    result = run("f = open('big', 'wb')\nfor _ in range(1024): f.write(b'x' * (1 << 20))", layers)
    assert not result.success


MEMORY_ELSEWHERE = """
import array, fcntl, json, os, socket, threading
held, got = [], {}
def count(name, step, most):
    n = 0
    try:
        while n < most: step(n); n += 1
    except (OSError, AttributeError, RuntimeError, MemoryError): pass
    got[name] = n
def memfd(n):
    fd = os.memfd_create('m'); held.append(fd); os.ftruncate(fd, 1 << 20); os.write(fd, bytes(1 << 20))
def in_flight(n):
    a, b = socket.socketpair(); held.extend([a, b])
    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])
def big_pipe(n):
    r, w = os.pipe(); held.extend([r, w]); fcntl.fcntl(w, 1031, 1 << 20)
def lock(n): fcntl.lockf(held[0], fcntl.LOCK_EX, 1, 2 * n)
def thread(n):
    threading.stack_size(32768); t = threading.Thread(target=event.wait, daemon=True); t.start()
count('memfd', memfd, 20)
count('in flight', in_flight, 20)
count('big pipes', big_pipe, 20)
for f in held: os.close(f) if isinstance(f, int) else f.close()
held = [open('locked', 'wb')]
count('locks', lock, 1000)
event = threading.Event()
count('threads', thread, 300)
event.set()
print(json.dumps(got))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' system calls")
@every_layer
def test_memory_beside_the_address_space(layers):
    result = run(MEMORY_ELSEWHERE, layers)
    if "seccomp" in layers and result.success:
        got = json.loads(result.stdout)
        # The user's other processes count as well, and some may end in the meantime.
        assert got.pop("threads") < 300 or os.geteuid() == 0, result
        assert set(got.values()) == {0}, result
    # A root without namespaces has no limit of threads from the kernel; then the supervisor looks.
    crowd = "import threading, time\nthreading.stack_size(32768)\n"
    crowd += "for i in range(200): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
    result = run(crowd + "time.sleep(300)", layers, timeout=300)
    assert not result.success and not result.timeout, result


MANY_FILES = "import os\nos.mkdir('d')\nfor i in range(600): os.symlink('x' * 50, f'd/{i}')\n"
MANY_BYTES = "for i in range(12):\n    with open(str(i), 'wb') as f: f.write(bytes(1 << 20))\n"


@pytest.mark.parametrize("code, says", [(MANY_FILES, "400 files"), (MANY_BYTES, "8 MB")])
@every_layer
def test_many_files_or_bytes_are_the_end(layers, code, says, tmp_path, monkeypatch):
    monkeypatch.setattr(execution.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(execution, "MAX_FILES", 400)
    monkeypatch.setattr(execution, "DISK_BYTES", 8 << 20)
    result = run(code + "import time; time.sleep(300)", layers, timeout=300)
    assert not result.success and not result.timeout, result
    assert ("No space left" if "namespaces" in layers else says) in result.error
    wait_until(lambda: list(tmp_path.iterdir()) == [])


@strongest_and_weakest
def test_folders_without_rights_and_nested_deeply_go(layers, tmp_path, monkeypatch):
    monkeypatch.setattr(execution.tempfile, "tempdir", str(tmp_path))
    code = """
import os
os.umask(0)
for mode in (0o300, 0o100, 0):
    os.makedirs(f'{mode}/inner/more')
    os.mkdir(f'{mode}/inner/{mode}', mode)
os.mkdir('closed', 0o300); os.mkdir('closed/x', 0o300); open('closed/x/file', 'w').close()
for i in range(1100):  # deeper than Python recurses
    os.mkdir('d'); os.chdir('d')
"""
    result = run(code, layers)
    assert result.success, result
    wait_until(lambda: list(tmp_path.iterdir()) == [])


# What a program may write where its answer goes, and all that a secret of the caller's could be read from.
ANSWERS = {
    "brackets": "b'[' * 60_000 + b'\\n'",
    "set-up error": 'b\'{"setup_error": "forged"}\\n\'',
    "report": 'b\'{"ready": true, "outcome": "ended"}\\n\'',
    "not text": "bytes(range(256)) * 4",
    "memory": "b'memory'",
    "a megabyte": "b'x' * (1 << 20)",
    "empty lines": "b'\\n' * 60_000",
    "a value": 'b\'["value", ["int", "zz"]]\\n\'',
    "unknown types": 'b\'["value", ["list", [["code", "x"]]]]\\n\'',
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_is_written_as_an_answer_is_a_failed_problem(name):
    code = f"""
import os
def f(x):
    for fd in range(3, 100):
        try: os.write(fd, {ANSWERS[name]})
        except OSError: pass
    os._exit(0)
"""
    result = run(code, LAYERS[0], tests="assert candidate(1) == 2", function="f")
    assert not result.success and not result.timeout, result
    assert "\n" not in (result.error or "") and len(result.error or "") <= 1010


# ----------------------------------------------------------------------------------------------------------------------
# The judge, and completions that would pass without solving anything

CHECK = """
def check(candidate):
    assert candidate(2) == 4
    assert abs(candidate(3) - 9) < 1e-6
    assert candidate(-1) == 1
f = candidate
check(candidate)
"""
WRONG = "\ndef f(x): return None\n"
TRACER = """
import sys
def tracer(frame, event, arg):
    if frame.f_code.co_name == 'check':
        frame.f_trace_lines = True
        if event == 'line':
            try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)
            except ValueError: pass
    return tracer
"""
FAKES = {
    "exit status": "import os; os._exit(0)",
    "signal handler": "import os, signal\nsignal.signal(14, lambda *a: os._exit(0)); signal.setitimer(0, 1e-4)" + WRONG,
    "a verdict": "import os\nfor i in range(3, 99):\n  try: os.write(i, b'passed')\n  except OSError: 0" + WRONG,
    "objects of the collector": """
import gc, os
for value in gc.get_objects():
    if isinstance(value, dict) and 'tests' in value or isinstance(value, str) and 'assert candidate' in value: solve()
""" + WRONG,
    "settrace": TRACER + "sys.settrace(tracer)\ndef f(x): return 1",
    "check defined before": "def check(candidate): pass" + WRONG,
    "stdout that raises": "import sys\nclass S:\n  def flush(self): raise SystemExit(0)\nsys.stdout = S()" + WRONG,
    "ctypes on constants": """
import ctypes, sys
def f(x):
    consts = sys._getframe(1).f_code.co_consts
    for i, c in enumerate(consts):
        if isinstance(c, int): ctypes.py_object.from_address(id(consts) + 24 + 8 * i).value = 0
    return 0""",
    "equal to everything": "class E:\n  __eq__ = lambda s, o: True\n  __sub__ = lambda s, o: 0\ndef f(x): return E()",
    "numbers with an opinion": """
class N(int):
    __eq__ = lambda s, o: True
    __sub__ = lambda s, o: 0
def f(x): return N(0)""",
    "answers read from the test": """
import sys
def f(x):
    numbers = [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, int)]
    return {2: 4, 3: 9, -1: 1}[x] if 9 in numbers else 0""",
    "builtins of its own": """
import builtins
class E(int):
    __eq__ = lambda s, o: True
    __sub__ = lambda s, o: 1000
builtins.abs = lambda x: 0
def f(x): return E()""",
}  # fmt: skip


@strongest_and_weakest
def test_no_fake_passes(layers):
    assert run("def f(x): return x * x", layers, tests=CHECK, function="f").success
    passed = [name for name, code in FAKES.items() if run(code, layers, tests=CHECK, function="f").success]
    assert passed == []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' system calls")
@every_kernel_layer
def test_the_judge_is_out_of_reach(layers):
    """The judge, the program's parent, is of the same user: neither files, nor memory, nor its tests can be had."""
    code = f"""
import ctypes, os
judge, libc = os.getppid(), ctypes.CDLL(None)
for pid in (judge, {os.getpid()}):
    for fd in range(64):
        try: os.write(os.open(f'/proc/{{pid}}/fd/{{fd}}', os.O_WRONLY), b'passed'); print('written', fd)
        except OSError: pass
    for name in ('mem', 'maps', 'environ', 'fd/0'):
        try: open(f'/proc/{{pid}}/{{name}}', 'rb').read(1); print(name)
        except OSError: pass
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
there = (ctypes.c_size_t * 2)(id(None), 8)
if libc.process_vm_readv(judge, vector, 1, there, 1, 0) != -1: print('read')
if libc.ptrace(16, judge, 0, 0) != -1: print('traced')
for fd in range(8):
    if libc.syscall(438, libc.syscall(434, judge, 0), fd, 0) != -1: print('taken', fd)
def f(x): return 0
"""
    result = run(code, layers, tests="assert candidate(1) == 1", function="f")
    assert not result.success and result.stdout == "" and result.error.startswith("AssertionError"), result


def test_what_passes_between_judge_and_program():
    """Arguments and results as they are, subclasses without their class, other objects equal to nothing."""
    tests = """
import math
assert candidate(-(1 << 20_000)) == -(1 << 20_000)  # more digits than int() reads
values = [None, True, -7, 0.1, -0.0, math.inf, 1e-320, 2j, "a\\n\\ud800", b"\\0", [], [1, (2, {3})], (), set()]
values += [frozenset({1}), {(1, 2): [None], "a": {1.5: b""}}]
for value in values:
    back = candidate(value)
    assert back == value and type(back) is type(value) and repr(back) == repr(value), (value, back)
assert math.isnan(candidate(math.nan)) and candidate(x=3) == 3
for value in (lambda x: x, object(), iter([])):
    try: candidate(value)
    except TypeError as e: assert "cannot be sent" in str(e)
    else: raise ValueError
"""
    echo = "def f(x): return x"
    result = execute_code(echo, timeout=30, tests=tests, function="f")
    assert result.success, result
    code = """
import collections, decimal, fractions
n = 0
def generator():
    yield 1
    yield [2]
def f(what):
    global n
    n += 1
    return {"counter": collections.Counter("aab"), "fraction": fractions.Fraction(5, 2), "range": range(2), "call": n,
            "decimal": decimal.Decimal("2.5"), "keys": {1: 2}.keys(), "generator": generator(), "function": [f]}[what]
"""
    tests = """
assert candidate("counter") == {"a": 2, "b": 1} and candidate("fraction") == 2.5 and candidate("keys") == {1}
assert abs(candidate("decimal") - 2.5) < 1e-9 and tuple(candidate("generator")) == (1, [2])
assert candidate("range") != [0, 1] and list(candidate("range")) == [0, 1] and candidate("function") != [None]
assert [candidate("call"), candidate("call")] == [9, 10]
"""
    result = execute_code(code, timeout=30, tests=tests, function="f")
    assert result.success, result
    for code, error in [
        ("def g(x): return x", "NameError: name 'f' is not defined"),
        ("def f(x): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(x):\n    a = []\n    a.append(a)\n    return a", "RecursionError"),
    ]:
        result = execute_code(code, timeout=30, tests="assert candidate(1)", function="f")
        assert not result.success and error in result.error, (code, result)


@every_kernel_layer
def test_crashes_are_failures(layers):
    for code in ("import ctypes; ctypes.string_at(0)", "import os; os.abort()", "def f(): f()\nf()"):
        result = run(code, layers)
        assert not result.success and not result.timeout, (code, result)


@every_kernel_layer
def test_root_is_left_behind(layers):
    """No capability is held, and none comes back (setuid programs cannot be run: seccomp, or nosuid mounts)."""
    code = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
data = ctypes.create_string_buffer(24)
number = {'x86_64': 125, 'aarch64': 90}[os.uname().machine]
assert libc.syscall(number, struct.pack('Ii', 0x20080522, 0), data) == 0
assert data.raw == bytes(24), data.raw
for name in ('setuid', 'setgid'):
    try: getattr(os, name)(0); assert os.getuid() == 0 and {landlock}
    except PermissionError: pass
    except OSError: pass
""".replace("{landlock}", str("landlock" in layers))
    result = run(code, layers)
    assert result.success, result


def children_of(pid: int) -> dict[int, int]:
    """Descendants of a process (Linux): their ids and the clock ticks that each has computed for."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(fields[1]), int(fields[11])
    found, new = {}, {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found.update((child, ticks[child]) for child in new)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(  # hooks do not keep the supervisor's end from being ignored
    "layers, signalled",
    [(x, "trainer") for x in EACH] + [(x, "supervisor") for x in EACH if "seccomp" in x],
    ids=str,
)
def test_the_sandbox_dies_with_the_trainer(layers, signalled, tmp_path):
    """Whatever the program does about PR_SET_PDEATHSIG; and its folder goes, unless the supervisor is killed, too."""
    code = "try:\n    import ctypes\n    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nexcept OSError: pass\n"
    code += "for i in range(100): open(str(i), 'w').close()\nwhile True: pass"
    # By its path: importing the package would import torch.
    call = f"['execute_code']({code!r}, timeout=60, layers={layers!r})"
    script = f"import runpy; runpy.run_path({execution.__file__!r}){call}"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[2], env=env)
    try:
        processes = 4 if "namespaces" in layers else 3
        wait_until(lambda: len(c := children_of(trainer.pid)) == processes and max(c.values()) > 9)  # it computes
        children = children_of(trainer.pid)
        if signalled == "trainer":
            trainer.send_signal(signal.SIGKILL)
        else:
            os.kill(min(children), signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 20)
        wait_until(lambda: list(tmp_path.iterdir()) == [], 20)
    finally:
        trainer.kill()
        trainer.wait()


def test_without_a_sandbox_nothing_runs(monkeypatch):
    def refuse(*args):
        raise SandboxError("refused by this test")

    monkeypatch.setattr(execution, "run_in_sandbox", refuse)
    execution.sandbox_layers.cache_clear()
    try:
        with pytest.raises(SandboxError, match="refused by this test"):
            execute_code("pass")
    finally:
        execution.sandbox_layers.cache_clear()
