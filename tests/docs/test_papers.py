"""The page of the small pipelines: three of them, cut short, are run, collected and shown."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.pipelines import read_pipeline
from groupwise.pipelines.over_seeds import run_seeds

ROOT = Path(__file__).parents[2]
SHORT = (
    *("*.steps=2", "*.prompts_per_step=2", "*.group_size=4", "*.data.limit=40"),
    *("*.warmup.steps=2", "*.evaluation.prompts=4", "*.evaluation.samples=2"),
    *("*.evaluation.validation=0", "*.guards.silent_rewards=say"),
)


@pytest.fixture(scope="module")
def papers() -> ModuleType:
    path = ROOT / "studies" / "papers" / "collect.py"
    spec = importlib.util.spec_from_file_location("papers_collect", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_stored_results(papers: ModuleType) -> None:
    known = papers.twins()
    made = papers.page(known, {name: papers.result(name) for name in known})
    assert papers.PAGE.read_text(encoding="utf-8") == made, "python studies/papers/collect.py page"


def test_every_small_pipeline_has_its_effects(papers: ModuleType) -> None:
    small = {name for name in papers.packaged_pipelines() if name.endswith("-small")}
    assert small == set(papers.twins())
    assert all(twin.effects and twin.rows for twin in papers.twins().values())


@pytest.mark.parametrize(
    ("name", "count"), [("r1-zero-small", 2), ("r1-distill-small", 1), ("r1-small", 1)]
)
def test_a_small_pipeline_cut_short_is_collected(
    papers: ModuleType, name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(source: str, **given: Any) -> Any:
        own = ["answers.prompts=16"] if name != "r1-zero-small" else []
        return read_pipeline(source, [*SHORT, *own], **given)

    seeds = [str(seed) for seed in range(count)]
    run_seeds(short(name, output=tmp_path), seeds=count)
    twin = papers.twins()[name]
    with pytest.raises(UsageError, match="holds no finished seed"):
        papers.collect(name, tmp_path, twin)  # they are of other settings than the package's
    monkeypatch.setattr(papers, "read_pipeline", short)
    found = json.loads(json.dumps(papers.collect(name, tmp_path, twin)))
    assert list(found["seeds"]) == seeds and found["keys"] == papers.keys(name)
    made = papers.page({name: twin}, {name: found})
    for seed in seeds:
        record = json.loads((tmp_path / f"seed-{seed}/table/stage.json").read_text("utf-8"))
        effect = twin.effects[0]
        cell = record["figures"]["models"][effect.of][effect.figure]["value"]
        assert found["seeds"][seed]["figures"]["table"][effect.of][effect.figure] == cell
    assert made.count(f"({count} of 3 seeds)") == len(twin.effects)


def seeds(*pairs: tuple[float, float]) -> dict[str, Any]:
    return {
        str(n): {"figures": {"table": {"a": {"sampled": a}, "b": {"sampled": b}}}, "metrics": {}}
        for n, (a, b) in enumerate(pairs)
    }


@pytest.mark.parametrize(
    "pairs, expected, said",
    [
        # d = .1, .2, .3: mean .2, s = .1, t(2) = 4.3027: half-width .2484, which holds 0
        ([(0.2, 0.1), (0.4, 0.2), (0.6, 0.3)], "higher", "not shown"),
        # d = .19, .2, .21: half-width .0248
        ([(0.29, 0.1), (0.4, 0.2), (0.51, 0.3)], "higher", "shown"),
        ([(0.29, 0.1), (0.4, 0.2), (0.51, 0.3)], "lower", "the opposite"),
        ([(0.1, 0.29), (0.2, 0.4), (0.3, 0.51)], "lower", "shown"),
        ([(0.5, 0.25), (0.75, 0.5), (1.0, 0.75)], "higher", "no interval"),
    ],
)
def test_a_verdict_follows_from_the_interval(
    papers: ModuleType, pairs: list[tuple[float, float]], expected: str, said: str
) -> None:
    effect = papers.Effect(claim="", figure="sampled", of="a", against="b", expected=expected)
    assert effect.verdict(effect.differences(seeds(*pairs))) == said


def test_a_figure_is_compared_with_its_bound(papers: ModuleType) -> None:
    # d = −.04, −.05, −.06 from the bound: half-width .0248
    found = seeds((0.06, 0), (0.05, 0), (0.04, 0))
    effect = papers.Effect(claim="", figure="sampled", of="a", bound=0.1, expected="lower")
    assert effect.verdict(effect.differences(found)) == "shown"
    assert papers.measured(effect) == "sampled accuracy of a − 0.1"


def test_results_of_other_settings_or_few_seeds_are_to_do(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    name = "r1-zero-small"
    known = {name: papers.twins()[name]}
    monkeypatch.setattr(papers, "twins", lambda: known)
    stored = {"pipeline": name, "keys": papers.keys(name), "seeds": {"0": {}, "1": {}, "2": {}}}
    assert papers.todo() == [name]
    for values, expected in (
        (stored, []),
        (stored | {"keys": {"trained": "?"}}, [name]),
        (stored | {"seeds": {"0": {}}}, [name]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
        assert papers.todo() == expected


@pytest.mark.parametrize(
    "text, said",
    [
        ("[no-such]\npaper = ''\nrows = []\neffects = []\n", "no packaged pipeline"),
        (
            "[r1-small]\npaper = ''\nrows = []\n"
            "effects = [{claim = '', figure = 'length', of = 'a', expected = 'more'}]\n",
            "must be higher or lower",
        ),
    ],
)
def test_a_list_that_cannot_be_is_refused(
    papers: ModuleType, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "twins.toml"
    path.write_text(text, encoding="utf-8")
    assert tomllib.loads(text)
    with pytest.raises(UsageError, match=said):
        papers.twins(path)


def test_a_seed_without_the_figure_has_no_difference_and_a_wrong_name_is_refused(
    papers: ModuleType,
) -> None:
    """A model without wrong answers has no length of wrong answers."""
    found = seeds((0.1, 0.2), (0.1, 0.3), (0.1, 0.4))
    del found["1"]["figures"]["table"]["a"]["sampled"]
    effect = papers.Effect(claim="", figure="sampled", of="a", against="b")
    difference = effect.differences(found)
    assert effect.verdict(difference) == "not measured in every seed"
    assert papers.shown(effect, difference, found) == "–"
    for wrong in ({"figure": "smapled"}, {"of": "c"}, {"section": "tables"}):
        other = papers.Effect(**{"claim": "", "figure": "sampled", "of": "a", **wrong})
        with pytest.raises(UsageError, match="have no"):
            other.differences(found)
