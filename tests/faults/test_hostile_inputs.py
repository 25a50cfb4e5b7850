"""Recipes, data, models and completions made to do harm: refused in one line, or harmless."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import build, load
from groupwise.errors import GroupwiseError, UsageError
from groupwise.models import load_policy
from groupwise.prompts.rows import read_rows
from groupwise.rewards import extract_answer
from groupwise.rewards.builtin.format import ordered_tags, repetition, tag_count
from groupwise.training.prepare import prepare
from groupwise.training.stages.sft import save
from small_runs import Quiet, config, letters, prepared, tiny

# -- model folders ---------------------------------------------------------------------------------


class Hostile:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tiny(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("beside", [True, False], ids=["beside safetensors", "instead of them"])
def test_pickled_weights_are_never_read(beside: bool, model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (model / name).write_bytes(pickle.dumps(Hostile(mark)))
    if beside:
        load_policy(model)
    else:
        (model / "model.safetensors").unlink()
        with pytest.raises(UsageError, match="model.path = .* cannot be loaded"):
            load_policy(model)
    assert not mark.exists()


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_of_a_model_folder_is_not_run(part: str, model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    (model / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    file, names = {
        "model": ("config.json", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}),
        "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", "own.Own"]}),
    }[part]
    settings = json.loads((model / file).read_text())
    settings |= {"auto_map": names, "model_type": "own"} if part == "model" else {"auto_map": names}
    (model / file).write_text(json.dumps(settings))
    try:
        load_policy(model)
    except GroupwiseError as error:
        assert "model.path" in str(error)
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "zeros", "empty"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_folder_is_named(name: str, damage: str, model: Path) -> None:
    content = (model / name).read_bytes()
    (model / name).write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "flipped": bytes(byte ^ 0x55 for byte in content[:64]) + content[64:],
            "zeros": bytes(len(content)),
            "empty": b"",
        }[damage]
    )
    with pytest.raises(GroupwiseError, match="model.path") as refusal:
        load_policy(model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_a_chat_template_reaches_nothing(template: str, tmp_path: Path) -> None:
    policy = tiny()
    policy.tokenizer.chat_template = template
    with pytest.raises(GroupwiseError, match="the chat template rejects"):
        prepared(tmp_path, policy=policy)


# -- recipes ---------------------------------------------------------------------------------------


def test_a_recipe_of_a_hundred_thousand_keys_is_refused_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "huge.toml"
    file.write_text("".join(f"k{number} = 1\n" for number in range(100_000)))
    start = time.process_time()
    with pytest.raises(UsageError, match="k0 = 1: no such setting") as refusal:
        load(file)
    assert time.process_time() - start < 5 and len(str(refusal.value)) < 2000


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["y"] * 10**5, {"z" * 10**5: 1}], ids=["text", "list", "table"]
)
def test_what_is_refused_is_not_printed_whole(value: Any) -> None:
    for settings in ({"steps": value}, {"stps": value}, {"optimizer": {"learning_rate": value}}):
        with pytest.raises(UsageError) as refusal:
            build(settings)
        assert len(str(refusal.value)) < 2000


@pytest.mark.parametrize(
    "text", ["steps = " + "[" * 50_000, "steps = " + "9" * 5000, "steps = " + "{a=" * 50_000]
)
def test_a_recipe_that_python_cannot_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        load(file)
    with pytest.raises(UsageError):
        load("word-problems", [text.replace(" ", "")])


@pytest.mark.parametrize("name", ["output", "data.train", "model.path"])
def test_a_path_that_no_system_knows(name: str, tmp_path: Path) -> None:
    """TOML can hold a zero byte; file names cannot."""
    given = [f"{name}={json.dumps(str(tmp_path) + chr(0) + 'x')}", 'rewards=[{name="letters"}]']
    with pytest.raises(UsageError, match=name):
        prepare(config(tmp_path / "run", given[0]), progress=Quiet(), functions=[letters])


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ['{"question": ' + "[" * 100_000, '{"question": "1?", "answer": ' + "9" * 5000 + "}"],
    ids=["nested", "number"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_that_python_cannot_read_is_named_with_its_place(
    name: str, line: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(line)
    with pytest.raises(UsageError, match=rf"{name}(:1)?: is not JSON that can be read"):
        read_rows(str(file))


def test_half_a_character_in_the_data(tmp_path: Path) -> None:
    r"""JSON can write "\ud83d" alone, which is no character; UTF-8 cannot hold it."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 \\ud83d?", "answer": "\\udc00"}\n' * 3)
    given = (f"data.train={file}", "data.prompt_column=question", "steps=1")
    with pytest.raises(UsageError, match=r"row 1: .* contains a lone surrogate"):
        prepared(tmp_path / "run", *given)


# -- completions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", ["a", "<answer>", "<think>", "\\boxed{", "9", " ", "1,", "\n\n"])
def test_a_completion_of_a_megabyte_is_judged_in_seconds(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    start = time.process_time()
    for style in ("auto", "answer_tag", "boxed", "gsm8k", "last_number", "choice"):
        extract_answer(text, style=style)
    for reward in (ordered_tags, repetition, tag_count):
        reward(text)
    assert time.process_time() - start < 5
