"""What a script's flags are."""

import argparse
import inspect
import sys

import pytest


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
