"""Models that give one number: folders that transformers loads, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, AutoPeftModelForTokenClassification
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import UsageError
from groupwise.models import (
    AdapterSettings,
    Policy,
    check_same_tokenizer,
    load_policy,
    load_scorer,
    save_policy,
    scorer_of,
    unsupported,
)
from groupwise.models.scoring import ScorerKind
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Batch
from groupwise.updates import OptimizerSettings, Score, TorchLearner
from small_runs import tiny
from tiny_models import letter_tokenizer, tiny_model

READS = {"sequence": "after", "token": "written"}
FOLDERS = {
    (False, "sequence"): AutoModelForSequenceClassification,
    (False, "token"): AutoModelForTokenClassification,
    (True, "sequence"): AutoPeftModelForSequenceClassification,
    (True, "token"): AutoPeftModelForTokenClassification,
}
STILL = OptimizerSettings(learning_rate=0.0)
SQUARES = FunctionObjective(
    loss=lambda outputs, batch: (outputs["values"] - batch.tokens / 20) ** 2,
    needs=frozenset({"values"}),
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A language model whose head is not its embedding, so that a classifier has to drop it."""
    policy = tiny()
    policy.model.config.tie_word_embeddings = False
    policy.model.lm_head.weight = nn.Parameter(policy.model.lm_head.weight.clone())
    save_policy(policy, tmp_path / "base")
    return tmp_path / "base"


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor([5, 2, 7, 4])
    mask = torch.arange(7) < length[:, None]
    tokens = torch.where(mask, torch.randint(12, 97, mask.shape, generator=generator), 0)
    return Batch(
        prompts=tuple(torch.randint(12, 97, (n,), generator=generator) for n in (4, 6)),
        group=torch.tensor([0, 0, 1, 1]),
        tokens=tokens,
        length=length,
        mask=mask,
        advantage=torch.zeros(mask.shape),
        weight=mask / mask.sum(),
    )


def trained(policy: Policy, reads: Any) -> TorchLearner:
    """A learner all of whose weights have moved."""
    learner = TorchLearner(policy, optimizer=STILL, head=Score(policy.model, reads={reads}))
    before = learner.evaluate(make_batch(), {"values"})["values"]
    assert not before.any(), "a new head gives 0"
    generator = torch.Generator().manual_seed(1)
    learner.set_trained(
        {
            name: weight + 0.3 * torch.randn(weight.shape, generator=generator)
            for name, weight in learner.trained().items()
        }
    )
    return learner


