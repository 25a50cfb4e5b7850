"""What qualifies an accuracy, from answers made up by hand; and prompts that two sets share."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from groupwise.errors import UsageError
from groupwise.evaluation.details import by_difficulty, details, reordered
from groupwise.evaluation.measure import Measurement, measure
from groupwise.models import load_policy
from groupwise.models.hub import check_on_hub
from groupwise.prompts.contamination import shared_prompts
from groupwise.prompts.lazy import LazySequence
from groupwise.rewards import from_functions
from groupwise.rollouts import ScriptedEngine
from groupwise.training.prepare import evaluation_row
from groupwise.types import Prompt, Request, Sampling

TAG = "<answer>{}</answer>"
# By prompt the greedy answer, then four samples; the answer of prompt n is n.
SAID = {
    "1": [TAG.format(1), TAG.format(1), TAG.format("1.0"), TAG.format(9), "1"],
    "2": ["It is 2.", TAG.format(2), TAG.format(8), TAG.format(8), "2"],
    "3": [TAG.format(8), TAG.format(8), TAG.format(8), TAG.format(8), TAG.format(8)],
    "4": [TAG.format(4), TAG.format(4), TAG.format(4), TAG.format(4), TAG.format(4) + "x" * 60],
}
PROMPTS = [Prompt(id=n, text="?", answer=n, columns={"level": int(n) % 2}) for n in SAID]


def measured(*, seeds=1, rewards=("exact_answer",)):
    calls = {}

    def answer(prompt, sample):
        # The first call of a prompt is the greedy one.
        calls[prompt.id] = calls.get(prompt.id, 0) + 1
        return SAID[prompt.id][min(calls[prompt.id] - 1, 4) if calls[prompt.id] < 6 else sample + 1]

    with from_functions(list(rewards)) as scorer:
        return measure(
            ScriptedEngine(answer),
            scorer,
            PROMPTS,
            [(1,)] * 4,
            sampling=Sampling(max_tokens=60),
            samples=4,
            seeds=seeds,
        )


def test_figures_by_hand():
    found = {k: v.value for k, v in details(measured(), PROMPTS, style="answer_tag").items()}
    assert found["greedy"] == 2 / 4  # prompts 1 and 4
    assert found["greedy_lenient"] == 3 / 4  # and 2, which lacks its tags
    assert found["well_formed"] == 3 / 4  # all but 2
    assert found["right_if_formed"] == pytest.approx(2 / 3)
    assert found["sampled"] == (2 + 1 + 0 + 4) / 16
    assert found["sampled_lenient"] == (3 + 2 + 0 + 4) / 16
    assert found["pass_at_4"] == 3 / 4
    # Votes: 1 = 1.0 twice against 9; 2 once against 8 twice; 8; 4.
    assert found["maj_at_4"] == 2 / 4
    assert "best_at_4" not in found, "the reward is the correctness, so it is pass@4 again"
    assert found["truncated"] == 1 / 16
    assert found["length"] == pytest.approx(
        sum(min(len(text), 60) for said in SAID.values() for text in said[1:]) / 16
    )
    # A tag with one digit has n characters. Right: prompt 1 (n, n + 2), 2 (n), 4 (n, n, n, 60).
    n = len(TAG.format(1))
    assert found["length_right"] == pytest.approx(((n + 1) + n + (3 * n + 60) / 4) / 3)
    # Wrong: prompt 1 (n, 1), 2 (n, n, 1), 3 (n four times).
    assert found["length_wrong"] == pytest.approx(((n + 1) / 2 + (2 * n + 1) / 3 + n) / 3)


def test_the_best_of_k_is_what_the_reward_prefers():
    def shorter(text: str) -> float:
        return -float(len(text))

    # The shortest answer: "1" (untagged, wrong), "2" (likewise), any 8, a short and right 4.
    found = details(measured(rewards=("exact_answer", shorter)), PROMPTS, style="answer_tag")
    assert found["best_at_4"].value == 1 / 4
    assert found["pass_at_4"].value == 3 / 4


def test_several_seeds_are_more_samples_and_a_spread():
    one, two = measured(), measured(seeds=2)
    assert two.sampled.shape == (4, 8) and two.samples == 4
    assert [len(group) for group in two.groups] == [8] * 4
    found = details(two, PROMPTS, style="answer_tag")
    assert found["sampled"].value == details(one, PROMPTS)["sampled"].value
    assert found["seed_deviation"].value == 0.0 and math.isnan(found["seed_deviation"].low)
    # pass@4 of 8 samples: prompt 1 has 4 right, 1 − C(4, 4)/C(8, 4); prompt 2 has 2, 1 − 15/70.
    assert found["pass_at_4"].value == pytest.approx((69 / 70 + 55 / 70 + 0 + 1) / 4)


def test_calls_of_tools_are_among_the_figures():
    plain = measured()
    assert "calls" not in details(plain, PROMPTS)
    groups = [
        replace(
            group, completions=tuple(replace(c, values={"calls": n}) for c in group.completions)
        )
        for n, group in enumerate(plain.groups)
    ]
    assert details(replace(plain, groups=groups), PROMPTS)["calls"].value == 1.5


def test_accuracy_by_number_of_calls():
    """Two prompts with two samples each: 0 and 1 calls, then 1 and 9."""
    plain = by_hand([[1, 0], [1, 0]])
    groups = []
    for group, counts in zip(plain.groups, ((0, 1), (1, 9)), strict=True):
        made = [replace(group.completions[0], values={"calls": n}) for n in counts]
        groups.append(replace(group, completions=tuple(made)))
    found = details(replace(plain, groups=tuple(groups)), PROMPTS[:2])
    named = {name: figure.value for name, figure in found.items() if name.startswith("accuracy_")}
    assert named == {
        "accuracy_after_0_calls": 1.0,
        "accuracy_after_1_calls": 0.5,
        "accuracy_after_5_calls": 0.0,
    }


class Noting:
    """The scripted engine, last prompt first, with what it was asked for."""

    def __init__(self, answer):
        self.engine, self.asked = ScriptedEngine(answer), []

    def generate(self, requests, sampling):
        requests = list(requests)
        self.asked += [(request.stream, len(request.tokens), sampling) for request in requests]
        yield from self.engine.generate(requests[::-1], sampling)


def test_what_is_drawn_and_in_which_order_it_comes():
    """Streams are (seed, −1, 0, place): training's have their step, 0 or more, in the second
    place, and a second seed draws anew."""
    engine = Noting(lambda prompt, _: TAG.format("1" if prompt.id == "1" else "x"))
    given = Sampling(max_tokens=60, temperature=0.7, top_p=0.9)
    with from_functions(["exact_answer"]) as scorer:
        found = measure(
            engine, scorer, PROMPTS, [(1,)] * 4, sampling=given, samples=2, seed=5, seeds=2
        )
    assert [stream for stream, _, _ in engine.asked] == [
        (seed, -1, 0, place) for seed in (5, 5, 6) for place in range(4)
    ]
    assert {s.temperature for _, _, s in engine.asked[:4]} == {0.0}
    assert {s for _, _, s in engine.asked[4:]} == {given}
    assert [group.prompt.id for group in found.groups] == ["1", "2", "3", "4"]
    assert found.greedy.tolist() == [1, 0, 0, 0]
    assert found.sampled.tolist() == [[1] * 4, [0] * 4, [0] * 4, [0] * 4]


def by_hand(sampled, *, seeds=1):
    """A measurement whose rewards are its correctness."""
    sampled = np.array(sampled, dtype=float)
    group = ScriptedEngine(lambda prompt, sample: "x").generate(
        [Request(prompt=PROMPTS[0], tokens=(1,), group=1)], Sampling()
    )
    groups = tuple(group) * len(sampled)
    return Measurement(
        greedy=sampled[:, 0],
        sampled=sampled,
        rewards=sampled,
        lengths=np.ones_like(sampled),
        truncations=np.zeros_like(sampled, dtype=bool),
        greedy_groups=groups,
        groups=groups,
        seeds=seeds,
    )


def test_the_spread_over_seeds():
    """Two samples for each of two seeds: the first seed's are columns 0 and 1, 3 of 4 right, the
    second's 0 of 4; the deviation of .75 and 0 is .75/√2."""
    found = details(by_hand([[1, 1, 0, 0], [1, 0, 0, 0]], seeds=2), PROMPTS[:2])
    assert found["seed_deviation"].value == pytest.approx(0.75 / math.sqrt(2))


