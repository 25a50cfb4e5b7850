"""The command from training to report, on a model that is made in a second."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.rundir.files import read_lines
from groupwise.training.stages.base_model import small_policy
from groupwise.training.stages.sft import save

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(small_policy(hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=64), folder)
    return str(folder)


def settings(model: str, output: Path, *more: str) -> list[str]:
    chosen = [
        f"model.path={model}",
        f"output={output}",
        "data.limit=40",
        "prompts_per_step=2",
        "group_size=2",
        "sampling.max_tokens=24",
        "evaluation.prompts=3",
        "evaluation.samples=2",
        "checkpoint.every_steps=2",
        "logging.rollouts_every=1",
        "threads=1",
        # A model made of noise earns nothing for its answers, and a run without reward is stopped.
        'rewards=[{name="exact_answer"}, {name="token_repetition", ngram=1}]',
        "algorithm.name=grpo",
        *more,
    ]
    return [word for setting in chosen for word in ("--set", setting)]


def train(model: str, output: Path, *more: str, options: tuple[str, ...] = ()) -> int:
    return main(["train", "word-problems", *settings(model, output, *more), *options])


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert train(model, folder, "steps=3") == 0
    return folder


def metrics(run: Path) -> list[dict[str, float]]:
    return list(read_lines(run / "metrics.jsonl"))


def test_a_run_directory_is_complete(run: Path) -> None:
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert {"reward", "accuracy", "grad_norm", "tokens_per_second"} <= set(metrics(run)[0])
    about = json.loads((run / "config.json").read_text())
    assert about["config"]["prompts_per_step"] == 2 and about["versions"]["torch"]
    assert (run / "final" / "model.safetensors").exists()
    assert (run / "final" / "tokenizer.json").exists()
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-000002", "step-000003"}
    assert len(list(read_lines(run / "rollouts" / "step-000002.jsonl"))) == 2
    assert list(read_lines(run / "evaluations.jsonl"))[-1]["figures"]["greedy"]


def test_a_run_ends_with_its_held_out_figures_before_and_after(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, tmp_path / "run", "steps=1") == 0
    said = capsys.readouterr().out
    assert re.search(r"^result  Greedy, held-out: .+ → .+ %\.$", said, re.MULTILINE), said
    assert train(model, tmp_path / "other", "steps=1", "evaluation.at_start=false") == 0
    assert "result" not in capsys.readouterr().out


def test_a_second_run_does_not_overwrite_the_first(
    model: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, run, "steps=3") == 2
    assert "already contains a run" in capsys.readouterr().err
    assert len(metrics(run)) == 3


def test_resuming_goes_on_as_if_nothing_had_happened(model: str, run: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(model, whole, "steps=5") == 0
    assert train(model, parts, "steps=3", options=("--resume", str(parts))) == 0
    assert train(model, parts, "steps=5", options=("--resume", str(parts))) == 0
    kept = ("step", "reward", "grad_norm", "length")
    lines = [[[line[key] for key in kept] for line in metrics(folder)] for folder in (whole, parts)]
    for together, apart in zip(*lines, strict=True):
        assert together == pytest.approx(apart)


def test_eval_compares_two_models_on_the_same_items(
    model: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    trained = str(run / "final")
    arguments = ["eval", trained, "--against", model, "--json", str(file)]
    assert main([*arguments, *settings(model, tmp_path)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures["models"]) == {"first/final", Path(model).name}
    assert set(figures["models"]["first/final"]) >= {"greedy", "sampled", "pass_at_2", "reward"}
    greedy, *others = figures["verdicts"]
    assert "greedy accuracy" in greedy
    for figure in ("sampled accuracy", "pass@2"):  # every figure of the table has a verdict
        assert figure in " ".join(others)
    assert "pass@2" in capsys.readouterr().out


def test_eval_needs_held_out_prompts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    more = settings(model, tmp_path, f"data.train={data}")
    assert main(["eval", model, *more]) == 2
    assert "data.eval: must be set" in capsys.readouterr().err


def test_report_is_one_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == run / "report.html"
    assert not re.search(r'(src|href)="https?://', page.read_text())


def test_chat_with_the_trained_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.StringIO("Tom has 3 cups.\nAnd 4 more?\n\nnot read\n"))
    assert main(["chat", str(run / "final"), "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


GSM8K = (
    Path(os.environ.get("GROUPWISE_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"
)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not there (GROUPWISE_DATA)")
def test_gsm8k_files_go_through_every_part(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real prompts and answers, supervised warm-up, RL and evaluation on the real test file."""
    more = settings(
        model,
        tmp_path / "run",
        "steps=2",
        f"data.train={GSM8K / 'train.jsonl'}",
        f"data.eval={GSM8K / 'test.jsonl'}",
        "data.limit=200",
        "warmup.steps=4",
        "warmup.batch_size=4",
        "warmup.limit=100",
        "sampling.max_tokens=64",
    )
    assert main(["train", "gsm8k-offline", *more]) == 0
    assert "warm-up 4/4" in capsys.readouterr().err
    assert len(metrics(tmp_path / "run")) == 2
    group = next(read_lines(tmp_path / "run" / "rollouts" / "step-000001.jsonl"))
    assert re.fullmatch(r"-?[\d.]+", group["prompt"]["answer"])


def test_sft_trains_on_worked_answers(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "pairs.jsonl"
    pair = {"question": "1+1?", "answer": "One and one.\n#### 2"}
    data.write_text("".join(json.dumps(pair) + "\n" for _ in range(8)))
    more = settings(model, tmp_path, f"data.train={data}", "warmup.steps=20", "warmup.batch_size=8")
    more += ["--set", "sampling.max_tokens=64"]
    assert main(["sft", "gsm8k-offline", *more, "--output", str(tmp_path / "model")]) == 0
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().err)]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "model" / "model.safetensors").exists()
