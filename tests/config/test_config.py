"""Recipes and their settings: what is refused, with which words, and where values come from."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from groupwise.config import Config, build, flat, load, packaged, resolve
from groupwise.errors import UsageError
from groupwise.kernels.interface import BACKENDS
from groupwise.models.loading import DTYPES
from groupwise.rollouts.engines.registry import ENGINES
from groupwise.settings.sections import ModelSettings

RECIPE = """
steps = 80
prompts_per_step = 6
group_size = 4
[algorithm]
name = "softrank"
advantage = {tau = 0.7}
[[rewards]]
name = "exact_match"
source = "all"
[[rewards]]
name = "token_f1"
weight = 0.5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


def refusal(recipe: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_recipe_keeps_the_defaults_it_does_not_mention(recipe: Path) -> None:
    config = load(recipe)
    assert (config.steps, config.group_size, config.seed) == (80, 4, 0)
    assert config.algorithm.overrides() == {"advantage": {"tau": 0.7}}
    assert [(r.name, r.weight, r.settings) for r in config.rewards] == [
        ("exact_match", 1.0, {"source": "all"}),
        ("token_f1", 0.5, {}),
    ]
    assert config.sampling.temperature == 1.0


def test_set_replaces_values_of_every_kind(recipe: Path) -> None:
    config = load(
        recipe,
        [
            "optimizer.learning_rate=2e-4",
            "sampling.stop=['</answer>', 'Q:']",
            "model.path=Qwen/Qwen2.5-3B-Instruct",
            "evaluation.keep_best=false",
            "rewards.1.weight=2",
            "model.adapter.rank=64",
            "data.train=/data/a b=c.jsonl",
        ],
    )
    assert config.optimizer.learning_rate == 2e-4
    assert config.sampling.stop == ("</answer>", "Q:")
    assert config.model.path == "Qwen/Qwen2.5-3B-Instruct"
    assert config.evaluation.keep_best is False
    assert config.rewards[1].weight == 2.0
    assert config.model.adapter is not None and config.model.adapter.rank == 64
    assert config.data.train == "/data/a b=c.jsonl"


def test_an_empty_value_goes_back_to_the_default(recipe: Path) -> None:
    assert load(recipe, ["steps="]).steps == Config.model_fields["steps"].default
    assert len(load(recipe, ["rewards.0="]).rewards) == 1


@pytest.mark.parametrize(
    ("algorithm", "override", "said"),
    [
        ("grpo", "critic.lam=0.9", "critic.lam: not used, because algorithm 'grpo' has no critic"),
        ("ppo", "token_reward.model=here", "token_reward.model: not used, because algorithm 'ppo'"),
        ("oreal_token", "critic.epochs=2", "critic.epochs: not used, because"),
        ("ppo", "critic.lam=0.9", None),
        ("oreal_token", "token_reward.model=here", None),
        ("grpo", "critic.lam=1.0", None),
    ],
)
def test_settings_of_a_second_learner_that_the_algorithm_lacks_are_said(
    recipe: Path,
    algorithm: str,
    override: str,
    said: str | None,
    recwarn: pytest.WarningsRecorder,
) -> None:
    load(recipe, [f"algorithm={{name='{algorithm}'}}", override])
    lines = [str(one.message) for one in recwarn]
    assert [line.startswith(str(said)) for line in lines] == ([] if said is None else [True])


def test_a_correction_of_ratios_that_start_from_the_sampler_is_said(recipe: Path) -> None:
    about = "correction.name = 'tis': not used, because update.prox"
    with pytest.warns(UserWarning, match=about) as warned:
        load(recipe, ["algorithm.correction.name=tis", "update.proximal=sampler"])
    assert warned[0].filename == __file__, "it names the caller's line"


def test_every_packaged_recipe_uses_its_second_learner(recwarn: pytest.WarningsRecorder) -> None:
    for name in (name for name in packaged() if not name.endswith("-base")):
        load(name)
    assert not [str(one.message) for one in recwarn if "not used" in str(one.message)]


def test_the_last_of_two_equal_settings_wins(recipe: Path) -> None:
    assert load(recipe, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "grop_size=2",
            "grop_size = 2: no such setting; did you mean group_size? Known: ahead",
        ),
        ("num_generations=8", "num_generations = 8: no such setting; did you mean group_size? K"),
        ("learning_rate=1", "learning_rate = 1: no such setting; did you mean optimizer.learn"),
        ("rank=8", "rank = 8: no such setting; did you mean model.adapter.rank or critic.ad"),
        ("optimizer.lr=1", "optimizer.lr = 1: no such setting; did you mean optimizer.learning_r"),
        ("optimizer.lerning_rate=1", "optimizer.lerning_rate = 1: no such setting; did you mean"),
        ("model.adapter.rnk=2", "model.adapter.rnk = 2: no such setting; did you mean rank?"),
        ("group_size=eight", "group_size = 'eight': must be a valid integer."),
        ("group_size=0", "group_size = 0: must be greater than or equal to 1."),
        ("group_size=4097", "group_size = 4097: must be less than or equal to 4096."),
        ("seed=true", "seed = True: must be a valid integer."),
        ("model.dtype=fp32", "model.dtype = 'fp32': must be 'float32', 'bfloat16' or 'float16'."),
        ("sampling.temperature=0", "sampling.temperature = 0: must be greater than 0."),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: must be"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: must be given."),
        ("sampling.stop=a", "sampling.stop = 'a': must be a list."),
        ("optimizer=3", "optimizer = 3: must be a section (a table of settings)."),
        ("data.train=''", "data.train = '': must not be empty."),
        ("steps.x=2", "--set steps.x: 'x' follows a setting that is not a section."),
        ("rewards.7.weight=2", "--set rewards.7.weight: '7' must be a number from 0 to 1."),
        ("rewards.x=2", "--set rewards.x: 'x' must be a number from 0 to 1, a place in a list."),
        ("combine=wieghted_sum", "combination = 'wieghted_sum': not registered; did you mean"),
        ('combine=["weighted_sum", {name="clip", lo=1}]', "combine.lo = 1: clip has no such"),
        ("=3", "--set = '=3': must have the form section.field=value."),
        ("steps", "--set = 'steps': must have the form section.field=value."),
        (
            "rewards.0.name=exact_mach",
            "rewards.0.name = 'exact_mach': no such reward; did you mean",
        ),
        ("rewards.0.sorce=all", "rewards.0.sorce = 'all': exact_match has no such setting; did"),
        ("rewards.0.source=some", "rewards.0.source = 'some': must be of type"),
        *(
            (f"rewards=[{{name='{name}', {value}}}]", f"rewards.0.{value}: must be ")
            for name in ("code_asserts", "code_function", "code_stdio")
            for value in ("seconds = 0", "seconds = -1", "memory_mb = -1")
        ),
        (
            "environment={name='python', seconds=0.0}",
            "environment.seconds = 0.0: must be above 0",
        ),
        ("algorithm.name=gpro", "algorithm.name = 'gpro': no such row; did you mean grpo? Known"),
        ("algorithm.name=GRPO", "algorithm.name = 'GRPO': no such row; did you mean grpo? Known"),
        ("algorithm.advantage.tua=0.5", "algorithm.advantage.tua = 0.5: "),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    recipe: Path, override: str, message: str
) -> None:
    assert refusal(recipe, override).startswith(message)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["update.minibatches=5"], "update.minibatches = 5: must divide prompts_per_step"),
        (["model.quantization=nf4"], "model.quantization = 'nf4': 4-bit weights"),
        (["data.eval_split=train"], "data.eval_split = 'train': is the training split"),
        (["algorithm.name=grpo", "algorithm.advantage=", "group_size=1"], "group_size = 1: "),
    ],
)
def test_settings_that_cannot_work_together_are_refused(
    recipe: Path, overrides: list[str], message: str
) -> None:
    assert refusal(recipe, *overrides).startswith(message)


