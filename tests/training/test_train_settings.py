"""Settings of [model] and [algorithm] given to `groupwise.train` from Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import train
from groupwise.errors import UsageError
from groupwise.kernels import active, using
from groupwise.kernels.interface import BACKENDS
from groupwise.models import is_adapted
from groupwise.models.loading import resolve
from groupwise.rewards.code.reward import code_asserts
from groupwise.training import prepare
from small_runs import prepared

SMALL: dict[str, Any] = {
    "steps": 1,
    "group_size": 2,
    "prompts_per_step": 1,
    "sampling": {"max_tokens": 4},
    "guards": {"silent_rewards": "say"},
    "optimizer": {"learning_rate": 1e-4},
}
ADAPTED = {"dtype": "bfloat16", "adapter": {"rank": 2}}


def length(text: str) -> float:
    return float(len(text))


def at_hand() -> dict[str, Any]:
    """A loaded model and its tokenizer."""
    place = resolve("bundled")
    return {
        "model": AutoModelForCausalLM.from_pretrained(place),
        "tokenizer": AutoTokenizer.from_pretrained(place),
    }


def test_a_named_model_gets_dtype_and_adapter(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run = train("bundled", ["1+1?"], length, model=ADAPTED, output=str(tmp_path / "run"), **SMALL)
    assert [str(one.message) for one in recwarn if "is_gradient" in str(one.message)] == []
    assert is_adapted(run.model)
    assert run.model.dtype == torch.bfloat16


def test_a_loaded_model_gets_an_adapter(tmp_path: Path) -> None:
    given = at_hand()
    run = train(
        given["model"],
        ["1+1?"],
        length,
        {"name": "grpo", "advantage": {"ddof": 1}},
        tokenizer=given["tokenizer"],
        model={"adapter": {"rank": 2}},
        output=str(tmp_path / "run"),
        **SMALL,
    )
    assert is_adapted(run.model)
    assert run.config.algorithm.advantage == {"ddof": 1}


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"quantization": "nf4"}])
def test_what_needs_loading_is_refused_for_a_loaded_model(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    given = at_hand()
    values = {"adapter": {"rank": 2}, **setting}
    with pytest.raises(UsageError, match="cannot be applied to a model that is already loaded"):
        train(
            given["model"],
            ["1+1?"],
            length,
            tokenizer=given["tokenizer"],
            model=values,
            output=str(tmp_path / "run"),
            **SMALL,
        )


def test_a_warm_up_of_a_loaded_model_computes_with_the_kernels_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[type] = []
    monkeypatch.setattr(prepare, "warm_up", lambda *_, **__: used.append(type(active())))
    with using(active()):
        for kernels in ("torch", "auto"):
            prepared(tmp_path / kernels, f"model.kernels={kernels}", "warmup.steps=1").close()
    assert used == [type(BACKENDS[kernels]()) for kernels in ("torch", "auto")]


@pytest.mark.parametrize("where", ["data.train", "data.eval"])
def test_data_that_the_rewards_cannot_judge_is_refused(tmp_path: Path, where: str) -> None:
    rows = {
        good: [{"prompt": f"{n}+1?", "tests": [tests]} for n in range(4)]
        for good, tests in ((True, "assert f(1) == 2"), (False, "assert ("))
    }
    reward = partial(code_asserts, tests="tests")
    with pytest.raises(UsageError, match=where + ".*can judge no row: a test does not compile"):
        train(
            "bundled",
            rows[where != "data.train"],
            reward,
            eval_prompts=rows[where != "data.eval"],
            output=str(tmp_path / "run"),
            **SMALL,
        )