def test_how_often_a_seed_puts_models_in_the_other_order():
    """Accuracies by seed are 1, 1, 0 and ½, ½, ½ and 1, 1, 1, so the first model is above the
    second over all seeds (⅔ and ½), and below it in the third. The last is below none in any."""
    first = by_hand([[1, 1, 0], [1, 1, 0]], seeds=3)
    second = by_hand([[1, 1, 1], [0, 0, 0]], seeds=3)
    always = by_hand([[1, 1, 1], [1, 1, 1]], seeds=3)
    assert reordered([first, second, always]) == pytest.approx(1 / 3)
    assert reordered([first, always]) == 0
    assert reordered([first]) is None and reordered([by_hand([[1]]), by_hand([[0]])]) is None


def test_what_was_not_judged_is_not_wrong():
    nan = math.nan
    found = by_hand([[1, 1], [1, nan], [nan, nan]])
    assert found.figures["greedy"].value == 1.0
    # Of prompts alone that were judged whole; of rewards, the mean of 1 and 1.
    assert found.figures["sampled"].value == found.figures["pass_at_2"].value == 1.0
    assert found.figures["reward"].value == 1.0
    nothing = by_hand([[nan, nan]])
    assert nothing.figures == {} and set(details(nothing, PROMPTS[:1])) == {"length", "truncated"}
    assert math.isnan(evaluation_row(nothing)["score"])


