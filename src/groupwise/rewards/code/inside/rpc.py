"""The two ends of the connection between the judge and the program under test.

The judge asks (`Client`), the program's process answers (`Server`); what the program defines stays
on its side and is named by numbers. The program may replace everything on its side and write any
bytes, so the client checks the form of each message, and one that is malformed ends the program.
"""

import _operator
import builtins
import os
import sys

from groupwise.rewards.code.inside.arguments import changeable, given, write_back
from groupwise.rewards.code.inside.codec import (
    ERROR,
    KILLED,
    TIMEOUT,
    Malformed,
    Unsendable,
    decode_message,
    encode,
    is_named_tuple,
    read_frame,
    write_frame,
)
from groupwise.rewards.code.inside.handles import DERIVED, Remote, awaited, named_tuple_class

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DETAIL = 1000
_FUNCTIONS = (
    "getattr setattr delattr len iter next str repr bool isinstance hash reversed format "
    "float int round bytes aiter divmod"
).split()
_VIEWS = (type({}.keys()), type({}.items()))
_MOST_OBJECTS = 1 << 31


class ProgramEnded(BaseException):
    """The program's process can no longer answer. Not an Exception: no test catches it.

    `cause` is a verdict: ERROR, TIMEOUT (out of processor time) or KILLED."""

    def __init__(self, text, cause=ERROR) -> None:
        super().__init__(text)
        self.cause = cause


def load_program(source, name):
    """Run a program in a fresh module of that name and return the module's names."""
    module = type(sys)(name)
    sys.modules[name] = module
    builtins.exit = builtins.quit = leave
    exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def leave(code=None):
    """`exit` and `quit`, which the interpreter has only with `site`."""
    raise SystemExit(code)


def write_message(fd, message, export, known=None) -> None:
    """Encode the three values of a message and write them as a frame."""
    out = []
    encode(message, export, out, known)
    write_frame(fd, b"".join(out))


class Server:
    """Answers what the judge asks about the program's objects."""

    def __init__(self, questions, answers) -> None:
        self.questions, self.answers = questions, answers
        self.objects, self.numbers, self.names, self.exceptions = [], {}, {}, {}
        self.loop = None

    def export(self, value):
        """The message that describes an object, which is not data, to the judge."""
        if type(value) is Callback:
            return b"k", str(value.number)
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self.numbers[id(value)]
        if type(value) is _COROUTINE:
            return b"w", str(number)
        if isinstance(value, type) and issubclass(value, BaseException):
            return b"e", f"{number} {exception_names(value)}"
        return b"h", str(number)

    def load(self, tag, text):
        if tag == b"h":
            return self.objects[int(text)]
        if tag == b"m":
            return self.objects[int(text.split()[0])]
        if tag == b"n":
            return getattr(builtins, text)
        called = Callback(self, int(text))
        return Iterated(called) if tag == b"j" else called

    def send(self, *message) -> None:
        write_message(self.answers, message, self.export)

    def receive(self) -> "Any":
        frame = read_frame(self.questions)
        if frame is None:
            os._exit(0)
        return decode_message(frame, self.load, [])

    def call_back(self, number, args):
        """Have the judge call a function of the tests; answer its questions meanwhile."""
        self.send("call", number, args)
        while (message := self.receive())[0] not in ("returned", "raised"):
            self.answer(*message)
        kind, value, text = message
        if kind == "raised":
            raise exception_class(self.exceptions, *value.split())(text[0])
        return value

    def serve(self) -> None:
        while True:
            self.answer(*self.receive())

    def answer(self, op, args, named) -> None:
        outer, before = [], []
        try:
            outer, inside = given(args, named, sent_by_value) if op == "call" else ([], [])
            before = self._bytes(outer)
            value = self.run(op, args, named)
            changed = self._changed(outer, before)
            place = next((i for i, mine in enumerate(inside) if mine is value), None)
            if place is None:
                self.send("returned", value, changed)
            else:
                self.send("returned", value, (place, changed))
        except BaseException as error:
            self.send_error(error, outer, before)

    def _changed(self, outer, before):
        """The arguments, if the program has changed what is in them."""
        return outer if outer and self._bytes(outer) != before else None

    def send_error(self, error, outer, before) -> None:
        names, text = exception_names(type(error)), str(error)[:_DETAIL]
        own = {k: v for k, v in vars(error).items() if k.isidentifier() and not k.startswith("_")}
        try:
            if len(repr(error.args)) <= _DETAIL:
                args, changed = tuple(error.args), self._changed(outer, before)
                self.send("raised", names, (text, args, own, changed))
                return
        except Exception:
            pass  # `repr` and attributes are the program's own code, which may raise anything
        self.send("raised", names, (text, (text,), {}, None))

    def _bytes(self, values):
        out = []
        encode(values, self.export, out)
        return out

    def wait_for(self, awaitable):
        """Wait on one event loop for all, so that what a test awaits later goes on there."""
        if self.loop is None:
            import asyncio

            self.loop = asyncio.new_event_loop()

        async def wait():
            return await awaitable

        return self.loop.run_until_complete(wait())

    def run(self, op, args, named):
        if op == "load":
            self.names = load_program(args[0], "solution")
            return None
        if op == "name":
            return self.names[args[0]]
        if op == "call":
            return args[0](*args[1:], **named)
        if op in _FUNCTIONS:
            return getattr(builtins, op)(*args)
        if op in ("await", "anext", "aenter"):
            return self.wait_for(args[0] if op == "await" else special(args[0], op)())
        if op == "enter":
            return special(args[0], op)()
        if op in ("exit", "aexit"):
            error = None if args[1] is None else Exception(args[1])
            left = special(args[0], op)(error and Exception, error, None)
            return self.wait_for(left) if op == "aexit" else left
        if op == "content":
            return content(args[0])
        if op == "rdivmod":
            return divmod(*reversed(args))
        op = op + "_" if op in ("and", "or") else op
        if hasattr(_operator, op):
            return getattr(_operator, op)(*args)
        op = op.removeprefix("r")
        return getattr(_operator, op + "_" if op in ("and", "or") else op)(*reversed(args))


