"""Programs of a model run in the sandbox, and names stay defined."""

from __future__ import annotations

import pytest

from groupwise.environments import TagEnvironment
from groupwise.environments.python import python
from groupwise.rewards.code.sandbox import unavailable
from groupwise.types import Prompt, Status, Stream

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "")


def test_names_stay_and_only_new_output_comes_back() -> None:
    environment = python(seconds=5.0)
    state = environment.begin(Prompt(id="a"), stream=Stream())

    def ran(program: str) -> str:
        reply = environment.reply(state, f"so <python>{program}</python>")
        assert reply.status is Status.OK
        return reply.text.removeprefix("\n<output>\n").removesuffix("\n</output>\n")

    assert ran("x = 41\nprint('first')") == "first"
    assert ran("```python\nprint(x + 1)\n```") == "42"
    assert ran("x = 0\n1 / 0") == "error: ZeroDivisionError: division by zero"
    assert ran("print(x)") == "0"
    assert ran("print('</output>')") == "< /output>"
    assert ran("open('/etc/passwd')").startswith("error: ")


def ran_by(environment: TagEnvironment, *programs: str, stream: Stream) -> list[str]:
    """What the programs of one completion print."""
    state = environment.begin(Prompt(id="a"), stream=stream)
    texts = [environment.reply(state, f"<python>{each}</python>").text for each in programs]
    return [text.removeprefix("\n<output>\n").removesuffix("\n</output>\n") for text in texts]


def test_random_numbers_are_kept_and_are_those_of_the_stream() -> None:
    programs = (
        "import random\nx = random.random()\nprint(x)",
        "print(x)",
        "print(random.random())",
    )
    environment = python(seconds=5.0)
    first, again, next_one = ran_by(environment, *programs, stream=Stream(seed=1))
    assert first == again != next_one
    assert ran_by(environment, *programs, stream=Stream(seed=1)) == [first, again, next_one]
    assert ran_by(environment, *programs, stream=Stream(seed=2))[0] != first


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("y = 5\n1 / 0", "ZeroDivisionError: division by zero"),
        ("y = 5\nraise ValueError('two\\nlines')", "lines"),
        ("y = 5\nassert y == 'a'", "AssertionError"),
        ("y = 5\nimport io, sys\nsys.stdout = io.StringIO()\nz", "NameError: name 'z'"),
    ],
)
def test_names_that_were_defined_before_an_exception_stay(program: str, error: str) -> None:
    after = "import sys; print(y, file=sys.__stdout__, flush=True)"
    told = ran_by(python(seconds=5.0), program, after, stream=Stream())
    assert told[0].startswith(f"error: {error}")
    assert told[1] == "5"


def test_a_program_that_exits_keeps_its_names_and_one_that_cannot_be_compiled_harms_nothing() -> (
    None
):
    programs = ("y = 5\nprint(1)\nraise SystemExit", "y = (", "print(y)")
    told = ran_by(python(seconds=5.0), *programs, stream=Stream())
    assert told[0] == "1" and told[1].startswith("error: SyntaxError") and told[2] == "5"


def test_a_program_that_hangs_is_an_answer_and_no_failure() -> None:
    environment = python(seconds=0.5)
    state = environment.begin(Prompt(id="a"), stream=Stream())
    reply = environment.reply(state, "<python>while True: pass</python>")
    assert reply.status is Status.OK and reply.values["timeout"] == 1.0
    assert "still running after 0.5 s" in reply.text


@pytest.mark.parametrize(
    "program", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_program_that_ends_its_process_is_an_answer_and_the_next_one_runs(program: str) -> None:
    environment = python(seconds=5.0)
    state = environment.begin(Prompt(id="a"), stream=Stream())
    died = environment.reply(state, f"<python>{program}</python>")
    assert died.status is Status.OK and "error" in died.text
    assert "\n7\n" in environment.reply(state, "<python>print(7)</python>").text


def test_megabytes_are_refused_in_words_and_bytes_that_are_no_text_are_readable() -> None:
    environment = python(seconds=5.0)
    state = environment.begin(Prompt(id="a"), stream=Stream())
    long = environment.reply(state, "<python>print('x' * 3_000_000)</python>")
    assert long.status is Status.OK and "error: flooded" in long.text
    raw = r"import sys; sys.stdout.buffer.write(b'a\xff\xfeb')"
    told = environment.reply(state, f"<python>{raw}</python>")
    assert told.status is Status.OK
    told.text.encode()


def test_programs_may_give_names_of_builtins_other_meanings() -> None:
    rebound = "from re import *\nprint = exec = globals = BaseException = None\nx = 1"
    texts = ran_by(python(), rebound, "import sys; sys.stdout.write(str(x))", stream=Stream())
    assert texts == ["", "1"]


@pytest.mark.parametrize("end", ["import os\nos._exit(0)", "import sys\nsys.exit()"])
def test_a_program_that_ends_its_process_does_not_keep_later_ones_from_running(end: str) -> None:
    programs = "print(1)", f"print(2, flush=True)\n{end}", "print(3)"
    assert ran_by(python(), *programs, stream=Stream()) == ["1", "2", "3"]
