"""The model card: what the run was, what was measured, and nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from groupwise.report.card import CARD, model_card, remove_own_card, write_model_card

ABOUT = {
    "config": {
        "steps": 934,
        "warmup": {"steps": 100},
        "seed": 3,
        "prompts_per_step": 8,
        "group_size": 8,
        "model": {"path": "Qwen/Qwen2.5-3B-Instruct", "adapter": {"rank": 64}},
        "data": {"train": "openai/gsm8k", "eval": "/home/me/secret/test.jsonl", "system": "Think."},
        "algorithm": {"name": "softrank", "advantage": {"tau": 0.5}, "ratio": {}},
        "sampling": {"max_tokens": 512, "temperature": 1.0},
        "rewards": [{"name": "exact_answer", "weight": 2.0}, {"name": "x", "label": "format"}],
        "optimizer": {"learning_rate": 5e-6},
        "evaluation": {"prompts": 1319},
    },
    "versions": {"groupwise": "0.1.0", "torch": "2.13.0"},
    "commit": "abc123",
}


def greedy(step: int, value: float, low: float, high: float) -> dict:
    figures = {"greedy": {"value": value, "low": low, "high": high}}
    return {"step": step, "split": "held_out", "figures": figures}


def test_a_card_names_data_algorithm_figures_and_versions() -> None:
    card = model_card("mine", ABOUT, [greedy(0, 0.5, 0.4, 0.6), greedy(934, 0.75, 0.7, 0.8)])
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "base_model": "Qwen/Qwen2.5-3B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["groupwise", "reinforcement-learning", "softrank"],
    }
    assert "| held-out | greedy | 50.0 [40.0, 60.0] | 75.0 [70.0, 80.0] |" in text
    assert "Up to 1319 held-out prompts of test.jsonl" in text and "secret" not in card
    assert '- algorithm settings: {"advantage": {"tau": 0.5}}\n' in text
    assert "- rewards: exact_answer × 2, format × 1\n" in text
    assert "- adapter: LoRA, rank 64\n" in text and "- supervised warm-up: 100 steps\n" in text
    assert "- per step: 8 prompts × 8 completions\n" in text
    assert "- commit of groupwise: abc123\n" in text


def test_what_is_not_known_is_not_claimed(tmp_path: Path) -> None:
    """A local model and local data are no names of the hub, and no evaluation is no figure."""
    base = str(tmp_path / "earlier" / "final")
    local = {"model": {"path": base}, "data": {"train": "./rows.jsonl"}}
    (tmp_path / "config.json").write_text(json.dumps({"config": local}))
    text = write_model_card(tmp_path, tmp_path).read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---\n", 2)[1])
    assert "base_model" not in head and "datasets" not in head
    assert head["library_name"] == "transformers"
    assert "Not evaluated" in text and "|" not in text
    assert str(tmp_path) not in text and "earlier, trained on rows.jsonl" in text


def test_only_a_card_of_groupwise_is_removed(tmp_path: Path) -> None:
    assert not remove_own_card(tmp_path)
    (tmp_path / CARD).write_text("# mine, made with groupwise")
    assert not remove_own_card(tmp_path)
    assert (tmp_path / CARD).read_text() == "# mine, made with groupwise"
    (tmp_path / CARD).write_text(model_card("old", {"config": {}, "versions": {}}, []))
    assert remove_own_card(tmp_path) and not (tmp_path / CARD).exists()
