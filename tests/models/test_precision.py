"""Number formats: what is rounded, what is not, and what a machine without a package says."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from groupwise.errors import UsageError
from groupwise.models import AdapterSettings, Backbone, head_product, load_policy, save_policy
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Batch
from groupwise.updates import OptimizerSettings, TorchLearner, pack
from groupwise.updates.optimizer import MasterOptimizer
from small_runs import prepared, timeless, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_policy(tiny(), folder)
    return folder


def test_a_wide_head_rounds_no_logit() -> None:
    """1 · 256 + 1 · 1 = 257 needs 9 bits; bf16 has 8 and makes it 256."""
    hidden = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    assert head_product(hidden, weight, wide=False).item() == 256
    assert head_product(hidden, weight, wide=True).item() == 257
    assert head_product(hidden, weight, wide=True).dtype == torch.float32


def test_a_wide_head_serves_the_sampler_and_the_learner(model: Path, tmp_path: Path) -> None:
    """Both sides see the logits of float32 factors; the saved model says so itself."""
    narrow = load_policy(model, dtype="bfloat16")
    policy = load_policy(model, dtype="bfloat16", head_dtype="float32")
    backbone = Backbone.of(policy.model)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.float() @ backbone.head.weight.float().t()
    assert torch.equal(backbone.logits(hidden), exact)
    assert not torch.equal(Backbone.of(narrow.model).logits(hidden), exact)
    run = prepared(tmp_path / "run", f"model.path={model}", "model.dtype=bfloat16",
                   "model.head_dtype=float32")  # fmt: skip
    run.trainer.advance()
    head = run.trainer.policy.reader.backbone
    run.close()
    assert head.fp32_logits
    # The learner's own pass: hidden states of one row, and from them logits without rounding.
    learner = TorchLearner(policy, optimizer=OptimizerSettings())
    ids = torch.arange(20, 30)[None]
    batch = Batch(
        prompts=(torch.arange(5, 9),),
        group=torch.zeros(1, dtype=torch.long),
        tokens=ids,
        length=torch.tensor([10]),
        mask=torch.ones(1, 10, dtype=torch.bool),
        advantage=torch.zeros(1, 10),
        weight=torch.zeros(1, 10),
    )
    laid = pack(batch, torch.tensor([0]), device=torch.device("cpu"))
    with torch.no_grad():
        states = backbone.hidden(laid.tokens, laid.positions, laid.attend)[laid.source]
        logits = states.float() @ backbone.head.weight.float().t()
    wanted = logits.log_softmax(-1).gather(1, ids.t()).t()
    torch.testing.assert_close(learner.evaluate(batch, {"logp"})["logp"], wanted, atol=1e-5, rtol=0)
    save_policy(policy, tmp_path / "saved")
    assert Backbone.of(load_policy(tmp_path / "saved", dtype="bfloat16").model).fp32_logits


def test_a_wide_head_where_no_side_would_heed_it(model: Path, tmp_path: Path) -> None:
    more = (f"model.path={model}", "model.head_dtype=float32")
    with pytest.raises(UsageError, match="model.head_dtype = 'float32': engine 'generate'"):
        prepared(tmp_path, *more, "engine.name=generate")
    with pytest.raises(UsageError, match="head of this model cannot be computed separately"):
        prepared(tmp_path, *more, 'model.adapter={targets=["lm_head"]}')


def test_an_attention_that_is_not_installed(model: Path) -> None:
    with pytest.raises(UsageError, match="model.attention = 'flash_attention_2': the package"):
        load_policy(model, attention="flash_attention_2")
    assert load_policy(model, attention="eager").model.config._attn_implementation == "eager"


# -- bitsandbytes ----------------------------------------------------------------------------------


def test_without_bitsandbytes_both_of_its_settings_say_so(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    # A test before this one may have loaded the module that needs bitsandbytes.
    monkeypatch.delitem(sys.modules, "groupwise.updates.adam_8bit", raising=False)
    with pytest.raises(UsageError, match="quantization = 'nf4': needs bitsandbytes; pip install"):
        load_policy(model, quantization="nf4")
    settings = OptimizerSettings(name="adamw_8bit")
    with pytest.raises(UsageError, match="optimizer.name = 'adamw_8bit': needs bitsandbytes"):
        MasterOptimizer({"w": nn.Parameter(torch.zeros(1))}, settings)


def moved(name: Any, *, break_after: int | None = None) -> tuple[MasterOptimizer, torch.Tensor]:
    """Ten steps on Σ (w − target)², with a break between two of them."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128, generator=generator))
    target = torch.randn(64, 128, generator=generator)
    settings = OptimizerSettings(name=name, learning_rate=0.01, max_grad_norm=None)
    optimizer = MasterOptimizer({"w": weight}, settings)
    for step in range(10):
        if step == break_after:
            state = copy.deepcopy(optimizer.state())
            optimizer = MasterOptimizer({"w": weight}, settings)
            optimizer.restore(state)
        (weight - target).square().sum().backward()
        optimizer.step()
    return optimizer, weight.detach()