def sent_by_value(kind) -> bool:
    """Whether tuples of a class come to the program as values; it has others by handles."""
    return kind is tuple or is_named_tuple(kind)


def has_no_handle(kind) -> bool:
    """The same of the judge's classes."""
    return kind is not DERIVED[tuple]


def special(value, name):
    """A special method of an object, which is looked up in its class."""
    return lambda *args: getattr(type(value), f"__{name}__")(value, *args)


def content(value):
    """What is in an object of a class that derives from a builtin container, or in a view of a
    dictionary, as plain data; None for other objects."""
    kind = type(value)
    if kind in _VIEWS:
        return set(value)
    base = next((c for c in kind.__mro__ if c in (list, tuple, dict, set, frozenset)), None)
    if base is None:
        return None
    return dict(dict.items(value)) if base is dict else base(base.__iter__(value))


def own_coroutine(value):
    """The handle behind a coroutine of the program; a coroutine of the tests as it is.

    Raises:
        TypeError: the program's has been awaited, so that there is nothing to give back.
    """
    if value.cr_code is not awaited.__code__:
        return value
    if value.cr_frame is None:
        raise TypeError("a coroutine of the program is given back to it after its end")
    return value.cr_frame.f_locals["remote"]


async def _nothing() -> None: ...


_unused = _nothing()
_COROUTINE = type(_unused)
_unused.close()


def exception_names(kind):
    """The name of an exception class and that of the nearest builtin class it derives from."""
    base = next(c.__name__ for c in kind.__mro__ if getattr(builtins, c.__name__, None) is c)
    return f"{kind.__name__} {base}"


def exception_class(known, name, base):
    """The builtin exception class of these names, or a class like it, made once.

    Never one that `assert` raises or that catches what it raises: with `NotFound = Exception` a
    program would otherwise pass `try: find(0); assert False` / `except NotFound: pass`.
    """
    if (name, base) not in known:
        ancestors = getattr(getattr(builtins, base, None), "__mro__", ())
        parent = next((c for c in ancestors if _takes_message(c)), Exception)
        same = name == base == parent.__name__ and not issubclass(AssertionError, parent)
        known[name, base] = parent if same else type(name, (parent,), {})
    return known[name, base]


