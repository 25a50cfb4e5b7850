"""Checks of an `Engine`: run them on an engine of your own before a run depends on it.

Each check raises `AssertionError` with what differs. The policy must be the one that the engine
samples from, with several end tokens that occur often enough for completions of different lengths
(`check_ends` says so where they do not).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.models import Policy
from groupwise.models.weights import PublishedWeights
from groupwise.types import (
    Completion,
    Engine,
    Group,
    Limits,
    Prompt,
    Request,
    Sampling,
)

TOKENS = 24
FREE = Sampling(max_tokens=TOKENS)


def make_requests(count: int = 7, *, group: int = 4, vocab: int = 97) -> list[Request]:
    """Prompts of different lengths, of tokens from 12 to `vocab` − 1, which should end nothing."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for place in range(count):
        length = int(torch.randint(1, 20, (1,), generator=generator))
        tokens = torch.randint(12, vocab, (length,), generator=generator).tolist()
        requests.append(Request(prompt=Prompt(id=str(place), text=""), tokens=tokens, group=group))
    return requests


def published(policy: Policy, *, version: int) -> PublishedWeights:
    """The policy's present weights as a version."""
    return PublishedWeights(version=version, named=dict(policy.model.named_parameters()))


def cut(completion: Completion, count: int) -> Completion:
    """The first `count` tokens of a completion, as `Request.begun` takes them."""
    support = completion.support
    return replace(
        completion,
        tokens=completion.tokens[:count],
        mask=completion.mask[:count],
        logprobs=completion.logprobs[:count],
        support=None if support is None else support[:count],
        text="",
        finish="length",
    )


