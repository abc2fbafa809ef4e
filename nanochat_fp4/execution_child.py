"""
What runs inside the sandbox of execution.py: a supervisor that keeps the deadline, and the worker that runs the code.

Started as a script by execute_code (`python -I -B execution_child.py RESULT_FD`, the request as JSON on stdin), never
imported by the package; it needs nothing but the standard library and makes kernel calls through ctypes. Each layer
is one function below and raises OSError where the kernel refuses it. Who uses which layer: execution.py.
"""

import ctypes
import json
import os
import platform
import signal
import struct
import sys
import time

EXIT_DEADLINE = 124  # the supervisor's exit status when it had to kill the worker (as coreutils' timeout has it)
NOBODY = 65534

# ----------------------------------------------------------------------------------------------------------------------
# Kernel interface (numbers from Linux' uapi headers)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_THREAD = 0x00010000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, *args) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _check(_libc.syscall(ctypes.c_long(number), *converted), f"syscall {number}")


def _prctl(option: int, *args: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def _mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    encode = lambda s: None if s is None else os.fsencode(s)  # noqa: E731
    result = _libc.mount(encode(source), encode(target), encode(fstype), ctypes.c_ulong(flags), encode(data))
    _check(result, f"mount {target}")


# ----------------------------------------------------------------------------------------------------------------------
# Layer "namespaces": own mounts, processes, network, IPC; a root that holds only Python and an empty folder in memory


def enter_namespaces() -> None:
    """Called by the supervisor. Its next child is process 1 of a world of its own, and takes it along when it dies."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if uid != 0:
        flags |= CLONE_NEWUSER  # what lets an ordinary user make the others
    _check(_libc.unshare(flags), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)  # nothing mounted from here on shows outside


def python_folders() -> list[str]:
    """What a Python program must be able to read: the interpreter, its libraries, its standard library."""
    wanted = [sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix, "/usr", "/lib", "/lib64", "/bin"]
    folders: list[str] = []
    for folder in sorted({os.path.abspath(p) for p in wanted}, key=len):
        nested = any(os.path.commonpath([folder, other]) == other for other in folders)
        if folder != "/" and os.path.isdir(folder) and not nested:
            folders.append(folder)
    return folders


def build_root(new_root: str, disk_bytes: int) -> None:
    """Swap the root for a small tmpfs at `new_root` with Python's folders bound read-only and a writable /sandbox."""
    _mount("tmpfs", new_root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=0755")
    for folder in python_folders():
        inside = new_root + folder
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(folder) and os.path.dirname(folder) == "/":  # /bin -> usr/bin and its like
            os.symlink(os.readlink(folder), inside)
            continue
        os.makedirs(inside)
        _mount(folder, inside, None, MS_BIND | MS_REC)
        attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
        _syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(inside), AT_RECURSIVE, attributes, len(attributes))
    os.makedirs(new_root + "/dev")
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        open(new_root + device, "w").close()
        _mount(device, new_root + device, None, MS_BIND)
    os.mkdir(new_root + "/sandbox")
    if os.geteuid() == 0:
        os.chown(new_root + "/sandbox", NOBODY, NOBODY)
    os.chdir(new_root)
    _syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b".")  # the old root now lies under the new one,
    _check(_libc.umount2(b".", MNT_DETACH), "umount old root")  # and goes
    os.chdir("/sandbox")


def become_nobody() -> None:
    """Leave root (its processes are exempt from RLIMIT_NPROC) and every capability, for good."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()


def drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _syscall(SYS_CAPSET[platform.machine()], header, struct.pack("6I", *[0] * 6))


# ----------------------------------------------------------------------------------------------------------------------
# Layer "landlock": the same promise about files where namespaces are refused (most containers), Linux 5.13 or newer

# landlock.h: EXECUTE 0, WRITE_FILE 1, READ_FILE 2, READ_DIR 3, then the ways to create and remove things, 4 to 12;
# REFER 13 (ABI 2), TRUNCATE 14 (ABI 3), IOCTL_DEV 15 (ABI 5).
LANDLOCK_READ = 1 << 2 | 1 << 3
LANDLOCK_FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # all that may be granted on something not a folder


def restrict_files(writable: str) -> None:
    """From now on this process reads only Python's folders and writes only inside `writable`."""
    abi = _syscall(SYS_LANDLOCK_CREATE, None, 0, 1)
    everything = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15) * (abi >= 5)
    attributes = struct.pack("Q", everything)
    ruleset = _syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    rules = [(folder, LANDLOCK_READ) for folder in python_folders()]
    rules += [(device, 1 << 1 | 1 << 2) for device in ("/dev/null", "/dev/zero", "/dev/urandom")]
    rules.append((writable, everything))
    for path, access in rules:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                access &= LANDLOCK_FILE_ONLY
            _syscall(SYS_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access & everything, fd), 0)
        finally:
            os.close(fd)
    _syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


# ----------------------------------------------------------------------------------------------------------------------
# Layer "seccomp": no network, no new processes or programs, no signals to others, no change of rights or of the system

