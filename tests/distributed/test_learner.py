"""The learner of several ranks is the one of a single process: gradients, steps, state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from batches import batch_of
from groupwise import kernels
from groupwise.algorithms import ALGORITHMS, bind
from groupwise.algorithms.losses import FunctionObjective
from groupwise.distributed import learner as learners
from groupwise.distributed import sharding as shardings
from groupwise.distributed.learner import DistributedLearner
from groupwise.distributed.sharding import sharded_modules
from groupwise.distributed.weights import take_over
from groupwise.distributed.world import World
from groupwise.models import score_layer, scorer_of
from groupwise.models.adapters import new_adapter
from groupwise.settings import AdapterSettings
from groupwise.types import Batch
from groupwise.updates import OptimizerSettings, Score, TorchLearner
from ranks import exact_norms, run_ranks, same
from tiny_models import SHAPE, random_model, tiny_model, tiny_policy

ADAM = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1.0)
EXACT = 1e-12
"""Largest relative difference in float64."""

POLICY_GRADIENT = FunctionObjective(
    loss=lambda outputs, batch: -batch.advantage * outputs["logp"] - 0.1 * outputs["entropy"],
    needs=frozenset({"logp", "entropy"}),
)


def model_of(kind: str, *, dtype: torch.dtype = torch.float64) -> Any:
    """A model: with its head tied to the embedding, with one of its own, or with an adapter."""
    if kind == "tied":
        return exact_norms(
            random_model(Qwen2Config(**SHAPE, tie_word_embeddings=True), dtype=dtype)
        )
    model = exact_norms(tiny_model("qwen3", dtype=dtype))
    if kind == "adapter":
        torch.manual_seed(1)
        model = new_adapter(model, AdapterSettings(rank=4))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.randn(parameter.shape, dtype=dtype)
    return model


def made(world: World | None, kind: str = "tied", **given: Any) -> TorchLearner:
    """A learner of one process, or of several."""
    policy = tiny_policy(model_of(kind, dtype=given.pop("dtype", torch.float64)))
    given = {"optimizer": ADAM, "tokens_per_microbatch": 40, **given}
    if world is None:
        given.pop("sharding", None)
        return TorchLearner(policy, **given)
    return DistributedLearner(policy, world=world, **given)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def step_on(world: World | None, kind: str, sharding: str, groups: int) -> dict[str, Tensor]:
    """A gradient, outputs, and what three steps with clipping make of the weights."""
    batch = batch_of(groups)
    reference = "adapter" if kind == "adapter" else "frozen"
    learner = made(world, kind, sharding=sharding, reference=reference)
    found = {"gradient": learner.gradient(batch, POLICY_GRADIENT)}
    for _ in range(3):
        update = learner.update(batch, POLICY_GRADIENT)
    outputs = learner.evaluate(batch, {"logp", "ref_logp"})
    moments = learner.state()["optimizer"]["moments"]
    return {
        **found,
        **outputs,
        "norm": torch.tensor([update.grad_norm]),
        "loss": torch.tensor([update.loss]),
        "update": update.logp.nan_to_num(nan=7.0),
        "version": torch.tensor([float(learner.version)]),
        "weights": joined(learner.trained()),
        "moments": joined({name: each["exp_avg"] for name, each in moments.items()}),
    }


def joined(named: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([named[name].double().flatten() for name in sorted(named)])


def compare_steps(world: World, cases: list[tuple[str, str, int]]) -> dict[str, float]:
    """For each case the largest relative difference from a single process, on this rank."""
    worst = {}
    for kind, sharding, groups in cases:
        here, alone = step_on(world, kind, sharding, groups), step_on(None, kind, sharding, groups)
        assert here.keys() == alone.keys()
        worst[f"{kind} {sharding} {groups}"] = max(
            difference(here[name].double(), alone[name].double()) for name in alone
        )
    return worst


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 3])
def test_steps_are_those_of_one_process(size: int) -> None:
    """Uneven groups; with one group and whole prompts there is a rank without work."""
    cases = [("tied", "full", 3), ("adapter", "none", 3)]
    if size == 3:
        cases += [("tied", "none", 5), ("adapter", "full", 5), ("untied", "full", 1)]
    for worst in same(run_ranks(size, compare_steps, cases)):
        assert {case: worst[case] for case in worst if not worst[case] <= EXACT} == {}
        assert len(worst) == len(cases)


def idle_rank(world: World, sharding: str) -> tuple[int, float, float]:
    """Microbatches with rows on this rank, and difference of the gradient and of the norm, when
    rows that belong together leave nothing for the second rank."""
    batch = batch_of(1)
    objective = FunctionObjective(
        loss=lambda outputs, batch: -(batch.advantage * outputs["logp"] * batch.mask).sum(1),
        needs=frozenset({"logp"}),
        granularity="group",
    )
    learner, alone = made(world, sharding=sharding), made(None)
    own = sum(len(part) > 0 for part in learner.parts(batch, objective))
    gap = difference(learner.gradient(batch, objective), alone.gradient(batch, objective))
    norms = [each.update(batch, objective).grad_norm for each in (learner, alone)]
    return own, gap, abs(norms[0] - norms[1]) / norms[1]


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.cluster)])
def test_a_rank_without_rows_takes_the_same_step(sharding: str) -> None:
    results = same(run_ranks(2, idle_rank, sharding))
    assert [own for own, *_ in results] == [1, 0]
    assert all(gap <= EXACT and norm <= EXACT for _, gap, norm in results)


def all_rows(world: World, sharding: str) -> dict[str, float]:
    """For every row of the table, the difference of its gradient from that of one process."""
    batch, learner, alone = batch_of(5), made(world, sharding=sharding), made(None)
    found = {}
    for name in ALGORITHMS.names():
        objective = bind(name).objective
        expected = alone.gradient(batch, objective)
        found[name] = difference(learner.gradient(batch, objective), expected)
    return found


@pytest.mark.cluster
@pytest.mark.parametrize(("size", "sharding"), [(2, "none"), (3, "full")])
def test_every_algorithm_has_the_gradient_of_one_process(size: int, sharding: str) -> None:
    for found in same(run_ranks(size, all_rows, sharding)):
        assert found.keys() == set(ALGORITHMS.names())
        assert {name: gap for name, gap in found.items() if not gap <= EXACT} == {}


def summed_gradients(world: World, sharding: str, dtype: torch.dtype) -> tuple[float, float]:
    """Distance of the gradient from the sum in float64 of single microbatches, and from one
    process."""
    if dtype != torch.float32:
        kernels.select("torch")  # Sharded weights of 16 bits use no kernels, which round otherwise.
    batch = batch_of(20, dtype=torch.float32)
    learner = made(world, "untied", sharding=sharding, dtype=dtype)
    alone = made(None, "untied", dtype=dtype)
    rows = torch.arange(len(batch.length))
    assert isinstance(learner, DistributedLearner)
    total = torch.zeros(1)
    for share in learner.shares(batch, rows):
        for part in share:
            if len(part):
                alone.begin(batch, POLICY_GRADIENT)
                alone.add(part)
                total = total + alone.optimizer.pop_gradient().double()
    gradient = learner.gradient(batch, POLICY_GRADIENT).double()
    single = alone.gradient(batch, POLICY_GRADIENT).double()
    return tuple(float((gradient - e).norm() / e.norm()) for e in (total, single))  # type: ignore[return-value]


@pytest.mark.cluster
@pytest.mark.parametrize(("size", "sharding"), [(2, "none"), (2, "full"), (3, "full")])
def test_float32_is_as_near_to_the_exact_sum_as_sums_are(size: int, sharding: str) -> None:
    for exact, single in same(run_ranks(size, summed_gradients, sharding, torch.float32)):
        assert exact <= 2e-7
        assert single <= 3e-6


@pytest.mark.cluster
@pytest.mark.parametrize(("size", "sharding"), [(2, "none"), (3, "full")])
def test_gradients_of_a_16_bit_model_are_summed_in_float32(size: int, sharding: str) -> None:
    for exact, _ in same(run_ranks(size, summed_gradients, sharding, torch.bfloat16)):
        assert exact <= 2e-7


# -- what would be wrong without a word ------------------------------------------------------------


def averaged(world: World) -> float:
    """The gradient if FSDP averages, as it does by default."""
    shardings.sum_gradients = lambda reader: None  # type: ignore[assignment]
    batch = batch_of(5)
    learner = made(world, sharding="full")
    expected = made(None).gradient(batch, POLICY_GRADIENT)
    return difference(learner.gradient(batch, POLICY_GRADIENT), expected / world.size)


@pytest.mark.cluster
def test_fsdp_averages_unless_it_is_told_to_sum() -> None:
    assert all(gap <= EXACT for gap in same(run_ranks(2, averaged)))


def summed_in_16_bits(world: World) -> float:
    """Distance from the exact sum if FSDP sums gradients in the type of the computation, as it does
    by default."""
    own = shardings.MixedPrecisionPolicy
    shardings.MixedPrecisionPolicy = lambda **given: own(param_dtype=given.get("param_dtype"))  # type: ignore[assignment,misc]
    return summed_gradients(world, "full", torch.bfloat16)[0]


@pytest.mark.cluster
def test_fsdp_sums_in_16_bits_unless_it_is_told_otherwise() -> None:
    assert all(gap > 1e-4 for gap in same(run_ranks(2, summed_in_16_bits)))


class OptimizerFirst(DistributedLearner):
    """Makes its optimizer of the whole weights, then shards them."""

    def place(self) -> None:
        """Later."""

    def shard_late(self) -> None:
        super().place()


def optimizer_first(world: World) -> float:
    learner = OptimizerFirst(
        tiny_policy(model_of("tied")), world=world, sharding="full", optimizer=ADAM
    )
    learner.shard_late()
    return learner.update(batch_of(5), POLICY_GRADIENT).grad_norm


def test_an_optimizer_made_before_sharding_is_refused() -> None:
    for result in run_ranks(2, optimizer_first):
        assert "before the weights were sharded" in str(result)


def left_gathered(world: World) -> tuple[int, int]:
    """Weights that lose a write after a pass without gradients, with the root left gathered, and as
    the learner does it."""
    batch, lost = batch_of(3), []
    for careless in (True, False):
        learner = made(world, sharding="full")
        if careless:
            learners.reshard = lambda reader: None  # type: ignore[assignment]
            root = list(sharded_modules(learner.reader))[0]
            root.set_reshard_after_forward(False)
        learner.evaluate(batch, {"logp"})
        wanted = {name: torch.full_like(w, 0.5) for name, w in learner.trained().items()}
        learner.set_trained(wanted)
        learners.reshard = shardings.reshard
        learners.reshard(learner.reader)
        now = learner.trained()
        lost.append(sum(not torch.equal(now[name], wanted[name]) for name in wanted))
    return lost[0], lost[1]


def test_weights_left_gathered_lose_writes_and_the_accessors_reshard_first() -> None:
    for careless, careful in same(run_ranks(2, left_gathered)):
        assert careless > 0
        assert careful == 0


def without_anchor(world: World) -> None:
    """A rank with fewer microbatches than the others, and no anchors."""
    batch = batch_of(5)
    learner = made(world, sharding="full", tokens_per_microbatch=10)
    parts = [part for part in learner.parts(batch, POLICY_GRADIENT) if len(part)]
    with world.waiting("the other ranks in 'update'"):
        learner.update(batch, POLICY_GRADIENT, parts=parts[: 2 - world.rank])


@pytest.mark.cluster
def test_a_missing_anchor_ends_in_an_error_that_says_so() -> None:
    results = run_ranks(2, without_anchor, timeout_s=4.0, limit_s=30.0)
    assert any(isinstance(result, BaseException) for result in results)
    assert all(result is None or isinstance(result, BaseException) for result in results)
    said = " ".join(map(str, results))
    assert "waited for" in said and "rank" in said


# -- checkpoints -----------------------------------------------------------------------------------


def continued(
    world: World | None, weights: Mapping[str, Tensor] | None, state: Any, steps: int, sharding: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Go on from a checkpoint for some steps; the checkpoint afterwards."""
    learner = made(world, sharding=sharding)
    if weights is not None:
        first = world is None or world.leads
        learner.set_trained(weights if first else {})
        learner.restore(state if first else {})
    for _ in range(steps):
        learner.update(batch_of(3), POLICY_GRADIENT)
    return learner.trained(), learner.state()


