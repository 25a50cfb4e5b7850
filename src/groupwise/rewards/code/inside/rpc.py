"""The two ends of the line between the judge and the program under test.

The judge asks (`Client`), the program's process answers (`Server`); what the program defines stays
on its side and is named by numbers.
"""

import _operator
import builtins
import os
import sys

from groupwise.rewards.code.inside.codec import (
    Malformed,
    Remote,
    Unsendable,
    decode,
    encode,
    read_frame,
    write_frame,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DETAIL = 1000
_MOVABLE = (list, dict, set, bytearray)


class ProgramEnded(BaseException):
    """The program's process cannot answer any more. No Exception, so that no test catches it."""


def load_program(source, name):
    """Run a program in a fresh module of that name and return the module's names."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


class Server:
    """Answers what the judge asks about the program's objects."""

    def __init__(self, questions, answers) -> None:
        self.questions, self.answers = questions, answers
        self.objects, self.numbers, self.names = [], {}, {}

    def export(self, value):
        """How the judge is told of an object that is no data."""
        if type(value) is type(sys) and value.__name__ in sys.stdlib_module_names:
            return b"m", value.__name__
        if type(value) is Callback:
            return b"k", str(value.number)
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self.numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return b"e", f"{number} {_names(value)}"
        return b"h", str(number)

    def load(self, tag, text):
        if tag == b"h":
            return self.objects[int(text)]
        if tag == b"n":
            return getattr(builtins, text)
        return Callback(self, int(text))

    def send(self, *message) -> None:
        out = []
        encode(message, self.export, out)
        write_frame(self.answers, b"".join(out))

    def receive(self) -> "Any":
        frame = read_frame(self.questions)
        if frame is None:
            os._exit(0)
        return decode(frame, 0, self.load)[0]

    def call_back(self, number, args):
        """Have the judge call a function of the tests; answer its questions meanwhile."""
        self.send("call", number, args)
        while (message := self.receive())[0] != "returned":
            self.answer(*message)
        return message[1]

    def serve(self) -> None:
        while True:
            self.answer(*self.receive())

    def answer(self, op, args, named) -> None:
        movable = [a for a in args if type(a) in _MOVABLE] if op == "call" else []
        try:
            before = self._bytes(movable)
            value = self.run(op, args, named)
            changed = movable if self._bytes(movable) != before else None
            self.send("returned", value, changed)
        except BaseException as error:
            self.send("raised", _names(type(error)), str(error)[:_DETAIL])

    def _bytes(self, values):
        out = []
        encode(values, self.export, out)
        return out

    def run(self, op, args, named):
        if op == "load":
            self.names = load_program(args[0], "solution")
            return None
        if op == "globals":
            return {name: self.names[name] for name in args[0] if name in self.names}
        if op == "call":
            return args[0](*args[1:], **named)
        if op in ("getattr", "setattr", "len", "iter", "next", "str", "repr", "bool", "isinstance"):
            return getattr(builtins, op)(*args)
        if hasattr(_operator, op):
            return getattr(_operator, op)(*args)
        return getattr(_operator, op.removeprefix("r"))(*reversed(args))


def _names(kind):
    """The name of an exception class and that of the nearest builtin class it derives from."""
    base = next(c.__name__ for c in kind.__mro__ if getattr(builtins, c.__name__, None) is c)
    return f"{kind.__name__} {base}"


class Callback:
    """A function of the tests, as the program sees it."""

    def __init__(self, server, number) -> None:
        self.server, self.number = server, number

    def __call__(self, *args):
        return self.server.call_back(self.number, args)


class Client:
    """Asks the program's process, and believes nothing it says but plain values."""

    def __init__(self, pid, questions, answers) -> None:
        self.pid, self.questions, self.answers = pid, questions, answers
        self.callbacks, self.exceptions, self.classes = [], {}, {}

    def export(self, value):
        if type(value) is Remote:
            return b"h", str(object.__getattribute__(value, "_number"))
        if isinstance(value, type) and value in self.classes:
            return b"h", str(self.classes[value])
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return b"n", value.__name__
        if callable(value) and not isinstance(value, type):
            self.callbacks.append(value)
            return b"k", str(len(self.callbacks) - 1)
        raise Unsendable(f"a test gives the program a {type(value).__name__}")

    def load(self, tag, text):
        if tag == b"h":
            return Remote(self.ask, int(text))
        if tag == b"k":
            return self.callbacks[int(text)]
        if tag == b"m" and text in sys.stdlib_module_names:
            return __import__(text)
        if tag == b"e":
            number, name, base = text.split()
            kind = self.exception(name, base)
            if name != base:
                self.classes[kind] = int(number)
            return kind
        raise Malformed(text)

    def exception(self, name, base):
        """The builtin exception, or a class of the judge's own for one that the program defines."""
        ancestors = getattr(getattr(builtins, base, None), "__mro__", ())
        parent = next((c for c in ancestors if _plain_exception(c)), Exception)
        if name == base:
            return parent
        if (name, base) not in self.exceptions:
            self.exceptions[name, base] = type(name, (parent,), {})
        return self.exceptions[name, base]

    def send(self, *message) -> None:
        out = []
        encode(message, self.export, out)
        try:
            write_frame(self.questions, b"".join(out))
        except BrokenPipeError:
            pass  # the missing answer will say why

    def ask(self, op, *args, **named) -> "Any":
        """Have the program's process do something, and return or raise what came of it."""
        self.send(op, args, named)
        while True:
            kind, said, changed = self.receive()
            if kind == "raised":
                raise said
            if kind == "returned":
                _write_back(args, changed)
                return said
            self.send("returned", said(*changed))

    def receive(self) -> "Any":
        """("returned", value, changed), ("raised", exception, None) or ("call", f, arguments)."""
        try:
            frame = read_frame(self.answers)
            if frame is None:
                raise ProgramEnded(ending(os.waitpid(self.pid, 0)[1]))
            kind, said, changed = decode(frame, 0, self.load)[0]
            if kind == "raised":
                return kind, self.exception(*said.split())(str(changed)), None
            if kind == "call":
                return kind, self.callbacks[said], changed
            if kind != "returned":
                raise Malformed(kind)
            return kind, said, changed
        except Exception as problem:
            raise ProgramEnded(f"the program answered no value: {problem!r}") from None


def _plain_exception(kind) -> bool:
    try:
        return issubclass(kind, Exception) and isinstance(kind(""), kind)
    except TypeError:
        return False  # UnicodeDecodeError and ExceptionGroup want more than a message


def _write_back(args, changed) -> None:
    """Give lists, dicts and sets of a call the contents that the program left in them."""
    for mine, theirs in zip([a for a in args if type(a) in _MOVABLE], changed or (), strict=False):
        if type(mine) is not type(theirs):
            continue
        if type(mine) in (list, bytearray):
            mine[:] = theirs
        else:
            mine.clear()
            mine.update(theirs)


def ending(status) -> str:
    """How a process came to its end, by its wait status."""
    if os.WIFSIGNALED(status):
        return f"the program was killed by signal {os.WTERMSIG(status)}"
    return f"the program ended with exit status {os.WEXITSTATUS(status)}"