def test_without_a_style_nothing_is_read_out():
    found = details(measured(), PROMPTS)
    lengths = {"length", "length_right", "length_wrong"}
    assert set(found) == {"greedy", "sampled", "pass_at_4", "reward", "truncated", *lengths}


def test_levels_of_difficulty():
    assert by_difficulty(PROMPTS) == {"level 0": [1, 3], "level 1": [0, 2]}
    assert measured().part([1, 3]).figures["greedy"].value == 0.5
    many = [Prompt(id=str(n), text="?", columns={"level": n}) for n in range(20)]
    assert by_difficulty(many) == {} == by_difficulty([Prompt(id="a", text="?")])


def test_shared_prompts_are_found_whatever_their_dress():
    held_out = [
        Prompt(id="a", messages=({"role": "user", "content": "What is 1+1?"},)),
        Prompt(id="b", messages=({"role": "user", "content": "What is 1-1?"},)),
        Prompt(id="c", text="Two"),
    ]
    system = {"role": "system", "content": "Think."}
    train = [
        Prompt(id="x", messages=(system, {"role": "user", "content": " what is\n1+1 ?"})),
        Prompt(id="y", text="ＴＷＯ"),
        Prompt(id="z", text="What is 1*1?"),
    ]
    assert shared_prompts(train, held_out) == 2
    assert shared_prompts(LazySequence(3, train.__getitem__), held_out[:2]) == 1
    assert shared_prompts([], held_out) == 0


@pytest.mark.parametrize("name", ["no-one/has-this-model", "./a/folder/that/is/not", "a b"])
def test_a_model_that_is_nowhere_is_refused_at_once(name, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(UsageError, match="is not a folder"):
        load_policy(name)
    assert time.monotonic() - start < 5


def test_a_model_in_the_cache_is_not_asked_for(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    check_on_hub("some/model")
    with pytest.raises(UsageError):
        check_on_hub("some/other")