def flat(checkpoint: tuple[Mapping[str, Tensor], Mapping[str, Any]]) -> dict[str, Tensor]:
    weights, state = checkpoint
    moments = state["optimizer"]["moments"]
    return {
        **weights,
        **{f"{n} {key}": value for n, each in moments.items() for key, value in each.items()},
        "version": torch.tensor(state["version"]),
    }


def test_a_checkpoint_goes_on_with_any_number_of_ranks() -> None:
    """2 ranks sharded → 1 process → 3 ranks sharded: loading alone changes no bit, and the steps
    after it are those of one process."""
    alone = continued(None, None, None, 2, "none")
    saved = same(run_ranks(2, continued, None, None, 2, "full"))[0]
    assert difference(joined(saved[0]), joined(alone[0])) <= EXACT
    for size, sharding in ((1, "none"), (3, "full")):
        for steps in (0, 1):
            if size == 1:
                loaded = continued(None, *saved, steps, sharding)
            else:
                loaded = same(run_ranks(size, continued, *saved, steps, sharding))[0]
            if steps == 0:
                assert flat(loaded).keys() == flat(saved).keys()
                assert all(torch.equal(flat(loaded)[n], flat(saved)[n]) for n in flat(saved))
        saved = loaded
    last = continued(None, None, None, 4, "none")
    assert difference(joined(saved[0]), joined(last[0])) <= EXACT


