"""Values between two processes that do not trust each other: plain data, and handles to the rest.

Nothing that is received is executed: decoding makes builtin values, a short list of value types of
the standard library, and handles. An object of the program under test stays in the program's
process and is seen as a `Remote`. Whether it equals plain data is never asked of the program.
"""

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONGEST = 32 * 1024 * 1024

READY = b"ready"
PASSED = b"P"
FAILED = b"F"  # an assertion did not hold
ERROR = b"E"  # an exception, an early exit, a crash
TIMEOUT = b"T"
FLOODED = b"L"  # more output than allowed
KILLED = b"K"  # by SIGKILL, which the program cannot send itself where it is confined
UNJUDGEABLE = b"U"  # the test itself cannot be run
OUTPUT = b"O"  # not a verdict yet: the output follows

_TYPES = {
    name: getattr(builtins, name)
    for name in "bool int float complex str bytes list tuple dict set frozenset object type".split()
}
_VALUES = {
    ("array", "array"): lambda v: (v.typecode, list(v)),
    ("builtins", "range"): lambda v: (v.start, v.stop, v.step),
    ("collections", "deque"): lambda v: (list(v), v.maxlen),
    ("datetime", "date"): lambda v: (v.year, v.month, v.day),
    ("datetime", "time"): lambda v: (v.hour, v.minute, v.second, v.microsecond),
    ("datetime", "timedelta"): lambda v: (v.days, v.seconds, v.microseconds),
    ("datetime", "datetime"): lambda v: (*v.timetuple()[:6], v.microsecond, _offset(v), v.fold),
    ("decimal", "Decimal"): lambda v: (str(v),),
    ("fractions", "Fraction"): lambda v: (v.numerator, v.denominator),
    ("pathlib", "PosixPath"): lambda v: (str(v),),
    ("pathlib", "PurePosixPath"): lambda v: (str(v),),
    ("uuid", "UUID"): lambda v: (str(v),),
}
_BASES = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda v: bytes.__getitem__(v, slice(None)),
    tuple: lambda v: tuple.__getitem__(v, slice(None)),
}
_SHOWN = ("__repr__", "__str__", "__format__")
_OWN = {*_SHOWN, "__new__", "__init__", "__doc__", "__init_subclass__", "__dir__", "__getnewargs__"}
_OWN |= {"__reduce__", "__reduce_ex__", "__getattribute__", "__setattr__", "__delattr__"}
_known_bases = {}
_FIELDS = (int, str, list, type(None))
_DICTS = ("Counter", "OrderedDict", "defaultdict")
_TAGS = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z"}
_MAKERS = {tag: kind for kind, tag in _TAGS.items()}


class Unsendable(TypeError):
    """A value that the other process cannot be given."""


class Malformed(Exception):
    """Bytes that are not a message."""


