"""What a script's flags are."""

import argparse
import importlib
import runpy

import pytest


class Captured(BaseException):
    pass


def options(program: str) -> list[argparse.Action]:
    """The flags of a script, which is a module or the path of a file, without running it."""
    if program.endswith(".py"):
        main = runpy.run_path(program)["main"]
    else:
        main = importlib.import_module(program).main

    def capture(parser, *args, **kwargs):
        raise Captured(parser)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        try:
            main([])
        except Captured as e:
            return [a for a in e.args[0]._actions if a.option_strings]
    raise AssertionError(f"{program} does not parse its arguments first")