# -- what changes during a run ---------------------------------------------------------------------


def reference_of(learner: TorchLearner) -> Tensor:
    """Log-probabilities of the reference model."""
    return learner.evaluate(batch_of(3), {"ref_logp"})["ref_logp"]


def replaced(world: World | None, kind: str, sharding: str) -> list[Tensor]:
    """What the reference computes at first and after it was replaced; a learner that is restored
    computes the same."""
    given = {"sharding": sharding, "reference": "adapter" if kind == "adapter" else "frozen"}
    learner = made(world, kind, **given)
    found = [reference_of(learner)]
    learner.update(batch_of(3), POLICY_GRADIENT)
    learner.replace_reference()
    learner.reset_optimizer()
    found.append(reference_of(learner))
    learner.update(batch_of(3), POLICY_GRADIENT)
    weights, state = learner.trained(), learner.state()
    again = made(world, kind, **given)
    first = world is None or world.leads
    again.set_trained(weights if first else {})
    again.restore(state if first else {})
    assert torch.equal(reference_of(again), reference_of(learner))
    assert torch.equal(*(e.evaluate(batch_of(3), {"logp"})["logp"] for e in (again, learner)))
    return found


def replaced_gaps(world: World, cases: list[tuple[str, str]]) -> dict[str, list[float]]:
    return {
        f"{kind} {sharding}": [
            difference(here, alone)
            for here, alone in zip(
                replaced(world, kind, sharding), replaced(None, kind, sharding), strict=True
            )
        ]
        for kind, sharding in cases
    }