def test_an_unknown_recipe_names_the_packaged_ones() -> None:
    with pytest.raises(UsageError, match="did you mean word-problems"):
        load("word-problem")


@pytest.mark.parametrize("content", [b"steps = ", b"steps = 1\nsteps = 2", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_wrong_usage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="broken.toml"):
        load(path)


def test_every_setting_says_where_it_comes_from(recipe: Path) -> None:
    resolved = resolve(recipe, ["seed=3", "algorithm.advantage.tau=0.9", "steps="])
    origins = resolved.origins
    assert origins["seed"] == origins["algorithm.advantage.tau"] == "--set"
    assert origins["group_size"] == origins["rewards.0.source"] == str(recipe)
    assert origins["steps"] == origins["optimizer.learning_rate"] == "default"
    assert set(origins) == set(flat(resolved.config))


def test_what_follows_from_the_settings_is_computed(recipe: Path) -> None:
    """6 prompts · 4 completions = 24 per step; 80 steps · 2 epochs · 3 = 480 optimizer steps."""
    resolved = resolve(recipe, ["update.epochs=2", "update.minibatches=3"])
    assert resolved.derived["completions per step"].startswith("24 = ")
    assert resolved.derived["completions per optimizer step"].startswith("8 = ")
    assert resolved.derived["optimizer steps"].startswith("480 = ")
    assert resolved.derived["completions of the run"].startswith("1920 = ")


def test_the_resolved_settings_make_the_same_configuration_again(recipe: Path) -> None:
    config = load(recipe, ["sampling.stop=['a']", "model.adapter.rank=4"])
    assert build(json.loads(config.to_json())) == config


def test_settings_cannot_be_changed_afterwards(recipe: Path) -> None:
    config = load(recipe)
    with pytest.raises(Exception, match="frozen"):
        config.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [
        option
        for field in model.model_fields.values()
        for option in (field.annotation, *typing.get_args(field.annotation))
        if isinstance(option, type) and issubclass(option, BaseModel)
    ]
    return [model, *(deep for section in inner for deep in sections(section))]


def test_every_setting_has_a_description() -> None:
    for section in sections(Config):
        for name, field in section.model_fields.items():
            is_section = any(
                isinstance(option, type) and issubclass(option, BaseModel)
                for option in (field.annotation, *typing.get_args(field.annotation))
            )
            assert is_section or field.description, f"{section.__name__}.{name}"


@pytest.mark.parametrize("name", [n for n in packaged() if not n.endswith("-base")])
def test_packaged_recipes_load(name: str) -> None:
    config = load(name)
    assert config.rewards
    assert config.output.startswith("runs/")


def test_the_twins_differ_in_the_algorithm_only() -> None:
    """A comparison of the two is one of algorithms only if nothing else differs."""
    softrank = flat(load("gsm8k-softrank-qwen2.5-3b"))
    grpo = flat(load("gsm8k-grpo-qwen2.5-3b"))
    differing = {key for key in softrank | grpo if softrank.get(key) != grpo.get(key)}
    assert {key.split(".")[0] for key in differing} == {"algorithm", "output"}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("gsm8k-softrank-qwen2.5-3b-80gb", {"model.quantization", "update", "engine.max_rows"}),
        ("gsm8k-softrank-kaist-qwen2.5-3b", {"algorithm", "rewards"}),
    ],
)
def test_variants_of_the_run_of_the_paper_differ_where_they_say(name: str, where: set[str]) -> None:
    """What the header of a recipe does not name is as in the recipe that it varies."""
    paper, variant = flat(load("gsm8k-softrank-qwen2.5-3b")), flat(load(name))
    differing = {key for key in paper | variant if paper.get(key) != variant.get(key)}
    assert "output" in differing
    assert {key for key in differing - {"output"} if not key.startswith(tuple(where))} == set()


def test_a_model_is_evaluated_in_the_format_it_is_trained_in() -> None:
    training, evaluation = load("gsm8k-softrank-qwen2.5-3b"), load("gsm8k-eval")
    assert evaluation.data.system == training.data.system
    assert evaluation.data.answer_style == training.data.answer_style
    assert evaluation.sampling == training.sampling
    assert evaluation.evaluation.prompts == training.evaluation.prompts == 1319


@pytest.mark.parametrize(
    "setting, registry", [("engine.name", ENGINES), ("model.kernels", BACKENDS)]
)
def test_the_registry_is_the_one_list_of_names(
    setting: str, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    section, _, name = setting.partition(".")
    named = ", ".join(sorted(registry))
    with pytest.raises(UsageError, match=rf"{setting} = 'mine': no such .*known: {named}\."):
        build({section: {name: "mine"}})
    monkeypatch.setitem(registry, "mine", pytest.fail)
    assert getattr(getattr(build({section: {name: "mine"}}), section), name) == "mine"


def test_every_dtype_that_settings_offer_is_known() -> None:
    assert set(get_args(ModelSettings.model_fields["dtype"].annotation)) < set(DTYPES)
