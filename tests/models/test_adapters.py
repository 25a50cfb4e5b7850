"""Adapters as folders: loaded, trained on, merged, and refused where they do not belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, PromptTuningConfig, VeraConfig, get_peft_model
from torch import Tensor

from groupwise.cli import main
from groupwise.errors import RunError, UsageError
from groupwise.integrations.trl import GRPOTrainer
from groupwise.kernels import active
from groupwise.models import (
    AdapterSettings,
    Policy,
    is_adapted,
    load_policy,
    make_policy,
    save_policy,
)
from groupwise.models.adapters import new_adapter
from groupwise.models.low_rank import SUMMED
from groupwise.rollouts.chat import chat
from groupwise.training.hub import push
from groupwise.training.stages.base_model import small_policy
from groupwise.training.stages.merge import merge
from groupwise.types import Sampling
from small_runs import assert_resumes_to_the_bit, prepared, settings, timeless, tiny
from trl_scripts import arguments

TOKENS = torch.arange(12)[None]


def logits(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.model.eval()(TOKENS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_policy(tiny(), tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, *, scale: float = 0.3, rank: int = 4) -> Policy:
    """A policy whose adapter does something."""
    policy = load_policy(base, adapter=AdapterSettings(rank=rank, alpha=8.0))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, scale)
    return policy


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    save_policy(adapted(base), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_folder_with_an_adapter_is_the_model_that_was_saved(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From wherever it is loaded, with what it was trained with, ready to be trained on."""
    first = adapted(base)
    monkeypatch.chdir(adapter)
    again = load_policy(".")
    assert torch.equal(logits(again), logits(first))
    assert float((logits(again) - logits(load_policy(base))).abs().max()) > 0.1
    learn = [n for n, p in again.model.named_parameters() if p.requires_grad]
    assert learn and all("lora_" in name for name in learn)
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    assert again.end_tokens == first.end_tokens


