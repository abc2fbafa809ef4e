"""The identity of a function of a user's own, such as a rounding's: a digest of what it computes.

A checkpoint and a finished run store it, so that a run whose function was edited is neither resumed nor counts as done,
and one whose file was read again, or moved, does.
"""

import functools
import hashlib
import re
import sys
from collections.abc import Mapping, Set
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@functools.cache
def identity(function: FunctionType) -> str:
    """Returns "name PYTHON digest" of a function. The digest is of what it computes: its code without the docstring and
    places, its defaults, and the values of variables from outside, as they are at the first call. Functions of the same
    file are read as well. Classes, modules, and functions of other files count by their names.

    Code differs between versions of Python, so only digests of one version can be compared. Raises ValueError for a
    callable that is no function.

    >>> identity(lambda x, rounding, noise: x / 7) == identity(lambda x, rounding, noise: x / 5)
    False
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"quantize is a {type(function).__name__}, expected a function; write a def or a lambda")
    content = str(_content(function, function.__globals__, set()))
    return f"{function.__name__} {PYTHON} {hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _content(value: Any, place: dict[str, Any], read: set[int]) -> Any:
    """What decides how a part of a function computes, alike in each process. `place` has the global variables, and
    `read` the ids of the functions and objects that were read."""
    if isinstance(value, FunctionType) and id(value) not in read:
        read.add(id(value))
        place, code = value.__globals__, value.__code__
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        code = code.replace(co_consts=tuple(const for const in code.co_consts if const != value.__doc__))
        value = [code, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, CodeType):
        outer = [getattr(place[name], "__wrapped__", place[name]) for name in value.co_names if name in place]
        outer = [f"{o.__module__}.{o.__name__}" if getattr(o, "__globals__", place) is not place else o for o in outer]
        value = [value.co_code.hex(), value.co_names, value.co_consts, outer]
    if isinstance(value, Mapping | Set):
        value = sorted(value.items() if isinstance(value, Mapping) else value, key=repr)
    if isinstance(value, list | tuple):
        return [_content(item, place, read) for item in value]
    if hasattr(type(value), "tolist"):  # a tensor or an array
        return str(value.dtype), value.tolist()
    made_of_parts = isinstance(value, MethodType) or (hasattr(value, "__dict__") and not hasattr(value, "__name__"))
    if made_of_parts and id(value) not in read:  # also functools.partial
        read.add(id(value))
        return _content(value.__reduce_ex__(2)[1:], place, read)
    return getattr(value, "__name__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(value))
