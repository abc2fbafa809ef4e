"""Triton's interpreter, with its language replaced once for each launch of a kernel."""

import functools
import inspect

import pytest


@functools.cache
def _languages(function) -> frozenset[str]:
    import triton.language as tl

    values = function.__globals__.values()
    return frozenset(v.__name__ for v in values if inspect.ismodule(v) and v in (tl, tl.core))


@pytest.fixture(autouse=True, scope="session")
def language_replaced_once():
    """The interpreter looks for all of triton.language's functions, to put its own in their places, at each call of a
    function inside a kernel, too: a third of the time. There it finds them replaced, unless the function has another of
    Triton's modules."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        interpreter = None
    if not hasattr(interpreter, "_LangPatchScope"):  # no Triton, or another way to replace
        yield
        return
    own, running = interpreter._patch_lang, []  # the modules that are replaced now, where a kernel runs

    def replace(function):
        names = _languages(function)
        if running:
            if names <= running[0]:
                return interpreter._LangPatchScope()
            running[0] |= names
            return own(function)
        scope = own(function)
        restore = scope.restore
        scope.restore = lambda: (running.clear(), restore())
        running.append(set(names))
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace)
        yield