def test_moments_of_8_bits_move_weights_as_those_of_32_do() -> None:
    """Ten steps of 0.01 in nearly the same direction; a break changes no bit."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
    optimizer, weight = moved("adamw_8bit")
    _, wanted = moved("adamw")
    kept = [
        v
        for v in optimizer.adam.state[optimizer.masters["w"].stepped].values()
        if torch.is_tensor(v)
    ]
    assert sum(v.numel() * v.element_size() for v in kept) < 2.5 * weight.numel()
    assert float((weight - wanted).abs().mean()) < 0.005
    assert float((weight - moved("adamw")[1]).abs().max()) < 0.05
    assert torch.equal(moved("adamw_8bit", break_after=6)[1], weight)


def test_a_weight_in_pieces_gets_the_bits_of_one_step_in_8_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """7,000 weights: 13 pieces of two blocks and a part of one."""
    optim = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)").optim
    from groupwise.updates import adam_8bit

    monkeypatch.setattr(adam_8bit, "PIECE", 512)
    found, names = [], ("state1", "state2", "absmax1", "absmax2")
    for kind in (adam_8bit.PiecewiseAdamW8bit, optim.AdamW8bit):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(70, 100, generator=generator))
        adam = kind([weight], lr=0.01, weight_decay=0.1)
        for _ in range(3):
            weight.grad = torch.randn(70, 100, generator=generator)
            adam.step()
        (state,) = adam.state.values()
        assert state["step"] == 3
        found.append([weight.detach(), *(state[n] for n in names)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def base_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a model without its adapter."""
    with torch.no_grad(), model.disable_adapter():
        return model.eval()(tokens).logits


def test_a_4_bit_model_learns_by_its_adapter_alone(tmp_path: Path) -> None:
    """QLoRA: the base stays as it is, to the bit; sampler and learner see the same model."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
    wide = small_policy(hidden=64, layers=1, heads=2, key_value_heads=1, feed_forward=128)
    save_policy(wide, tmp_path / "wide")
    more = (f"model.path={tmp_path / 'wide'}", "model.quantization=nf4", "model.adapter={rank=4}")
    run = prepared(tmp_path / "run", *more, "steps=3")
    named = dict(run.policy.model.named_parameters())
    assert str(tmp_path / "wide") not in Path("/proc/self/maps").read_text()
    four = {n: p for n, p in named.items() if isinstance(p, bitsandbytes.nn.Params4bit)}
    assert len(four) == 7 and all(p.quant_state.nested for p in four.values())
    tokens = torch.arange(9)[None]
    before = base_logits(run.policy.model, tokens)
    run.trainer.run()
    run.trainer.finish()
    run.close()
    assert torch.equal(base_logits(run.policy.model, tokens), before)
    rows = timeless(tmp_path / "run")
    assert max(row["sampler_gap_max"] for row in rows) < 1e-3
    again = load_policy(tmp_path / "run" / "final", quantization="nf4")
    with torch.no_grad():
        found = again.model(tokens).logits
        assert torch.equal(found, run.policy.model.eval()(tokens).logits)
    assert float((found - before).abs().max()) > 0.02


def test_rows_that_share_a_scale_in_4_bits_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """96 inputs are a block and a half; bitsandbytes would compute with the scales of others."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
    narrow = small_policy(hidden=64, layers=1, heads=2, key_value_heads=1, feed_forward=96)
    save_policy(narrow, tmp_path)
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.down_proj of .* rows of 96"):
        load_policy(tmp_path, quantization="nf4", adapter=AdapterSettings(rank=4))


def test_gradients_pass_through_4_bit_layers(tmp_path: Path) -> None:
    """They are those of the model whose matrices are what the 4 bits stand for."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
    wide = small_policy(hidden=64, layers=2, heads=2, key_value_heads=1, feed_forward=128)
    save_policy(wide, tmp_path)
    model = load_policy(tmp_path, quantization="nf4", adapter=AdapterSettings(rank=4)).model.eval()
    learn = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in learn:
            parameter.normal_(0, 0.1)
        model(torch.arange(9)[None])  # as the sampler does before every update
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(torch.arange(9)[None]).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in learn])
        for module in model.modules():
            if isinstance(getattr(module, "base_layer", None), bitsandbytes.nn.Linear4bit):
                small = module.base_layer
                plain = nn.Linear(small.in_features, small.out_features, bias=False)
                state = small.weight.quant_state
                whole = bitsandbytes.functional.dequantize_4bit(small.weight.data, state)
                plain.weight, plain.bias = nn.Parameter(whole, requires_grad=False), small.bias
                module.base_layer = plain
    for through, wanted in zip(*grads, strict=True):
        assert float(wanted.abs().max()) > 0
        torch.testing.assert_close(through, wanted, atol=1e-4, rtol=1e-3)


def test_a_machine_without_a_card_has_nowhere_to_offload_to(model: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.warns(UserWarning, match="optimizer.offload = true: needs a CUDA GPU"):
        run = prepared(tmp_path / "run", f"model.path={model}", "optimizer.offload=true", "steps=1")
    run.trainer.run()
    run.close()


@pytest.mark.gpu
def test_an_offloaded_optimizer_moves_weights_as_one_on_the_card_does() -> None:
    results = []
    for offload in (False, True):
        weight = nn.Parameter(torch.full((4, 4), 0.5, device="cuda", dtype=torch.bfloat16))
        settings = OptimizerSettings(learning_rate=0.1, offload=offload)
        optimizer = MasterOptimizer({"w": weight}, settings)
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()
        assert optimizer.masters["w"].stepped.is_pinned() is offload
        results.append(weight.detach().cpu())
    assert torch.equal(*results)


@pytest.mark.gpu
def test_what_crosses_over_to_an_offloaded_optimizer_is_pinned() -> None:
    weight = nn.Parameter(torch.full((64, 64), 0.5, device="cuda", dtype=torch.bfloat16))
    optimizer = MasterOptimizer({"w": weight}, OptimizerSettings(offload=True))
    with torch.profiler.profile() as profile:
        weight.square().sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    copies = {event.key for event in profile.key_averages() if "Memcpy" in event.key}
    assert "Memcpy HtoD (Pinned -> Device)" in copies
    assert any("Pinned" in key for key in copies if "DtoH" in key)
