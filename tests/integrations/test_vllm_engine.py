"""The vLLM engine against a real vLLM, in an environment of its own (`make vllm-env`).

The interpreter is .venv-vllm/bin/python, or that of GROUPWISE_VLLM_PYTHON.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise.testing.engines as contract
from groupwise.errors import RunError
from groupwise.models import AdapterSettings, Policy
from groupwise.models.loading import with_adapter
from groupwise.rollouts import VllmEngine
from groupwise.rollouts.engines.vllm.files import WeightFiles
from groupwise.rollouts.engines.vllm.process import OwnServer
from groupwise.rundir.files import read_lines
from groupwise.settings import EngineSettings
from groupwise.types import Sampling
from small_runs import prepared
from vllm_peer import saved_policy

REPOSITORY = Path(__file__).parents[2]
PYTHON = os.environ.get("GROUPWISE_VLLM_PYTHON", str(REPOSITORY / ".venv-vllm/bin/python"))
EAGER = ("--enforce-eager",)
"""Without compilation the build for CPUs starts several times faster."""

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not Path(PYTHON).exists(),
        reason="no environment with vLLM: make vllm-env, or set GROUPWISE_VLLM_PYTHON",
    ),
]


def settings(**given: Any) -> EngineSettings:
    shared: dict[str, Any] = {"python": PYTHON, "memory_share": 0.1, "arguments": EAGER}
    return EngineSettings(**{**shared, **given})


def engine_of(policy: Policy, **given: Any) -> VllmEngine:
    return VllmEngine(policy, max_rows=64, settings=settings(**given))


def move(policy: Policy, *, seed: int) -> None:
    """What an update does: other weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return saved_policy(tmp_path / "model")


@pytest.fixture
def engine(policy: Policy) -> Iterator[VllmEngine]:
    engine = engine_of(policy)
    yield engine
    engine.close()


def test_the_contract_of_engines(engine: VllmEngine, policy: Policy) -> None:
    contract.check_contract(engine, policy, own_streams=True)
    contract.check_samples(engine, policy)
    for version in (1, 2):
        move(policy, seed=version)
        figures = engine.publish(contract.published(policy, version=version))
        assert engine.way == "reload" and figures["canary_gap"] < 1e-3
        contract.check_logprobs(engine, policy)
    group = next(iter(engine.generate(contract.make_requests(1), Sampling(max_tokens=2))))
    assert {one.versions for one in group.completions} == {((0, 2),)}