# name: (x86_64, aarch64); None where an architecture does not have the call.
DENIED_SYSCALLS = {
    # network (socketpair stays: it reaches nobody)
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # processes, and other processes' memory, signals and priorities
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # rights, owners, times and attributes of files, which landlock does not see; truncate before its ABI 3
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "truncate": (76, 45), "open_by_handle_at": (304, 265),
    # shared memory, queues and keys of others
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # the system, and corners of the kernel that a program for a benchmark has no business in
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "fsmount": (432, 432), "move_mount": (429, 429),
    "open_tree": (428, 428), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "memfd_secret": (447, 447), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "vhangup": (153, 58),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92),
}  # fmt: skip
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_CLONE3 = 435
SYS_TGKILL = {"x86_64": 234, "aarch64": 131}
SYS_PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
SYS_OPENAT = {"x86_64": 257, "aarch64": 56}
SYS_OPEN = {"x86_64": 2, "aarch64": None}
EPERM, ENOSYS = 1, 38


def seccomp_program(machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jt, jf, k) rows of classic BPF; every row reads: if equal, answer EPERM."""
    load = lambda offset: (0x20, 0, 0, offset)  # noqa: E731  BPF_LD | BPF_W | BPF_ABS
    equal = lambda k, jt, jf: (0x15, jt, jf, k)  # noqa: E731  BPF_JMP | BPF_JEQ | BPF_K
    answer = lambda k: (0x06, 0, 0, k)  # noqa: E731  BPF_RET | BPF_K
    masked = lambda k: (0x54, 0, 0, k)  # noqa: E731  BPF_ALU | BPF_AND | BPF_K
    allow, deny, missing = answer(0x7FFF0000), answer(0x00050000 | EPERM), answer(0x00050000 | ENOSYS)
    nr, arch, arg0, arg1, arg2 = load(0), load(4), load(16), load(24), load(32)  # low halves of the arguments
    column = {"x86_64": 0, "aarch64": 1}[machine]

    rows = [arch, equal(AUDIT_ARCH[machine], 1, 0), deny, nr]
    if machine == "x86_64":
        rows += [(0x35, 0, 1, 0x40000000), deny]  # BPF_JGE: the x32 calls are the same calls under other numbers
    for numbers in DENIED_SYSCALLS.values():
        if numbers[column] is not None:
            rows += [equal(numbers[column], 0, 1), deny]
    rows += [equal(SYS_CLONE3, 0, 1), missing]  # its flags lie in memory; libc falls back to clone, whose do not
    # Threads are fine, processes are not.
    rows += [equal(SYS_CLONE[machine], 0, 5), arg0, masked(CLONE_THREAD), equal(CLONE_THREAD, 1, 0), deny, allow]
    # A signal to oneself (abort, raise) is fine.
    rows += [equal(SYS_TGKILL[machine], 0, 4), arg0, equal(pid, 1, 0), deny, allow]
    rows += [equal(SYS_PRLIMIT64[machine], 0, 4), arg0, equal(0, 1, 0), deny, allow]
    # Read-only with O_TRUNC would empty a file that landlock lets us read, before its ABI 3.
    rw_trunc = os.O_TRUNC | os.O_WRONLY | os.O_RDWR
    for number, flags in ((SYS_OPENAT[machine], arg2), (SYS_OPEN[machine], arg1)):
        if number is not None:
            rows += [equal(number, 0, 5), flags, masked(rw_trunc), equal(os.O_TRUNC, 0, 1), deny, allow]
    return [*rows, allow]


def restrict_syscalls() -> None:
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"no seccomp table for {machine}")
    program = b"".join(struct.pack("HBBI", *row) for row in seccomp_program(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    holder = ctypes.create_string_buffer(header, len(header))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))


# ----------------------------------------------------------------------------------------------------------------------
# Layer "audit": Python's own hooks, where the kernel offers nothing better. Stops accidents, not attacks.

FORBIDDEN_EVENTS = {
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill",
    "os.killpg", "os.chmod", "os.chown", "os.setxattr", "os.removexattr", "os.utime", "os.chflags", "os.lockf",
    "subprocess.Popen", "pty.spawn", "signal.pthread_kill", "ctypes.dlopen", "ctypes.dlsym", "fcntl.ioctl",
    "resource.setrlimit", "resource.prlimit", "webbrowser.open", "syslog.openlog", "shutil.chown",
}  # fmt: skip
# event: which arguments are paths that must lie inside the working folder
PATH_EVENTS = {
    "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (0, 1),
    "os.symlink": (0, 1), "os.truncate": (0,), "os.mkfifo": (0,), "os.mknod": (0,), "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
}  # fmt: skip


def install_audit_hook(writable: str) -> None:
    root = os.path.realpath(writable)
    realpath, isdir, fsdecode = os.path.realpath, os.path.isdir, os.fsdecode
    separator, write_flags = os.sep, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    forbidden, path_events = frozenset(FORBIDDEN_EVENTS), dict(PATH_EVENTS)

    def outside(path) -> bool:
        if isinstance(path, int) or path is None:  # an open file is inside, or was handed to us
            return False
        full = realpath(fsdecode(path))
        return full != root and not full.startswith(root + separator) and full != "/dev/null"

    def hook(event: str, args: tuple) -> None:
        if event in forbidden or event.startswith("socket."):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if event == "open":
            path, _mode, flags = args  # a folder outside could serve as the dir_fd of a call that shows no dir_fd
            if outside(path) and (flags & write_flags or isdir(path)):
                raise PermissionError(f"writing {path!r} is not allowed in the sandbox")
        elif event in path_events:
            for i in path_events[event]:
                if i < len(args) and outside(args[i]):
                    raise PermissionError(f"{event} of {args[i]!r} is not allowed in the sandbox")

    sys.addaudithook(hook)


# ----------------------------------------------------------------------------------------------------------------------
# Supervisor and worker


def set_limits(request: dict) -> None:
    """Hard limits, per process: memory, processor seconds, file size, open files, processes, no core files."""
    import resource

    limits = {
        "RLIMIT_AS": request["memory"],
        "RLIMIT_DATA": request["memory"],
        "RLIMIT_CPU": int(request["timeout"]) + 2,
        "RLIMIT_FSIZE": request["file_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": request["processes"],
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        if value is None or not hasattr(resource, name):
            continue
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except (ValueError, OSError):
            if sys.platform == "linux":  # macOS refuses RLIMIT_AS, Linux none of them
                raise


def work(request: dict, result_fd: int) -> None:
    """Enter the layers, run the code, say how it went. Ends the process in every case."""
    write, leave, nonce = os.write, os._exit, request["nonce"]
    say = lambda **fields: write(result_fd, json.dumps({"nonce": nonce, **fields}).encode() + b"\n")  # noqa: E731
    layers = request["layers"]
    try:
        os.setpgid(0, 0)
        if _libc is not None:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(request["folder"])
        if "namespaces" in layers:
            build_root(request["folder"], request["disk_bytes"])
            become_nobody()
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
        elif "landlock" in layers or "seccomp" in layers:
            drop_capabilities()
        os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd())
        set_limits(request)
        if "landlock" in layers:
            _prctl(PR_SET_NO_NEW_PRIVS, 1)
            restrict_files(os.getcwd())
        if "seccomp" in layers:
            restrict_syscalls()
        if "audit" in layers:
            import linecache  # noqa: F401  what tracebacks and warnings need must be loaded before the hook

            install_audit_hook(os.getcwd())
    except BaseException as e:
        say(setup_error=f"{type(e).__name__}: {e}")
        leave(1)

    # Made beforehand: the code may break json, os and sys for its own process.
    done = json.dumps({"nonce": nonce, "success": True}).encode() + b"\n"
    out_of_memory = json.dumps({"nonce": nonce, "success": False, "memory_exceeded": True}).encode() + b"\n"
    memory_error, dumps, clean = MemoryError, json.dumps, str.isprintable
    answer = b""
    sys.modules["__main__"] = type(sys)("__main__")  # not this file with its handle on libc
    try:
        try:
            # No __name__, as in nanochat: a `__main__` block of the completion does not run.
            exec(compile(request["code"], "<sandbox>", "exec"), {})
            answer = done
        except memory_error:
            answer = out_of_memory
        except BaseException as e:  # sys.exit() too: the tests that follow a completion did not run
            message = f"{type(e).__name__}: {e}"[:1000]
            message = "".join(c if clean(c) else " " for c in message)
            answer = dumps({"nonce": nonce, "success": False, "error": message}).encode() + b"\n"
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # closed or replaced by the code: its own loss
                pass
    finally:
        try:
            write(result_fd, answer)
        finally:
            leave(0)


def main() -> None:
    result_fd = int(sys.argv[1])
    request = json.loads(sys.stdin.buffer.read())
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)  # input() meets the end of the file
    os.closerange(3, result_fd)
    os.closerange(result_fd + 1, 64)
    try:
        if _libc is not None:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the trainer is gone: so are we
        if "namespaces" in request["layers"]:
            enter_namespaces()
        worker = os.fork()
    except OSError as e:
        os.write(result_fd, json.dumps({"nonce": request["nonce"], "setup_error": str(e)}).encode() + b"\n")
        sys.exit(1)
    if worker == 0:
        work(request, result_fd)
    deadline, pause = time.monotonic() + request["timeout"], 0.001
    while os.waitpid(worker, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            signal_quietly(os.killpg, worker)
            signal_quietly(os.kill, worker)  # in case it had no time to found its group
            os.waitpid(worker, 0)
            os._exit(EXIT_DEADLINE)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    signal_quietly(os.killpg, worker)  # what it left behind in its process group
    os._exit(0)


def signal_quietly(kill, pid: int) -> None:
    try:
        kill(pid, signal.SIGKILL)
    except OSError:  # nobody there any more
        pass


if __name__ == "__main__":
    main()
