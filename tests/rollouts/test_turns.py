"""Environments that reply to the turns that a model ends itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch

from groupwise.environments import END_OF_TURN
from groupwise.environments.by_column import ByColumn
from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.rollouts import GenerateEngine, GroupEngine
from groupwise.rollouts.partial import PartialRollouts, RowRequest
from groupwise.rollouts.text import decode_all
from groupwise.rollouts.tools.turns import turn_end
from groupwise.types import Group, Prompt, Sampling
from small_runs import noisy
from talkers import POLICY, SAMPLING, Talker, asked, by_prompt, tools

LETTER, LAST = "w", range(40, 43)
(END,) = POLICY.tokenizer(LETTER, add_special_tokens=False).input_ids
LONGER = SAMPLING.model_copy(update={"max_tokens": 40})


def talking(template: str | None = None) -> Policy:
    """A policy of noise whose chat template ends turns with a token that it writes often."""
    policy = noisy(ends=(*LAST, END))
    weight = policy.model.get_input_embeddings().weight
    with torch.no_grad():
        weight.add_(0.3)  # A direction that all states share, in which the token is longer.
        weight[END] = 0.57
    tokenizer = policy.tokenizer
    tokenizer.chat_template = template or tokenizer.chat_template.replace("<|end|>", LETTER)
    return policy


class Partner(Talker):
    """Replies to turns; it knows earlier turns by what was said."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.stops = (END_OF_TURN,)

    def begin(self, prompt: Prompt, *, stream: Any) -> list[str]:
        return [prompt.id]

    def resume(self, state: list[str], texts: Sequence[str]) -> None:
        state += texts


def conversed(environment: Any = None, **more: Any) -> dict[str, Group]:
    policy, sampling = more.pop("policy", None) or talking(), more.pop("sampling", LONGER)
    made = tools(environment or Partner(), policy=policy, layout="turns", **more)
    return by_prompt(made.generate(asked(6), sampling))


def test_a_reply_follows_the_end_of_a_turn_as_the_template_has_it() -> None:
    partner = Partner()
    found = [c for group in conversed(partner).values() for c in group.completions]
    assert len({c.values["calls"] for c in found}) > 2
    replies = 0
    for one in found:
        marked = groupby(zip(one.tokens, one.mask, strict=True), lambda pair: pair[1])
        runs = [(own, [token for token, _ in run]) for own, run in marked]
        for (own, turn), (_, reply) in pairwise(runs):
            if own:
                replies += 1
                assert turn[-1] == END, "the policy ended its turn itself"
                said, text = decode_all(POLICY.tokenizer, [turn[:-1], reply])
                assert said in partner.asked, "without the end of the turn"
                assert text.startswith("<|user|>[") and text.endswith(f"]{LETTER}<|assistant|>")
    assert replies > 6


def test_every_end_of_a_turn_is_learned_and_no_reply_is() -> None:
    found = [c for group in conversed().values() for c in group.completions]
    for one in found:
        ends = [n for n, token in enumerate(one.tokens) if token == END and one.mask[n]]
        replied = [n for n in ends if n + 1 < len(one.tokens) and not one.mask[n + 1]]
        assert ends[:-1] == replied[: len(ends) - 1], "every turn but the last has a reply"


def test_other_end_tokens_end_the_completion() -> None:
    found = [c for group in conversed().values() for c in group.completions]
    last = {c.tokens[-1] for c in found if c.finish == "stop" and c.mask[-1]}
    assert last and END not in last and last <= {*POLICY.end_tokens}


def shown(groups: dict[str, Group]) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: [(list(c.tokens), list(c.mask), c.finish, c.values["calls"]) for c in g.completions]
        for name, g in groups.items()
    }


def test_engines_agree() -> None:
    policy = talking()
    native = conversed(policy=policy, engine=GroupEngine(policy, max_rows=9))
    assert shown(native) == shown(conversed(policy=policy, engine=GenerateEngine(policy)))


BRIEF = LONGER.model_copy(update={"max_turn_tokens": 12})


@pytest.mark.parametrize("engine", [GroupEngine, GenerateEngine])
def test_a_turn_longer_than_its_budget_ends_the_completion(engine: Any) -> None:
    policy = talking()
    free = conversed(policy=policy, engine=engine(policy))
    found = conversed(policy=policy, engine=engine(policy), sampling=BRIEF)
    cut = 0
    for name, group in found.items():
        for one, whole in zip(group.completions, free[name].completions, strict=True):
            assert list(one.tokens) == list(whole.tokens[: len(one.tokens)])
            runs = [len(list(run)) for own, run in groupby(one.mask) if own]
            assert max(runs) <= 12
            if len(one.tokens) < len(whole.tokens):
                cut += one.finish == "length" and runs[-1] == 12 and bool(one.mask[-1])
            else:
                assert one.finish == whole.finish
    whole = [c for group in free.values() for c in group.completions]
    longer = [c for c in whole if max(len(list(r)) for own, r in groupby(c.mask) if own) > 12]
    assert cut == len(longer) > 2
    assert any(c.own_tokens > 12 for group in found.values() for c in group.completions)


@pytest.mark.parametrize("sampling", [LONGER, BRIEF], ids=["free", "brief"])
def test_conversations_go_on_in_the_next_step_as_if_unbroken(sampling: Sampling) -> None:
    whole = conversed(sampling=sampling)
    partial, found = PartialRollouts(5), {}
    requests = asked(6)
    budget = partial.budget(sampling)
    prompts, tokens = [r.prompt for r in requests], [r.tokens for r in requests]
    waiting = [RowRequest(row, replace(r, budget=budget)) for row, r in enumerate(requests)]
    while waiting:
        by_stream = {(one.request.stream, one.request.prompt.id): one for one in waiting}
        engine = tools(Partner(), policy=talking(), layout="turns")
        for group in engine.generate([one.request for one in waiting], sampling):
            one = partial.take(by_stream[group.stream, group.prompt.id], group, sampling)
            found |= {} if one is None else {one.prompt.id: one}
        partial.restore(partial.state(), prompts, tokens)
        waiting = partial.resumed(sampling)
    assert shown(found) == shown(whole)


def test_a_turn_of_a_prompt_whose_environment_answers_calls_alone_ends_the_completion() -> None:
    def with_column(request: Any) -> Any:
        kind = "talks" if int(request.prompt.id) % 2 else "answers"
        return replace(request, prompt=replace(request.prompt, columns={"kind": kind}))

    silent = Talker()
    silent.stops = ("no model says this",)
    several = ByColumn({"talks": Partner(), "answers": silent}, column="kind")
    made = tools(several, policy=talking(), layout="turns")
    found = by_prompt(made.generate(list(map(with_column, asked(6))), LONGER))
    calls = {
        name: sum(c.values["calls"] for c in group.completions) for name, group in found.items()
    }
    assert all((calls[name] > 0) == bool(int(name) % 2) for name in calls)
    assert silent.asked == []


def test_what_cannot_be_turns_is_refused() -> None:
    with pytest.raises(UsageError, match="environment.layout = 'inline': test replies to turns"):
        tools(Partner())
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    with pytest.raises(UsageError, match="does not end them with an end token"):
        turn_end(talking(template))
