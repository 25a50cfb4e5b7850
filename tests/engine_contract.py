"""What every engine must do that runs a real model, whoever computes and however it draws."""

from __future__ import annotations

import pytest
import torch

from groupwise.models import Policy
from groupwise.types import Engine, Group, Prompt, PublishedWeights, Request, Sampling


def make_requests(count: int = 7, *, group: int = 4, vocab: int = 97) -> list[Request]:
    """Prompts of different lengths, of tokens that end nothing."""
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


def plain_logits(model: torch.nn.Module, group: Group, tokens: list[int]) -> torch.Tensor:
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


def check_logprobs(engine: Engine, policy: Policy, *, atol: float = 1e-4) -> None:
    """Every request is answered by one whole group, and log-probabilities are the model's, with the
    temperature."""
    for temperature in (1.0, 0.7):
        sampling = Sampling(max_tokens=24, temperature=temperature)
        groups = list(engine.generate(make_requests(), sampling))
        assert sorted(group.prompt.id for group in groups) == [str(n) for n in range(7)]
        lengths = set()
        for group in groups:
            assert len(group) == 4
            for one in group.completions:
                lengths.add(len(one.tokens))
                tokens = list(one.tokens)
                wanted = plain_logprobs(policy.model, group, tokens, temperature=temperature)
                assert list(one.logprobs) == pytest.approx(wanted, abs=atol)
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
            wanted = plain_logprobs(policy.model, group, tokens)
            assert list(one.logprobs) == pytest.approx(wanted, abs=1e-4)


def check_ends(engine: Engine, policy: Policy) -> None:
    """A completion ends at its first end token, where a stop string is complete, or at its budget;
    the tokens that complete the stop string stay, and the text leaves out the end token alone."""
    requests, free = make_requests(), Sampling(max_tokens=24)
    texts = [one.text for group in engine.generate(requests, free) for one in group.completions]
    # The two characters that stand together most often, across two tokens.
    pairs = [text[n : n + 2] for text in texts for n in range(len(text) - 1)]
    stop = max(sorted(set(pairs)), key=pairs.count)
    finishes = []
    for group in engine.generate(requests, Sampling(max_tokens=24, stop=(stop,))):
        for one in group.completions:
            tokens, ended = list(one.tokens), one.tokens[-1] in policy.end_tokens
            assert not set(tokens[:-1]) & policy.end_tokens
            assert len(one.logprobs) == len(tokens) == len(one.mask)
            spoken = tokens[:-1] if ended else tokens
            assert one.text == policy.tokenizer.decode(spoken, skip_special_tokens=False)
            assert stop not in policy.tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            halted = not ended and stop in one.text
            assert one.finish == ("stop" if ended or halted else "length")
            assert ended or halted or len(tokens) == 24
            finishes.append("end" if ended else "stop" if halted else "length")
    assert finishes.count("stop") and finishes.count("end")


def check_uneven(engine: Engine) -> None:
    """Groups of different sizes, and budgets of one and two tokens."""
    requests = [
        Request(prompt=request.prompt, tokens=request.tokens, group=1 + place % 3)
        for place, request in enumerate(make_requests())
    ]
    for budget in (1, 2):
        groups = list(engine.generate(requests, Sampling(max_tokens=budget)))
        assert sorted(map(len, groups)) == sorted(request.group for request in requests)
        assert all(1 <= len(one.tokens) <= budget for group in groups for one in group.completions)


def check_contract(engine: Engine, policy: Policy) -> None:
    """All of it."""
    check_logprobs(engine, policy)
    check_greedy(engine, policy)
    check_ends(engine, policy)
    check_uneven(engine)
