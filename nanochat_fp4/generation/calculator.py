"""
The calculator that a chat model calls. It evaluates a small grammar on Python's syntax tree, and never executes code.

    expression := number | (expression) | +expression | -expression
                | expression (+ | - | * | / | // | **) expression
                | "text".count("text")

Numbers are Python's: 7 / 2 is 3.5 and 7 // 2 is 3.

No deadline is needed. The text has at most MAX_LENGTH characters, so the tree is small. Integers stay below 2^MAX_BITS,
so each operation is quick. An exponent is checked before the power is computed.
"""

import ast
import math
import operator
import warnings

MAX_LENGTH = 256  # The largest number of characters. The calls in GSM8K's training set have fewer than 100.
# The largest number of bits of an integer. This is 77 decimal digits, and str(int) refuses more than 4300.
MAX_BITS = 256
MAX_EXPONENT = 64

_ARITHMETIC = frozenset("0123456789*+-/.() ")

BINARY_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class _Refused(Exception):
    """The error for an expression that is not in the grammar, or whose numbers are out of bounds."""


def _number(value: object) -> int | float:
    """Returns `value` if it is an int or a finite float within bounds. A power can be complex, and bool is a
    subclass of int."""
    if type(value) is int and value.bit_length() <= MAX_BITS:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise _Refused


def _arithmetic(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _number(_UNARY[type(node.op)](_arithmetic(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY_OPERATORS:
        left, right = _arithmetic(node.left), _arithmetic(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise _Refused
        return _number(BINARY_OPERATORS[type(node.op)](left, right))
    raise _Refused


def _count(node: ast.expr) -> int:
    """Returns the value of "text".count("text")."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "count":
        arguments = [node.func.value, *node.args]
        texts = [a.value for a in arguments if isinstance(a, ast.Constant) and type(a.value) is str]
        if len(arguments) == len(texts) == 2 and not node.keywords:
            return texts[0].count(texts[1])
    raise _Refused


def use_calculator(expr: str) -> int | float | None:
    """
    Returns the value of `expr` if it is in the grammar of this module, otherwise None. It never raises an error,
    whatever a model writes.

    Thousands separators are removed from arithmetic ("1,000 * 2" is 2000), as in nanochat.
    """
    expr = expr.strip()
    if len(expr) > MAX_LENGTH:
        return None
    plain = expr.replace(",", "")
    is_arithmetic = set(plain) <= _ARITHMETIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Odd literals give a warning before they fail.
            tree = ast.parse(plain if is_arithmetic else expr, mode="eval").body
        return _arithmetic(tree) if is_arithmetic else _count(tree)
    except (_Refused, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None
