"""The reference of settings: complete, and what it says of legal values is what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.config import flat, load, packaged, read, reference
from groupwise.config.reference import sections
from groupwise.errors import UsageError


def test_every_setting_is_described() -> None:
    found = reference()
    assert not [path for path, setting in found.items() if len(setting.about) < 10]
    assert not [path for path, setting in found.items() if setting.legal == "any value"]
    assert all(sections().values())
    recipe = flat(load("word-problems"))
    listed = {path for path in recipe if ".0." not in path and ".1." not in path}
    free = {p for p, s in found.items() if s.legal.startswith("table")}
    missing = {p for p in listed if p not in found and p.rsplit(".", 1)[0] not in free}
    sections_that_are_off = {p for p in missing if any(s.startswith(f"{p}.") for s in found)}
    assert missing == sections_that_are_off


def test_values_and_defaults_are_those_of_the_models() -> None:
    found = reference()
    assert found["group_size"].legal == "integer, ≥ 1, ≤ 4,096"
    assert found["model.dtype"].legal == '"float32" or "bfloat16" or "float16"'
    assert found["model.adapter.rank"].default == "16"
    assert found["threads"].legal == "integer, ≥ 1, ≤ 4,096 or null"
    assert found["rewards.N.name"].default == "required"
    assert found["imports"].trust == "can run code" and not found["seed"].trust
    assert found["evaluation.prompts"].may_change and not found["seed"].may_change


def test_a_recipe_in_yaml_is_the_recipe_in_toml(tmp_path: Path) -> None:
    import yaml

    for name in ("word-problems", "gsm8k-softrank-qwen2.5-3b"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(read(packaged()[name])), encoding="utf-8")
        assert load(path) == load(name)
    hand = tmp_path / "hand.yml"
    hand.write_text("optimizer:\n  learning_rate: 1e-6\nsteps: 10\nrewards:\n- name: rouge\n")
    assert load(hand).optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("text", ["a: &a [*a]\n", None])
def test_aliases_in_yaml_do_not_grow_without_bounds(text: str | None, tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 9):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    path = tmp_path / "recipe.yaml"
    path.write_text(text or "\n".join(lines))
    with pytest.raises(UsageError, match=r"^recipe = '\S+': must not contain more than 100,000 v"):
        read(path)
