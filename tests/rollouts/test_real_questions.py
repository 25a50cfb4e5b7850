"""The search recipes on published questions and passages, from the files to the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")

from data_folder import data_file
from groupwise.cli import main
from groupwise.config import load
from groupwise.config.connect import make_environment
from groupwise.models import save_policy
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.small_tokenizer import small_tokenizer
from groupwise.rundir.files import read_lines
from groupwise.training.stages.base_model import small_policy
from groupwise.training.stages.sft import fit
from groupwise.types import Prompt, Stream

STUDY = Path(__file__).parents[2] / "studies" / "search"
QUERIES = {"hotpotqa": "Lilu", "musique": "president", "squad": "Normans", "korquad": "서울에서"}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The study's script as a module, gone again afterwards."""
    monkeypatch.syspath_prepend(str(STUDY))
    yield import_module("real")
    sys.modules.pop("real", None)


def save_searcher(study: ModuleType, name: str, given: list[str], folder: Path) -> str:
    """Train a tiny model that has a query and an answer by heart; returns its call."""
    config = load(study.SETS[name].recipe, given)
    environment, tags = make_environment(config.environment), study.tags_of(config)
    before, after = study.AROUND[study.SETS[name].recipe]
    call = f"{before}{tags.call[0]}{QUERIES[name]}{tags.call[1]}"
    answer = after.format(answer="Rome")
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([call, answer])
    policy = small_policy(
        hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=64, tokenizer=tokenizer
    )
    examples = []
    for number, question in enumerate(("Who was it? ->", "어디인가? ->", "When did they go? ->")):
        prompt = Prompt(id=str(number), text=question)
        reply = environment.reply(environment.begin(prompt, stream=Stream()), call)
        result = reply.text[:40] + reply.text[-reply.frame[1] :]
        part = (len(call), len(call) + len(result))
        whole = Example(prompt=prompt, completion=call + result + answer, injected=(part,))
        examples.append(whole)
    for _ in fit(policy, examples, steps=120, batch_size=3, learning_rate=1e-2):
        pass
    save_policy(policy, folder)
    return call


@pytest.mark.parametrize("name", QUERIES)
def test_a_recipe_trains_on_published_questions_and_passages(
    name: str, study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = study.SETS[name]
    questions = str(data_file(f"{name}/{files.questions}"))
    folder = data_file(f"{name}/{files.corpus}").parents[1]
    given = [
        *study.settings(name, folder, tmp_path, steps=2),
        f"data.train={questions}",
        "data.wording={question} ->",
        "data.limit=40",
        "environment.max_result_tokens=96",
        "environment.max_injected_tokens=200",
        "logging.rollouts_every=1",
        "prompts_per_step=4",
    ]
    given = [setting for setting in given if not setting.startswith("data.eval=")]
    call = save_searcher(study, name, given, tmp_path / "base")
    changes = [word for setting in given for word in ("--set", setting)]
    assert main(["train", files.recipe, *changes]) == 0, capsys.readouterr().err
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert len(rows) == 2
    for row in rows:
        assert row["calls"] > 0.1 and row["tool_found"] > 0.1 and row["injected"] > 5
        assert row["answered_share"] == 1
    assert main(["report", str(tmp_path / "run")]) == 0
    shown = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "calls" in shown and call
