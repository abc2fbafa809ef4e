"""
The two processes inside the sandbox: the program, and the judge that tests the program's function.

    judge -- one line of JSON per request: the code, then calls of the function --> program
          <-- one line per reply: a value, an error, or "out of memory" --

The program never holds the tests or the result pipe. The judge reads the tests after the fork. Only the judge writes
the verdict. The judge decodes replies into values of Python's own types, so no object of the program reaches a test.
"""

import json
import os
import sys
from collections.abc import Iterable, Set
from fractions import Fraction
from typing import Any, BinaryIO, NoReturn

COLLECTIONS = {"list": list, "tuple": tuple, "frozenset": frozenset, "set": set}


class Failed(Exception):
    """The program failed. The text is shown as it is."""


def encode(value: Any) -> Any:
    """
    A value as JSON: None, bool and str as they are, everything else as [type, content].

    Subclasses lose their class: a named tuple is a tuple. Keys of a dict are a set, a Decimal is a Fraction, NumPy's
    scalars are Python's. Raises TypeError for all other types, functions among them.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # decimal digits are limited to 4300
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [encode(value.real), encode(value.imag)]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(k), encode(v)] for k, v in value.items()]]
    for name, kind in COLLECTIONS.items():
        if isinstance(value, Set if kind is set else kind):
            return [name, [encode(v) for v in value]]
    if hasattr(value, "item"):
        return encode(value.item())
    if hasattr(value, "as_integer_ratio"):
        return ["ratio", [encode(v) for v in value.as_integer_ratio()]]
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process; use numbers, text and collections")


def encode_result(value: Any) -> Any:
    """As encode. Another iterable stays one that equals no list; any other object equals nothing."""
    try:
        return encode(value)
    except (TypeError, RecursionError):
        return ["iterator", [encode_result(v) for v in value]] if isinstance(value, Iterable) else ["object", None]


def decode(data: Any) -> Any:
    """The value that encode or encode_result was given. Raises an exception for anything else; runs nothing."""
    if data is None or isinstance(data, (bool, str)):
        return data
    kind, content = data
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float.fromhex(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "object":
        return object()
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    values = [decode(v) for v in content]
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](values)
    return {"complex": complex, "ratio": Fraction, "iterator": lambda *v: iter(v)}[kind](*values)


def describe(error: BaseException) -> str:
    """One printable line of at most 1000 characters."""
    text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    return "".join(c if c.isprintable() else " " for c in text[:1000])


def run_program(calls: BinaryIO, replies: BinaryIO) -> NoReturn:
    """The program's process: run the code, then answer calls of its functions until the judge is gone."""
    leave = os._exit  # the code may break os and sys for its own process
    namespace: dict[str, Any] = {}  # no __name__, as in nanochat: a `__main__` block of the completion does not run
    try:
        for line in calls:
            request = json.loads(line)
            try:
                if "code" in request:
                    exec(compile(request["code"], "<sandbox>", "exec"), namespace)  # noqa: S102 inside the sandbox
                    reply = ["value", None]
                elif request["function"] not in namespace:
                    reply = ["error", f"NameError: name {request['function']!r} is not defined"]
                else:
                    value = namespace[request["function"]](*decode(request["args"]), **decode(request["kwargs"]))
                    reply = ["value", encode_result(value)]
            except MemoryError:
                reply = ["memory", None]
            except BaseException as e:  # sys.exit() too
                reply = ["error", describe(e)]
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:  # closed or replaced by the code: its own loss
                    pass
            replies.write(json.dumps(reply).encode() + b"\n")
            replies.flush()
    finally:
        leave(0)


def run_judge(task: dict, calls: BinaryIO, replies: BinaryIO, result_fd: int) -> NoReturn:
    """
    The judge's process: send the code, run the tests, write "passed", "memory" or "error ..." to result_fd.

    task: "code", "tests" and the name of the "function" that the tests know as `candidate`.
    """

    def ask(**request: Any) -> Any:
        try:
            calls.write(json.dumps(request).encode() + b"\n")
            calls.flush()
            kind, content = json.loads(replies.readline())
        except (OSError, ValueError, TypeError) as e:
            raise Failed("the program ended without finishing (killed by a limit, a crash, or os._exit)") from e
        if kind == "memory":
            raise MemoryError
        if kind != "value":
            raise Failed(content)
        return decode(content)

    def candidate(*args: Any, **kwargs: Any) -> Any:
        return ask(function=task["function"], args=encode(args), kwargs=encode(kwargs))

    try:
        ask(code=task["code"])
        exec(compile(task["tests"], "<tests>", "exec"), {"candidate": candidate})  # noqa: S102 inside the sandbox
        sys.stdout.flush()
        answer = "passed"
    except MemoryError:
        answer = "memory"
    except BaseException as e:  # sys.exit() too: the tests that follow did not run
        answer = "error " + describe(e)
    os.write(result_fd, answer.encode(errors="replace"))
    os._exit(0)
