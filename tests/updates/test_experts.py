"""The load-balancing loss of a mixture of experts is that of transformers, and its gradient too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import UsageError
from groupwise.types import Batch
from groupwise.updates import OptimizerSettings, TorchLearner
from groupwise.updates.experts import load_balancing_loss
from tiny_models import VOCAB, tiny_model, tiny_policy

COEFFICIENT = 0.5
STILL = OptimizerSettings(learning_rate=0.0, max_grad_norm=None)
NOTHING = FunctionObjective(
    loss=lambda outputs, batch: 0.0 * outputs["logp"], needs=frozenset({"logp"})
)


def experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=2, intermediate_size=16, moe_intermediate_size=8, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def batch() -> Batch:
    """Three prompts with one completion each, so that no token is shared."""
    generator = torch.Generator().manual_seed(1)
    length = torch.tensor([5, 2, 7])
    mask = torch.arange(7) < length[:, None]
    tokens = torch.randint(12, VOCAB, (3, 7), generator=generator) * mask
    prompts = tuple(torch.randint(12, VOCAB, (n,), generator=generator) for n in (3, 6, 4))
    return Batch(
        prompts=prompts, group=torch.arange(3), tokens=tokens, length=length, mask=mask,
        advantage=torch.zeros(3, 7), weight=mask / mask.sum(),
    )  # fmt: skip


def learner(model: Qwen3MoeForCausalLM, **given: object) -> TorchLearner:
    policy = tiny_policy(model)
    settings = {"optimizer": STILL, "skip_inert_rows": False, "router_aux_loss": COEFFICIENT}
    return TorchLearner(policy, **{**settings, **given})  # pyright: ignore[reportArgumentType]


def theirs(model: Qwen3MoeForCausalLM, rows: Batch) -> Tensor:
    """The loss that transformers computes of the rows, padded on the right. The last token of a row
    predicts nothing, so an update does not compute it."""
    pad = torch.nn.utils.rnn.pad_sequence
    whole = [
        torch.cat([prompt, tokens[: length - 1]])
        for prompt, tokens, length in zip(rows.prompts, rows.tokens, rows.length, strict=True)
    ]
    seen = pad([torch.ones_like(row) for row in whole], batch_first=True)
    tokens = pad(whole, batch_first=True)
    return model(input_ids=tokens, attention_mask=seen, output_router_logits=True).aux_loss


def test_the_loss_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(10, 4, generator=generator) for _ in range(3))
    seen = torch.tensor([[True] * 4 + [False], [True] * 3 + [False] * 2])
    for mask in (None, seen):
        wanted = load_balancing_loss_func(logits, 4, 2, mask)
        torch.testing.assert_close(load_balancing_loss(logits, chosen=2, seen=mask), wanted)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_an_update_has_the_balance_of_its_tokens(checkpointing: bool) -> None:
    model, rows = experts(), batch()
    own = learner(model, gradient_checkpointing=checkpointing)
    gradient = own.gradient(rows, NOTHING)
    balance = theirs(model.eval(), rows)
    found = torch.autograd.grad(
        COEFFICIENT * balance, list(own.reader.named().values()), allow_unused=True
    )
    wanted = torch.cat(
        [
            torch.zeros(p.numel()) if g is None else g.flatten()
            for p, g in zip(own.reader.named().values(), found, strict=True)
        ]
    )
    assert wanted.abs().max() > 1e-4
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-4)
    update = own.update(rows, NOTHING)
    assert update.aux_loss == pytest.approx(float(balance.detach()), rel=1e-5)
    assert update.loss == pytest.approx(COEFFICIENT * update.aux_loss, rel=1e-5)


def test_microbatches_count_by_their_rows() -> None:
    model, rows = experts(), batch()
    found = learner(model, tokens_per_microbatch=1).update(rows, NOTHING).aux_loss
    parts = [
        replace(
            rows.rows(torch.tensor([i])), prompts=(rows.prompts[i],), group=torch.zeros(1).long()
        )
        for i in range(3)
    ]
    alone = [float(theirs(model, part).detach()) for part in parts]
    assert found == pytest.approx(sum(alone) / 3, rel=1e-5)


def test_nothing_is_added_unless_asked_for() -> None:
    update = learner(experts(), router_aux_loss=0.0).update(batch(), NOTHING)
    assert (update.aux_loss, update.loss) == (None, 0.0)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UsageError, match="LlamaForCausalLM is not a mixture of experts"):
        TorchLearner(tiny_policy(tiny_model("llama")), optimizer=STILL, router_aux_loss=0.1)
