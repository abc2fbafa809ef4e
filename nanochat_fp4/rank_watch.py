"""Names a lost process of a run: the others print one line and end.

A process that waits in a collective does not learn that another process is dead or stopped. NCCL ends it after the time
limit and names no rank. Each process therefore has a thread that beats. The thread counts up its number in torchrun's
store and reads the number of the next rank. If the next rank is on the same host, its death is seen at once, else after
the time limit. The rank that sees the death tells all others through the store.

The watch uses no collective. A process that is busy, in Python or on its GPU, beats on. If all processes beat and a
collective still does not end, the process group's own time limit ends it.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from nanochat_fp4.console import print_safely

BEAT = 1.0  # seconds
GRACE = 3.0  # seconds for the main thread to end by itself
ADVICE = "start all of them again with --resume-from-step latest (torchrun --max-restarts does it by itself)"


class RankWatch:
    """
    The watch of one process. All ranks construct a watch, meet at a barrier and call begin().

    store is a connection for this watch alone. A rank is lost after timeout seconds without a beat. lost() returns the
    line that names a lost rank, or None. A process that ends properly calls leave() first.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float):
        self.store, self.rank, self.next, self.timeout = store, rank, (rank + 1) % world_size, timeout
        self.stopping = threading.Event()
        self.message: str | None = None
        who = {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_time(os.getpid())}
        store.set(f"who/{rank}", json.dumps(who))
        store.set(f"beat/{rank}", "0")

    def begin(self) -> None:
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    def leave(self) -> None:
        self.stopping.set()
        with contextlib.suppress(RuntimeError):  # the store's process has ended: there is nobody to tell
            self.store.set(f"beat/{self.rank}", "done")

    def lost(self) -> str | None:
        """The line that names a lost rank, awaited for a few seconds; else None."""
        for _ in range(int((GRACE + 2 * BEAT) / 0.1)):
            if self.message:
                break
            time.sleep(0.1)
        return self.message

    def _watch(self) -> None:
        beats, last, since, patience = 0, "", time.monotonic(), GRACE
        try:
            who = json.loads(self.store.get(f"who/{self.next}"))
            while not (self.message or self.stopping.wait(BEAT)):
                beats += 1
                self.store.set(f"beat/{self.rank}", str(beats))
                beat = self.store.get(f"beat/{self.next}").decode()
                if beat != last:
                    last, since = beat, time.monotonic()
                if self.store.check(["lost"]):
                    self.message = self.store.get("lost").decode()
                elif message := self._problem(who, beat, since):
                    self.store.set("lost", message)
                    self.message = message
        except RuntimeError:
            self.message, patience = f"the process that holds the run's store has ended; {ADVICE}", 3 * GRACE
        # A main thread that can act prints the line itself, or is ending. After the wait it must be in a collective.
        if self.message and not self.stopping.wait(patience):
            prefix = "error" if self.rank == 0 else f"error (rank {self.rank})"
            print_safely(f"{prefix}: {self.message}", file=sys.stderr, flush=True)
            os._exit(1)

    def _problem(self, who: dict[str, Any], beat: str, since: float) -> str | None:
        where = f"rank {self.next} (process {who['pid']} on {who['host']})"
        if beat == "done":
            return None
        if who["host"] == socket.gethostname() and _start_time(who["pid"]) != who["start"]:
            return f"{where} has ended; {ADVICE}"
        if time.monotonic() - since > self.timeout:
            return f"{where} has not answered for {self.timeout:.0f} seconds (NANOCHAT_RANK_TIMEOUT); {ADVICE}"
        return None


def _start_time(pid: int) -> str | None:
    """The kernel's start time of a process; None if the process does not exist or is a zombie."""
    if not os.path.exists("/proc/self/stat"):  # not Linux: only beats are watched
        return ""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


_watch: RankWatch | None = None


def start(store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Begins to watch the ranks of this run. All ranks call this together."""
    global _watch
    _watch = RankWatch(store, rank, world_size, timeout)
    dist.barrier()
    _watch.begin()


def stop() -> None:
    """Call before this process ends properly: the others do not report it as lost."""
    global _watch
    if _watch is not None:
        _watch.leave()
        _watch = None


def lost() -> str | None:
    """The line that names the lost rank, or None if none is known."""
    return _watch.lost() if _watch is not None else None
