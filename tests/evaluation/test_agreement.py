"""Agreement of a score with a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from groupwise.cli import main
from groupwise.errors import UsageError
from groupwise.evaluation.agreement import agreement_figures, kappa


def rows(*pairs: tuple[float | None, float | None], per_prompt: int = 2) -> list[dict[str, object]]:
    return [
        {"id": number // per_prompt, "correct": correct, "parts": {"judge": score}}
        for number, (correct, score) in enumerate(pairs)
    ]


def test_kappa_of_cohens_table() -> None:
    # 20 + 15 of 50 agree (.7); the raters say yes to 25 and 30: chance is .5 · .6 + .5 · .4 = .5.
    said = np.array([1] * 20 + [1] * 5 + [0] * 10 + [0] * 15) > 0
    right = np.array([1] * 20 + [0] * 5 + [1] * 10 + [0] * 15) > 0
    assert kappa(said, right) == pytest.approx(0.4)
    assert np.isnan(kappa(right | True, right | True))


def test_figures_by_threshold_and_what_is_undefined() -> None:
    found = agreement_figures(
        rows((1, 0.95), (1, 0.6), (0, 0.3), (0, 0.6), (1, None), (None, 0.2)), "judge"
    )
    middle = {name: each.value for name, each in found["judge ≥ 0.5"].items()}
    assert middle == pytest.approx(
        {"accuracy": 3 / 4, "kappa": 0.5, "precision": 2 / 3, "recall": 1, "accepted": 3 / 4}
    )
    assert set(found["judge ≥ 0.1"]) == {"accuracy", "kappa", "precision", "recall", "accepted"}
    whole = found["all answers"]
    assert whole["auc"].value == pytest.approx(3.5 / 4)
    assert whole["compared"].value == pytest.approx(4 / 6)
    none = agreement_figures(rows((1, 0.0), (0, 0.05)), "judge")["judge ≥ 0.5"]
    assert "precision" not in none and none["recall"].value == 0


def test_scores_of_any_scale_are_cut_at_their_quantiles() -> None:
    generator = np.random.default_rng(3)
    right = generator.random(400) < 0.5
    scores = 7 * (right + generator.normal(size=400))
    found = agreement_figures(rows(*zip(right.tolist(), scores.tolist(), strict=True)), "judge")
    sections = [name for name in found if name.startswith("judge")]
    assert [found[name]["accepted"].value for name in sections] == pytest.approx(
        [0.9, 0.75, 0.5, 0.25, 0.1], abs=0.005
    )
    middle = found[sections[2]]["accuracy"]
    assert middle.low < middle.value < middle.high


def test_select_prints_the_agreement_and_names_the_scores_there_are(tmp_path: Path) -> None:
    samples, file = tmp_path / "samples.jsonl", tmp_path / "found.json"
    given = [row | {"completion": "x"} for row in rows((1, 0.9), (0, 0.2), (0, 0.4), (1, 0.7))]
    samples.write_text("".join(json.dumps(row) + "\n" for row in given))
    assert main(["select", str(samples), "--agreement", "judge", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["agreement"]["judge ≥ 0.5"]["kappa"]["value"] == 1
    with pytest.raises(UsageError, match="'juge'.*did you mean judge"):
        agreement_figures(given, "juge")
