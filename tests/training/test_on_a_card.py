"""Runs on a card: on a pretended one, which raises where tensors of the CPU and of the card meet,
and, by the mark `gpu`, on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pretended_card
from groupwise.config import connect
from groupwise.kernels.reference import inverse_cdf
from groupwise.training import prepare
from groupwise.updates.logprobs import Projection, token_logprobs
from own_process import printed
from pretended_card import CASES, SAMPLED, rows

LOOSE = "sampler_"
"""Metrics near 0 that are differences of rounding."""


def assert_same_metrics(
    found: Any, wanted: list[dict[str, Any]], *, rel: float, abs: float
) -> None:
    assert isinstance(found, list), found
    for one, two in zip(found, wanted, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {n for n in one if n.startswith(LOOSE)}:
            assert one[name] == pytest.approx(two[name], rel=rel, abs=abs, nan_ok=True), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of every case on the CPU and on the pretended card, in a process of its own."""
    return printed(pretended_card, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("case", CASES)
def test_a_run_mixes_no_devices_and_computes_the_same(case: str, runs: dict[str, Any]) -> None:
    assert_same_metrics(runs[case]["card"], runs[case]["cpu"], rel=1e-4, abs=1e-6)


def test_the_pretended_card_notices_a_mixture(runs: dict[str, Any]) -> None:
    assert runs["mixing"] == "aten.add.Tensor: tensors of the card and of the CPU meet"


@pytest.mark.parametrize("case", SAMPLED)
def test_sampling_waits_for_the_card_by_the_token_and_not_by_the_row(
    case: str, runs: dict[str, Any]
) -> None:
    """6 rows and 36 rows of 8 tokens."""
    few, many = runs["waits"][case]
    assert 8 <= few <= 80 and many < few + 30


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_card_is_that_on_the_cpu(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, because later ones sample from weights that rounding has moved apart."""
    found = rows(tmp_path / "card", "steps=1", *CASES[case])
    for module in (prepare, connect):
        monkeypatch.setattr(module, "best_device", lambda: torch.device("cpu"))
    wanted = rows(tmp_path / "cpu", "steps=1", *CASES[case])
    assert isinstance(wanted, list), wanted
    assert_same_metrics(found, wanted, rel=2e-2, abs=1e-3)


@pytest.mark.gpu
def test_a_card_draws_no_token_of_probability_zero() -> None:
    random = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        logits = torch.randn(256, 50_000, generator=random, device="cuda")
        probs = logits.masked_fill(logits < 1.0, float("-inf")).softmax(-1)
        tokens, logp = inverse_cdf(probs, torch.rand(256, generator=random, device="cuda"))
        assert bool(logp.isfinite().all()) and bool((probs.gather(1, tokens[:, None]) > 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_a_card_are_those_of_float64(kind: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=random).to(kind) for n in (300, 5000))
    target = torch.randint(5000, (300,), generator=random)
    wanted = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, target[:, None])
    head = Projection(weight=weight.cuda())
    found, _ = token_logprobs(hidden.cuda(), target.cuda(), head)
    tolerance = 1e-3 if kind == torch.float32 else 0.2
    torch.testing.assert_close(found.cpu().double(), wanted[:, 0], atol=tolerance, rtol=1e-3)
