"""Values between two processes that do not trust each other: plain data, and handles to the rest.

Nothing that is received is executed: decoding makes builtin values, a short list of value types of
the standard library, and handles. An object of the program under test stays in the program's
process and is seen as a `Remote`. Whether it equals plain data is never asked of the program.
"""

import builtins
import os
import sys

from groupwise.rewards.code.inside.handles import BASES, DERIVED, SHOWN, Remote

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
    ("re", "Pattern"): lambda v: (v.pattern, v.flags),
    ("uuid", "UUID"): lambda v: (str(v),),
}
_OWN = {*SHOWN, "__new__", "__init__", "__doc__", "__init_subclass__", "__dir__", "__getnewargs__"}
_OWN |= {"__reduce__", "__reduce_ex__", "__getattribute__", "__setattr__", "__delattr__"}
_known_bases = dict.fromkeys(DERIVED.values())
_known_named = {}
_FIELDS = (int, str, bytes, list, type(None))
_DICTS = ("Counter", "OrderedDict", "defaultdict")
_TAGS = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z"}
_MAKERS = {tag: kind for kind, tag in _TAGS.items()}
_COUNTED = (list, dict, set, bytearray)
_PLAIN = (int, str, float, bool, type(None), tuple, bytes, complex, frozenset)


class Unsendable(TypeError):
    """A value that the other process cannot be given."""


class Malformed(Exception):
    """Bytes that are not a message."""


def encode(value: "Any", export, out, known=None) -> None:
    """Append a value to a list of bytes; `export(value)` gives (tag, text) for what is not data,
    and the tag of tuples for what is sent as one. `known`, an empty dictionary, has a container
    that occurs again in the value sent as a reference to its first place."""
    if known is None:
        _encode(value, export, out, None)
    elif id(value) in known:
        _count(out, b"r", known[id(value)][0])
    else:
        _encode(value, export, out, known)
        if _is_counted(type(value)):
            known[id(value)] = len(known), value  # kept, so that no other object has its id


def _is_counted(kind) -> bool:
    """Whether values of a class are containers that may be referred to, in the order in which they
    end; others of `_VALUES` are counted with them."""
    return kind in _COUNTED or (kind not in _PLAIN and (is_dict(kind) or is_in_stdlib(kind)))


def _encode(value, export, out, known) -> None:
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
    elif kind in _TAGS or is_named_tuple(kind):
        tag, number = (b"t", "") if kind in _TAGS else export(kind)
        if tag == b"h":
            _block(out, b"m", " ".join((number, *kind._fields)).encode())
        _count(out, _TAGS.get(kind, b"t"), len(value))
        for item in tuple.__iter__(value) if kind not in _TAGS else value:
            encode(item, export, out, known)
    elif kind is dict or is_dict(kind):
        if kind is not dict:
            made = getattr(value, "default_factory", None)
            factory = (
                made.__name__ if type(made) is type and _TYPES.get(made.__name__) is made else ""
            )
            _block(out, b"D", f"{kind.__name__} {factory}".encode())
        _count(out, b"d", len(value))
        for key, item in value.items():
            encode(key, export, out, known)
            encode(item, export, out, known)
    elif kind is slice:
        out.append(b"x")
        for item in (value.start, value.stop, value.step):
            encode(item, export, out, known)
    elif is_in_stdlib(kind):
        _block(out, b"v", " ".join(_key(kind)).encode())
        encode(_VALUES[_key(kind)](value), export, out, known)
    elif kind is type and _TYPES.get(value.__name__) is value:
        _block(out, b"g", value.__name__.encode())
    elif kind is type and is_in_stdlib(value):
        _block(out, b"V", " ".join(_key(value)).encode())
    else:
        base = _base_of(kind)
        tag, text = export(value)
        if tag == b"t":
            if kind is type:
                raise Unsendable("a test gives the program a class of its own")
            encode(BASES[tuple](value), export, out, known)
            return
        _block(out, b"u" if base else tag, text.encode())
        if base:
            encode(BASES[base](value), export, out, known)


