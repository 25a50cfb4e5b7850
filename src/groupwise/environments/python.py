"""A Python interpreter: the model writes a program, and reads what it prints."""

from __future__ import annotations

import zlib

from groupwise.environments.base import ENVIRONMENTS, Reply, TagEnvironment, Tags, TagState
from groupwise.errors import UsageError
from groupwise.registry import checked_by
from groupwise.rewards.code.sandbox import Limits, Outcome, Verdict, run_inputs, unavailable
from groupwise.types import Prompt, Stream

_MARK, _RAISED, _END = "\x1e\x1e\x1e", "\x1d\x1d\x1d", "\x1c\x1c\x1c"
"""Written before the last program, so that the repeated output of earlier ones can be removed,
before the exception that it raised, and after it, unless it ended its process."""
_SEED = "__import__('random').seed({seed})"
# A program may give the names of builtins other meanings.
_RUN = """\
    __import__("builtins").exec(
        __import__("builtins").compile({program!r}, "<program>", "exec"),
        __import__("builtins").globals(),
    )"""
_EARLIER = f"""\
try:
{_RUN}
except __import__("builtins").BaseException:
    pass
"""
_LAST = f"""\
__import__("sys").__stdout__.write({_MARK!r})
__import__("sys").__stdout__.flush()
try:
{_RUN}
except __import__("builtins").SystemExit:
    raise
except __import__("builtins").BaseException as error:
    __import__("sys").__stdout__.write(
        {_RAISED!r} + __import__("traceback").format_exception_only(error)[-1]
    )
finally:
    __import__("sys").__stdout__.write({_END!r})
    __import__("sys").__stdout__.flush()
"""


class _State(TagState):
    """The programs of one completion that came to an end, even by an exception.

    Args:
        seed: of the module `random`, before the first program.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.programs: list[str] = []


class PythonEnvironment(TagEnvironment):
    """Runs the programs of a completion, each after those before it, so that names stay defined.

    Every call starts a sandbox of its own and runs the earlier programs again: nothing outlives a
    call, and a completion that is continued elsewhere finds the same names. Names that a program
    defined before it raised an exception stay as well. `random` is seeded from the stream, so its
    numbers repeat; values that depend on the time, on `os.urandom` or on the order of a set of
    strings do not. The time of earlier programs counts in every call. A program that was stopped or
    that ended its process leaves nothing behind.

    Args:
        tags: where programs and results stand.
        limits: of one call.
        max_result_chars: characters of a result; the middle of a longer one is left out.
        max_calls: calls of one completion.

    Raises:
        UsageError: there is no sandbox on this machine.
    """

    has_processes = True

    def __init__(
        self, *, tags: Tags, limits: Limits, max_result_chars: int = 2000, max_calls: int = 8
    ) -> None:
        super().__init__(
            lambda call: Reply(text=call),
            tags=tags,
            max_result_chars=max_result_chars,
            max_calls=max_calls,
        )
        self.limits = limits
        if reason := unavailable():
            raise UsageError(
                f"environment.name = 'python': {reason}; programs written by a model "
                "run only in a sandbox."
            )

    def begin(self, prompt: Prompt, *, stream: Stream) -> _State:
        """A completion without programs."""
        return _State(zlib.crc32(repr((tuple(stream), prompt.id)).encode()))

    def answer(self, state: TagState, call: str) -> Reply:
        """What the program prints, or the last line of its error."""
        assert isinstance(state, _State)
        program = _unfenced(call)
        earlier = [_EARLIER.format(program=each) for each in state.programs]
        last = _LAST.format(program=program)
        whole = "\n".join([_SEED.format(seed=state.seed), *earlier, last])
        (ran,) = run_inputs(whole, [""], limits=self.limits)
        if isinstance(ran, Outcome):
            failed = {"timeout": 1.0} if ran.verdict is Verdict.TIMEOUT else {"malformed": 1.0}
            said = (ran.detail or ran.verdict.value).rpartition("\n")[2]
            return Reply(text=f"error: {said}", values=failed)
        if _END in ran:
            state.programs.append(program)
        said, raised, error = ran.rpartition(_MARK)[2].replace(_END, "").partition(_RAISED)
        if raised:
            error = error.strip().rpartition("\n")[2]
            return Reply(text=f"error: {error}", values={"malformed": 1.0})
        return Reply(text=_shortened(said.strip(), self.max_result_chars))


@checked_by(Limits)
@ENVIRONMENTS.register
def python(
    *,
    opening: str = "<python>",
    closing: str = "</python>",
    seconds: float = 5.0,
    memory_mb: int = 512,
    max_result_chars: int = 2000,
    max_calls: int = 8,
) -> TagEnvironment:
    """Runs programs in the sandbox of code rewards: no network, no files, limits on everything.

    Args:
        opening, closing: tags around a program; a Markdown fence inside them is removed.
        seconds: processor time of a call; it may take three times as long by the clock, which
            `environment.timeout_s` must exceed.
        memory_mb: address space of a program, in MiB.
        max_result_chars: characters of a result; the middle of a longer one is left out.
        max_calls: calls of one completion.

    Raises:
        UsageError: there is no sandbox on this machine.

    Source: ToRA (2309.17452) for programs in the middle of mathematical reasoning.
    """
    return PythonEnvironment(
        tags=Tags(call=(opening, closing), result=("\n<output>\n", "\n</output>\n")),
        limits=Limits(seconds=seconds, memory_mb=memory_mb),
        max_result_chars=max_result_chars,
        max_calls=max_calls,
    )


def _unfenced(program: str) -> str:
    """A program without a Markdown fence around it.

    Example:
        >>> _unfenced("```python\\nprint(1)\\n```")
        'print(1)'
    """
    lines = program.strip("\n").split("\n")
    if len(lines) > 1 and lines[0].startswith("```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    return "\n".join(lines)


def _shortened(text: str, longest: int) -> str:
    """The beginning and the end of a text; errors stand at its end.

    Example:
        >>> _shortened("0123456789", 9)
        '012…\\n…789'
    """
    if len(text) <= longest:
        return text
    half = max(1, (longest - 3) // 2)
    return f"{text[:half]}…\n…{text[-half:]}"