@pytest.mark.cluster
def test_a_replaced_reference_is_that_of_one_process_and_part_of_the_state() -> None:
    first, last = replaced(None, "tied", "none")[:2]
    assert difference(first, last) > 1e-3
    cases = [("tied", "none"), ("tied", "full"), ("adapter", "full")]
    for gaps in same(run_ranks(2, replaced_gaps, cases)):
        assert {case: gap for case, gap in gaps.items() if not max(gap) <= EXACT} == {}
        assert len(gaps) == len(cases)


def published(world: World) -> dict[str, Tensor]:
    """What a sharded learner of a 16-bit model publishes after a step; its sampler takes it."""
    model = random_model(Qwen2Config(**SHAPE, tie_word_embeddings=True), dtype=torch.bfloat16)
    sampler = copy.deepcopy(model)
    learner = DistributedLearner(
        tiny_policy(model), world=world, sharding="full", optimizer=ADAM, tokens_per_microbatch=40
    )
    learner.update(batch_of(3, dtype=torch.float32), POLICY_GRADIENT)
    take_over(sampler, learner.publish())
    trained = learner.trained()
    return {n: p.detach() - trained[n] for n, p in sampler.named_parameters()}


def test_a_16_bit_model_is_published_in_its_own_type() -> None:
    """Samplers have 16-bit weights, though the shards have 32 bits."""
    for differences in same(run_ranks(2, published)):
        assert all(gap.dtype == torch.bfloat16 for gap in differences.values())
        assert not joined(differences).any()


