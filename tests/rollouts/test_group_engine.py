"""The group engine says what the model itself says, whatever the batch looks like."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import groupwise.testing.engines as contract
from groupwise.kernels import Reference, using
from groupwise.models import unsupported
from groupwise.models.loading import with_adapter
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts import GenerateEngine, GroupEngine, distribution
from groupwise.settings import AdapterSettings
from groupwise.testing.engines import make_requests, plain_logits, plain_logprobs
from groupwise.types import Group, Limits, Request, Sampling
from groupwise.updates.learner import update_mode
from tiny_models import NAMES, tiny_model, tiny_policy

ENDS = (1, 7, 8, 9, 10, 11)  # Several, so that completions end at different steps.


def by_prompt(groups: list[Group]) -> dict[str, list[tuple[int, ...]]]:
    return {g.prompt.id: [tuple(c.tokens) for c in g.completions] for g in groups}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [4, 12])
def test_logprobs_are_those_of_a_plain_forward_pass(name: str, rows: int) -> None:
    policy = tiny_policy(tiny_model(name), ends=ENDS)
    contract.check_logprobs(GroupEngine(policy, max_rows=rows), policy, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_same_completions_in_any_batch_order_and_refill(name: str) -> None:
    policy = tiny_policy(tiny_model(name, dtype=torch.float64), ends=ENDS)
    requests, sampling = make_requests(), Sampling(max_tokens=24)
    engine = GroupEngine(policy, max_rows=4)
    alone = by_prompt([g for r in requests for g in engine.generate([r], sampling)])
    lengths = {len(tokens) for rows in alone.values() for tokens in rows}
    assert len(lengths) > 5, "the test is about ragged lengths"
    for rows, asked in ((4, requests[::-1]), (11, requests), (64, requests[::-1])):
        engine = GroupEngine(policy, max_rows=rows)
        assert by_prompt(list(engine.generate(asked, sampling))) == alone


def test_generate_engine_draws_the_same_completions() -> None:
    policy = tiny_policy(tiny_model("qwen2", dtype=torch.float64), ends=ENDS)
    requests, sampling = make_requests(), Sampling(max_tokens=24, temperature=0.8, top_k=20)
    ours = {g.prompt.id: g for g in GroupEngine(policy).generate(requests, sampling)}
    for group in GenerateEngine(policy, max_rows=9).generate(requests, sampling):
        for theirs, mine in zip(group.completions, ours[group.prompt.id].completions, strict=True):
            assert list(theirs.tokens) == list(mine.tokens)
            assert theirs.finish == mine.finish
            assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-6)
            assert [set(k) for k in theirs.support or ()] == [set(k) for k in mine.support or ()]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, temperature=0.7),
        Sampling(max_tokens=12, top_p=0.8),
        Sampling(max_tokens=12, top_k=5),
        Sampling(max_tokens=12, min_p=0.05, temperature=1.3),
        Sampling(max_tokens=12, temperature=0.9, top_k=30, top_p=0.9, min_p=0.01),
    ],
)
def test_logprobs_are_of_the_distribution_sampled_from(sampling: Sampling) -> None:
    model = tiny_model("qwen3", dtype=torch.float64)
    engine = GroupEngine(tiny_policy(model, ends=ENDS))
    for group in engine.generate(make_requests(3), sampling):
        for completion in group.completions:
            logits = plain_logits(model, group, list(completion.tokens))
            probs, kept = distribution(logits, sampling)
            wanted = probs.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1).log()
            assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-8)
            if kept is None:
                assert completion.support is None
            else:
                sets = [set(row.nonzero().squeeze(1).tolist()) for row in kept]
                assert [set(ids) for ids in completion.support or ()] == sets


def test_samples_follow_the_distribution() -> None:
    policy = tiny_policy(tiny_model("llama"))
    contract.check_samples(GroupEngine(policy, max_rows=4000), policy)


def test_greedy_is_the_most_probable_token_every_time() -> None:
    policy = tiny_policy(tiny_model("gemma2"), ends=ENDS)
    contract.check_greedy(GroupEngine(policy), policy)


@pytest.mark.parametrize("engine", [GroupEngine, GenerateEngine])
def test_the_contract_of_engines(engine: type[GroupEngine] | type[GenerateEngine]) -> None:
    policy = tiny_policy(tiny_model("qwen2"), ends=ENDS)
    contract.check_contract(engine(policy, max_rows=9), policy)


def test_a_completion_ends_at_its_first_end_token_or_stop_string() -> None:
    model = tiny_model("mistral")
    policy = tiny_policy(model, ends=ENDS)
    free = Sampling(max_tokens=24)
    texts = [
        c.text for g in GroupEngine(policy).generate(make_requests(), free) for c in g.completions
    ]
    stop = max(texts, key=len)[3:5]  # A string that surely occurs, across two tokens.
    stopped = Sampling(max_tokens=24, stop=(stop,))
    plain = by_prompt(list(GroupEngine(policy).generate(make_requests(), free)))
    seen = 0
    for group in GroupEngine(policy).generate(make_requests(), stopped):
        for completion, whole in zip(group.completions, plain[group.prompt.id], strict=True):
            tokens = list(completion.tokens)
            assert tuple(tokens) == whole[: len(tokens)]
            assert not set(tokens[:-1]) & set(ENDS)
            if stop in completion.text:
                seen += 1
                assert completion.text.endswith(stop) and completion.finish == "stop"
            elif len(tokens) < 24:
                assert tokens[-1] in ENDS and completion.finish == "stop"
            else:
                assert completion.finish == ("stop" if tokens[-1] in ENDS else "length")
    assert seen


def test_a_model_that_does_not_fit_is_refused_with_the_reason() -> None:
    model = tiny_model("llama")
    assert unsupported(model) is None
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output * 2)
    model.get_decoder().norm.register_forward_hook(lambda module, inputs, output: output * 1)
    assert unsupported(model) is None, "a hook on the head belongs to the head"
    model.register_forward_hook(
        lambda module, inputs, output: type(output)(logits=output.logits * 3)
    )
    assert "log-probabilities change" in (unsupported(model) or "")


@pytest.mark.parametrize("rows", [4, 8])
def test_tokens_after_a_publication_carry_the_new_version(rows: int) -> None:
    policy = tiny_policy(tiny_model("llama"), ends=ENDS)
    engine, sampling = GroupEngine(policy, max_rows=rows), Sampling(max_tokens=24)
    engine.publish(PublishedWeights(version=3, named={}))
    groups = []
    for group in engine.generate(make_requests(), sampling):
        if not groups:
            engine.publish(PublishedWeights(version=4, named={}))
        groups.append(group)
    assert {completion.versions for completion in groups[0].completions} == {((0, 3),)}
    later = [completion.versions for group in groups[1:] for completion in group.completions]
    assert ((0, 4),) in later, "prompts that were admitted afterwards"
    for span in later:
        places, versions = zip(*span, strict=True)
        assert versions in {(3,), (4,), (3, 4)} and list(places) == sorted(set(places))
        assert places[0] == 0
    assert groups[-1].completions[-1].versions[-1][1] == 4


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_weights_published_while_a_request_is_taken_write_all_of_its_tokens(name: str) -> None:
    """Of the request before it too, whose prompt is computed together with it. Gemma is computed
    with the live weights, Qwen with copies of them."""
    policy = tiny_policy(tiny_model(name), ends=ENDS)
    engine, requests = GroupEngine(policy, max_rows=8), make_requests(2)

    def source() -> Iterator[Request]:
        yield requests[0]
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.3)
        engine.publish(PublishedWeights(version=1, named={}))
        yield requests[1]

    limits = Limits(prompt=20, group=4, suffix=8, slots=4)
    for group in engine.generate(source(), Sampling(max_tokens=8), limits):
        for one in group.completions:
            wanted = plain_logprobs(policy.model, group, list(one.tokens))
            assert one.versions == ((0, 1),)
            assert one.logprobs == pytest.approx(wanted, abs=1e-4)


def test_an_update_during_a_rollout_turns_no_dropout_on() -> None:
    settings = AdapterSettings(rank=4, dropout=0.9)
    policy = with_adapter(tiny_policy(tiny_model("qwen2"), ends=ENDS), settings)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    engine, sampling = GroupEngine(policy, max_rows=4), Sampling(max_tokens=8)
    wanted = by_prompt(list(engine.generate(make_requests(), sampling)))
    found = []
    for group in engine.generate(make_requests(), sampling):
        update_mode(policy.model)
        found.append(group)
    assert by_prompt(found) == wanted


def test_another_backend_may_be_selected_after_an_engine_was_built() -> None:
    engine = GroupEngine(tiny_policy(tiny_model("qwen2"), ends=ENDS))
    wanted = by_prompt(list(engine.generate(make_requests(2), Sampling(max_tokens=8))))
    with using(Reference()):
        assert not engine.exact_continuation
        found = by_prompt(list(engine.generate(make_requests(2), Sampling(max_tokens=8))))
    assert found == wanted
