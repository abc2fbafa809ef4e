"""
The layers that confine a program. All of them rely on the kernel but "audit". execution.py says which ones are used
where.

A layer is one function, which raises OSError if the kernel refuses the layer. Calls of the kernel go through ctypes.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

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
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
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


def prctl(option: int, *args: int) -> None:
    """Calls prctl. Does nothing if the system has no prctl (macOS)."""
    if _libc is None:
        return
    padded = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def _mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    encode = lambda s: None if s is None else os.fsencode(s)  # noqa: E731
    result = _libc.mount(encode(source), encode(target), encode(fstype), ctypes.c_ulong(flags), encode(data))
    _check(result, f"mount {target}")


# ----------------------------------------------------------------------------------------------------------------------
# The layer "namespaces": own mounts, processes, network, IPC. The root has Python and an empty folder in memory.


def make_process_namespace() -> None:
    """Makes a process namespace. The supervisor calls this function. Its next child is process 1 of the namespace,
    and all processes of the namespace die with it."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWPID | (CLONE_NEWUSER if uid != 0 else 0)  # An ordinary user needs a user namespace, too.
    _check(_libc.unshare(flags), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)


def make_other_namespaces() -> None:
    """Makes namespaces for mounts, network and IPC. Process 1 calls this function, and the supervisor still sees
    those of the machine."""
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS), "unshare")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)  # Mounts from here on are not visible outside.


def python_folders() -> list[str]:
    """Returns the folders that a Python program reads: interpreter, libraries, standard library."""
    wanted = [sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix, "/usr", "/lib", "/lib64", "/bin"]
    folders: list[str] = []
    for folder in sorted({os.path.abspath(p) for p in wanted}, key=len):
        nested = any(os.path.commonpath([folder, other]) == other for other in folders)
        if folder != "/" and os.path.isdir(folder) and not nested:
            folders.append(folder)
    return folders


def build_root(new_root: str, disk_bytes: int, files: int) -> None:
    """Replaces the root by a small tmpfs at `new_root`, with Python's folders bound read-only and a writable
    /sandbox."""
    _mount("tmpfs", new_root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes={files},mode=0755")
    for folder in python_folders():
        inside = new_root + folder
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(folder) and os.path.dirname(folder) == "/":  # This is for links like /bin -> usr/bin.
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
    _syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b".")  # The old root then lies under the new one.
    _check(_libc.umount2(b".", MNT_DETACH), "umount old root")  # This removes the old root.
    os.chdir("/sandbox")


def become_nobody() -> None:
    """Gives up the user root, whose processes RLIMIT_NPROC does not limit, and every capability, for good."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()


def drop_capabilities() -> None:
    """Gives up every capability of this thread."""
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, for this thread.
    _syscall(SYS_CAPSET[platform.machine()], header, struct.pack("6I", *[0] * 6))


# ----------------------------------------------------------------------------------------------------------------------
# The layer "landlock": the same promise about files where namespaces are refused (most containers), Linux 5.13 or newer

# The bits in landlock.h are EXECUTE 0, WRITE_FILE 1, READ_FILE 2, READ_DIR 3, the ways to create and remove things 4 to
# 12, REFER 13 (ABI 2), TRUNCATE 14 (ABI 3), and IOCTL_DEV 15 (ABI 5).
LANDLOCK_READ = 1 << 2 | 1 << 3
# Only these rights may be granted on something that is not a folder.
LANDLOCK_FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def restrict_files(writable: str) -> None:
    """From now on this process can read only Python's folders, and write only inside of `writable`."""
    abi = _syscall(SYS_LANDLOCK_CREATE, None, 0, 1)
    everything = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15) * (abi >= 5)
    # ABI 4 adds TCP ports. ABI 6 adds abstract Unix sockets and signals to processes outside (1 | 2 each).
    attributes = struct.pack("Q", everything) + struct.pack("Q", 3) * (abi >= 4) + struct.pack("Q", 3) * (abi >= 6)
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
# The layer "seccomp": a list of the system calls that a Python program needs. Everything else is refused: network,
# processes, programs, signals to others, shared memory, asynchronous I/O, changes of rights, and calls of later
# kernels.

