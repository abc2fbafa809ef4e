"""
The supervisor of one program: starts the judge and the program, keeps the deadline, removes the folder.

Started by execution.py as `python -I -B FOLDER REQUEST`, the request as JSON. The task, also JSON, is stdin, which only
the judge reads: neither the supervisor nor the program ever has the tests in memory.

    trainer -- supervisor (outside) -- [process 1 of the namespaces] -- judge -- program

- setup pipe, judge and program to supervisor: "ready" and the program's process, or what went wrong.
- report pipe, supervisor to trainer: JSON lines. No other process has the pipe.
- result pipe, judge to trainer: the verdict. The program does not have the pipe.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

import judge
import layers

SETUP_SECONDS = 30.0  # from the fork until judge and program are ready


def be_first_process(request: dict) -> None:
    """Process 1 of the namespace: makes the others, forks, returns in the child, ends everything with the child."""
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
    layers.prctl(layers.PR_SET_DUMPABLE, 0)  # the program may be of the same user
    os.setsid()
    layers.make_other_namespaces()
    layers.build_root(request["folder"], request["disk_bytes"], request["files"])
    child = os.fork()
    if child == 0:
        os.setsid()
        return
    os.closerange(0, 4096)
    while os.wait()[0] != child:
        pass
    os._exit(0)


def enter(request: dict) -> None:
    """Before the fork: the namespaces, the folder, no capabilities."""
    if "namespaces" in request["layers"]:
        be_first_process(request)
        layers.become_nobody()
    else:
        os.setpgid(0, 0)
        os.chdir(request["folder"])
        if "landlock" in request["layers"] or "seccomp" in request["layers"]:
            layers.drop_capabilities()
    layers.prctl(layers.PR_SET_NO_NEW_PRIVS, 1)
    if "landlock" in request["layers"]:
        layers.restrict_files(os.getcwd())
    os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd())


def restrict(request: dict) -> None:
    """The limits and layers that each of the two processes sets for itself."""
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears the signal
    layers.set_limits(request)
    if "seccomp" in request["layers"]:
        layers.restrict_syscalls()
    if "audit" in request["layers"]:
        import linecache  # noqa: F401  tracebacks and warnings need the module, which the hook would refuse

        layers.install_audit_hook(os.getcwd())


def work(request: dict, setup_fd: int) -> None:
    """Become the judge and fork the program. Ends the process in every case."""
    try:
        enter(request)
        from_judge, to_program = os.pipe()
        from_program, to_judge = os.pipe()
        program = os.fork()
        if program == 0:
            devnull = os.open(os.devnull, os.O_RDONLY)
            os.dup2(devnull, 0)  # input() meets the end of the file
            for fd in (devnull, request["result_fd"], to_program, from_program):
                os.close(fd)
            if "landlock" in request["layers"]:
                layers.restrict_files(os.getcwd())  # within the judge's domain: its end must be able to signal this
            restrict(request)
            with open(to_judge, "wb") as replies, open(from_judge, "rb") as calls:
                replies.write(b"ready\n")
                replies.flush()  # raises where the judge is dead
                os.close(setup_fd)
                judge.run_program(calls, replies)
        os.close(from_judge)
        os.close(to_judge)
        layers.prctl(layers.PR_SET_DUMPABLE, 0)  # the program, of the same user, cannot look into the judge
        restrict(request)
        replies, calls = open(from_program, "rb"), open(to_program, "wb")
        if replies.readline() == b"ready\n":  # the program has no code yet
            os.write(setup_fd, b"ready %d" % program)  # raises where the supervisor is dead
            os.close(setup_fd)
            with open(0, "rb") as task:
                judge.run_judge(json.load(task), calls, replies, request["result_fd"])
    except BaseException as e:
        os.write(setup_fd, f"{type(e).__name__}: {e}"[:1000].encode(errors="replace"))
    finally:
        os._exit(1)


# ----------------------------------------------------------------------------------------------------------------------
# The supervisor


def remove_folder(folder: str) -> None:
    """Remove `folder` with all it holds. chmod and rm know folders without rights and deeper than a path can say."""
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(folder)
        except OSError:
            os.spawnvp(os.P_WAIT, "sh", ["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', folder])


def oversized(folder: str, most_files: int, most_bytes: int) -> str | None:
    """What is too much in `folder`, where no file system of its own limits it. Costs no more than `most_files` do."""
    files = written = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > most_files:
                        return f"more than {most_files} files"
                    with contextlib.suppress(FileNotFoundError):
                        written += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError as e:  # without rights, or deeper than a path can say
            return f"a folder that cannot be listed ({e.strerror})"
        if written > most_bytes:
            return f"more than {most_bytes >> 20} MB of files"
    return None


def threads_of(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def supervise(child: int, program: int, request: dict, report_fd: int) -> str:
    """Wait for the end of the code: "ended", "deadline", "abandoned" (the trainer is gone), or what was too much."""
    hung_up = select.poll()
    hung_up.register(report_fd, 0)  # POLLERR or POLLHUP: nobody reads it any more
    deadline, pause = time.monotonic() + request["timeout"], 0.001
    look, interval = time.monotonic() + 0.1, 0.1
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        now = time.monotonic()
        if now > deadline:
            return "deadline"
        if os.getppid() != request["trainer"] or hung_up.poll(pause * 1000):
            return "abandoned"
        if now > look and "namespaces" not in request["layers"]:
            problem = oversized(request["folder"], request["files"], request["disk_bytes"])
            if problem is None and threads_of(program) > request["processes"]:
                problem = f"more than {request['processes']} threads"
            if problem is not None:
                return problem
            interval = max(interval, 10 * (time.monotonic() - now))  # at most a tenth of the time goes into looking
            look = time.monotonic() + interval
        pause = min(pause * 1.5, 0.02)
    return "ended"


def end(child: int) -> None:
    """Kill judge and program, or process 1 and with it the namespace, and see all of them gone."""
    for kill in (os.killpg, os.kill):  # the second in case it had no time to found its group
        with contextlib.suppress(OSError):  # nobody there any more
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:  # the program, too: PR_SET_CHILD_SUBREAPER
            os.waitpid(-1, 0)


def wait_until_ready(setup_fd: int) -> str:
    """What judge and program say of their set-up: "ready PID", or what went wrong."""
    said, deadline = b"", time.monotonic() + SETUP_SECONDS
    while select.select([setup_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(setup_fd, 4096)
        if not data:
            return said.decode(errors="replace") or "the judge was killed while it was set up"
        said += data
    return f"not set up after {SETUP_SECONDS:g} s"


def main() -> None:
    if sys.argv[1] == "remove":  # The supervisor was killed.
        remove_folder(sys.argv[2])
        return
    request = json.loads(sys.argv.pop())
    report_fd = request["report_fd"]
    setup_read, setup_write = os.pipe()
    say = lambda **fields: os.write(report_fd, json.dumps(fields).encode() + b"\n")  # noqa: E731
    outcome = "abandoned"
    try:
        if "namespaces" in request["layers"]:
            layers.make_process_namespace()
        layers.prctl(layers.PR_SET_CHILD_SUBREAPER, 1)
        child = os.fork()
    except OSError as e:
        say(setup_error=str(e))
        sys.exit(1)
    if child == 0:
        os.close(report_fd)
        os.close(setup_read)
        work(request, setup_write)
    for fd in (setup_write, request["result_fd"], 0, 1, 2):  # The trainer waits for the end of these.
        os.close(fd)
    try:
        answer, _, program = wait_until_ready(setup_read).partition(" ")
        os.close(setup_read)
        if answer == "ready":
            say(ready=True)
            outcome = supervise(child, int(program), request, report_fd)
        end(child)
        say(outcome=outcome) if answer == "ready" else say(setup_error=f"{answer} {program}")
    except BrokenPipeError:  # the trainer is gone
        end(child)
    remove_folder(request["folder"])


if __name__ == "__main__":
    sys.path.pop(0)  # No program finds this folder.
    main()
