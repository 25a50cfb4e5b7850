"""Own code by `--import`, by `path.py:function` and by entry points, here and in workers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise import extensions
from groupwise.algorithms import ALGORITHMS
from groupwise.cli import main
from groupwise.config import load, load_run, trusted_overrides
from groupwise.errors import UsageError
from groupwise.experiments import make_plan, read_plan
from groupwise.rewards import REWARDS, build_scorer
from groupwise.settings import RewardSettings
from groupwise.types import Completion, Group, Prompt

OWN = '''
from groupwise import ADVANTAGES, ALGORITHMS
from groupwise.algorithms import Algorithm
from groupwise.registry import spec
from groupwise.rewards import verifier

@verifier
def right(text: str, answer: str, *, bonus: float = 0.0) -> float:
    """1 for the right answer in tags."""
    return float(f"<answer>{{answer}}</answer>" in text) * (1 + bonus)

def untyped(text, *, bonus=0.0):
    return 1 + bonus

def trl_style(completions, level, **more):
    return [float(len(text) + value) for text, value in zip(completions, level)]

@ADVANTAGES.register
def {name}_centered(rewards, valid=None, *, scale: float = 1.0):
    """scale · (r − mean r)."""
    return scale * (rewards - rewards.nanmean(-1, keepdim=True)).nan_to_num(0.0)

ROW = ALGORITHMS.register(
    Algorithm(name="{name}", paper="none: a test", advantage=spec("{name}_centered"),
              weighting=spec("batch_token_mean"))
)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with own code under a name that no other test uses; nothing of it stays."""
    name = f"own_{abs(hash(tmp_path.name)) % 10**8}"
    path = tmp_path / f"{name}.py"
    path.write_text(OWN.format(name=name), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(extensions.ENVIRONMENT, "")
    yield path
    sys.modules.pop(name, None)
    ALGORITHMS._rows.pop(name, None)
    extensions_of = importlib.import_module("groupwise.algorithms.advantages").ADVANTAGES
    extensions_of._functions.pop(f"{name}_centered", None)


def group(*texts: str) -> Group:
    completions = tuple(
        Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
        for text in texts
    )
    prompt = Prompt(id="p", text="2+2", answer="4", columns={"level": 3})
    return Group(prompt=prompt, prompt_tokens=[5], completions=completions)


def test_a_function_by_its_path_scores_here_and_in_workers(own: Path) -> None:
    parts = [
        RewardSettings(name=f"{own}:right", bonus=0.5),
        RewardSettings(name=f"{own}:trl_style", weight=0.0),
    ]
    for workers in (0, 1):
        with build_scorer(parts, workers=workers) as scorer:
            scores = scorer.gather([scorer.submit(group("<answer>4</answer>", "no"))])
        assert scores.total.tolist() == [[1.5, 0.0]]
        # A verifier by its mark, and correctness is cut to 1.
        assert scores.correct.tolist() == [[1.0, 0.0]]
        assert scores.parts["trl_style"].tolist() == [[21.0, 5.0]]
    untyped = __import__("groupwise").registry.spec(f"{own}:untyped", bonus=0.5)
    assert REWARDS.bind(untyped).spec.settings == {"bonus": 0.5}
    with pytest.raises(UsageError, match="right has no such setting; did you mean bonus"):
        REWARDS.bind(__import__("groupwise").registry.spec(f"{own}:right", bonsu=1.0))
    with pytest.raises(UsageError, match="has no 'rihgt'; did you mean right"):
        REWARDS.get(f"{own}:rihgt")
    assert f"{own}:right" not in REWARDS.names()


def test_import_is_known_to_recipes_and_to_started_processes(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["algorithms", own.stem, "--import", str(own)]) == 0
    assert f"{own.stem}_centered(scale=1.0)" in capsys.readouterr().out
    assert os.environ[extensions.ENVIRONMENT] == str(own)
    config = load("word-problems", [f"algorithm.name={own.stem}"])
    # The run says what it imported, so that it can be resumed from its folder.
    assert config.imports == (str(own),)
    # A worker of `compare` has nothing but the environment and the recipe.
    code = (
        f"from groupwise.config import load; load('word-problems', ['algorithm.name={own.stem}'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load("word-problems", [f"algorithm.name={own}:ROW"]).algorithm.name == f"{own}:ROW"
    with pytest.raises(
        UsageError, match=r"must name a groupwise.algorithms.Algorithm; got function"
    ):
        load("word-problems", [f"algorithm.name={own}:right"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("imports = ['{own}']", "imports = "),
        ("[[rewards]]\nname = '{own}:right'", "rewards.0.name = "),
        ("[algorithm]\nname = '{own}:ROW'", "algorithm.name = "),
        ("[algorithm]\nadvantage = {{name = '{own}:f'}}", "algorithm.advantage.name = "),
        ("combine = ['{own}:f']", "combine = "),
        ("[data]\ntrain = '{own}:f'", "data.train = "),
        ("[data]\ntrain = '{own}:f(a=1)'", "data.train = "),
        ("[data]\nanswer_style = '{own}:f'", "data.answer_style = "),
        ("[data]\nanswer_style = 'bundled:f'", "data.answer_style = "),
        ("[[data.sources]]\nanswer_style = '{own}:f'", "data.sources.0.answer_style = "),
        ("[warmup]\nstyle = '{own}:f'", "warmup.style = "),
        ("[sft]\nstyle = '{own}:f'", "sft.style = "),
        ("[process]\nfunction = '{own}:f'", "process.function = "),
    ],
)
def test_a_recipe_file_cannot_import_unless_trusted(
    own: Path, tmp_path: Path, text: str, said: str
) -> None:
    recipe = tmp_path / "recipe.toml"
    own.write_text("raise SystemExit('imported')", encoding="utf-8")
    recipe.write_text(text.format(own=own), encoding="utf-8")
    with pytest.raises(
        UsageError, match="can run code, so a recipe or run directory may not set it"
    ) as caught:
        load(recipe)
    assert said in str(caught.value)


def test_removing_a_part_does_not_let_the_next_one_of_an_untrusted_file_in(
    own: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"[[rewards]]\nname = 'rouge'\n[[rewards]]\nname = '{own}:right'", encoding="utf-8"
    )
    own.write_text("raise SystemExit('imported')", encoding="utf-8")
    with pytest.raises(UsageError, match="rewards.1.name = .*can run code"):
        load(recipe, ["rewards.0="])
    assert load(recipe, ["rewards.1="]).rewards[0].name == "rouge"


def test_an_experiment_file_cannot_import(own: Path, tmp_path: Path) -> None:
    own.write_text("raise SystemExit('imported')", encoding="utf-8")
    head = 'recipe = "word-problems"\nseeds = [0, 1, 2]\n[[arms]]\n'
    plan = tmp_path / "plan.toml"
    for arm in (
        f'label = "own"\nalgorithm = "{own}:ROW"',
        f'algorithm = "grpo"\nset = ["imports=[\'{own}\']"]',
    ):
        plan.write_text(head + arm, encoding="utf-8")
        with pytest.raises(UsageError, match="may not set it"):
            read_plan(plan)
    plan.write_text(
        f'{head}algorithm = "grpo"\nset = ["algorithm.advantage.name={own}:f"]', encoding="utf-8"
    )
    with pytest.raises(UsageError, match="can run code"):
        read_plan(plan)


def test_arms_may_be_own_rows(own: Path) -> None:
    extensions.request([str(own)])
    arms = [{"algorithm": own.stem}, {"algorithm": "grpo"}]
    plan = make_plan({"recipe": "word-problems", "seeds": [0, 1, 2], "arms": arms})
    assert plan.config(plan.arms[0]).algorithm.name == own.stem


def test_a_run_is_loaded_from_its_folder_with_what_it_imported(own: Path, tmp_path: Path) -> None:
    extensions.request([str(own)])
    config = load("word-problems", [f"rewards=[{{name='{own}:right'}}]", "steps=7"])
    about = {"config": json.loads(config.to_json())}
    (tmp_path / "config.json").write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(UsageError, match="rewards.0.name = .*can run code"):
        load_run(tmp_path)
    with pytest.warns(UserWarning, match="set by the recipe, and can run code"):
        again = load_run(tmp_path, ["steps=9"], trust_recipe=True)
    assert (again.steps, again.rewards) == (9, config.rewards)
    with pytest.raises(UsageError, match="has no config.json of a run; name the recipe too"):
        load_run(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere.py", "nowhere.py': no such file."),
        ("no_such_module_at_all", "no such module, and the name of a file ends in .py"),
        ("my-rewards.py", "such as my_rewards.py"),
        ("math.py", "another module is called 'math'"),
        ("broken.py", "failed: ZeroDivisionError: division by zero."),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my-rewards.py", "math.py"):
        Path(name).write_text("", encoding="utf-8")
    Path("broken.py").write_text("1 / 0", encoding="utf-8")
    assert main(["algorithms", "--import", place]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert main(["algorithms", "--import"]) == 2
    assert "--import: must name a module" in capsys.readouterr().err


def test_entry_points_are_imported_when_a_name_is_unknown(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = importlib.metadata.EntryPoint(own.stem, own.stem, extensions.GROUP)
    broken = importlib.metadata.EntryPoint("broken", "no_such_module_at_all", extensions.GROUP)
    sys.path.append(str(own.parent))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken, point])
    extensions.discover.cache_clear()
    try:
        with pytest.warns(UserWarning, match="entry point broken = .*cannot be loaded"):
            assert own.stem in ALGORITHMS
    finally:
        extensions.discover.cache_clear()


def test_what_only_looks_like_code_is_left_alone(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[model]\npath = 'bundled:search'\n[data]\nsystem = 'Answer:briefly'\n"
        "train = 'reasoning_gym:chain_sum'\nanswer_column = 'meta:answer'\n",
        encoding="utf-8",
    )
    assert load(recipe).data.train == "reasoning_gym:chain_sum"


def test_names_of_own_code_in_a_trusted_recipe_reach_the_plan_of_an_experiment(
    own: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[[rewards]]\nname = '{own}:right'\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="set by the recipe, and can run code"):
        overrides = trusted_overrides(recipe)
    assert load(recipe, overrides).rewards[0].name == f"{own}:right"


def test_a_key_with_a_dot_is_no_setting(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("'hub.name' = 'a/b'\n'x.y' = 1\n", encoding="utf-8")
    with pytest.raises(UsageError):
        load(recipe)
