"""
The two processes inside the sandbox. One runs the program, and the other one, the judge, tests the program's function.

    judge -- one line of JSON per request: the code, then calls of the function --> program
          <-- one line per reply: a value, an error, or "out of memory" --

The program has neither the tests nor the result pipe. The judge reads the tests after the fork, and only the judge
writes the verdict. The judge decodes replies into values of Python's own types, so no object of the program reaches a
test.
"""

import json
import os
import sys
from collections.abc import Iterable, Set
from fractions import Fraction
from typing import Any, BinaryIO, NoReturn

COLLECTIONS = {"list": list, "tuple": tuple, "frozenset": frozenset, "set": set}


class Failed(Exception):
    """The error for a program that failed. Its text is shown without changes."""


def encode(value: Any) -> Any:
    """
    Returns a value in the form of JSON. None, bool and str stay as they are, and everything else becomes [type,
    content].

    Subclasses lose their class: a named tuple becomes a tuple. Keys of a dict become a set, a Decimal becomes a
    Fraction, and NumPy's scalars become Python's. Raises TypeError for all other types, for example functions.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # Decimal numbers are limited to 4300 digits.
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
    """Encodes a result. A value that encode refuses becomes an iterator, which equals no list, if it is iterable,
    and otherwise an object that equals nothing."""
    try:
        return encode(value)
    except (TypeError, RecursionError):
        return ["iterator", [encode_result(v) for v in value]] if isinstance(value, Iterable) else ["object", None]


def decode(data: Any) -> Any:
    """Returns the value that encode or encode_result was given. Raises an exception for anything else, and never
    runs code."""
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
    """Returns the error as one printable line of at most 1000 characters."""
    text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    return "".join(c if c.isprintable() else " " for c in text[:1000])


def run_program(calls: BinaryIO, replies: BinaryIO) -> NoReturn:
    """This function is the program's process. It runs the code, and then answers calls of its functions until the
    judge is gone."""
    leave = os._exit  # The code may change os and sys in its own process.
    # There is no __name__, as in nanochat, so that a `__main__` block of the completion does not run.
    namespace: dict[str, Any] = {}
    try:
        for line in calls:
            request = json.loads(line)
            try:
                if "code" in request:
                    # This runs inside of the sandbox.
                    exec(compile(request["code"], "<sandbox>", "exec"), namespace)  # noqa: S102
                    reply = ["value", None]
                elif request["function"] not in namespace:
                    reply = ["error", f"NameError: name {request['function']!r} is not defined"]
                else:
                    value = namespace[request["function"]](*decode(request["args"]), **decode(request["kwargs"]))
                    reply = ["value", encode_result(value)]
            except MemoryError:
                reply = ["memory", None]
            except BaseException as e:  # This includes sys.exit().
                reply = ["error", describe(e)]
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:  # If the code has closed or replaced the stream, its output is lost.
                    pass
            replies.write(json.dumps(reply).encode() + b"\n")
            replies.flush()
    finally:
        leave(0)


def run_judge(task: dict, calls: BinaryIO, replies: BinaryIO, result_fd: int) -> NoReturn:
    """
    This function is the judge's process. It sends the code, runs the tests, and writes "passed", "memory" or "error
    ..." to result_fd.

    The task has "code", "tests" and the name of the "function" that the tests know as `candidate`.
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
        # This runs inside of the sandbox, too.
        exec(compile(task["tests"], "<tests>", "exec"), {"candidate": candidate})  # noqa: S102
        sys.stdout.flush()
        answer = "passed"
    except MemoryError:
        answer = "memory"
    except BaseException as e:  # This includes sys.exit(), after which the following tests have not run.
        answer = "error " + describe(e)
    os.write(result_fd, answer.encode(errors="replace"))
    os._exit(0)