def _takes_message(kind) -> bool:
    try:
        return issubclass(kind, Exception) and isinstance(kind(""), kind)
    except TypeError:
        return False  # UnicodeDecodeError and ExceptionGroup want more than a message


class Callback:
    """A function of the tests, as the program sees it."""

    def __init__(self, server, number) -> None:
        self.server, self.number = server, number

    def __call__(self, *args):
        return self.server.call_back(self.number, args)


class Iterated:
    """An iterator of the tests, as the program sees it."""

    def __init__(self, step) -> None:
        self.step = step

    def __iter__(self):
        return self

    def __next__(self):
        return self.step()


class Client:
    """Asks the program's process, and trusts nothing in its answers but plain values."""

    def __init__(self, pid, questions, answers, cpu) -> None:
        self.pid, self.questions, self.answers = pid, questions, answers
        self.cpu, self.cause = cpu, ERROR
        self.callbacks, self.exceptions, self.classes, self.remotes = [], {}, {}, {}
        self.tuples = {}
        self.ended = ""

    def end(self) -> None:
        """Kill the program if it is still there."""
        os.close(self.questions)
        os.close(self.answers)
        try:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        except OSError:
            pass  # its end was noticed before

    def export(self, value):
        """The message that describes an object, which is not data, to the program.

        Raises:
            Unsendable: the test gives the program what cannot leave its process.
            TypeError: it does, and the program is where that comes from.
        """
        value = getattr(value, "_remote", value) if type(value) in DERIVED.values() else value
        value = own_coroutine(value) if type(value) is _COROUTINE else value
        if type(value) is Remote:
            return b"h", str(object.__getattribute__(value, "_number"))
        if isinstance(value, type) and value in self.classes:
            return b"h", str(self.classes[value])
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return b"n", value.__name__
        of_program = any(value is kind for kind in (Remote, _COROUTINE, *DERIVED.values()))
        if of_program or isinstance(value, BaseException):
            raise TypeError(f"a {type(value).__name__} of the program is given back to it")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return b"t", ""  # of a named tuple of the tests with methods, the program gets a tuple
        if isinstance(value, type) and issubclass(value, tuple):
            known = [number for (number, _), kind in self.tuples.items() if kind is value]
            return (b"h", str(known[0])) if known else (b"t", "")
        if callable(value) and not isinstance(value, type):
            self.callbacks.append(value)
            return b"k", str(len(self.callbacks) - 1)
        own = {name for name in dir(type(value)) if not name.startswith(("_", "gi_"))}
        if hasattr(type(value), "__next__") and own <= {"send", "throw", "close"}:
            self.callbacks.append(value.__next__)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            return b"j", str(len(self.callbacks) - 1)
        raise Unsendable(f"a test gives the program a {type(value).__name__}")

    def load(self, tag, text):
        number = int(text.split()[0])
        if not 0 <= number < _MOST_OBJECTS:
            raise Malformed(text)
        if tag == b"h":
            if number not in self.remotes:
                self.remotes[number] = Remote(self.ask, number)
            return self.remotes[number]
        if tag == b"k":
            return self.callbacks[number]
        if tag == b"w":
            return awaited(Remote(self.ask, number))
        if tag == b"m":
            fields = tuple(text.split()[1:])
            if (number, fields) not in self.tuples:
                kind = self.tuples[number, fields] = named_tuple_class("tuple", fields)
                kind._number = number
            return self.tuples[number, fields]
        if tag == b"e":
            _, name, base = text.split()
            kind = exception_class(self.exceptions, name, base)
            if getattr(builtins, kind.__name__, None) is not kind:
                self.classes[kind] = number
            return kind
        raise Malformed(text)

    def send(self, *message) -> None:
        try:
            write_message(self.questions, message, self.export, {})
        except BrokenPipeError:
            pass  # the missing answer will say why

    def ask(self, op, *args, **named) -> "Any":
        """Have the program's process do something, and return or raise what came of it."""
        self.send(op, args, named)
        outer, inside = given(args, named, has_no_handle) if op == "call" else ([], [])
        while True:
            kind, said, changed = self.receive()
            if kind == "raised":
                *about, changed = changed
                write_back(outer, changed)
                raise made_error(exception_class(self.exceptions, *said.split()), op, *about)
            if kind == "returned":
                if type(changed) is not tuple:
                    write_back(outer, changed)
                    return said
                write_back(outer, changed[1])
                write_back(inside[changed[0] : changed[0] + 1], [said])
                return inside[changed[0]]
            self.reply(self.callbacks[said], changed)

    def reply(self, function, args) -> None:
        """Call a function of the tests for the program; a failed assertion ends the test."""
        try:
            value = function(*args)
        except (AssertionError, Unsendable):
            raise
        except Exception as error:
            names = exception_names(type(error))
            self.exceptions.setdefault(tuple(names.split()), type(error))
            self.send("raised", names, (str(error)[:_DETAIL], (), {}))
        else:
            self.send("returned", value, None)

    def receive(self) -> "Any":
        """("returned", value, changed), ("raised", names, text) or ("call", number, arguments)."""
        if not self.ended:
            try:
                frame = read_frame(self.answers)
                if frame is None:
                    _, status, usage = os.wait4(self.pid, 0)
                    self.ended, self.cause = ending(status), ended_by(status, usage, self.cpu)
                else:
                    return self.checked(decode_message(frame, self.load))
            except Exception as problem:
                self.ended = f"the program's answer is malformed: {problem!r}"[:_DETAIL]
        raise ProgramEnded(self.ended, self.cause)

    def checked(self, message):
        """The message, if it is one of the three that a program may send."""
        kind, said, changed = message
        valid = True
        if kind == "returned":
            contents = changed
            if type(changed) is tuple:
                place, contents = changed if len(changed) == 2 else (None, None)
                valid = changeable(said) and type(place) is int and place >= 0
            valid = valid and (contents is None or type(contents) is list)
        elif kind == "raised":
            valid = type(said) is str and len(said.split()) == 2 and _is_error(changed)
        else:
            numbered = type(said) is int and 0 <= said < len(self.callbacks)
            valid = kind == "call" and numbered and type(changed) is tuple
        if type(kind) is not str or not valid:
            raise Malformed(kind)
        return message


