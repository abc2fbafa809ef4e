"""Programs in processes of their own, and what a script's flags are."""

import argparse
import inspect
import os
import socket
import subprocess
import sys

import pytest


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


class Captured(BaseException):
    pass


def options(module: str) -> list[argparse.Action]:
    """The flags of a script, without running it."""

    def capture(parser, *args, **kwargs):
        raise Captured(parser)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        m.setattr(sys, "argv", [module])
        main = __import__(module, fromlist=["main"]).main
        try:
            main([]) if inspect.signature(main).parameters else main()
        except Captured as e:
            return [a for a in e.args[0]._actions if a.option_strings]
    raise AssertionError(f"{module} does not parse its arguments first")