def values_on(world: World | None, sharding: str) -> dict[str, Tensor]:
    """Values of a critic, its gradient, and its weights after a step."""
    critic = scorer_of(tiny_policy(model_of("tied")), kind="token")
    torch.manual_seed(3)
    torch.nn.init.normal_(score_layer(critic.model).weight)
    head = Score(critic.model, reads=("before", "after"))
    given: dict[str, Any] = {"optimizer": ADAM, "tokens_per_microbatch": 40, "head": head}
    learner = (
        TorchLearner(critic, **given)
        if world is None
        else DistributedLearner(critic, world=world, sharding=sharding, **given)  # type: ignore[arg-type]
    )
    batch = batch_of(5)
    loss = FunctionObjective(
        loss=lambda outputs, batch: (outputs["values"][:, :-1] - batch.advantage).square(),
        needs=frozenset({"values"}),
    )
    found = {
        "values": learner.evaluate(batch, {"values"})["values"],
        "gradient": learner.gradient(batch, loss),
    }
    update = learner.update(batch, loss)
    assert update.values is not None
    return {
        **found,
        "weights": joined(learner.trained()),
        "updated": update.values.nan_to_num(nan=7.0),
    }


def value_gaps(world: World, sharding: str) -> dict[str, float]:
    here, alone = values_on(world, sharding), values_on(None, sharding)
    return {name: difference(here[name].double(), alone[name].double()) for name in alone}


@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.cluster), "full"])
def test_a_critic_is_that_of_one_process(sharding: str) -> None:
    for gaps in same(run_ranks(3, value_gaps, sharding)):
        assert {name: gap for name, gap in gaps.items() if not gap <= EXACT} == {}


def shares_of_equal_rows(world: World) -> list[int]:
    """Microbatches of each rank for six equal completions, each as long as a microbatch."""
    batch = Batch(
        prompts=(torch.tensor([20]),),
        group=torch.zeros(6, dtype=torch.long),
        tokens=torch.full((6, 12), 30),
        length=torch.full((6,), 12),
        mask=torch.ones(6, 12, dtype=torch.bool),
        advantage=torch.ones(6, 12),
        weight=torch.ones(6, 12),
    )
    learner = made(world, tokens_per_microbatch=13, share_equal_rows=True)
    assert isinstance(learner, DistributedLearner)
    return [len(share) for share in learner.shares(batch, torch.arange(6))]


def test_equal_rows_are_computed_once_on_each_rank() -> None:
    assert same(run_ranks(2, shares_of_equal_rows)) == [[1, 1]] * 2
