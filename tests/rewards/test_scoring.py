"""Composition, adapters and scoring in this process."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.errors import RewardError, UsageError
from groupwise.prompts.sources import load_prompts
from groupwise.registry import spec
from groupwise.rewards import (
    COMBINATIONS,
    GroupScore,
    Scorer,
    build_scorer,
    combination,
    from_functions,
    reward_alert,
    stack,
    verifier,
)
from groupwise.rewards.compose import normalised_sum
from groupwise.settings import RewardSettings
from groupwise.types import Completion, Group, Prompt, Scores, Status

OK, ERROR, LATE, UNJUDGEABLE = Status.OK, Status.ERROR, Status.TIMEOUT, Status.UNJUDGEABLE


def completion(text: str, *, finish: Any = "stop") -> Completion:
    n = len(text)
    return Completion(
        tokens=list(range(n)), mask=[True] * n, logprobs=[0.0] * n, text=text, finish=finish
    )


def group(*texts: str, answer: str | None = "5", chat: bool = False, **columns: Any) -> Group:
    messages = ({"role": "user", "content": "q"},) if chat else ()
    prompt = Prompt(
        id="p", text=None if chat else "q", messages=messages, answer=answer, columns=columns
    )
    return Group(prompt=prompt, prompt_tokens=[1], completions=tuple(map(completion, texts)))


def scored(scorer: Scorer, *groups: Group) -> Scores:
    with scorer:
        return scorer.gather([scorer.submit(one) for one in groups])


def right(text: str, answer: str) -> float:
    return float(text == answer)


def test_parts_are_weighted_summed_and_logged_by_name() -> None:
    parts = [
        RewardSettings(name="exact_answer", weight=2.0, style="last_number"),
        RewardSettings(name="soft_overlong", cache=2),
    ]
    scores = scored(build_scorer(parts, max_tokens=4), group("5", "4", "  5"))
    # lengths 1, 1, 3 with limit 4 and cache 2: 0, 0, (2 - 3)/2
    assert scores.total.tolist() == [[2.0, 0.0, 1.5]]
    assert scores.correct.tolist() == [[1.0, 0.0, 1.0]]
    assert scores.parts["exact_answer"].tolist() == [[1.0, 0.0, 1.0]]
    assert scores.parts["soft_overlong"].tolist() == [[0.0, 0.0, -0.5]]
    assert scores.status == ((OK, OK, OK),) and bool(scores.valid.all()) and scores.errors == ()


@pytest.mark.parametrize(
    ("reward", "call", "page"),
    [
        ("research", "<think>t</think>", r"<answer>\boxed{5}</answer>"),
        ("r1searcher_answer", "no answer", "</think><answer>5</answer>"),
        ("r1searcher_call", "no call", "</think><answer>5</answer>"),
    ],
)
def test_rewards_score_what_the_policy_wrote_and_not_what_it_was_told(
    reward: str, call: str, page: str
) -> None:
    counted = {"calls": 0.0}
    told = replace(completion(call + page), own=call, values=counted)
    alone = replace(completion(call), values=counted)
    given = replace(group(), completions=(told, alone))
    scores = scored(build_scorer([RewardSettings(name=reward)]), given)
    one, other = scores.total[0].tolist()
    assert one == other <= 0.0


def test_parts_of_one_name_are_kept_apart() -> None:
    parts = [RewardSettings(name="tag_count"), RewardSettings(name="tag_count", weight=2.0)]
    scores = scored(build_scorer(parts), group("<think>\n"))
    assert list(scores.parts) == ["tag_count", "tag_count_2"]
    assert scores.total.item() == 0.75
    labelled = [
        RewardSettings(name="tag_count", label="a"),
        RewardSettings(name="tag_count", label="b"),
    ]
    assert list(scored(build_scorer(labelled), group("x")).parts) == ["a", "b"]


def test_length_rewards_see_the_correctness_of_the_verifier_before_them() -> None:
    parts = [
        RewardSettings(name="exact_answer", style="last_number"),
        RewardSettings(name="kimi_length"),
        RewardSettings(name="cosine", limit=10),
    ]
    scores = scored(build_scorer(parts), group("5", "    5", "4"))
    # lengths 1, 5, 1: λ = .5, -.5, .5, and at most 0 for the wrong third
    assert scores.parts["kimi_length"].tolist() == [[0.5, -0.5, 0.0]]
    assert (scores.parts["cosine"][0] > 0).tolist() == [True, True, False]
    with pytest.raises(UsageError, match="a verifier must come before"):
        build_scorer(parts[::-1])
    explicit = [RewardSettings(name="tag_count", correct=True), RewardSettings(name="kimi_length")]
    assert scored(build_scorer(explicit), group("a", "b")).correct.tolist() == [[0.0, 0.0]]


def test_only_one_part_defines_correctness() -> None:
    numbers = RewardSettings(name="exact_answer", style="last_number")
    strings = RewardSettings(name="normalised_match")
    cosine = RewardSettings(name="cosine", limit=10)
    scores = scored(build_scorer([numbers, strings, cosine]), group("it is 5"))
    assert scores.parts["normalised_match"].item() == 0.0
    assert scores.correct.item() == 1.0 and scores.parts["cosine"].item() > 0
    chosen = RewardSettings(name="normalised_match", correct=True)
    scores = scored(build_scorer([numbers, chosen, cosine]), group("it is 5"))
    assert scores.correct.item() == 0.0 and scores.parts["cosine"].item() < 0
    with pytest.raises(UsageError, match="only one part"):
        build_scorer([chosen, chosen])


def test_a_completion_without_a_verdict_leaves_the_group() -> None:
    def judge(text: str) -> float | None:
        if text == "bad":
            raise ValueError("no such thing")
        return {"none": None, "nan": math.nan, "text": "x"}.get(text, 1.0)  # type: ignore[return-value]

    seen: list[list[int]] = []

    def lengths_of(lengths: list[int]) -> list[float]:
        seen.append(lengths)
        return [0.0] * len(lengths)

    scores = scored(from_functions([judge, lengths_of]), group("ok", "bad", "none", "nan", "text"))
    assert scores.status == ((OK, ERROR, UNJUDGEABLE, ERROR, ERROR),)
    assert scores.valid.tolist() == [[True, False, False, False, False]]
    assert scores.total[0, 0] == 1.0 and bool(scores.total[0, 1:].isnan().all())
    assert seen == [[2]]
    [said] = [error for error in scores.errors if "ValueError" in error]
    assert said.startswith("judge: ValueError: no such thing (test_scoring.py, line ")
    assert said.endswith(': raise ValueError("no such thing"))')


def test_leaving_the_process_in_a_reward_is_an_error_of_the_reward() -> None:
    def leaves(text: str) -> float:
        return sys.exit(3)

    async def leaves_later(text: str) -> float:
        return sys.exit(3)

    for reward in (leaves, leaves_later):
        with pytest.raises(RewardError, match=r"SystemExit: 3 \(test_scoring.py, line"):
            scored(from_functions([reward]), group("a"))


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_what_a_reward_cancels_itself_is_an_error_of_the_reward(
    error: type[BaseException],
) -> None:
    def raises(text: str) -> float:
        if text == "b":
            raise error
        return 1.0

    async def awaits(text: str) -> float:
        if text == "b":
            waiting = asyncio.ensure_future(asyncio.sleep(60))
            waiting.cancel()
            await waiting
        return 1.0

    for reward in (raises, awaits):
        scores = scored(from_functions([reward]), group("a", "b", "c"))
        assert scores.status == ((OK, ERROR, OK),)
        assert scores.errors[0].startswith(f"{reward.__name__}: ")


@pytest.mark.parametrize("value", [1e300, -1e19, 10**400, math.inf, math.nan])
def test_a_reward_beyond_the_range_of_statistics_is_an_error_of_the_reward(value: float) -> None:
    def huge(text: str) -> float:
        return value if text == "b" else 1.0

    scores = scored(from_functions(huge), group("a", "b"))
    assert scores.status == ((OK, ERROR),) and scores.errors[0].startswith("huge: ")


def test_a_total_beyond_the_range_of_statistics_is_an_error_of_the_reward() -> None:
    def plain(text: str) -> float:
        return 1.0 if text == "b" else 0.0

    scores = scored(from_functions(plain, weights=[1e300]), group("a", "b"))
    assert scores.status == ((OK, ERROR),) and "the total reward is 1e+300" in scores.errors[0]


def test_an_optional_part_that_is_none_does_not_apply() -> None:
    parts = [RewardSettings(name="tag_count"), RewardSettings(name="exact_answer", optional=True)]
    scores = scored(build_scorer(parts), group("<think>\n", answer=None))
    assert scores.total.item() == 0.25 and math.isnan(scores.parts["exact_answer"].item())
    with pytest.raises(RewardError, match="exact_answer: the row has no answer"):
        scored(build_scorer([RewardSettings(name="exact_answer")]), group("5", answer=None))


def test_a_failed_completion_is_masked() -> None:
    one = Group(
        prompt=group().prompt,
        prompt_tokens=[1],
        completions=(completion("5"), completion("5", finish="error")),
    )
    assert scored(from_functions(right), one).status == ((OK, ERROR),)


def test_an_exception_in_place_of_a_value_is_not_forgotten_over_the_next_part() -> None:
    def judged(text: str) -> float | Exception:
        return RewardError("the server is down") if text == "b" else 1.0

    def other(text: str) -> float:
        return 0.5

    scores = scored(from_functions([judged, other]), group("a", "b"))
    assert scores.status == ((OK, ERROR),) and scores.total[0, 0] == 1.5
    assert "the server is down" in scores.errors[0]


def test_a_group_reward_must_return_one_value_each() -> None:
    with pytest.raises(RewardError, match="2 values for 3"):
        scored(from_functions(lambda group: [1.0, 2.0]), group("a", "b", "c"))
    with pytest.raises(RewardError, match="one value per completion"):
        scored(from_functions(lambda texts: 1.0), group("a"))


def test_a_first_batch_without_any_verdict_is_an_error_and_a_later_one_is_not() -> None:
    def fails(text: str) -> float:
        if text == "x":
            raise KeyError("solution")
        return 1.0

    scorer = from_functions(fails)
    with pytest.raises(RewardError, match="none of 2 completions.*KeyError: 'solution'"):
        scorer.gather([scorer.submit(group("x", "x"))])
    scorer.gather([scorer.submit(group("a", "b"))])
    assert not bool(scorer.gather([scorer.submit(group("x", "x"))]).valid.any())


# -- forms of functions -------------------------------------------------------------------------


def test_forms_of_functions() -> None:
    def whole(group: Group) -> list[float]:
        return [float(len(c.text)) for c in group.completions]

    def with_column(text: str, level: int, *, factor: float = 2.0) -> float:
        return level * factor

    def trl(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
        assert prompts == ["q", "q"] and kwargs["level"] == [3, 3] and kwargs["answer"] == ["5"] * 2
        return [float(c == "5") for c in completions]

    def trl_named(
        completions: list[str], solution: list[str], log_extra: Any = None
    ) -> list[float]:
        log_extra("column", solution)
        return [float(c == s) for c, s in zip(completions, solution, strict=True)]

    functions = [whole, with_column, trl, trl_named, functools.partial(right, answer="5")]
    scores = scored(from_functions(functions), group("5", "44", level=3))
    values = {name: row.tolist() for name, row in scores.parts.items()}
    assert values == {
        "whole": [[1.0, 2.0]],
        "with_column": [[6.0, 6.0]],
        "trl": [[1.0, 0.0]],
        "trl_named": [[1.0, 0.0]],
        "right": [[1.0, 0.0]],
    }
    assert bool(scores.correct.isnan().all())  # nobody was marked as a verifier


def test_conversational_completions_for_trl_functions() -> None:
    def trl(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [float(c == [{"role": "assistant", "content": "5"}]) for c in completions]

    assert scored(from_functions(trl), group("5", "6", chat=True)).total.tolist() == [[1.0, 0.0]]


def test_forms_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="must take `group`"):
        from_functions(lambda x, y: 1.0)
    with pytest.raises(UsageError, match="of one completion with data of the group"):
        from_functions(lambda text, lengths: 1.0)
    with pytest.raises(UsageError, match="2 functions, but 1 weights"):
        from_functions([right, right], [1.0])
    with pytest.raises(UsageError, match="did you mean exact_answer"):
        from_functions("exact_anser")
    with pytest.raises(UsageError, match="must be a function"):
        from_functions([5])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="at least one"):
        build_scorer([])
    for nothing in (lambda: 1.0, lambda *given: 1.0):
        with pytest.raises(UsageError, match="must take `group`"):
            from_functions(nothing)
    with pytest.raises(RewardError, match="the row has no 'level', and no data that a reward"):
        scored(from_functions(lambda text, level: 1.0), group("a"))
    with pytest.raises(RewardError, match="did you mean completions?"):
        scored(from_functions(lambda text, completion: 1.0), group("a"))


def test_a_row_without_the_answer_that_a_reward_needs_is_told_so() -> None:
    nameless = group("a", answer=None)
    with pytest.raises(RewardError, match="right: the row has no answer; data.answer_column"):
        scored(from_functions(right), nameless)
    with pytest.raises(RewardError, match="<lambda>: cannot be judged"):
        scored(from_functions(lambda text: None), nameless)


def test_a_marked_function_defines_correctness() -> None:
    @verifier
    def judged(text: str, answer: str) -> float:
        return 3.0 if text == answer else -2.0

    scores = scored(from_functions([judged, "kimi_length"]), group("5", "44"))
    assert scores.correct.tolist() == [[1.0, 0.0]]
    assert scores.parts["judged"].tolist() == [[3.0, -2.0]]


def test_async_functions_wait_together() -> None:
    threads = set()

    async def slow(text: str) -> float:
        threads.add(threading.get_ident())
        await asyncio.sleep(0.2)
        return 1.0

    start = time.perf_counter()
    scores = scored(from_functions([slow, right]), *[group("5", "6") for _ in range(10)])
    assert time.perf_counter() - start < 3.5  # 20 waits of 0.2 s one after the other are 4 s
    assert scores.total.tolist() == [[2.0, 1.0]] * 10
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_closing_cancels_what_waits() -> None:
    async def waits(text: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    scorer = from_functions(waits)
    ticket = scorer.submit(group("a"))
    scorer.close()
    with pytest.raises(CancelledError):
        ticket.result(timeout=5)


def test_an_async_function_that_hangs_is_a_timeout() -> None:
    async def hangs(text: str) -> float:
        await asyncio.sleep(60 if text == "x" else 0)
        return 1.0

    from groupwise.rewards.scoring.scorer import InlineScorer

    composition = from_functions(hangs).composition  # type: ignore[attr-defined]
    scores = scored(InlineScorer(composition, timeout_s=0.1), group("a", "x"))
    assert scores.status == ((OK, LATE),)


HANGS_IN_A_THREAD = """
import threading
from groupwise.rewards import from_functions, in_thread
from groupwise.rewards.scoring import waiting
from groupwise.types import Completion, Group, Prompt