def test_the_tokenizer_of_the_base_serves_an_adapter_without_one(base: Path, adapter: Path) -> None:
    for path in [*adapter.glob("tokenizer*"), *adapter.glob("*.jinja")]:
        path.unlink()
    assert load_policy(adapter).tokenizer.get_vocab() == load_policy(base).tokenizer.get_vocab()


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_a_merged_model_computes_what_base_and_adapter_compute(
    dtype: str, limit: float, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Within rounding: float32 has 24 bits; bf16 has 8, of logits of about 1 to 4."""
    wanted = logits(load_policy(adapter))
    folder = merge(adapter, tmp_path / "merged", dtype=dtype)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in card
    assert "# merged\n\nbase, with the adapter adapter merged" in card
    merged = load_policy(folder)
    assert not is_adapted(merged.model)
    assert float((logits(merged) - wanted).abs().max()) < limit
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == sorted(
        merged.end_tokens
    )
    assert (folder / "chat_template.jinja").exists()


def test_what_a_run_with_an_adapter_writes_is_measured_talked_to_merged_and_trained_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    given = settings(run, f"model.path={base}", "model.adapter={rank=2, alpha=4.0}", "steps=2")
    first = prepared(run, *given)
    first.trainer.run()
    first.trainer.finish()
    first.close()
    wanted = logits(first.policy)
    assert torch.equal(logits(load_policy(run / "final")), wanted)
    words = [w for each in settings(run, "evaluation.prompts=1") for w in ("--set", each)]
    assert main(["eval", str(run / "final"), "--against", str(base), *words]) == 0
    (answer,) = chat(str(run / "final"), ["1 + 1?"], sampling=Sampling(max_tokens=3))
    assert isinstance(answer, str)
    assert main(["merge", str(run), "--output", str(tmp_path / "merged")]) == 0
    assert str(tmp_path / "merged") in capsys.readouterr().out
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in card and "- adapter: LoRA, rank 2" in card
    assert float((logits(load_policy(tmp_path / "merged")) - wanted).abs().max()) < 1e-5


def test_training_goes_on_with_an_adapter_and_is_resumed_to_the_bit(
    adapter: Path, tmp_path: Path
) -> None:
    """The KL of the first step is 0: the reference is the model with the adapter as it was, and
    not the base, from which it is far. A break between two checkpoints changes nothing."""
    more = (f"model.path={adapter}", "checkpoint.every_steps=2", "steps=5")
    more = (*more, 'algorithm.divergence={name="k3", coefficient=0.1, in="loss"}')
    assert_resumes_to_the_bit(prepared, tmp_path, *more, steps=5)
    kl = [row["kl"] for row in timeless(tmp_path / "whole")]
    assert abs(kl[0]) < 1e-6 < kl[-1]


def test_a_recipe_goes_on_with_the_adapter_it_describes_and_no_other(adapter: Path) -> None:
    policy = load_policy(adapter, adapter=AdapterSettings(rank=4, alpha=8.0, dropout=0.5))
    dropouts = [m.p for n, m in policy.model.named_modules() if n.endswith("lora_dropout.default")]
    assert set(dropouts) == {0.5}
    for wanted, says in [
        (AdapterSettings(rank=8, alpha=8.0), "adapter.rank = 8: the adapter .* has 4"),
        (AdapterSettings(rank=4, alpha=9.0), "adapter.alpha = 9.0: the adapter .* has 8.0"),
        (AdapterSettings(rank=4, alpha=8.0, targets=("q_proj",)), "adapter.targets"),
    ]:
        with pytest.raises(UsageError, match=says):
            load_policy(adapter, adapter=wanted)


def test_an_adapter_of_another_model_is_refused_by_name(base: Path, adapter: Path) -> None:
    """Another model of the same shape is found out by its weights, one of another by its shape."""
    save_policy(tiny(seed=1), base)
    with pytest.raises(UsageError, match=f"adapter of '{base}' .* weights there have changed"):
        load_policy(adapter)
    (adapter / "base_model.json").unlink()
    wider = small_policy(hidden=48, layers=1, heads=2, key_value_heads=1, feed_forward=64)
    save_policy(wider, base)
    with pytest.raises(UsageError, match=f"adapter of '{base}', and does not fit"):
        load_policy(adapter)
    shutil.rmtree(adapter)
    save_policy(tiny(), base)
    save_policy(load_policy(base, adapter=AdapterSettings(targets=("q_proj",))), adapter)
    (adapter / "base_model.json").unlink()
    deeper = small_policy(hidden=32, layers=2, heads=2, key_value_heads=1, feed_forward=64)
    save_policy(deeper, base)
    with pytest.raises(UsageError, match=r"layers\.1\..*is not in both"):
        load_policy(adapter)
    shutil.rmtree(base)
    with pytest.raises(UsageError, match=f"'{base}', which is not there; write"):
        load_policy(adapter)


def test_adapter_folders_that_cannot_be_used(base: Path, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(UsageError, match="without adapter_model.safetensors"):
        load_policy(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        load_policy(adapter)


@pytest.mark.parametrize(
    ("key", "slow"),
    [
        ("target_modules", r"(([a-z_.0-9]+)+)+!"),
        ("target_modules", r"[a-z_0-9]+|((?:.|.)*)*Q"),  # only where whole names are matched
        ("modules_to_save", r"(([a-z_.0-9]+)+)+!"),
        ("rank_pattern", r"(([a-z_.0-9]+)+)+!"),
        ("layers_pattern", r"(([a-z_.0-9]+)+)+!"),
    ],
)
def test_a_pattern_that_takes_exponential_time_is_refused(
    key: str, slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.models.adapters.MATCH_SECONDS", 0.2)
    save_policy(tiny(), tmp_path / "base")
    adapted = load_policy(tmp_path / "base", adapter=AdapterSettings(rank=2))
    save_policy(adapted, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    settings[key] = {"rank_pattern": {slow: 4}, "modules_to_save": [slow]}.get(key, slow)
    file.write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="a pattern in its adapter_config.json .* more than 0.2 s"):
        load_policy(tmp_path / "adapter")


def test_what_cannot_be_merged_or_pushed(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="contains no adapter"):
        merge(base, tmp_path / "out")
    with pytest.raises(UsageError, match="is in use"):
        merge(adapter, base)
    with pytest.raises(UsageError, match="--dtype = 'int4': no such type. Known: float32"):
        merge(adapter, tmp_path / "out", dtype="int4")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--push = 'not a name'"):
        push(base, "not a name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        RunError, match=f"could not be uploaded .*The model is in {base}; hf upload"
    ):
        push(base, "someone/model")


FACTORS = {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(task_type="CAUSAL_LM", **FACTORS),
        VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_of_other_kinds_are_read_and_merged(
    config: Any, base: Path, tmp_path: Path
) -> None:
    policy = load_policy(base)
    made: Any = get_peft_model(policy.model, config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5 * torch.randn_like(parameter))
        wanted = made.eval()(torch.tensor([[5, 6, 7]])).logits
    made.save_pretrained(str(tmp_path / "adapter"))
    merge(tmp_path / "adapter", tmp_path / "merged")
    for folder in ("adapter", "merged"):
        model = load_policy(tmp_path / folder).model.eval()
        assert torch.allclose(model(torch.tensor([[5, 6, 7]])).logits, wanted, atol=1e-4), folder
    assert "adapter merged into its weights" in (tmp_path / "merged" / "README.md").read_text()
    with pytest.raises(UsageError, match=r"model\.adapter describes a LoRA"):
        load_policy(tmp_path / "adapter", adapter=AdapterSettings())


def test_an_adapter_without_a_merged_form_is_refused_by_its_kind(
    base: Path, tmp_path: Path
) -> None:
    for config, said in (
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "puts virtual tokens"),
        (LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]), "kind LN_TUNING.*IA3"),
    ):
        made = get_peft_model(load_policy(base).model, config)
        made.save_pretrained(str(tmp_path / config.peft_type.value))
        with pytest.raises(UsageError, match=said):
            load_policy(tmp_path / config.peft_type.value)


def test_prompt_tuning_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    """As a model at hand, and as the adapter that a script for TRL asks for."""
    policy = load_policy(base)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    said = r"PromptTuningConfig: puts virtual tokens.*use LoraConfig\(task_type='CAUSAL_LM'\)"
    given = arguments(tmp_path, str(base))
    with pytest.raises(UsageError, match=f"peft_config = {said}"):
        GRPOTrainer(**given, peft_config=config)
    tuned = get_peft_model(policy.model, config)
    with pytest.raises(UsageError, match=f"model = {said}"):
        make_policy(tuned, policy.tokenizer)
    with pytest.raises(UsageError, match=f"model = {said}"):
        GRPOTrainer(**{**given, "model": tuned}, processing_class=policy.tokenizer)


def saved_and_gradients(model: Any) -> tuple[int, list[Tensor]]:
    """Bytes that the forward pass keeps besides weights, and logits and gradients."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.eval().zero_grad(set_to_none=True)
    with active().training_layers(model):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(TOKENS, use_cache=False).logits
        size = sum(kept.values())
        out.float().square().mean().backward()
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return size, [out.detach(), *(p.grad for p in learns.values() if p.grad is not None)]


def test_an_adapter_keeps_no_float32_copies_of_16_bit_inputs() -> None:
    """Logits and gradients are those of PEFT, to the bit; some products are computed by kernels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=32,
    )
    model = new_adapter(LlamaForCausalLM(config).bfloat16(), AdapterSettings(rank=64, alpha=8.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    small, found = saved_and_gradients(model)
    of_peft = {own: theirs for theirs, own in SUMMED.items()}
    changed = [layer for layer in model.modules() if type(layer) in of_peft]
    assert len(changed) == 2 * 7
    for layer in changed:
        layer.__class__ = of_peft[type(layer)]
    large, wanted = saved_and_gradients(model)
    assert len(found) == len(wanted) == 1 + 2 * 7 * 2
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(bool(gradient.any()) for gradient in found)
    # PEFT's copies of two layers: inputs of six products of size 64, and of one of size 1,024.
    copies = 2 * TOKENS.numel() * (6 * 64 + 1024) * 4
    assert large - small >= copies / 2
