"""A program that calls a function of another program, for `groupwise.rewards.code.behaviour`.

It runs as a main program: the arguments come on standard input as a literal, and a canonical text
of the result goes to standard output. What the other program prints is dropped. It knows no
expected value, so the other program, which shares its process, can only describe itself.
"""

import ast
import io
import re
import sys

_LONGEST = 100_000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def main(source, name) -> None:
    """Call the function, or the method of class Solution, and write what it returned."""
    given = ast.literal_eval(sys.stdin.read())
    out, sys.stdout = sys.stdout, io.StringIO()
    space: dict = {"__name__": "program"}
    exec(compile(source, "program", "exec", dont_inherit=True), space)
    owner = space.get("Solution") if name not in space else None
    function = getattr(owner(), name) if owner is not None else space[name]
    text = plain(function(*given))
    sys.stdout = out
    out.write(text[:_LONGEST])


def plain(value) -> str:
    """A text that is equal for values that `==` calls equal, up to twelve digits of a float.

    Example:
        >>> plain([1.0, {"b": 2, "a": True}]), plain({3, 1}), plain((0.1 + 0.2,))
        ("[1, {'a': 1, 'b': 2}]", '{1, 3}', '(0.3,)')
    """
    kind = type(value)
    if kind is bool:
        return str(int(value))
    if kind is float:
        whole = abs(value) < 1e15 and value == int(value)
        return str(int(value)) if whole else f"{value:.12g}"
    if kind is complex:
        return plain(value.real) if not value.imag else f"{value:.12g}"
    if kind is list:
        return f"[{', '.join(map(plain, value))}]"
    if kind is tuple:
        return f"({', '.join(map(plain, value))}{',' if len(value) == 1 else ''})"
    if kind in (set, frozenset):
        return "{" + ", ".join(sorted(map(plain, value))) + "}"
    if isinstance(value, dict):
        pairs = sorted((plain(key), plain(each)) for key, each in value.items())
        return "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}"
    return _ADDRESS.sub("", repr(value))
