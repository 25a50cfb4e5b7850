"""Handles to objects that stay in the program's process, as the judge sees them."""

BASES = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda v: bytes.__getitem__(v, slice(None)),
    tuple: lambda v: tuple.__getitem__(v, slice(None)),
}
SHOWN = ("__repr__", "__str__", "__format__")


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


class Remote:
    """A handle to an object of the program under test, kept in the program's process.

    Equality and order are asked of the program only between two of its own objects, and `!=` is the
    opposite of `==`. A container of the program equals plain data if its content does: the program
    says what it contains, and the judge compares.

    Arithmetic with plain data has to give another handle: a program that answered
    `result - expected` with a number would answer 0. Handles that took part in it, or came of it,
    are `_mixed`; the program may know what is expected of them, so they never become plain data by
    `abs`, `round`, `float` or equality.
    """

    __slots__ = ("_ask", "_mixed", "_number", "_plain")

    def __init__(self, ask, number) -> None:
        own = {"_ask": ask, "_number": number, "_plain": None, "_mixed": False}
        for name, value in own.items():
            object.__setattr__(self, name, value)

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

    async def __aenter__(self):
        return self._ask("aenter", self)

    async def __aexit__(self, kind, error, _):
        text = None if kind is None else str(error)
        return self._ask("aexit", self, text) is True and hasattr(error, "of_program")

    async def __anext__(self):
        return self._ask("anext", self)

    def __eq__(self, other):
        if isinstance(other, Remote):
            return self._ask("eq", self, other)
        if self._mixed or not isinstance(other, _CONTAINERS):
            return NotImplemented
        content = self._ask("content", self)
        return type(content) in _CONTAINERS and content == other

    def __ne__(self, other):
        same = self.__eq__(other)
        return NotImplemented if same is NotImplemented else not same

    def __hash__(self) -> int:
        return hash(self._ask("hash", self))

    def __contains__(self, item) -> bool:
        """Whether an item is among the elements. Only of an object of its own is the program asked;
        for plain data it could say yes without knowing any."""
        if isinstance(item, Remote):
            return bool(self._ask("contains", self, item))
        elements = self._ask("iter", self)
        return any(each is item or each == item for each in elements)


_CONTAINERS = (list, tuple, dict, set, frozenset)


async def awaited(remote):
    """A coroutine of the program, run where it is when the test awaits it."""
    return object.__getattribute__(remote, "_ask")("await", remote)


def _forward(name):
    return lambda self, *args: self._ask(name, self, *args)


def _between_remotes(name):
    def method(self, other):
        return self._ask(name, self, other) if isinstance(other, Remote) else NotImplemented

    return method


def _mark(*values) -> None:
    for value in values:
        if type(value) is Remote:
            object.__setattr__(value, "_mixed", True)


def _to_remote(name):
    """An operator, which gives a handle or, between two handles, anything."""

    def method(self, other):
        answer = self._ask(name, self, other)
        pair = name.endswith("divmod") and type(answer) is tuple and len(answer) == 2
        parts = answer if pair else (answer,)
        if not isinstance(other, Remote):
            if not all(isinstance(part, Remote) for part in parts):
                return NotImplemented
            _mark(self, *parts)
        elif self._mixed or other._mixed:
            _mark(*parts)
        return answer

    return method


def _inplace(name):
    def method(self, other):
        answer = self._ask(name, self, other)
        if not isinstance(answer, Remote):
            return NotImplemented
        if not isinstance(other, Remote) or self._mixed or other._mixed:
            _mark(self, answer)
        return answer

    return method


def _converted(name):
    """A function of one handle, which gives plain data only if the handle is not mixed."""

    def method(self, *args):
        answer = self._ask(name, self, *args)
        if self._mixed:
            if not isinstance(answer, Remote):
                raise TypeError(
                    f"{name} of the result of arithmetic with plain data is not a number"
                )
            _mark(answer)
        return answer

    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()
_METHODS = (
    (_converted, "neg pos abs invert float int index round bytes bool".split()),
    (_forward, "len iter next str repr getitem setitem delitem reversed format aiter".split()),
    (_between_remotes, "lt le gt ge".split()),
    (_to_remote, [side + name for name in [*_BINARY, "divmod"] for side in ("", "r")]),
    (_inplace, [f"i{name}" for name in _BINARY]),
)
for _made, _names in _METHODS:
    for _name in _names:
        setattr(Remote, f"__{_name}__", _made(_name))


def _derived_class(base) -> type:
    """Values of a builtin class whose object shows them, and has their attributes and flags."""
    shown = {name: lambda self, *a, name=name: getattr(self._remote, name)(*a) for name in SHOWN}
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


DERIVED = {base: _derived_class(base) for base in BASES}
