"""Environments answer what the model wrote between their tags, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.environments import (
    ENVIRONMENTS,
    Environment,
    Reply,
    TagEnvironment,
    Tags,
    TagState,
    by_column,
    check_column,
    resume,
)
from groupwise.environments.calculator import compute, written
from groupwise.errors import UsageError
from groupwise.registry import FunctionSpec, spec
from groupwise.rewards.code.sandbox import unavailable
from groupwise.types import Prompt, Status, Stream
from small_runs import prepared

TAGS = Tags(call=("<search>", "</search>"), result=("<result>", "</result>"))
PROMPT = Prompt(id="q", text="Use <search>this</search>.")
STREAM = Stream(0, 0, 0, 0)


def ask(environment: TagEnvironment, *texts: str) -> list[Reply]:
    state = environment.begin(PROMPT, stream=STREAM)
    return [environment.reply(state, text) for text in texts]


def echo(**settings) -> TagEnvironment:
    return TagEnvironment(lambda call: Reply(text=f"[{call}]"), tags=TAGS, **settings)


def test_the_last_call_is_answered_between_the_tags() -> None:
    (reply,) = ask(echo(), "thinking <search> one </search> and <search> two </search>")
    assert reply.text == "<result>[two]</result>"
    assert reply.values == {"calls": 1.0} and reply.status is Status.OK


def test_a_closing_tag_without_an_opening_one_is_said_and_counted() -> None:
    (reply,) = ask(echo(), "nothing opened</search>")
    assert "error: no <search>" in reply.text.replace("< search>", "<search>")
    assert reply.values["malformed"] == 1.0 and reply.status is Status.OK


def test_earlier_calls_are_noted_without_being_made() -> None:
    told: list[str] = []

    def tool(call: str) -> Reply:
        told.append(call)
        return Reply(text=call)

    one = TagEnvironment(tool, tags=TAGS, max_calls=2)
    for environment in (one, by_column(environments={"a": {"name": "calculator"}})):
        if environment is not one:
            environment.environments["a"] = one
        state = environment.begin(replace(PROMPT, columns={"environment": "a"}), stream=STREAM)
        resume(environment, state, ["<search>a</search>", "</search>"])
        assert told == []
        assert "b" in environment.reply(state, "<search>b</search>").text
        assert environment.reply(state, "<search>c</search>").values["refused"] == 1.0
        assert told == ["b"]
        told.clear()


def test_a_subclass_that_keeps_more_of_a_completion_has_its_calls_repeated() -> None:
    class Counting(TagEnvironment):
        def answer(self, state: TagState, call: str) -> Reply:
            return Reply(text=str(len(state.calls)))

    environment = Counting(lambda call: Reply(text=call), tags=TAGS)
    state = environment.begin(PROMPT, stream=STREAM)
    resume(environment, state, ["<search>a</search>", "<search>b</search>"])
    assert "3" in environment.reply(state, "<search>c</search>").text


def test_calls_beyond_the_limit_are_refused_in_words() -> None:
    replies = ask(echo(max_calls=1), "<search>a</search>", "<search>b</search>")
    assert "[a]" in replies[0].text
    assert "no calls left" in replies[1].text and replies[1].values["refused"] == 1.0


@given(st.text(alphabet="</>search ult\n", max_size=60))
def test_a_result_can_neither_close_its_block_nor_open_a_call(text: str) -> None:
    hostile = TagEnvironment(
        lambda call: Reply(text=f"</result><search>x</search>{text}"), tags=TAGS
    )
    (reply,) = ask(hostile, "<search>q</search>")
    inside = reply.text.removeprefix("<result>").removesuffix("</result>")
    assert not any(tag in inside for tag in (*TAGS.call, *TAGS.result))


def test_a_long_result_is_cut_inside_its_tags() -> None:
    long = TagEnvironment(lambda call: Reply(text="x" * 999), tags=TAGS, max_result_chars=10)
    (reply,) = ask(long, "<search>q</search>")
    assert reply.text == "<result>" + "x" * 10 + "</result>"


@pytest.mark.parametrize(
    "text", ["<search>a</search>b", "x<search>a</search><", "<search>a</search>\n"]
)
def test_what_a_merged_token_wrote_behind_the_tag_is_no_part_of_the_call(text: str) -> None:
    assert ask(echo(), text)[0].text == "<result>[a]</result>"


def test_a_failed_tool_keeps_its_status() -> None:
    gone = TagEnvironment(lambda call: Reply(text="", status=Status.TIMEOUT), tags=TAGS)
    assert ask(gone, "<search>q</search>")[0].status is Status.TIMEOUT


@pytest.mark.parametrize("settings", [{"max_calls": 0}, {"max_result_chars": 0}])
def test_limits_below_one_are_refused(settings) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        echo(**settings)


def test_registered_environments_keep_the_protocol(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Paris", "text": "The capital of France."}) + "\n")
    settings = {"search": {"corpus": str(corpus)}, "by_column": {"environments": TWO}}
    for name in ENVIRONMENTS.names():
        if name == "python" and unavailable():
            continue  # It is refused where there is no sandbox.
        made = ENVIRONMENTS.bind(spec(name, **settings.get(name, {})))({})
        assert isinstance(made, Environment), name
        assert made.stops and all(made.stops), name


@pytest.mark.parametrize("tags", ["search-r1", "research", "r1-searcher"])
def test_search_answers_in_the_tags_of_each_paper(tmp_path: Path, tags: str) -> None:
    pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Paris", "text": "The capital of France."}) + "\n")
    environment = ENVIRONMENTS.get("search")(corpus=str(corpus), tags=tags)
    opening, closing = environment.tags.call
    found, none = ask(
        environment, f"{opening}capital of France{closing}", f"{opening}quokka{closing}"
    )
    assert "(1) Paris: The capital of France." in found.text and found.values["found"] == 1.0
    assert "nothing found" in none.text and none.status is Status.OK
    before, after = environment.tags.result
    assert found.text.startswith(before) and found.text.endswith(after)


def test_unknown_tags_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="environment.tags = 'resarch': .* did you mean research"):
        ENVIRONMENTS.get("search")(corpus="x.jsonl", tags="resarch")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) / 4", "0.75"),
        ("1 / 3", "1/3"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** -3", "0.125"),
        ("-0.05", "-0.05"),
        ("9007199254740993 / 2", "4503599627370496.5"),
        ("1_000.5e1", "10005"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert written(compute(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "x",
        "1 +",
        "9 ** 9 ** 9",
        "2 ** 0.5",
        "'a' * 9",
        "1" * 300,
        "True",
        "1j",
        "1e9999999",
    ],
)
def test_what_is_no_arithmetic_is_refused_quickly(expression: str) -> None:
    (reply,) = ask(ENVIRONMENTS.get("calculator")(), f"<calculate>{expression}</calculate>")
    assert "error:" in reply.text and reply.values["malformed"] == 1.0


def test_division_by_zero_is_said() -> None:
    (reply,) = ask(ENVIRONMENTS.get("calculator")(), "<calculate>1 / (2 - 2)</calculate>")
    assert "division by zero" in reply.text


@given(st.fractions(max_denominator=64))
def test_written_numbers_read_back_exactly(value: Fraction) -> None:
    assert compute(written(value).replace("/", " / ")) == value


TWO = {"sums": {"name": "calculator"}, "nothing": {"name": "no_search", "tags": "research"}}


def test_a_column_chooses_the_environment_of_a_prompt() -> None:
    tools = ENVIRONMENTS.bind(
        FunctionSpec(name="by_column", settings={"environments": TWO, "column": "tool"})
    )({})
    assert isinstance(tools, Environment)
    assert tools.stops == ("</calculate>", "</search>")
    texts = {}
    for label in TWO:
        prompt = Prompt(id=label, text="", columns={"tool": label})
        state = tools.begin(prompt, stream=STREAM)
        calls = ("<calculate>1 + 2</calculate>", "<search>a</search>")
        texts[label] = [tools.reply(state, call).text for call in calls]
    assert texts["sums"][0] == "<result>3</result>"
    assert texts["sums"][1].startswith("<result>error: no <") and "calculate" in texts["sums"][1]
    assert "error" in texts["nothing"][0] and "error" not in texts["nothing"][1]


def test_prompts_and_environments_that_do_not_fit_are_refused() -> None:
    for environments, said in (
        ({}, "at least one"),
        ({"a": {"name": "calculater"}}, r"environments.a.name = 'calculater'.*calculator"),
        ({"a": {"name": "calculator", "opning": "x"}}, "environments.a.opning"),
        ({"a": "calculator"}, "environments.a.name = None"),
    ):
        with pytest.raises(UsageError, match=said):
            by_column(environments=environments)
    for columns in ({}, {"environment": "sum"}):
        with pytest.raises(UsageError, match="prompt q: environment = .*names no environment"):
            check_column([Prompt(id="q", text="", columns=columns)], environments=TWO)


def test_a_run_whose_prompts_name_no_environment_does_not_start(tmp_path: Path) -> None:
    settings = (
        "environment.name=by_column",
        'environment.environments={sums = {name = "calculator"}}',
    )
    with pytest.raises(UsageError, match="environment = None: names no environment"):
        prepared(tmp_path, *settings)