def encode(value: "Any", export, out) -> None:
    """Append a value to a list of bytes; `export(value)` gives (tag, text) for what is no data."""
    kind = type(value)
    if value is None or kind is bool:
        out.append(b"N" if value is None else b"T" if value else b"F")
    elif kind is int:
        _block(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    elif kind is float:
        _block(out, b"f", value.hex().encode())
    elif kind is complex:
        _block(out, b"c", f"{value.real.hex()} {value.imag.hex()}".encode())
    elif kind is str:
        _block(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes or kind is bytearray:
        _block(out, b"b" if kind is bytes else b"y", bytes(value))
    elif kind in _TAGS or _named(kind):
        tag, number = (b"t", "") if kind in _TAGS else export(kind)
        if tag == b"h":
            _block(out, b"m", " ".join((number, *kind._fields)).encode())
        _count(out, _TAGS.get(kind, b"t"), len(value))
        for item in tuple.__iter__(value) if kind not in _TAGS else value:
            encode(item, export, out)
    elif kind is dict or _is_dict(kind):
        if kind is not dict:
            made = getattr(value, "default_factory", None)
            factory = (
                made.__name__ if type(made) is type and _TYPES.get(made.__name__) is made else ""
            )
            _block(out, b"D", f"{kind.__name__} {factory}".encode())
        _count(out, b"d", len(value))
        for key, item in value.items():
            encode(key, export, out)
            encode(item, export, out)
    elif kind is slice:
        out.append(b"x")
        for item in (value.start, value.stop, value.step):
            encode(item, export, out)
    elif _in_stdlib(kind):
        _block(out, b"v", " ".join(_key(kind)).encode())
        encode(_VALUES[_key(kind)](value), export, out)
    elif kind is type and _TYPES.get(value.__name__) is value:
        _block(out, b"g", value.__name__.encode())
    elif kind is type and _in_stdlib(value):
        _block(out, b"V", " ".join(_key(value)).encode())
    else:
        base = _base_of(kind)
        tag, text = export(value)
        _block(out, b"u" if base else tag, text.encode())
        if base:
            encode(_BASES[base](value), export, out)


def _base_of(kind) -> "Any":
    """The builtin class whose values those of a class are, such as int for an IntEnum: it derives
    from it, and its operators are that class's own or those of `enum`. None for any other class:
    its objects stay handles, because its operators are the program's."""
    if kind not in _known_bases:
        base = next((c for c in kind.__mro__ if c in _BASES), None)
        flags = getattr(sys.modules.get("enum"), "Flag", object).__dict__
        if base is not None and any(
            name in c.__dict__ and c.__dict__[name] is not flags.get(name)
            for c in kind.__mro__[: kind.__mro__.index(base)]
            for name in dir(base)
            if name not in _OWN
        ):
            base = None
        _known_bases[kind] = base
    return _known_bases[kind]


def _offset(moment) -> "int | None":
    offset = moment.utcoffset()
    return None if offset is None else offset.days * 86400 + offset.seconds


def _is_dict(kind) -> bool:
    """Whether a class is one of `_DICTS` itself, not one that borrows its name."""
    known = kind.__module__ == "collections" and kind.__name__ in _DICTS
    return known and getattr(sys.modules.get("collections"), kind.__name__, None) is kind


def _named(kind) -> bool:
    """Whether a class is a named tuple with fields that no attribute of tuples is called."""
    fields = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and type(fields) is tuple
        and all(type(field) is str and _is_field(field) for field in fields)
    )


def _is_field(name) -> bool:
    return name.isidentifier() and not name.startswith("_") and not hasattr(tuple, name)


def _in_stdlib(kind) -> bool:
    """Whether a class is one of `_VALUES` itself, not one that borrows its name."""
    key = _key(kind)
    return key in _VALUES and getattr(sys.modules.get(key[0]), key[1], None) is kind


def _key(kind) -> tuple[str, str]:
    """The module that a class is imported from, and its name. Paths of Python 3.13 name another."""
    module = "pathlib" if kind.__module__ == "pathlib._local" else kind.__module__
    return module, kind.__name__


def _block(out, tag, data) -> None:
    out += (tag, len(data).to_bytes(4, "big"), data)


def _count(out, tag, count) -> None:
    out += (tag, count.to_bytes(4, "big"))


def decode(data, at, load) -> "tuple[Any, int]":
    """The value at a position and the next position; `load(tag, text)` makes what is no data."""
    tag = data[at : at + 1]
    at += 1
    if tag in (b"N", b"T", b"F"):
        return (None if tag == b"N" else tag == b"T"), at
    if tag == b"x":
        parts = []
        for _ in range(3):
            part, at = decode(data, at, load)
            parts.append(part)
        return slice(*parts), at
    size = int.from_bytes(data[at : at + 4], "big")
    at += 4
    if tag == b"d":
        made = {}
        for _ in range(size):
            key, at = decode(data, at, load)
            made[key], at = decode(data, at, load)
        return made, at
    if tag in _MAKERS:
        items = []
        for _ in range(size):
            item, at = decode(data, at, load)
            items.append(item)
        return _MAKERS[tag](items), at
    block, at = data[at : at + size], at + size
    if not tag or len(block) != size:
        raise Malformed("cut off")
    if tag == b"v":
        fields, at = decode(data, at, load)
        if type(fields) is not tuple or not all(type(field) in _FIELDS for field in fields):
            raise Malformed("fields of a value")
        return _value(block.decode(), fields), at
    if tag in (b"D", b"m", b"u"):
        inner, at = decode(data, at, load)
        make = {b"D": _dict, b"m": _tuple, b"u": _derived}[tag]
        return make(block.decode(), inner, load), at
    return _scalar(tag, block, load), at


def _scalar(tag, block, load) -> "Any":
    if tag == b"i":
        return int.from_bytes(block, "big", signed=True)
    if tag == b"s":
        return block.decode("utf-8", "surrogatepass")
    if tag == b"b":
        return bytes(block)
    if tag == b"y":
        return bytearray(block)
    text = block.decode()
    if tag == b"f":
        return float.fromhex(text)
    if tag == b"c":
        return complex(*map(float.fromhex, text.split()))
    if tag == b"g":
        return _TYPES[text]
    if tag == b"V":
        return _from_stdlib(text)
    return load(tag, text)


def _value(text, fields) -> "Any":
    """A value of the standard library from its fields."""
    kind = _from_stdlib(text)
    if text != "datetime datetime":
        return kind(*fields)
    import datetime

    zone = None if fields[7] is None else datetime.timezone(datetime.timedelta(seconds=fields[7]))
    return kind(*fields[:7], zone, fold=fields[8])


def _dict(text, inner, _) -> "Any":
    """A dictionary of `collections` with the content of a plain one."""
    import collections

    name, _, factory = text.partition(" ")
    if name not in _DICTS or type(inner) is not dict:
        raise Malformed(text)
    if name == "defaultdict":
        return collections.defaultdict(_TYPES[factory] if factory else None, inner)
    return getattr(collections, name)(inner)


def _tuple(text, inner, load) -> "Any":
    """A named tuple of a class of the other side."""
    number, *fields = text.split()
    if type(inner) is not tuple or len(fields) != len(inner) or not all(map(_is_field, fields)):
        raise Malformed(text)
    kind = load(b"m", text)
    return tuple.__new__(kind, inner)


def _derived(text, inner, load) -> "Any":
    """An object of the program whose class derives from a builtin one and keeps its operators: its
    value, with everything else behind a handle. A tuple's lists may have changed since it came."""
    if type(inner) not in _BASES:
        raise Malformed(text)
    whole = load(b"h", text)
    if type(whole) is not Remote:
        return whole
    known: Any = object.__getattribute__(whole, "_plain")
    if known is None or (type(inner) is tuple and known != inner):
        known = type(inner).__new__(DERIVED[type(inner)], inner)
        known._remote = whole
        object.__setattr__(whole, "_plain", known)
    return known


def named_tuple_class(name, fields) -> type:
    """A class of tuples with these attributes, made without executing text."""
    attributes = {
        field: property(lambda self, at=at: tuple.__getitem__(self, at))
        for at, field in enumerate(fields)
    }

    def _asdict(self):
        return dict(zip(fields, self, strict=True))

    def __repr__(self):
        return (
            f"{name}({', '.join(f'{field}={value!r}' for field, value in _asdict(self).items())})"
        )

    own = {"__slots__": (), "_fields": fields, "_asdict": _asdict, "__repr__": __repr__}
    return type(name, (tuple,), {**own, **attributes})


def _from_stdlib(text) -> "Any":
    module, name = text.split()
    if (module, name) not in _VALUES:
        raise Malformed(text)
    return getattr(__import__(module), name)


def decode_message(data, load) -> "tuple[Any, Any, Any]":
    """The three values of a message: always a tuple of exactly three, and nothing behind it."""
    message, end = decode(data, 0, load)
    if type(message) is not tuple or len(message) != 3 or end != len(data):
        raise Malformed("a message has three parts")
    return message


def read_exactly(fd, size):
    """`size` bytes; fewer only at the end of the stream."""
    parts = []
    while size and (part := os.read(fd, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame(fd) -> "bytes | None":
    """The next frame (8 bytes of length, then the data), or None at the end of the stream."""
    head = read_exactly(fd, 8)
    size = int.from_bytes(head, "big")
    if size > LONGEST:
        raise Malformed(f"a message of {size} bytes")
    data = read_exactly(fd, size)
    return data if len(head) == 8 and len(data) == size else None


def write_frame(fd, data) -> None:
    """Write a frame, however many writes it takes."""
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(fd, view) :]


class Remote:
    """A handle to an object of the program under test, kept in the program's process.

    Equality and order are asked of the program only between two of its own objects, and `!=` is the
    opposite of `==`. Arithmetic with plain data has to give another handle: a program that answered
    `result - expected` with a number would answer 0.
    """

    __slots__ = ("_ask", "_number", "_plain")

    def __init__(self, ask, number) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_plain", None)

    def __getattr__(self, name):
        return self._ask("getattr", self, name)

    def __setattr__(self, name, value) -> None:
        self._ask("setattr", self, name, value)

    def __call__(self, *args, **named):
        return self._ask("call", self, *args, **named)

    def __instancecheck__(self, value) -> bool:
        if type(value) in DERIVED.values():
            value = value._remote
        if not isinstance(value, Remote):
            return getattr(type(value), "_number", None) == self._number
        return self._ask("isinstance", value, self) is True

    def __delattr__(self, name) -> None:
        self._ask("delattr", self, name)

    def __enter__(self):
        return self._ask("enter", self)

    def __exit__(self, kind, error, _):
        """The program learns that an exception leaves the block, and may end only its own there."""
        text = None if kind is None else str(error)
        return self._ask("exit", self, text) is True and hasattr(error, "of_program")

    def __ne__(self, other):
        return not self == other if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ask("hash", self))


def _forward(name):
    return lambda self, *args: self._ask(name, self, *args)


def _between_remotes(name):
    def method(self, other):
        return self._ask(name, self, other) if isinstance(other, Remote) else NotImplemented

    return method


def _to_remote(name):
    def method(self, other):
        answer = self._ask(name, self, other)
        mine = isinstance(other, Remote) or isinstance(answer, Remote)
        return answer if mine else NotImplemented

    return method


def _inplace(name):
    def method(self, other):
        answer = self._ask(name, self, other)
        return answer if isinstance(answer, Remote) else NotImplemented

    return method


def _unary(name):
    def method(self):
        answer = self._ask(name, self)
        if not isinstance(answer, Remote):
            raise TypeError(f"{name} of an object of the program must be one too")
        return answer

    return method


for _name in ("neg", "pos", "abs", "invert"):
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in (
    "len",
    "iter",
    "next",
    "str",
    "repr",
    "bool",
    "getitem",
    "setitem",
    "delitem",
    "reversed",
    "format",
):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("eq", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _between_remotes(_name))
_BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor"
for _name in _BINARY.split():
    setattr(Remote, f"__{_name}__", _to_remote(_name))
    setattr(Remote, f"__i{_name}__", _inplace("i" + _name))
    setattr(Remote, f"__r{_name}__", _to_remote("r" + _name))


def _derived_class(base) -> type:
    """Values of a builtin class whose object shows them, and has their attributes and flags."""
    shown = {name: lambda self, *a, name=name: getattr(self._remote, name)(*a) for name in _SHOWN}
    own = {
        "__getattr__": lambda self, name: getattr(self._remote, name),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, _: self,
    }
    flags = {"__iter__": lambda self: iter(self._remote), "__len__": lambda self: len(self._remote)}
    flags |= {f"__{name}__": _between_flags(f"__{name}__") for name in ("or", "and", "xor")}
    flags["__invert__"] = _inverted
    return type(base.__name__, (base,), {**shown, **own, **(flags if base is int else {})})


def _between_flags(name):
    """An operator of int; its result is an object of the program if that has the same value."""

    def method(self, other):
        value, both = getattr(int, name)(self, other), type(other) is type(self)
        answer = getattr(self._remote, name)(other._remote) if both else value
        return answer if type(answer) is type(self) and answer == value else value

    return method


def _inverted(self):
    """The flags that are not set: what the program answers, if it shares no bit with these."""
    answer = self._remote._ask("invert", self._remote)
    return answer if type(answer) is type(self) and not int.__and__(answer, self) else ~int(self)


DERIVED = {base: _derived_class(base) for base in _BASES}
_known_bases.update(dict.fromkeys(DERIVED.values()))
