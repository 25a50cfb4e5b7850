"""The memory of a run, planned from the sizes of its model alone."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from groupwise.cli import main
from groupwise.cli.doctor import examine
from groupwise.config import Config, load
from groupwise.config.dry_run import Live
from groupwise.config.memory import MemoryPlan, memory_plan, memory_savings, rollout_limits
from groupwise.errors import UsageError
from groupwise.kernels import GroupCache, Reference, active, onednn, using
from groupwise.models import save_policy
from groupwise.rollouts.engines import group
from groupwise.training.distillation import make_teacher
from groupwise.training.stages.base_model import small_policy
from groupwise.updates import TorchLearner
from small_runs import config, distilling, prepared, settings, tiny

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_policy(tiny(), folder)
    (folder / "model.safetensors").unlink()
    return folder


def planned(model: Path, *more: str) -> tuple[MemoryPlan, Config]:
    """Of a model whose weights are not even there."""
    found = config(Path("unused"), f"model.path={model}", "data.max_prompt_tokens=20", *more)
    return memory_plan(found), found


def test_what_is_alive_at_the_same_time_is_added_up() -> None:
    """1000 and 500 numbers of 4 bytes; a view holds nothing, and what is gone does not count."""
    with FakeTensorMode(), Live() as live:
        first = torch.zeros(1000)
        view = first.view(10, 100)
        assert live.now == 4000
        del first
        assert live.now == 4000
        half = view[0].repeat(5)
        assert live.now == live.peak == 6000
        del view
        assert (live.now, live.peak) == (2000, 6000)
        assert half.shape == (500,)


def counted(model: Path) -> int:
    """Parameters of a layer of width 32 with 2 heads, 1 key head of 16 and 64 inside, and tied
    embeddings: q and its bias, k and v and theirs, o; three matrices; three norms."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    attention = 32 * 32 + 32 + 2 * (32 * 16 + 16) + 32 * 32
    return vocab * 32 + attention + 3 * 32 * 64 + 3 * 32


def test_what_a_run_always_holds(model: Path) -> None:
    """float32 learns in place; bf16 has the other half of its masters; an adapter of rank 2 has
    2 · (in + out) numbers for each of 7 matrices, and they alone have moments."""
    n = counted(model)
    assert planned(model)[0].held == {
        "weights": 4 * n, "adapter": 0, "float32 masters": 0, "moments": 8 * n, "reference": 0,
    }  # fmt: skip
    kl = 'algorithm.divergence={name="k3", coefficient=0.1, in="loss"}'
    assert planned(model, "model.dtype=bfloat16", kl)[0].held == {
        "weights": 2 * n, "adapter": 0, "float32 masters": 2 * n, "moments": 8 * n,
        "reference": 2 * n,
    }  # fmt: skip
    learn = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    plan, _ = planned(model, "model.adapter={rank=2}", kl)
    assert plan.held == {
        "weights": 4 * n, "adapter": 4 * learn, "float32 masters": 0, "moments": 8 * learn,
        "reference": 4 * learn,
    }  # fmt: skip
    assert (plan.parameters, plan.trained) == (n + learn, learn)


def test_weights_that_are_float32_only_in_a_step(model: Path) -> None:
    """AdamW steps the halves of bf16 weights in place; the one with moments in 8 bits needs them,
    and their gradients, in float32."""
    bf16 = ("model.dtype=bfloat16", "sampling.max_tokens=1", "data.max_prompt_tokens=1")
    plan, _ = planned(model, *bf16, "optimizer.name=adamw_8bit")
    n = counted(model)
    assert plan.update == {"gradients": 2 * n, "weights and gradients of a step": 8 * n}
    assert "activations" in planned(model, *bf16)[0].update


