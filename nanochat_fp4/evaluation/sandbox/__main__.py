"""
The supervisor of one program. It starts the judge and the program, enforces the deadline, and removes the folder.

execution.py starts it as `python -I -B FOLDER REQUEST`. The request is JSON. stdin has the task, which is JSON, too,
and which only the judge reads. Neither the supervisor nor the program ever has the tests in memory.

    trainer -- supervisor (outside) -- [process 1 of the namespaces] -- judge -- program

- The setup pipe goes from judge and program to the supervisor. It transmits "ready" and the program's process, or the
  reason why the set-up failed.
- The report pipe goes from the supervisor to the trainer, with lines of JSON. No other process has this pipe.
- The result pipe goes from the judge to the trainer, with the verdict. The program does not have this pipe.
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

SETUP_SECONDS = 30.0  # The limit in seconds from the fork until judge and program are ready.


def be_first_process(request: dict) -> None:
    """Becomes process 1 of the process namespace. Makes the other namespaces, forks, and returns in the child. When
    the child ends, process 1 ends everything."""
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
    layers.prctl(layers.PR_SET_DUMPABLE, 0)  # The program may belong to the same user.
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
    """Enters the namespaces and the folder, and gives up capabilities. It is called before the fork."""
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
    """Sets the limits and layers that each of the two processes sets for itself."""
    # This must follow the change of user, which clears the signal.
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
    layers.set_limits(request)
    if "seccomp" in request["layers"]:
        layers.restrict_syscalls()
    if "audit" in request["layers"]:
        import linecache  # noqa: F401 Tracebacks and warnings need this module, and the hook would refuse to load it.

        layers.install_audit_hook(os.getcwd())


def work(request: dict, setup_fd: int) -> None:
    """Becomes the judge and forks the program. Ends the process in every case."""
    try:
        enter(request)
        from_judge, to_program = os.pipe()
        from_program, to_judge = os.pipe()
        program = os.fork()
        if program == 0:
            devnull = os.open(os.devnull, os.O_RDONLY)
            os.dup2(devnull, 0)  # With this, input() finds the end of the file.
            for fd in (devnull, request["result_fd"], to_program, from_program):
                os.close(fd)
            if "landlock" in request["layers"]:
                # The program's domain lies within the judge's domain, so that the kernel may signal the program when
                # the judge ends.
                layers.restrict_files(os.getcwd())
            restrict(request)
            with open(to_judge, "wb") as replies, open(from_judge, "rb") as calls:
                replies.write(b"ready\n")
                replies.flush()  # This raises an exception if the judge is dead.
                os.close(setup_fd)
                judge.run_program(calls, replies)
        os.close(from_judge)
        os.close(to_judge)
        # The program, which has the same user, can then not read the judge's memory.
        layers.prctl(layers.PR_SET_DUMPABLE, 0)
        restrict(request)
        replies, calls = open(from_program, "rb"), open(to_program, "wb")
        if replies.readline() == b"ready\n":  # At this point the program has no code yet.
            os.write(setup_fd, b"ready %d" % program)  # This raises an exception if the supervisor is dead.
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
    """Removes `folder` with its content. chmod and rm can remove folders without permissions, and folders whose path
    is too long for a system call."""
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(folder)
        except OSError:
            os.spawnvp(os.P_WAIT, "sh", ["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', folder])


def oversized(folder: str, most_files: int, most_bytes: int) -> str | None:
    """Returns what is too much in `folder`, or None. It is for folders that no file system of their own limits. It
    looks at no more than `most_files` entries."""
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
        except OSError as e:  # The folder may have no permissions, or a path that is too long.
            return f"a folder that cannot be listed ({e.strerror})"
        if written > most_bytes:
            return f"more than {most_bytes >> 20} MB of files"
    return None


def threads_of(pid: int) -> int:
    """Returns the number of a process's threads, or 0 if it is not known."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def supervise(child: int, program: int, request: dict, report_fd: int) -> str:
    """Waits for the end of the code. Returns "ended", "deadline", "abandoned" (the trainer is gone), or what was too
    much."""
    hung_up = select.poll()
    hung_up.register(report_fd, 0)  # POLLERR or POLLHUP mean that nobody reads the pipe any more.
    deadline, pause = time.monotonic() + request["timeout"], 0.001
    next_check, interval = time.monotonic() + 0.1, 0.1
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        now = time.monotonic()
        if now > deadline:
            return "deadline"
        if os.getppid() != request["trainer"] or hung_up.poll(pause * 1000):
            return "abandoned"
        if now > next_check and "namespaces" not in request["layers"]:
            problem = oversized(request["folder"], request["files"], request["disk_bytes"])
            if problem is None and threads_of(program) > request["processes"]:
                problem = f"more than {request['processes']} threads"
            if problem is not None:
                return problem
            # At most a tenth of the time is spent in these checks.
            interval = max(interval, 10 * (time.monotonic() - now))
            next_check = time.monotonic() + interval
        pause = min(pause * 1.5, 0.02)
    return "ended"


def end(child: int) -> None:
    """Kills judge and program, or process 1 and with it the namespace, and waits until all of them are gone."""
    for kill in (os.killpg, os.kill):  # The second call is for a child that had no time to make its process group.
        with contextlib.suppress(OSError):  # The processes may have ended already.
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:  # This includes the program, because of PR_SET_CHILD_SUBREAPER.
            os.waitpid(-1, 0)


def wait_until_ready(setup_fd: int) -> str:
    """Returns the answer of judge and program to their set-up, which is "ready PID" or a reason why it failed."""
    answer, deadline = b"", time.monotonic() + SETUP_SECONDS
    while select.select([setup_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(setup_fd, 4096)
        if not data:
            return answer.decode(errors="replace") or "the judge was killed while it was set up"
        answer += data
    return f"not set up after {SETUP_SECONDS:g} s"


def main() -> None:
    """Runs the supervisor, or removes the folder of a supervisor that was killed."""
    if sys.argv[1] == "remove":  # The supervisor was killed, so another process removes its folder.
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
    # The trainer waits until all other ends of these are closed.
    for fd in (setup_write, request["result_fd"], 0, 1, 2):
        os.close(fd)
    try:
        answer, _, program = wait_until_ready(setup_read).partition(" ")
        os.close(setup_read)
        if answer == "ready":
            say(ready=True)
            outcome = supervise(child, int(program), request, report_fd)
        end(child)
        say(outcome=outcome) if answer == "ready" else say(setup_error=f"{answer} {program}")
    except BrokenPipeError:  # The trainer is gone.
        end(child)
    remove_folder(request["folder"])


if __name__ == "__main__":
    sys.path.pop(0)  # Without this entry no program finds the modules of this folder.
    main()