def of_transformers(model: Any, batch: Batch, kind: ScorerKind) -> Tensor:
    """What transformers computes from padded sequences: per sequence, or per completion token."""
    rows = [
        torch.cat([batch.prompts[int(g)], tokens[:n]])
        for g, tokens, n in zip(batch.group, batch.tokens, batch.length, strict=True)
    ]
    padding = model.config.pad_token_id
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    with torch.no_grad():
        found = model.eval()(input_ids=ids, attention_mask=(ids != padding).long()).logits
    if kind == "sequence":
        return found.squeeze(-1)
    wanted = torch.zeros(batch.mask.shape)
    for row, (tokens, n) in enumerate(zip(rows, batch.length.tolist(), strict=True)):
        wanted[row, :n] = found[row, len(tokens) - n : len(tokens), 0]
    return wanted


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=2)], ids=["whole", "lora"])
def test_transformers_gives_the_same_numbers_from_the_folder_that_is_saved(
    kind: ScorerKind, adapter: AdapterSettings | None, base: Path, tmp_path: Path
) -> None:
    batch, reads = make_batch(), READS[kind]
    policy = load_scorer(base, kind=kind, adapter=adapter)
    assert unsupported(policy.model) is None
    learner = trained(policy, reads)
    own = learner.evaluate(batch, {"values"})["values"]
    if kind == "sequence":
        own = own.gather(1, batch.length[:, None]).squeeze(1)
    assert float(own.std()) > 0.01
    learner.save(str(tmp_path / "saved"))
    given = {} if adapter is None else {"num_labels": 1}
    theirs = FOLDERS[adapter is not None, kind].from_pretrained(tmp_path / "saved", **given)
    torch.testing.assert_close(own, of_transformers(theirs, batch, kind), atol=1e-5, rtol=0)
    again = load_scorer(tmp_path / "saved", kind="sequence")
    head = Score(again.model, reads={reads})  # type: ignore[arg-type]
    same = TorchLearner(again, optimizer=STILL, head=head)
    values = same.evaluate(batch, {"values"})["values"]
    if kind == "sequence":
        values = values.gather(1, batch.length[:, None]).squeeze(1)
    torch.testing.assert_close(values, own, atol=1e-6, rtol=1e-6)
    assert same.trained().keys() == learner.trained().keys()


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=2)], ids=["whole", "lora"])
def test_head_and_trunk_are_trained(adapter: AdapterSettings | None, base: Path) -> None:
    policy = load_scorer(base, kind="token", adapter=adapter)
    settings = OptimizerSettings(learning_rate=1e-2)
    head = Score(policy.model, reads={"before"})
    learner = TorchLearner(policy, optimizer=settings, head=head)
    before = {name: weight.clone() for name, weight in learner.trained().items()}
    losses = [learner.update(make_batch(), SQUARES).loss for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert not any(torch.equal(weight, before[n]) for n, weight in learner.trained().items())
    assert any("score" in name for name in before)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_a_4_bit_base_keeps_a_whole_head_that_learns_and_is_saved(
    kind: ScorerKind, tmp_path: Path
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
    wide = small_policy(hidden=64, layers=1, heads=2, key_value_heads=1, feed_forward=128)
    save_policy(wide, tmp_path / "wide")

    def learner(folder: str, adapter: AdapterSettings | None = None) -> TorchLearner:
        policy = load_scorer(tmp_path / folder, kind=kind, adapter=adapter, quantization="nf4")
        four = [p for p in policy.model.parameters() if isinstance(p, bitsandbytes.nn.Params4bit)]
        assert len(four) == 7 and policy.model.score.weight.dtype == torch.float32
        head = Score(policy.model, reads={"before"})
        return TorchLearner(policy, optimizer=OptimizerSettings(learning_rate=1e-2), head=head)

    first = learner("wide", AdapterSettings(rank=4))
    losses = [first.update(make_batch(), SQUARES).loss for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    first.save(str(tmp_path / "saved"))
    found, wanted = (
        one.evaluate(make_batch(), {"values"})["values"] for one in (learner("saved"), first)
    )
    assert torch.equal(found, wanted) and float(wanted.abs().max()) > 0.1


@pytest.mark.parametrize("packs", [True, False])
def test_states_of_written_tokens_are_those_before_the_next(packs: bool, base: Path) -> None:
    """Also where an injected token follows, before which nothing else is read."""
    batch = make_batch()
    batch.mask[2, 3] = False
    policy = load_scorer(base, kind="token")
    learner = trained(policy, "written")
    learner.reader.packs = packs
    own = learner.evaluate(batch, {"values"})["values"]
    wanted = of_transformers(policy.model, batch, "token")
    torch.testing.assert_close(own, torch.where(batch.mask, wanted, 0), atol=1e-5, rtol=0)


def test_a_classifier_of_a_model_at_hand_has_its_decoder_and_leaves_it_alone(base: Path) -> None:
    policy = load_policy(base)
    copied, loaded = scorer_of(policy, kind="token"), load_scorer(base, kind="token")
    own, wanted = copied.model.state_dict(), loaded.model.state_dict()
    assert own.keys() == wanted.keys() and "lm_head.weight" not in own
    assert all(torch.equal(own[name], wanted[name]) for name in own)
    trained(copied, "written")
    fresh = load_policy(base).model.state_dict()
    assert all(torch.equal(w, fresh[name]) for name, w in policy.model.state_dict().items())
    with pytest.raises(UsageError, match="has an adapter or is held in 4 bits"):
        scorer_of(load_policy(base, adapter=AdapterSettings()))


def test_the_padding_token_of_a_classifier_ends_no_text(base: Path, tmp_path: Path) -> None:
    """Or transformers would skip the end token and read the state before it."""
    tokenizer = load_policy(base).tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    policy = load_scorer(base)
    assert policy.tokenizer.pad_token_id not in policy.end_tokens
    assert policy.model.config.pad_token_id == policy.tokenizer.pad_token_id


def test_heads_with_several_labels_are_refused(base: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model.save_pretrained(tmp_path / "three")
    load_policy(base).tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(UsageError, match="its head has 3 labels; a critic or reward model"):
        load_scorer(tmp_path / "three")
    with pytest.raises(UsageError, match="a Qwen2ForCausalLM has no linear layer score"):
        Score(tiny_model("qwen2"), reads={"before"})
    with pytest.raises(UsageError, match="are read alone"):
        Score(load_scorer(base).model, reads={"before", "written"})


def test_the_adapter_of_a_language_model_is_refused(base: Path, tmp_path: Path) -> None:
    save_policy(load_policy(base, adapter=AdapterSettings()), tmp_path / "adapter")
    with pytest.raises(UsageError, match="is the adapter of a language model"):
        load_scorer(tmp_path / "adapter")


def test_other_tokenizers_are_refused() -> None:
    own, bundled = letter_tokenizer(), load_policy("bundled").tokenizer
    check_same_tokenizer(own, letter_tokenizer(), where="critic.model = 'x'")
    with pytest.raises(UsageError, match="critic.model = 'bundled': its tokenizer has 512 tokens"):
        check_same_tokenizer(own, bundled, where="critic.model = 'bundled'")