def live_bytes() -> int:
    """Of all tensors of this process; views share what they show."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_teacher_is_held_as_planned(tmp_path: Path, dtype: str, size: int) -> None:
    """Its weights alone: it trains nothing, so it has no float32 masters in bf16 either."""
    more = distilling(tmp_path, "algorithm.name=opd", f"model.dtype={dtype}")
    found, policy = load("word-problems-distil", more), tiny(seed=2)
    gc.collect()
    before = live_bytes()
    teacher = make_teacher(found, policy)
    gc.collect()
    weights = size * sum(p.numel() for p in policy.model.parameters())
    assert memory_plan(found).held["teacher"] == weights
    assert weights <= live_bytes() - before < 1.01 * weights, teacher


def test_the_policy_as_its_own_teacher_holds_nothing_more(tmp_path: Path) -> None:
    more = distilling(tmp_path, "distillation.teacher=self", "distillation.prompt={prompt}{answer}")
    assert "teacher" not in memory_plan(load("word-problems-distil", more)).held


def test_the_reference_of_online_preferences_is_held_as_planned(tmp_path: Path) -> None:
    """A copy of the weights, where the loss compares with it."""
    save_policy(tiny(), tmp_path / "model")
    made = [f"model.path={tmp_path / 'model'}", "preference.online=true"]
    with closing(prepared(tmp_path / "a", *made)) as run:
        learner = run.trainer.learners["policy"]
        assert isinstance(learner, TorchLearner) and learner.frozen is not None
        measured = sum(w.nbytes for w in learner.frozen.named().values())
    assert memory_plan(config(tmp_path / "b", *made)).held["reference"] == measured > 0
    without = config(tmp_path / "c", *made, 'preference.loss={name="simpo"}')
    assert memory_plan(without).held["reference"] == 0


def test_matrices_in_4_bits(model: Path) -> None:
    """All but the embedding, biases and norms: half a byte, a byte for 64, four for 256 · 64."""
    matrices = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    plan, _ = planned(model, "model.adapter={rank=2}", "model.quantization=nf4")
    wanted = 4 * (counted(model) - matrices) + matrices * (0.5 + 1 / 64 + 4 / (64 * 256))
    assert abs(plan.held["weights"] - wanted) < 7


def test_a_full_cache_of_the_rollout(model: Path) -> None:
    """Keys and values of 1 layer with 1 head of 16: 3 prompts of 20 tokens, each once, and 12
    completions of 8."""
    plan, _ = planned(model)
    assert plan.rollout["keys and values"] == 2 * 4 * 16 * (3 * 20 + 12 * 8)


def test_completions_wait_in_the_cache_during_an_update(model: Path) -> None:
    """Those of 3 batches of 3 prompts, where weights change at most 2 times before they are
    learned from."""
    correction = 'algorithm.correction={name="tis"}'
    plan, _ = planned(model, "streaming.max_staleness=2", correction)
    assert plan.update["keys and values"] == 2 * 4 * 16 * 3 * (3 * 20 + 12 * 8)
    assert "keys and values" not in planned(model, correction)[0].update
    elsewhere = planned(model, "streaming.max_staleness=2", correction, "cluster={replicas=1}")[0]
    assert "keys and values" not in elsewhere.update


def test_an_evaluation_with_more_prompts_than_a_step_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the caches of a run are made, whose prompts may be shorter than planned."""
    made: list[GroupCache] = []

    def cache(**sizes: Any) -> GroupCache:
        made.append(GroupCache(**sizes))
        return made[-1]

    monkeypatch.setattr(group, "GroupCache", cache)
    more = ("steps=1", "evaluation.prompts=10", "evaluation.samples=3", "engine.max_rows=8")
    more += ("evaluation.at_start=false",)
    with closing(prepared(tmp_path, *more, eval_prompts=None)) as run:
        run.trainer.run()
        limits = rollout_limits(run.config, prompt=20)
    cells = [each.slots * (20 + each.group * each.suffix_capacity) for each in made]
    assert len(cells) == 3 and max(cells) > cells[0]
    assert limits.slots * (20 + limits.group * limits.suffix) == max(cells)


def test_kernels_are_planned_with_what_they_keep(model: Path) -> None:
    """Of a layer's 9 states of 32 numbers and 4 of 64 the reference keeps all; kernels, with which
    norms keep their inputs alone and feed-forwards two of the wide ones, less than two thirds."""
    if "cpp" not in active().description(torch.device("cpu")):
        pytest.skip("there are no CPU kernels here")
    for more in ((), ("model.dtype=bfloat16", "model.adapter={rank=2}")):
        plan, given = planned(model, *more)
        with using(Reference()):
            plain = memory_plan(given)
        assert plan.update["activations"] < 0.67 * plain.update["activations"]


def test_weights_that_a_rollout_lays_out(tmp_path: Path) -> None:
    """Of matrices of 2^16 entries and more: q and o (256 · 256), three of the feed-forward
    (256 · 512) and the head, not k and v (256 · 128). A matrix in 4 bits has half a byte per weight
    and four per 64."""
    policy = small_policy(hidden=256, layers=1, heads=2, key_value_heads=1, feed_forward=512)
    save_policy(policy, tmp_path)
    head, matrices = 256 * policy.model.config.vocab_size, 2 * 2**16 + 3 * 2**17
    with active().inference_layers(policy.model, rows=8):
        copied = sum("forward" in vars(layer) for layer in policy.model.modules())
    laid_out = "laid-out weights"
    if not copied:
        pytest.skip("this build of PyTorch has no oneDNN for the CPU")
    assert copied == 6
    assert planned(tmp_path)[0].rollout[laid_out] == 4 * (matrices + head)
    narrow = planned(tmp_path, "model.dtype=bfloat16")[0]
    assert narrow.rollout[laid_out] == 2 * (matrices + head)
    small = planned(tmp_path, "model.adapter={rank=2}", "model.quantization=nf4")[0]
    assert small.rollout[laid_out] == 4 * head + matrices * (1 / 2 + 4 / 64)
    assert laid_out not in planned(tmp_path, "engine.name=generate")[0].rollout