def plain_logits(model: torch.nn.Module, group: Group, tokens: list[int]) -> Tensor:
    """Logits that predict `tokens`, from a forward pass over prompt and completion alone."""
    ids = torch.tensor([[*group.prompt_tokens, *tokens]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    return logits[len(group.prompt_tokens) - 1 : -1]


def plain_logprobs(
    model: torch.nn.Module, group: Group, tokens: list[int], *, temperature: float = 1.0
) -> list[float]:
    """Log-probabilities of `tokens`, from the same pass."""
    logp = (plain_logits(model, group, tokens) / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


def check_contract(engine: Engine, policy: Policy, *, own_streams: bool = False) -> None:
    """All checks but `check_samples`, which needs a thousand completions at once.

    Args:
        own_streams: the engine draws random numbers of its own, so that only greedy completions can
            be compared with each other.
    """
    sampling = FREE.model_copy(update={"temperature": 0.0}) if own_streams else FREE
    check_logprobs(engine, policy)
    check_greedy(engine, policy)
    check_ends(engine, policy)
    check_uneven(engine)
    check_continuation(engine, sampling.model_copy(update={"max_tokens": 8}))
    check_injected(engine, policy)
    check_pieces(engine, sampling)
    check_lazy_requests(engine, sampling)
    check_versions(engine, policy)


def check_logprobs(engine: Engine, policy: Policy, *, atol: float = 1e-4) -> None:
    """Every request is answered by one whole group, and log-probabilities are the model's, with the
    temperature."""
    for temperature in (1.0, 0.7):
        sampling = FREE.model_copy(update={"temperature": temperature})
        groups = list(engine.generate(make_requests(), sampling))
        assert sorted(group.prompt.id for group in groups) == [str(n) for n in range(7)]
        lengths = set()
        for group in groups:
            assert len(group) == 4 and group.samples == (0, 1, 2, 3)
            for one in group.completions:
                lengths.add(len(one.tokens))
                tokens = list(one.tokens)
                wanted = plain_logprobs(policy.model, group, tokens, temperature=temperature)
                _close(one.logprobs, wanted, atol=atol)
        assert len(lengths) > 5, f"the check is about ragged lengths, and these are {lengths}"


def check_samples(engine: Engine, policy: Policy, *, count: int = 4000) -> None:
    """Samples follow the model's distribution: Pearson's statistic over the likely tokens has mean
    df and standard deviation √(2·df)."""
    request = make_requests(1, group=count)[0]
    group = next(iter(engine.generate([request], Sampling(max_tokens=1))))
    drawn = torch.tensor([one.tokens[0] for one in group.completions])
    probs = plain_logits(policy.model, group, [0]).softmax(-1)[0].double()
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    likely = probs > 5 / count
    statistic = ((counts - count * probs) ** 2 / (count * probs))[likely].sum()
    df = int(likely.sum())
    assert df > 5
    assert statistic < df + 5 * (2 * df) ** 0.5


def check_greedy(engine: Engine, policy: Policy) -> None:
    """Temperature 0 is the most probable token every time, with its log-probability at 1."""
    for group in engine.generate(make_requests(3), Sampling(max_tokens=8, temperature=0.0)):
        for one in group.completions:
            tokens = list(one.tokens)
            assert tokens == plain_logits(policy.model, group, tokens).argmax(-1).tolist()
            _close(one.logprobs, plain_logprobs(policy.model, group, tokens))


def check_ends(engine: Engine, policy: Policy) -> None:
    """A completion ends at its first end token, where a stop string is complete, or at its budget;
    the tokens that complete the stop string stay, and the text leaves out the end token alone."""
    requests, stop = make_requests(), _frequent_pair(engine)
    finishes = []
    for group in engine.generate(requests, FREE.model_copy(update={"stop": (stop,)})):
        for one in group.completions:
            tokens, ended = list(one.tokens), one.tokens[-1] in policy.end_tokens
            assert not set(tokens[:-1]) & policy.end_tokens
            assert len(one.logprobs) == len(tokens) == len(one.mask)
            spoken = tokens[:-1] if ended else tokens
            assert one.text == policy.tokenizer.decode(spoken, skip_special_tokens=False)
            assert stop not in policy.tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            halted = not ended and stop in one.text
            assert one.finish == ("stop" if ended or halted else "length")
            assert ended or halted or len(tokens) == TOKENS
            finishes.append("end" if ended else "stop" if halted else "length")
    assert finishes.count("stop") and finishes.count("end"), "the check is about several ends"


def check_uneven(engine: Engine) -> None:
    """Groups of different sizes, and budgets of one and two tokens, of all and of one request."""
    requests = [
        replace(request, group=1 + place % 3) for place, request in enumerate(make_requests())
    ]
    for budget in (1, 2):
        groups = list(engine.generate(requests, Sampling(max_tokens=budget)))
        assert sorted(map(len, groups)) == sorted(request.group for request in requests)
        assert all(1 <= len(one.tokens) <= budget for group in groups for one in group.completions)
    short = [replace(request, budget=1 + place) for place, request in enumerate(requests)]
    for group in engine.generate(short, FREE):
        longest = max(len(one.tokens) for one in group.completions)
        assert longest <= 1 + int(group.prompt.id)


def check_continuation(
    engine: Engine, sampling: Sampling = FREE, requests: Sequence[Request] | None = None
) -> None:
    """A completion cut at any position and continued under its stream equals the unbroken one: its
    tokens, its end and its supports; its log-probabilities to the bit where the engine
    says so, and within 1e-4 elsewhere. The rows of a request are cut at different positions."""
    requests = make_requests(2) if requests is None else requests
    whole = _by_prompt(engine.generate(requests, sampling))
    atol = 0.0 if engine.exact_continuation else 1e-4
    for shift in range(sampling.max_tokens + 1):
        begun = [
            replace(
                request,
                begun=tuple(
                    cut(one, (shift + 5 * place) % (len(one.tokens) + 1))
                    for place, one in enumerate(whole[request.prompt.id].completions)
                ),
            )
            for request in requests
        ]
        found = _by_prompt(engine.generate(begun, sampling))
        for name, group in whole.items():
            for one, other in zip(found[name].completions, group.completions, strict=True):
                assert list(one.tokens) == list(other.tokens)
                assert (one.finish, one.text) == (other.finish, other.text)
                assert all(one.mask) and one.versions == other.versions
                assert _sets(one) == _sets(other)
                _close(one.logprobs, other.logprobs, atol=atol)


def check_injected(engine: Engine, policy: Policy) -> None:
    """Injected tokens stay where they are, count neither as the policy's nor against its budget,
    and what follows them is drawn after them; a stop string before or among them ends nothing."""
    request, stop = make_requests(1)[0], _frequent_pair(engine)
    sampling = FREE.model_copy(update={"stop": (stop,), "temperature": 0.0})
    [whole] = engine.generate([request], sampling)
    inserted = [*policy.tokenizer.encode(stop, add_special_tokens=False), 20, 30]
    begun = tuple(
        Completion(
            tokens=[*one.tokens[:count], *inserted],
            mask=[*[True] * count, *[False] * len(inserted)],
            logprobs=[*one.logprobs[:count], *[0.0] * len(inserted)],
            text="",
            finish="stop",
            versions=one.versions,
        )
        for count, one in zip((0, 1, 3, 9), whole.completions, strict=True)
    )
    [found] = engine.generate([replace(request, begun=begun)], sampling)
    for one, before in zip(found.completions, begun, strict=True):
        first, tokens = len(before.tokens), list(one.tokens)
        assert tokens[:first] == list(before.tokens)
        assert list(one.mask) == [*before.mask, *[True] * (len(tokens) - first)]
        assert one.own_tokens == sum(one.mask) <= TOKENS
        assert len(tokens) > first
        assert one.finish == "stop" or one.own_tokens == TOKENS
        _close(one.logprobs[first:], plain_logprobs(policy.model, found, tokens)[first:])
        own = [token for token, mine in zip(tokens, one.mask, strict=True) if mine]
        own = own[:-1] if own[-1] in policy.end_tokens else own
        assert one.own_text == policy.tokenizer.decode(own, skip_special_tokens=False)


def check_pieces(engine: Engine, sampling: Sampling = FREE) -> None:
    """Some samples of a group, in any order, are those of the whole group."""
    request = make_requests(1)[0]
    [whole] = engine.generate([request], sampling)
    for samples in ((2,), (3, 1), (1, 2, 3)):
        [some] = engine.generate([replace(request, samples=samples)], sampling)
        assert some.samples == samples
        found = [list(one.tokens) for one in some.completions]
        assert found == [list(whole.completions[sample].tokens) for sample in samples]


def check_lazy_requests(engine: Engine, sampling: Sampling = FREE) -> None:
    """Requests that come one by one, with pauses and only after others were answered, give the same
    completions; an idle engine waits instead of asking on and on."""
    requests = make_requests()
    wanted = _by_prompt(engine.generate(requests, sampling))
    answered: list[str] = []
    asked_idle = 0

    def source() -> Iterator[Request | None]:
        nonlocal asked_idle
        for place, request in enumerate(requests):
            yield None
            for _ in range(20):  # Everything is answered, and nothing comes for a while.
                if len(answered) < place:
                    break
                asked_idle += 1
                yield None
            yield request

    limits = Limits(prompt=20, group=4, suffix=TOKENS, slots=4)
    found = {}
    for group in engine.generate(source(), sampling, limits):
        answered.append(group.prompt.id)
        found[group.prompt.id] = group
    assert asked_idle >= 20, "the first request is waited for"
    tokens = [
        {name: [list(one.tokens) for one in group.completions] for name, group in groups.items()}
        for groups in (found, wanted)
    ]
    assert tokens[0] == tokens[1]
    assert not list(engine.generate(iter([None]), sampling, limits))


def check_versions(engine: Engine, policy: Policy) -> None:
    """Tokens carry the version that was published last when they were drawn; what was begun keeps
    its own."""
    before = make_requests(1)[0]
    engine.publish(published(policy, version=3))
    [old] = engine.generate([before], FREE)
    assert {one.versions for one in old.completions} == {((0, 3),)}
    engine.publish(published(policy, version=4))
    begun = tuple(cut(one, min(2, len(one.tokens) - 1)) for one in old.completions)
    [found] = engine.generate([replace(before, begun=begun)], FREE)
    for one, there in zip(found.completions, begun, strict=True):
        count = len(there.tokens)
        assert one.versions == (((0, 3), (count, 4)) if count else ((0, 4),))


def _frequent_pair(engine: Engine) -> str:
    """The two characters that stand together most often, mostly across two tokens."""
    groups = engine.generate(make_requests(), FREE)
    texts = [one.text for group in groups for one in group.completions]
    pairs = [text[n : n + 2] for text in texts for n in range(len(text) - 1)]
    return max(sorted(set(pairs)), key=pairs.count)


def _by_prompt(groups: Iterator[Group]) -> dict[str, Group]:
    return {group.prompt.id: group for group in groups}


def _sets(completion: Completion) -> list[set[int]] | None:
    return None if completion.support is None else [set(ids) for ids in completion.support]


def _close(found: Sequence[float], wanted: Sequence[float], *, atol: float = 1e-4) -> None:
    one, other = (torch.tensor(list(x), dtype=torch.float64) for x in (found, wanted))
    torch.testing.assert_close(one, other, rtol=0.0, atol=atol)