def _is_error(said) -> bool:
    """Text, arguments and attributes of an exception, and what the call changed before it."""
    if type(said) is not tuple or [type(part) for part in said[:3]] != [str, tuple, dict]:
        return False
    named = all(type(name) is str and name.isidentifier() for name in said[2])
    return named and len(said) == 4 and (said[3] is None or type(said[3]) is list)


def made_error(kind, op, text, args, own):
    """An exception of the program, with its text, arguments and attributes. One that ends a loop
    does so only in answer to `next` or `anext`: raised by a call, it would end the loop of the test
    around it, such as `all(map(f, …))`, before anything is compared."""
    ends = {"next": StopIteration, "anext": StopAsyncIteration}.get(op, ())
    if issubclass(kind, (StopIteration, StopAsyncIteration)) and not issubclass(kind, ends):
        kind, text = RuntimeError, f"the program raised {kind.__name__}: {text}"
    error = kind(text)
    if args:
        error.args = args
    for name, value in own.items():
        if not name.startswith("_") and not hasattr(BaseException, name):
            setattr(error, name, value)
    error.of_program = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


def ended_by(status, usage, cpu):
    """What a wait status says of a program: TIMEOUT where it was killed after its processor time,
    by SIGXCPU or, if it ignores that, by SIGKILL; KILLED by SIGKILL before that; else ERROR."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == 24 or (number == 9 and usage.ru_utime + usage.ru_stime >= cpu - 0.1):
        return TIMEOUT
    return KILLED if number == 9 else ERROR


def ending(status) -> str:
    """How a process came to its end, by its wait status."""
    if os.WIFSIGNALED(status):
        return f"the program was killed by signal {os.WTERMSIG(status)}"
    return f"the program ended with exit status {os.WEXITSTATUS(status)}"