def test_more_prompts_than_fit_into_one_batch_of_tokens(engine: VllmEngine) -> None:
    """Of a prompt at the end of a full batch only a part would be computed, over which this build
    ends, as every request has a seed."""
    requests = [replace(one, tokens=8 * list(one.tokens)) for one in contract.make_requests(64)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # A server that was brought back says so.
        assert len(list(engine.generate(requests, Sampling(max_tokens=2)))) == 64


def test_a_server_killed_while_it_writes(engine: VllmEngine, policy: Policy) -> None:
    move(policy, seed=1)
    engine.publish(contract.published(policy, version=1))
    groups = []
    with pytest.warns(UserWarning, match="Restoring it with the newest weights"):
        for group in engine.generate(contract.make_requests(40), Sampling(max_tokens=200)):
            if not groups:
                process = engine.sampler.process  # pyright: ignore[reportAttributeAccessIssue]
                _kill_tree(process.pid)
            groups.append(group)
    assert sorted(group.prompt.id for group in groups) == sorted(str(n) for n in range(40))
    contract.check_logprobs(engine, policy)


def _kill_tree(process: int) -> None:
    import psutil

    for child in [*psutil.Process(process).children(recursive=True), psutil.Process(process)]:
        child.send_signal(signal.SIGKILL)


def test_a_head_that_keeps_its_old_weights_is_found(policy: Policy) -> None:
    """A tied head is repacked when this build loads a model, and not when it reads new weights:
    nothing is said, and some of the model is new. Files with a head of its own, as the engine
    writes them, bring it over to the same server."""
    server = OwnServer(policy, settings(), max_rows=64)
    files = WeightFiles(policy, untied=False)
    try:
        server.start(files.write(contract.published(policy, version=0)))
        assert server.server is not None
        url = server.server.client.url
        engine = VllmEngine(policy, settings=EngineSettings(server=url))
        contract.check_logprobs(engine, policy)
        engine.files.untied = False
        with pytest.raises(RunError, match="does not load new weights by 'reload'"):
            engine.publish(contract.published(policy, version=1))
        engine.files.untied = True
        assert engine.publish(contract.published(policy, version=2))["canary_gap"] < 1e-3
    finally:
        server.close()
        files.close()


def test_what_does_not_reload_is_started_again(policy: Policy) -> None:
    engine = engine_of(policy, arguments=())
    engine.files.untied = False
    try:
        with pytest.warns(UserWarning, match="'restart' is used"):
            assert engine.publish(contract.published(policy, version=1))["canary_gap"] < 1e-3
        assert engine.way == "restart"
        move(policy, seed=1)
        assert engine.publish(contract.published(policy, version=2))["canary_gap"] < 1e-3
        contract.check_logprobs(engine, policy)
    finally:
        engine.close()


def test_fifty_updates_through_shared_memory(policy: Policy) -> None:
    """vLLM's weight-transfer protocol, with the receiver of this package in vLLM's registry; both
    sides differ as little as after a reload from files."""
    engine, gaps = engine_of(policy, weights="shared_memory"), []
    try:
        for version in range(1, 51):
            move(policy, seed=version)
            figures = engine.publish(contract.published(policy, version=version))
            gaps.append(figures["canary_gap"])
        assert engine.way == "shared_memory" and engine.files._count == 1
        contract.check_logprobs(engine, policy)
    finally:
        engine.close()
    by_files = engine_of(policy, weights="reload")
    try:
        usual = by_files.publish(contract.published(policy, version=51))["canary_gap"]
    finally:
        by_files.close()
    print(f"largest canary gaps: {max(gaps):.2g} of {len(gaps)} updates, {usual:.2g} by files")
    assert max(gaps) < 2 * usual


@pytest.mark.parametrize("fault", ["bytes", "missing", "unset", "unknown", "shape", "unfinished"])
def test_a_faulty_transfer_through_shared_memory_is_refused_by_vllm(
    policy: Policy, fault: str
) -> None:
    said = {
        "bytes": "weights of version 1: model.* arrived with different bytes from those sent",
        "missing": "weights of version 1: model.layers.1.self_attn.k_proj.weight did not arrive",
        "unset": "weights of version 1: model.norm.weight got no value",
        "unknown": "no_such_layer",
        "shape": "Worker failed",
        "unfinished": "already active",
    }
    engine = engine_of(policy, weights="shared_memory")
    try:
        if fault == "unset":  # By the first update, before any was complete.
            engine.sampler.start(engine.files.write(engine.weights))
        else:
            engine.publish(contract.published(policy, version=0))
        tensors = dict(policy.model.state_dict())
        if fault == "missing":
            del tensors["model.layers.1.self_attn.k_proj.weight"]
        elif fault == "unset":
            del tensors["model.norm.weight"]
        elif fault == "unknown":
            tensors["model.no_such_layer.weight"] = torch.zeros(3)
        elif fault == "shape":
            name = "model.layers.0.mlp.up_proj.weight"
            tensors[name] = tensors[name][:, :-1].contiguous()
        assert engine.memory is not None and isinstance(engine.sampler, OwnServer)
        update = engine.memory.write(tensors, version=1)
        if fault == "bytes":
            engine.memory._memory[update.offsets[2]] ^= 1
        elif fault == "unfinished":
            assert engine.sampler.server is not None
            engine.sampler.server.client.post("/start_weight_update", {})
        with pytest.raises(RunError, match=said[fault]):
            engine.sampler.transfer(update)
    finally:
        engine.close()


def test_a_server_that_somebody_else_started(policy: Policy, tmp_path: Path) -> None:
    owner = engine_of(policy)
    try:
        contract.check_uneven(owner)
        url = owner.sampler.server.client.url  # pyright: ignore[reportAttributeAccessIssue]
        engine = VllmEngine(policy, settings=EngineSettings(server=url))
        contract.check_contract(engine, policy, own_streams=True)
        move(policy, seed=1)
        assert engine.publish(contract.published(policy, version=1))["canary_gap"] < 1e-3
        contract.check_logprobs(engine, policy)
        other = saved_policy(tmp_path / "other", seed=1)
        with pytest.raises(ValueError, match="log-probabilities differ"):
            VllmEngine(other, settings=EngineSettings(server=url))
    finally:
        owner.close()


def test_adapters_are_brought_over_under_new_names(policy: Policy) -> None:
    adapted = with_adapter(policy, AdapterSettings(rank=4, alpha=8.0))
    engine = engine_of(adapted)
    try:
        contract.check_logprobs(engine, adapted)
        for version in (1, 2, 3):
            move(adapted, seed=version)
            assert engine.publish(contract.published(policy, version=version))["canary_gap"] < 1e-3
        assert engine.way == "adapter"
        contract.check_logprobs(engine, adapted)
    finally:
        engine.close()


@pytest.mark.parametrize("weights, steps", [("reload", 12), ("restart", 2), ("shared_memory", 12)])
def test_training_with_an_update_after_every_step(tmp_path: Path, weights: str, steps: int) -> None:
    ready = prepared(
        tmp_path / "run",
        "model.path=bundled",
        f"steps={steps}",
        "engine.name=vllm",
        f"engine.python={PYTHON}",
        f"engine.weights={weights}",
        "engine.memory_share=0.1",
        'engine.arguments=["--enforce-eager"]',
        "algorithm.correction.name=tis",
        "sampling.max_tokens=24",
        "optimizer.learning_rate=1e-3",
    )
    try:
        ready.trainer.run()
    finally:
        ready.close()
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert len(rows) == steps
    assert all(row["canary_gap"] < 1e-3 for row in rows)
    assert all(row["sampler_gap_max"] < 1e-2 and row["sampler_ess"] > 0.999 for row in rows)
    assert rows[-1]["grad_norm"] > 0


def test_in_one_process_with_the_learner(tmp_path: Path) -> None:
    """The same contract where vLLM and the trainer are installed together."""
    saved_policy(tmp_path / "model")
    missing = subprocess.run(
        [PYTHON, "-c", "import groupwise.rollouts, pytest"],
        capture_output=True,
        text=True,
        env=_paths(),
    )
    if missing.returncode:
        pytest.skip(f"groupwise is not complete in that environment: {missing.stderr[-200:]}")
    script = Path(__file__).parents[1] / "vllm_inside.py"
    start = time.monotonic()
    done = subprocess.run(
        [PYTHON, str(script), str(tmp_path / "model")], capture_output=True, text=True, env=_paths()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the contract holds" in done.stdout, f"after {time.monotonic() - start:.0f} s"


def _paths() -> dict[str, str]:
    own = [str(REPOSITORY / "src"), str(REPOSITORY / "tests" / "support")]
    paths = [*own, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