def _base_of(kind) -> "Any":
    """The builtin class whose values those of a class are, such as int for an IntEnum: it derives
    from it, and its operators are that class's own or those of `enum`. None for any other class:
    its objects stay handles, because its operators are the program's."""
    if kind not in _known_bases:
        base = next((c for c in kind.__mro__ if c in BASES), None)
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


def is_dict(kind) -> bool:
    """Whether a class is one of `_DICTS` itself, not one that borrows its name."""
    known = kind.__module__ == "collections" and kind.__name__ in _DICTS
    return known and getattr(sys.modules.get("collections"), kind.__name__, None) is kind


def is_named_tuple(kind) -> bool:
    """Whether a class is a named tuple with fields that no attribute of tuples is called, and with
    nothing else of its own."""
    if kind not in _known_named:
        fields = getattr(kind, "_fields", None)
        _known_named[kind] = (
            issubclass(kind, tuple)
            and type(fields) is tuple
            and all(type(field) is str and _is_field(field) for field in fields)
            and not any(_has_own(c, fields) for c in kind.__mro__[: kind.__mro__.index(tuple)])
        )
    return _known_named[kind]


def _has_own(kind, fields) -> bool:
    """Whether a class of named tuples has methods or operators besides those of `namedtuple`."""
    public = {name for name in kind.__dict__ if not name.startswith("_")}
    return bool(public - {*fields} or (kind.__dict__.keys() & {*dir(tuple)}) - _OWN - public)


def _is_field(name) -> bool:
    return name.isidentifier() and not name.startswith("_") and not hasattr(tuple, name)


def is_in_stdlib(kind) -> bool:
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


def decode(data, at, load, known=None) -> "tuple[Any, int]":
    """The value at a position and the next position; `load(tag, text)` makes what is not data.
    `known`, an empty list, accepts references to containers of the same message. The judge accepts
    none: a few references to each other make a value that takes for ever to walk through."""
    value, at, counted = _decode(data, at, load, known)
    if known is not None and counted:
        known.append(value)
    return value, at


def _decode(data, at, load, known) -> "tuple[Any, int, bool]":
    tag = data[at : at + 1]
    at += 1
    if tag in (b"N", b"T", b"F"):
        return (None if tag == b"N" else tag == b"T"), at, False
    if tag == b"x":
        parts = []
        for _ in range(3):
            part, at = decode(data, at, load, known)
            parts.append(part)
        return slice(*parts), at, False
    size = int.from_bytes(data[at : at + 4], "big")
    at += 4
    if tag == b"r":
        if known is None or size >= len(known):
            raise Malformed("a reference")
        return known[size], at, False
    if tag == b"d":
        made = {}
        for _ in range(size):
            key, at = decode(data, at, load, known)
            made[key], at = decode(data, at, load, known)
        return made, at, True
    if tag in _MAKERS:
        items = []
        for _ in range(size):
            item, at = decode(data, at, load, known)
            items.append(item)
        return _MAKERS[tag](items), at, _MAKERS[tag] in _COUNTED
    block, at = data[at : at + size], at + size
    if not tag or len(block) != size:
        raise Malformed("cut off")
    if tag == b"v":
        fields, at = decode(data, at, load, known)
        if type(fields) is not tuple or not all(type(field) in _FIELDS for field in fields):
            raise Malformed("fields of a value")
        return _value(block.decode(), fields), at, True
    if tag in (b"D", b"m", b"u"):
        inner, at, _ = _decode(data, at, load, known)
        make = {b"D": _dict, b"m": _tuple, b"u": _derived}[tag]
        return make(block.decode(), inner, load), at, tag == b"D"
    return _scalar(tag, block, load), at, tag == b"y"


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
    if text == "re Pattern":
        import re

        return re.compile(fields[0], fields[1] & ~re.DEBUG)
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
    if type(inner) not in BASES:
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


def _from_stdlib(text) -> "Any":
    module, name = text.split()
    if (module, name) not in _VALUES:
        raise Malformed(text)
    return getattr(__import__(module), name)


def decode_message(data, load, known=None) -> "tuple[Any, Any, Any]":
    """The three values of a message: always a tuple of exactly three, and nothing behind it."""
    message, end = decode(data, 0, load, known)
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
