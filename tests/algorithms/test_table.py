"""The table of algorithms: names, overrides, refusals, descriptions."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from groupwise import ALGORITHMS
from groupwise.algorithms import SLOTS, Algorithm, bind, describe, table
from groupwise.errors import UsageError
from groupwise.registry import spec

PROMISED = {
    *("softrank", "softrank@kaist", "softrank_centered", "softrank_loo", "softrank_zero_sum"),
    *("softrank_interpolated", "entropic", "lse_loo", "softbok_loo"),
    *("grpo", "grpo@trl", "grpo@verl", "dr_grpo", "dapo", "rloo", "reinforce", "reinforce++"),
    *("maxrl", "gspo", "cispo", "gmpo", "sapo", "kimi"),
}


def test_the_table_has_the_promised_rows() -> None:
    assert PROMISED <= set(ALGORITHMS.names())
    assert all(ALGORITHMS.get(name).name == name for name in ALGORITHMS)
    assert len(ALGORITHMS) == len(ALGORITHMS.names())


# name: advantage, ratio, surrogate, divergence (β, place), weighting, filter, as in the papers
ROWS = {
    "softrank": ("softrank(tau=0.5)", "token", "ppo_clip", "k3", 0.0, "group_token_mean", "all"),
    "grpo": ("zscore", "token", "ppo_clip", "k3", 0.04, "sequence_mean", "all"),
    "grpo@trl": (
        *("zscore(ddof=1, eps=0.0001)", "token", "ppo_clip", "k3_weighted", 0.0),
        *("batch_token_mean", "all"),
    ),
    "grpo@verl": (
        *("zscore(ddof=1, eps=1e-06, raw_singletons=True)", "token", "dual_clip(bound=3.0)"),
        *("k3", 0.0, "batch_token_mean", "all"),
    ),
    "softrank@kaist": (
        *("softrank_group(tau=0.5, ddof=1, eps=1e-05)", "token", "importance", "k3", 0.04),
        *("sequence_mean", "all"),
    ),
    "dr_grpo": (
        *("centered", "token", "ppo_clip", "none", 0.0),
        *("constant_length(length=3000)", "all"),
    ),
    "dapo": (
        *("zscore", "token", "ppo_clip(low=0.2, high=0.28)", "none", 0.0),
        *("batch_token_mean", "spread"),
    ),
    "gspo": (
        *("zscore", "sequence", "ppo_clip(low=0.0003, high=0.0004)", "none", 0.0),
        *("sequence_mean", "all"),
    ),
    "cispo": (
        *("zscore", "token", "cispo(floor=0.0, cap=5.0)", "none", 0.0),
        *("batch_token_mean", "all"),
    ),
    "rloo": ("leave_one_out", "token", "reinforce", "k1", 0.0, "sequence_sum", "all"),
    "kimi": (
        *("centered", "token", "mirror_descent(tau=0.5)", "none", 0.0),
        *("sequence_sum", "all"),
    ),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_are_what_their_sources_say(name: str) -> None:
    row = ALGORITHMS.get(name)
    found = (
        *(str(row.advantage), str(row.ratio), str(row.surrogate), str(row.divergence)),
        *(row.divergence_coefficient, str(row.weighting), str(row.filter)),
    )
    assert found == ROWS[name]


def test_defaults_of_the_functions_that_rows_rely_on() -> None:
    defaults = {
        ("advantage", "softrank", "tau"): 0.5,
        ("advantage", "zscore", "ddof"): 0,
        ("advantage", "zscore", "eps"): 0.0,
        ("advantage", "maxrl", "eps"): 1e-6,
        ("surrogate", "ppo_clip", "low"): 0.2,
        ("surrogate", "ppo_clip", "high"): 0.2,
        ("surrogate", "dual_clip", "bound"): 3.0,
        ("surrogate", "sapo", "positive"): 1.0,
        ("surrogate", "sapo", "negative"): 1.05,
        ("surrogate", "gmpo", "high"): 0.4,
        ("correction", "tis", "cap"): 2.0,
    }
    found = {
        (slot, name, key): SLOTS[slot].settings(name)[key].default for slot, name, key in defaults
    }
    assert found == defaults


def test_overrides_change_one_setting_and_keep_the_others() -> None:
    algorithm = bind("grpo@trl", {"advantage": {"ddof": 0}, "divergence": {"coefficient": 0.1}})
    assert algorithm.row.advantage == spec("zscore", ddof=0, eps=1e-4)
    assert algorithm.objective.coefficient == 0.1
    assert ALGORITHMS.get("grpo@trl").advantage == spec("zscore", ddof=1, eps=1e-4)


def test_another_function_drops_the_settings_of_the_old_one() -> None:
    algorithm = bind("grpo@trl", {"advantage": {"name": "softrank", "tau": 1}})
    assert algorithm.row.advantage == spec("softrank", tau=1)
    same = bind("grpo@trl", {"advantage": {"name": "zscore", "eps": 0.5}})
    assert same.row.advantage == spec("zscore", ddof=1, eps=0.5)


def test_no_divergence_needs_no_coefficient() -> None:
    assert "ref_logp" not in bind("grpo", {"divergence": {"name": "none"}}).needs


def test_place_of_the_divergence() -> None:
    algorithm = bind("grpo", {"divergence": {"name": "k1", "in": "reward"}})
    assert algorithm.kl_in_reward == 0.04
    assert "ref_logp" not in algorithm.objective.needs


def test_whole_numbers_are_accepted_where_floats_are_meant() -> None:
    algorithm = bind("softrank", {"advantage": {"tau": 1}, "entropy": {"coefficient": 1}})
    got = algorithm.advantage({"rewards": torch.tensor([[1.0, 0.0]])})
    assert got[0, 0].item() == pytest.approx(1 / (1 + 2.718281828**-2))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"advantage": {"tua": 1.0}}, "run.advantage.tua = 1.0: .* did you mean tau"),
        ({"advantage": {"tau": "x"}}, "run.advantage.tau = 'x': must be of type float"),
        ({"advantage": {"tau": 0.0}}, "run.advantage.tau = 0.0: must be greater than 0"),
        ({"advantage": {"name": "zscor"}}, "run.advantage.name = 'zscor': .* did you mean zscore"),
        ({"advantage": {"name": "pass_at_k_gradient", "k": 0}}, "run.advantage.k = 0"),
        ({"surrogate": {"low": -0.1}}, "run.surrogate.low = -0.1: must be at least 0"),
        ({"surrogate": {"name": "cispo", "cap": 0.2}}, "run.surrogate.cap = 0.2: .* at least 1"),
        ({"surrogate": {"name": "dual_clip", "bound": 1.0}}, "run.surrogate.bound = 1.0"),
        ({"correction": {"name": "icepop", "low": 2.0}}, "run.correction.low, high = 2.0, 5.0"),
        ({"weighting": {"name": "constant_length"}}, "run.weighting.length: .* no default"),
        ({"weighting": {"name": "constant_length", "length": 0}}, "run.weighting.length = 0"),
        ({"filter": {"name": "spraed"}}, "run.filter.name = 'spraed': .* did you mean spread"),
        ({"clip": {"low": 0.1}}, "run.clip: no such slot"),
        ({"ratio": 3}, "run.ratio = 3: must be a table"),
        ({"divergence": {"coefficient": -1}}, "run.divergence.coefficient = -1"),
        ({"divergence": {"coefficient": True}}, "run.divergence.coefficient = True"),
        ({"divergence": {"in": "advantage"}}, "run.divergence.in = 'advantage'"),
        (
            {"divergence": {"name": "k1", "coefficient": 0.1}},
            "run.divergence.name = 'k1': its expected gradient in the loss is 0",
        ),
        (
            {"divergence": {"coefficient": 0.1, "in": "reward"}},
            "run.divergence.name = 'k3': only 'k1'",
        ),
        (
            {"divergence": {"name": "none", "coefficient": 0.1}},
            "run.divergence.coefficient = 0.1: there is no divergence",
        ),
        ({"entropy": {"coef": 0.1}}, "run.entropy.coef: no such setting; did you mean coefficient"),
        ({"entropy": {"coefficient": "x"}}, "run.entropy.coefficient = 'x'"),
    ],
)
def test_what_cannot_work_is_refused_with_its_path(overrides: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bind("softrank", overrides, where="run")


def test_unknown_row() -> None:
    with pytest.raises(UsageError, match="algorithm.name = 'dr-grpo': .* did you mean dr_grpo"):
        bind("dr-grpo")


def test_rows_of_ones_own() -> None:
    row = Algorithm(name="mine", paper="none", advantage=spec("centered"))
    algorithm = bind(row)
    got = algorithm.advantage({"rewards": torch.tensor([[1.0, 0.0]])})
    assert got.tolist() == [[0.5, -0.5]]
    with pytest.raises(UsageError, match="already registered"):
        ALGORITHMS.register(ALGORITHMS.get("grpo"))
    wrong = Algorithm(name="wrong", paper="none", advantage=spec("centered", tau=1.0))
    with pytest.raises(UsageError, match="wrong.advantage.tau"):
        ALGORITHMS.register(wrong)
    assert "wrong" not in ALGORITHMS


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_descriptions_are_made_from_signatures_and_docstrings(name: str) -> None:
    text, row = describe(name), ALGORITHMS.get(name)
    assert text.startswith(f"{name} · {row.paper}")
    for slot, registry in SLOTS.items():
        chosen = getattr(row, slot)
        line = next(line for line in text.splitlines() if line.startswith(slot.ljust(13)))
        for setting in registry.settings(chosen.name):
            assert f"{setting}=" in line
    flat = " ".join(text.split())
    assert all(" ".join(difference.split()) in flat for difference in row.differs)
    assert max(map(len, text.splitlines())) <= 120


def test_table_has_a_line_per_row_and_a_column_per_slot() -> None:
    lines = table()
    assert [line["name"] for line in lines] == ALGORITHMS.names()
    assert all(set(line) == {"name", "paper", *SLOTS} for line in lines)
    grpo = next(line for line in lines if line["name"] == "grpo")
    assert grpo["divergence"] == "0.04·k3 in the loss"


def test_public_names_load_on_first_use() -> None:
    code = (
        "import sys, groupwise; assert 'torch' not in sys.modules; "
        "from groupwise import ADVANTAGES, ALGORITHMS, RATIOS, SURROGATES, DIVERGENCES, "
        "CORRECTIONS, WEIGHTINGS, FILTERS; assert 'transformers' not in sys.modules; "
        "assert set(groupwise.__all__) <= set(dir(groupwise))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import groupwise

    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        groupwise.nothing_of_this_name  # noqa: B018


@pytest.mark.parametrize(
    "name, said", [("dapo", True), ("kimi", True), ("gspo", True), ("rloo", False)]
)
def test_a_row_says_what_does_not_act_with_one_optimizer_step(name: str, said: bool) -> None:
    assert ("update.minibatches" in " ".join(describe(name).split())) == said
