"""Programs of a model run in the sandbox, and names stay defined."""

from __future__ import annotations

import pytest

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
    assert ran("print(x)") == "41"
    assert ran("print('</output>')") == "< /output>"
    assert ran("open('/etc/passwd')").startswith("error: ")


def test_a_program_that_hangs_is_an_answer_and_no_failure() -> None:
    environment = python(seconds=0.5)
    state = environment.begin(Prompt(id="a"), stream=Stream())
    reply = environment.reply(state, "<python>while True: pass</python>")
    assert reply.status is Status.OK and reply.values["timeout"] == 1.0
    assert "still running after 0.5 s" in reply.text