# The numbers of each call on (x86_64, aarch64). None means that the architecture does not have the call.
ALLOWED_SYSCALLS = {
    # Files. Left out, because landlock does not see them: chmod, chown, utime, xattrs, truncate by path, flock, inotify
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "pipe": (22, None), "dup": (32, 23), "dup2": (33, None), "sendfile": (40, 71),
    "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None),
    "creat": (85, None), "link": (86, None), "unlink": (87, None), "symlink": (88, None), "readlink": (89, None),
    "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44), "getdents64": (217, 61), "fadvise64": (221, 223),
    "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37),
    "symlinkat": (266, 36), "readlinkat": (267, 78), "faccessat": (269, 48), "fallocate": (285, 47),
    "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70), "renameat2": (316, 276),
    "copy_file_range": (326, 285), "statx": (332, 291), "close_range": (436, 436), "faccessat2": (439, 439),
    # Memory. Left out: memfd_create, memfd_secret, remap_file_pages, mlock
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233),
    # Waiting and time
    "poll": (7, None), "select": (23, None), "sched_yield": (24, 124), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "gettimeofday": (96, 169), "times": (100, 153),
    "time": (201, None), "futex": (202, 98), "epoll_create": (213, None), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "epoll_wait": (232, None), "epoll_ctl": (233, 21),
    "pselect6": (270, 72), "ppoll": (271, 73), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "epoll_create1": (291, 20), "epoll_pwait2": (441, 441),
    # The process itself and its signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "getpid": (39, 172),
    "exit": (60, 93), "wait4": (61, 260), "uname": (63, 160), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156), "capget": (125, 90),
    "getpriority": (140, 141), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "arch_prctl": (158, None),
    "setrlimit": (160, 164), "gettid": (186, 178), "sched_getaffinity": (204, 123), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "exit_group": (231, 94), "waitid": (247, 95), "set_robust_list": (273, 99),
    "getcpu": (309, 168), "getrandom": (318, 278), "membarrier": (324, 283), "rseq": (334, 293),
    # A pair of connected sockets (asyncio wakes itself with one). Left out: sendmsg, which can pass open files on
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204), "getsockopt": (55, 209),
}  # fmt: skip

# These calls depend on arguments. A row has the numbers, and for one or two arguments (index, mask, allowed values).
# Values and masks have 32 bits. A mask of None compares all 64 bits with 0. Both architectures share the constants.
_ANY_NAMESPACE = 0x7E020080
_WRITING_TRUNCATION = os.O_TRUNC | os.O_WRONLY | os.O_RDWR
CONDITIONAL_SYSCALLS = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Left out: F_SETOWN and F_SETSIG (signals to
    # others), F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS; and locks, each of which takes memory of the kernel.
    "fcntl": ((72, 25), [(1, 0xFFFFFFFF, (0, 1, 2, 3, 1030, 1032))]),
    "fcntl F_SETFL without O_ASYNC": ((72, 25), [(1, 0xFFFFFFFF, (4,)), (2, 0o20000, (0,))]),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Left out: FIOSETOWN, SIOCSPGRP, FIOASYNC, TIOCSTI.
    "ioctl": ((16, 29), [(1, 0xFFFFFFFF, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))]),
    "socketpair AF_UNIX, SOCK_STREAM": ((53, 199), [(0, 0xFFFFFFFF, (1,)), (1, 0xF, (1,))]),
    "sendto without an address": ((44, 206), [(4, None, (0,))]),
    "prctl PR_SET_NAME, PR_GET_NAME": ((157, 167), [(0, 0xFFFFFFFF, (15, 16))]),  # PR_SET_PDEATHSIG is left out.
    "prlimit64 of oneself": ((302, 261), [(0, 0xFFFFFFFF, (0,))]),
    "clone of a thread": ((56, 220), [(0, CLONE_THREAD | _ANY_NAMESPACE, (CLONE_THREAD,))]),
    # Read-only with O_TRUNC would empty a file that landlock lets the program read, before ABI 3 of landlock.
    "open": ((2, None), [(1, _WRITING_TRUNCATION, (0, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2))]),
    "openat": ((257, 56), [(2, _WRITING_TRUNCATION, (0, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2))]),
}  # fmt: skip
SYS_TGKILL = (234, 131)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From here on all architectures have the same numbers. If such a call is missing, libc does without it.
FIRST_MODERN_SYSCALL = 424
EPERM, ENOSYS = 1, 38


