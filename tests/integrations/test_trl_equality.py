"""An optimizer step against the installed TRL: same model, completions and rewards; then loss and
gradient of every parameter agree, for each of its losses and what changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.algorithms.filters import FILTERS
from groupwise.integrations.trl import GRPOConfig
from groupwise.integrations.trl.settings import configuration
from groupwise.models import Policy, load_policy
from groupwise.types import Completion, Group, Prompt, ScoredGroups, Scores, Status
from groupwise.updates import OptimizerSettings, TorchLearner, assemble, sequences
from trl_peer import GROUP, PROMPTS, REWARDS, Fixed, fixed, require_trl, rows, trl_trainer

TOLERANCE = 1e-5
NAN = float("nan")

CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon_high": 1.01},
    {"loss_type": "sapo", "sapo_temperature_pos": 1.2},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
    {"scale_rewards": "batch"},
    {"scale_rewards": "none"},
    {"scale_rewards": False, "loss_type": "dr_grpo"},
    {"epsilon": 0.02, "epsilon_high": 0.05},
    {"epsilon": 0.01, "delta": 1.03},
    *({"loss_type": n, "importance_sampling_level": "sequence"} for n in ("grpo", "luspo", "dapo")),
    {"loss_type": "cispo", "epsilon_high": 1.0, "importance_sampling_level": "sequence"},
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    {"beta": 0.3},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"beta": 0.3, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    *({"entropy_coef": 0.1, "loss_type": n} for n in ("dapo", "grpo", "dr_grpo", "luspo", "sapo")),
    {"temperature": 0.7},
    *(
        {"mask_truncated_completions": True, "loss_type": name}
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo")
    ),
    {"loss_type": "cispo", "epsilon_high": 2.0, "mask_truncated_completions": True},
]
MEANS_OF_ROWS = ("grpo", "dr_grpo", "dapo", "luspo", "sapo")


@dataclass
class Step:
    """Takes the place of the optimizer: keeps the gradients, moves nothing."""

    model: Any
    gradients: dict[str, Tensor]
    scale: float = 1.0
    """Of the loss; only fp16 needs another one."""

    def clear(self) -> None:
        self.model.zero_grad()

    def step(self) -> tuple[float, float]:
        for name, parameter in self.model.named_parameters():
            self.gradients[name] = parameter.grad.clone()
        return 1.0, 0.0


def scored(
    rollouts: Fixed, rewards: Sequence[Sequence[float]], algorithm: BoundAlgorithm, policy: Policy
) -> ScoredGroups:
    """The fixed rollouts with their rewards, filtered as the algorithm says."""
    groups = []
    for prompt, tokens, finish in zip(PROMPTS, rollouts.tokens, rollouts.finish, strict=True):
        completions = tuple(
            Completion(
                tokens=ids,
                mask=[True] * len(ids),
                logprobs=[-1.0] * len(ids),
                text=policy.tokenizer.decode(ids),
                finish=end,
            )
            for ids, end in zip(tokens, finish, strict=True)
        )
        ids = policy.tokenizer(prompt).input_ids
        groups.append(
            Group(prompt=Prompt(id=prompt, text=prompt), prompt_tokens=ids, completions=completions)
        )
    total = torch.tensor(rewards)
    truncated = torch.tensor([[end == "length" for end in row] for row in rollouts.finish])
    keep = algorithm.filter({"rewards": total, "valid": total == total, "truncated": truncated})
    return ScoredGroups(
        groups=tuple(groups),
        scores=Scores(
            total=total,
            correct=total * NAN,
            parts={"told": total},
            status=((Status.OK,) * GROUP,) * len(PROMPTS),
            valid=total == total,
        ),
        keep=keep,
        drawn=len(PROMPTS),
    )


def moved(model: Any) -> None:
    """What an update does: parameters a little elsewhere, the same on both sides."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))


def drifted(rollouts: Fixed) -> list[list[float]]:
    """Log-probabilities of every token from a sampler that is not quite the learner."""
    policy, algorithm = load_policy(rollouts.folder), bind("grpo@trl", {})
    batch = sequences(scored(rollouts, REWARDS, algorithm, policy))
    own = TorchLearner(policy, optimizer=OptimizerSettings()).evaluate(batch, {"logp"})["logp"]
    noise = 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(2))
    return [row[:n].tolist() for row, n in zip(own + noise, batch.length.tolist(), strict=True)]