waiting.THREAD_SECONDS = 0.5
waiting.THREADS = 1

@in_thread
def hangs(text: str) -> float:
    if text == "x":
        threading.Event().wait()
    return 1.0

made = [Completion(tokens=[1], mask=[True], logprobs=[0.0], text=t, finish="stop") for t in "xya"]
group = Group(prompt=Prompt(id="p", text="q"), prompt_tokens=[1], completions=tuple(made))
with from_functions(hangs) as scorer:
    print(*[s.value for s in scorer.gather([scorer.submit(group)]).status[0]])
"""


def test_a_call_that_hangs_in_a_thread_delays_neither_the_others_nor_the_end() -> None:
    line = [sys.executable, "-c", HANGS_IN_A_THREAD]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["timeout", "ok", "ok"], ended.stderr


def test_order_is_that_of_the_tickets() -> None:
    async def waits(text: str) -> float:
        await asyncio.sleep(float(text))
        return float(text)

    scorer = from_functions(waits)
    tickets = [scorer.submit(group(text)) for text in ("0.1", "0.05", "0.0")]
    assert scorer.gather(tickets[::-1]).total.flatten().tolist() == pytest.approx([0, 0.05, 0.1])
    scorer.close()


# -- combinations -------------------------------------------------------------------------------

VALUES = [[1.0, 0.0, 1.0], [0.5, 0.5, None]]


@pytest.mark.parametrize(
    "chosen, totals",
    # weights 1 and 2
    [
        ("weighted_sum", [2.0, 1.0, 1.0]),
        ("product", [1.0, 0.0, 1.0]),
        ("maximum", [1.0, 1.0, 1.0]),
        ("first_decisive", [1.0, 0.0, 1.0]),
        ({"name": "gated_sum", "by": "b"}, [1.0, 0.0, 1.0]),
        (["weighted_sum", {"name": "clip", "high": 1.5}], [1.5, 1.0, 1.0]),
        (["weighted_sum", spec("shift", low=-1.0)], [3.0, 2.0, 2.0]),
        (["weighted_sum", spec("clip", low=-0.5), "shift"], [2.0, 1.0, 1.0]),
        (["weighted_sum", "shuffled"], [1.0, 1.0, 2.0]),
    ],
)
def test_combinations(chosen: Any, totals: list[float]) -> None:
    assert combination(chosen)(VALUES, weights=[1.0, 2.0], labels=["a", "b"]) == totals


def test_normalisation_per_part() -> None:
    # accuracy (1,0,0,0): mean ¼, std ½ (ddof 1): 1.5, -.5 ×3; format (1,1,0,0): ±.866025
    sums = normalised_sum([[1, 0, 0, 0], [1, 1, 0, 0]], [1.0, 1.0])
    assert sums == pytest.approx([2.366025, 0.366025, -1.366025, -1.366025], abs=1e-6)
    # ddof 0: (.75/.433013, …) + 1 → 2.732051, .42265, -1.57735 ×2
    sums = normalised_sum([[1, 0, 0, 0], [1, 1, 0, 0]], [1.0, 1.0], ddof=0)
    assert sums == pytest.approx([2.732051, 0.42265, -1.57735, -1.57735], abs=1e-5)
    assert normalised_sum([[2.0, 2.0], [1.0, None]], [1.0, 1.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    "chosen, message",
    [
        ("sum", "not registered"),
        ("clip", "must make a total"),
        (["weighted_sum", "product"], "must change a total"),
        ([], "at least one"),
        ({"name": "clip", "lo": 1}, "no such setting"),
    ],
)
def test_wrong_combinations(chosen: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        combination(chosen)


def test_a_wrong_gate_is_found_by_name() -> None:
    gate = combination({"name": "gated_sum", "by": "formt"})
    with pytest.raises(UsageError, match="did you mean format"):
        gate(VALUES, weights=[1.0, 1.0], labels=["format", "maths"])
    assert all(COMBINATIONS.get(name).__doc__ for name in COMBINATIONS.names())


def test_the_first_decisive_part_spares_the_others() -> None:
    asked: list[str] = []

    def cheap(text: str) -> float | None:
        return {"yes": 1.0, "no": 0.0}.get(text)

    def dear(text: str) -> float | None:
        asked.append(text)
        return 0.5 if text == "maybe" else None

    def group_level(texts: list[str]) -> list[float | None]:
        asked.append(",".join(texts))
        return [None] * len(texts)

    scorer = from_functions([cheap, dear, group_level], combine="first_decisive")
    scores = scored(scorer, group("yes", "no", "maybe", "what"))
    assert scores.total[0, :3].tolist() == [1.0, 0.0, 0.5]
    assert scores.status == ((OK, OK, OK, UNJUDGEABLE),)
    assert asked == ["maybe", "what", "what"]


# -- tensors and alarms -------------------------------------------------------------------------


def score(totals: list[float], status: list[Status] | None = None) -> GroupScore:
    status = status or [OK] * len(totals)
    return GroupScore(
        total=totals,
        correct=totals,
        parts={"a": totals},
        status=status,
        errors=[None if s is OK else "boom" for s in status],
    )


def test_stack() -> None:
    scores = stack([score([1.0, 0.0]), score([0.5, math.nan], [OK, LATE])])
    assert scores.total.dtype == torch.float32 and scores.total.shape == (2, 2)
    assert scores.valid.tolist() == [[True, True], [True, False]] and scores.errors == ("boom",)
    with pytest.raises(RewardError, match="different sizes"):
        stack([score([1.0]), score([1.0, 2.0])])
    assert stack([]).total.shape == (0, 0)


@pytest.mark.parametrize(
    "batches, reason",
    [
        ([[0.0, 0.0]] * 3, "is 0"),
        ([[1.5, 1.5]] * 3, "1.5, the same"),
        ([[0.0, 0.0]] * 2, None),
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]], None),
        ([[0.0, 1.0]] * 3 + [[0.0, 0.0]] * 5, None),
    ],
)
def test_alarm_over_totals(batches: list[list[float]], reason: str | None) -> None:
    said = reward_alert([stack([score(totals)]) for totals in batches])
    assert said is None if reason is None else said is not None and reason in said


def test_alarm_over_statuses() -> None:
    failing = stack([score([1.0, math.nan, math.nan], [OK, LATE, ERROR])])
    said = reward_alert([failing])
    assert said is not None and "only 1 of 3" in said and "boom" in said
    half = stack([score([1.0, math.nan], [OK, LATE])])
    assert reward_alert([half]) is None


def test_an_own_function_sees_the_answer_in_the_type_that_it_names() -> None:
    rows = [{"prompt": "Which?", "answer": [1, 2]}, {"prompt": "Why?", "answer": "so"}]
    seen: list[object] = []

    def plain(text: str, answer):  # type: ignore[no-untyped-def]
        seen.append(answer)
        return 0.0

    def as_text(text: str, answer: str | None = None) -> float:
        seen.append(answer)
        return 0.0

    def as_floats(text: str, answer: list[float]) -> float:
        seen.append(answer)
        return sum(answer)

    found = []
    for function in (plain, as_text, as_floats):
        with from_functions([function]) as scorer:
            for prompt in load_prompts(rows):
                ticket = scorer.submit(replace(group("a text"), prompt=prompt))
                found.append((ticket.result().total, ticket.result().errors))
    assert seen == [[1, 2], "so", "[1, 2]", "so", [1.0, 2.0]]
    assert found[4][0] == [3.0]
    assert "the answer 'so' is not list[float]" in str(found[5][1])