def seccomp_program(machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """Returns the filter as rows (code, jt, jf, k) of classic BPF. One of the rows allows a call, or the last row
    refuses it."""
    load = lambda offset: (0x20, 0, 0, offset)  # noqa: E731  BPF_LD | BPF_W | BPF_ABS
    equal = lambda k, jt, jf: (0x15, jt, jf, k)  # noqa: E731  BPF_JMP | BPF_JEQ | BPF_K
    at_least = lambda k, jt, jf: (0x35, jt, jf, k)  # noqa: E731  BPF_JMP | BPF_JGE | BPF_K
    answer = lambda k: (0x06, 0, 0, k)  # noqa: E731  BPF_RET | BPF_K
    allow, kill = answer(0x7FFF0000), answer(0x80000000)
    refuse, missing = answer(0x00050000 | EPERM), answer(0x00050000 | ENOSYS)
    column = {"x86_64": 0, "aarch64": 1}[machine]

    # A foreign ABI ends the process. This is 32 bits, or x32, which has the same calls under other numbers.
    rows = [load(4), equal(AUDIT_ARCH[machine], 1, 0), kill, load(0)]
    if machine == "x86_64":
        rows += [at_least(0x40000000, 0, 1), kill]
    for numbers in ALLOWED_SYSCALLS.values():
        if numbers[column] is not None:
            rows += [equal(numbers[column], 0, 1), allow]
    # raise() and abort() need this call.
    conditional = [*CONDITIONAL_SYSCALLS.values(), (SYS_TGKILL, [(0, 0xFFFFFFFF, (pid,))])]
    for numbers, conditions in conditional:
        if numbers[column] is None:
            continue
        checks: list[tuple[int, int, int, int]] = [allow]
        # The checks are made from the end, because each one jumps over those that follow it.
        for index, mask, values in reversed(conditions):
            offset, after = 16 + 8 * index, len(checks)
            if mask is None:  # Both halves must be 0. Otherwise everything that follows is skipped.
                checks = [load(offset), equal(0, 0, after + 2), load(offset + 4), equal(0, 0, after), *checks]
                continue
            test = [equal(v, len(values) - i - 1, 0) for i, v in enumerate(values[:-1])]
            checks = [load(offset), (0x54, 0, 0, mask), *test, equal(values[-1], 0, after), *checks]
        rows += [equal(numbers[column], 0, len(checks) + 1), *checks, load(0)]
    return [*rows, at_least(FIRST_MODERN_SYSCALL, 0, 1), missing, refuse]


def restrict_syscalls() -> None:
    """From now on this process can make only the allowed system calls."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"no seccomp table for {machine}")
    program = b"".join(struct.pack("HBBI", *row) for row in seccomp_program(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    holder = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))


# ----------------------------------------------------------------------------------------------------------------------
# The layer "audit": Python's own hooks, for kernels without better layers. They stop accidents, but not attacks.

FORBIDDEN_EVENTS = {
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill",
    "os.killpg", "os.chmod", "os.chown", "os.setxattr", "os.removexattr", "os.utime", "os.chflags", "os.lockf",
    "subprocess.Popen", "pty.spawn", "signal.pthread_kill", "ctypes.dlopen", "ctypes.dlsym", "fcntl.fcntl",
    "fcntl.flock", "fcntl.ioctl", "fcntl.lockf",
    "resource.setrlimit", "resource.prlimit", "webbrowser.open", "syslog.openlog", "shutil.chown",
}  # fmt: skip
# For each event, the arguments that are paths and must lie inside of the working folder.
PATH_EVENTS = {
    "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (0, 1),
    "os.symlink": (0, 1), "os.truncate": (0,), "os.mkfifo": (0,), "os.mknod": (0,), "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
}  # fmt: skip


def install_audit_hook(writable: str) -> None:
    """From now on Python's hooks refuse the forbidden events, and changes outside of `writable`."""
    root = os.path.realpath(writable)
    realpath, isdir, fsdecode = os.path.realpath, os.path.isdir, os.fsdecode
    separator, write_flags = os.sep, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    forbidden, path_events = frozenset(FORBIDDEN_EVENTS), dict(PATH_EVENTS)

    def outside(path) -> bool:
        if isinstance(path, int) or path is None:  # An open file lies inside, or this program received it.
            return False
        full = realpath(fsdecode(path))
        return full != root and not full.startswith(root + separator) and full != "/dev/null"

    def hook(event: str, args: tuple) -> None:
        if event in forbidden or event.startswith("socket."):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if event == "open":
            # A folder outside could be the dir_fd of a call whose event does not show its dir_fd.
            path, _mode, flags = args
            if outside(path) and (flags & write_flags or isdir(path)):
                raise PermissionError(f"writing {path!r} is not allowed in the sandbox")
        elif event in path_events:
            for i in path_events[event]:
                if i < len(args) and outside(args[i]):
                    raise PermissionError(f"{event} of {args[i]!r} is not allowed in the sandbox")

    sys.addaudithook(hook)


# ----------------------------------------------------------------------------------------------------------------------
# Limits of each process, in every set of layers


def set_limits(request: dict) -> None:
    """Sets the hard limits of this process."""
    limits = {
        "RLIMIT_AS": request["memory"],
        "RLIMIT_DATA": request["memory"],
        "RLIMIT_CPU": int(request["timeout"]) + 2,
        "RLIMIT_FSIZE": request["file_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": request["tasks"] + request["processes"],
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
            if sys.platform == "linux":  # macOS refuses RLIMIT_AS. Linux refuses none of these limits.
                raise