def test_a_model_too_large_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder copies all weights or none; without it, layers are copied while there is room,
    and none that has 4 bits."""
    narrow: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
    layers = torch.nn.ModuleList(torch.nn.Linear(512, 256, **narrow) for _ in range(4))
    size, small = 2 * 512 * 256, 0.5625 * 512 * 256
    if active().copied_bytes(layers, four_bit=[]) != 4 * size:
        pytest.skip("there are no CPU kernels here")
    three = [*layers][:3]
    assert active().copied_bytes(layers, four_bit=three) == size + 3 * small
    monkeypatch.setattr("groupwise.kernels.auto.COPY_LIMIT", 3 * size)
    monkeypatch.setattr("groupwise.kernels.onednn.COPY_LIMIT", 3 * size)
    fast = torch.bfloat16 in onednn.dtypes()
    assert active().copied_bytes(layers, four_bit=[]) == (3 * size if fast else 0)
    assert active().copied_bytes(layers, four_bit=three) == size + 3 * small
    monkeypatch.setattr("groupwise.kernels.auto.COPY_LIMIT", size)
    assert active().copied_bytes(layers, four_bit=three) == (size if fast else 0)


def test_settings_that_save_memory_are_planned_to(model: Path) -> None:
    """Activations follow the tokens of a microbatch; a run of one has no gradients at its start."""
    big = ("prompts_per_step=64", "sampling.max_tokens=100", "update.tokens_per_microbatch=16384")
    whole, wide = planned(model, *big)
    half, _ = planned(model, *big, "update.tokens_per_microbatch=8192")
    assert 0.4 < half.update["activations"] / whole.update["activations"] < 0.6
    again, _ = planned(model, *big, "update.gradient_checkpointing=true")
    assert again.update["activations"] < 0.3 * whole.update["activations"]
    single, _ = planned(model)
    assert single.update["gradients"] == 0
    # Groups of 20 + 4 · 8 tokens, 2 of which fit. Of 3, the second microbatch finds gradients and
    # has half the activations, so the first has the peak; of 6, others are as large.
    three, six = (
        planned(model, "update.tokens_per_microbatch=110", f"prompts_per_step={n}")[0].update
        for n in (3, 6)
    )
    assert three["activations"] == pytest.approx(six["activations"], rel=0.01)
    assert three["gradients"] == 0 and six["gradients"] >= 4 * counted(model)
    found = list(memory_savings(wide, room=0.5 * whole.peak))
    assert found[0].setting == "update.gradient_checkpointing"
    assert found[-1].peak <= 0.5 * whole.peak < whole.peak
    assert str(found[0]).startswith("update.gradient_checkpointing = true (")


def test_a_model_whose_sizes_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no config\.json could be read"):
        memory_plan(config(tmp_path / "run", f"model.path={tmp_path}"))


def test_the_doctor_says_what_fits_a_card(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(
        tmp_path / "run", f"model.path={model}", "prompts_per_step=400", "group_size=40",
        "sampling.max_tokens=100", "update.tokens_per_microbatch=131072",
    )  # fmt: skip
    words = [w for setting in given for w in ("--set", setting)]
    main(["doctor", "word-problems", *words, "--fit", "0.1"])
    shown = capsys.readouterr().out
    assert "FAIL  memory: 0.0 M parameters" in shown and "limit 102 MiB" in shown
    assert "→ set, cumulatively: update.gradient_checkpointing = true" in shown


def test_the_doctor_says_what_needs_most_where_nothing_fits(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("group_size=100", "sampling.max_tokens=1000", "prompts_per_step=400")
    given = settings(tmp_path / "run", f"model.path={model}", "engine.max_rows=40000", *sizes)
    main(["doctor", "word-problems", *(w for s in given for w in ("--set", s)), "--fit", "0.1"])
    shown = capsys.readouterr().out
    (least,) = re.findall(r"no setting needs less than (.*); use a smaller model", shown)
    found = re.fullmatch(r"[\d.]+ [GM]iB at the peak, in the rollout \((\D+) [\d.]+ .*\)", least)
    assert found is not None and found[1] == "keys and values", "the largest part comes first"


def test_the_heap_of_a_cpu_is_left_more_room_than_a_card(model: Path) -> None:
    """Three quarters of what is free fit a card of that size, and not this machine."""
    if torch.cuda.is_available():
        pytest.skip("there is a card")

    def wide(prompts: int) -> tuple[MemoryPlan, Config]:
        sizes = ("group_size=100", "sampling.max_tokens=1000", f"prompts_per_step={prompts}")
        return planned(model, *sizes, f"engine.max_rows={100 * prompts}")

    free = psutil.virtual_memory().available
    _, given = wide(round(10 * 0.75 * free / wide(10)[0].peak))
    for fit_gb, fits in ((None, False), (free / 2**30, True)):
        (check,) = (c for c in examine(given, fit_gb=fit_gb) if c.name == "memory")
        assert check.passed is fits, check


@pytest.mark.verify
def test_the_plan_is_within_15_percent_of_the_tensors_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "memory.py"), "--threads", "1"]
    cases = ["--cases", "full-fp32,lora-bf16"]
    subprocess.run([*command, *cases, "--json", str(file)], check=True)
    for found in json.loads(file.read_text())["cases"]:
        assert 0.85 < found["plan_over_tensors"] < 1.15, found