def ours(
    rollouts: Fixed,
    settings: Mapping[str, Any],
    *,
    off_policy: bool,
    sampler: Sequence[Sequence[float]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the optimizer step of the drop-in's configuration."""
    args = GRPOConfig(
        **{
            "per_device_train_batch_size": len(PROMPTS) * GROUP,
            "num_generations": GROUP,
            "max_completion_length": 16,
            **settings,
        }
    )
    config = configuration(args)
    algorithm = bind(config.algorithm.name, config.algorithm.overrides())
    policy = load_policy(rollouts.folder)
    learner = TorchLearner(
        policy,
        optimizer=OptimizerSettings(),
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        temperature=config.sampling.temperature,
        reference="frozen" if "ref_logp" in algorithm.needs else "none",
    )
    found = scored(rollouts, REWARDS, algorithm, policy)
    batch = sequences(found)
    if "ref_logp" in algorithm.needs:
        moved(policy.model)
        batch = replace(batch, ref_logp=learner.evaluate(batch, {"ref_logp"})["ref_logp"])
    if sampler is not None:
        padded = [torch.tensor(row) for row in sampler]
        batch = replace(batch, sampler_logp=torch.nn.utils.rnn.pad_sequence(padded, True))
    if off_policy:
        batch = replace(batch, old_logp=learner.evaluate(batch, {"logp"})["logp"])
        moved(policy.model)
    advantage = algorithm.advantage({"rewards": found.scores.total, "valid": found.scores.valid})
    (step,) = assemble(batch, advantage, algorithm.weighting)
    kept = Step(model=policy.model, gradients={})
    learner.optimizer = kept  # pyright: ignore[reportAttributeAccessIssue]
    return learner.update(step, algorithm.objective).loss, kept.gradients


def theirs(
    rollouts: Fixed,
    output: Path,
    settings: Mapping[str, Any],
    *,
    off_policy: bool,
    sampler: Sequence[Sequence[float]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """The same from TRL, over as many microbatches as the settings ask for."""
    # A second iteration makes TRL compute the log-probabilities of the policy that sampled.
    trainer = trl_trainer(rollouts, output, **settings, num_iterations=2 if off_policy else 1)
    if trainer.beta:
        moved(trainer.model)
    if sampler is not None:
        # As if vLLM had written: with no vLLM there, it must not be asked for at construction.
        written = [list(tokens) for group in rollouts.tokens for tokens in group]
        trainer._generate_single_turn = lambda *_, **__: (written, sampler)
        trainer.use_vllm = True
    inputs = trainer._generate_and_score_completions(rows())
    assert ("old_per_token_logps" in inputs) is off_policy
    if off_policy:
        moved(trainer.model)
    parts = trainer.args.gradient_accumulation_steps
    total = 0.0
    for part in range(parts):
        cut = {
            name: value.chunk(parts)[part] if value.ndim else value
            for name, value in inputs.items()
        }
        loss = trainer._compute_loss(trainer.model, cut)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def assert_agrees(
    tmp_path: Path,
    settings: Mapping[str, Any],
    *,
    off_policy: bool,
    microbatches: Mapping[str, Any] | None = None,
) -> None:
    rollouts = fixed(tmp_path / "model")
    loss, gradients = ours(rollouts, {**settings, **(microbatches or {})}, off_policy=off_policy)
    peer, wanted = theirs(
        rollouts,
        tmp_path / "out",
        {**settings, **(microbatches or {})},
        off_policy=off_policy,
    )
    assert_equal_steps(loss, gradients, peer, wanted)


def assert_equal_steps(
    loss: float, gradients: Mapping[str, Tensor], peer: float, wanted: Mapping[str, Tensor]
) -> None:
    assert loss == pytest.approx(peer, abs=TOLERANCE, rel=TOLERANCE)
    assert gradients.keys() == wanted.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    assert largest > 1e-3, "a step that says nothing"
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=TOLERANCE)


def named(case: Mapping[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_step_on_older_samples_is_trls(tmp_path: Path, case: dict[str, Any]) -> None:
    require_trl()
    assert_agrees(tmp_path, case, off_policy=True)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_of_what_vllm_wrote_is_trls(tmp_path: Path, level: str, mode: str) -> None:
    """Limits that some tokens and some answers exceed."""
    require_trl()
    rollouts = fixed(tmp_path / "model")
    prefix = "vllm_importance_sampling_"
    given: dict[str, Any] = {f"{prefix}mode": f"{level}_{mode}", f"{prefix}clip_max": 1.2}
    if mode == "mask":
        given[f"{prefix}clip_min"] = 0.8
    sampler = drifted(rollouts)
    loss, gradients = ours(
        rollouts, {**given, "use_vllm": True, "beta": 0.1}, off_policy=True, sampler=sampler
    )
    peer, wanted = theirs(
        rollouts, tmp_path / "out", {**given, "beta": 0.1}, off_policy=True, sampler=sampler
    )
    assert_equal_steps(loss, gradients, peer, wanted)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "vespo"])
def test_a_first_step_is_trls(tmp_path: Path, loss_type: str) -> None:
    require_trl()
    assert_agrees(tmp_path, {"loss_type": loss_type, "beta": 0.1}, off_policy=False)


@pytest.mark.parametrize("loss_type", MEANS_OF_ROWS)
def test_accumulation_changes_nothing_where_trl_is_exact(tmp_path: Path, loss_type: str) -> None:
    require_trl()
    cut = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": len(PROMPTS)}
    assert_agrees(tmp_path, {"loss_type": loss_type}, off_policy=True, microbatches=cut)


def test_the_filter_of_truncated_answers_is_the_mask_of_trl() -> None:
    rewards = torch.tensor([[1.0, 0.0]])
    kept = FILTERS.get("not_truncated")(rewards, torch.tensor([[True, False]]))
    assert kept.tolist() == [[False, True]]
