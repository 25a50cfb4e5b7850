"""New weights for vLLM through shared memory, against a server that speaks its weight-transfer
protocol (support/vllm_peer.py); tests/integrations/test_vllm_engine.py has vLLM itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise.testing.engines as contract
from groupwise.errors import RunError, UsageError
from groupwise.models import AdapterSettings, Policy
from groupwise.models.loading import with_adapter
from groupwise.rollouts import VllmEngine
from groupwise.rollouts.engines.vllm.base import EngineUnavailable
from groupwise.rollouts.engines.vllm.process import OwnServer
from groupwise.rollouts.engines.vllm.receiver import SharedUpdate, check, read
from groupwise.rollouts.engines.vllm.shared_memory import SharedWeights
from groupwise.settings import EngineSettings
from groupwise.types import Sampling
from vllm_peer import interpreter, saved_policy


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return saved_policy(tmp_path / "model")


def engine_of(policy: Policy, folder: Path, *arguments: str) -> VllmEngine:
    given = EngineSettings(
        python=str(interpreter(folder)),
        weights="shared_memory",
        patience_minutes=1.0,
        arguments=arguments,
    )
    return VllmEngine(policy, max_rows=16, settings=given)


def move(policy: Policy) -> None:
    """What an update does: other weights."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def open_memories() -> int:
    """Shared memories that this process holds open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("groupwise-weights" in os.readlink(link) for link in links if link.is_symlink())


def test_a_server_writes_with_the_weights_of_the_memory(policy: Policy, tmp_path: Path) -> None:
    """Until a transfer fails, after which it starts again from files."""
    before = open_memories()
    engine = engine_of(policy, tmp_path, "--breaks", "6")
    sampler: Any = engine.sampler
    try:
        contract.check_logprobs(engine, policy)
        for version in (1, 2, 3):  # With the trial, five transfers.
            move(policy)
            figures = engine.publish(contract.published(policy, version=version))
            assert figures["canary_gap"] < 1e-4 and engine.way == "shared_memory"
            contract.check_logprobs(engine, policy)
        assert engine.files._count == 1, "files are for the start of the server alone"
        group = next(iter(engine.generate(contract.make_requests(1), Sampling(max_tokens=4))))
        assert {one.versions for one in group.completions} == {((0, 3),)}

        first = sampler.process.pid
        move(policy)
        assert engine.publish(contract.published(policy, version=4))["canary_gap"] < 1e-4
        assert sampler.process.pid != first
        contract.check_logprobs(engine, policy)

        tensors = dict(policy.model.named_parameters())
        update = engine.memory.write(tensors, version=5)  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(EngineUnavailable, match=r"version 5: .* arrived with different bytes"):
            sampler.server.transfer(replace(update, digests=update.digests[::-1]))
        with pytest.raises(EngineUnavailable, match="a weight update is active"):
            sampler.server.transfer(update)
    finally:
        engine.close()
    assert open_memories() == before


@pytest.mark.parametrize(
    "fault",
    ["scrambled", *(pytest.param(f, marks=pytest.mark.verify) for f in ("ignored", "stale_cache"))],
)
def test_a_server_that_does_not_take_them_over_is_found(
    policy: Policy, tmp_path: Path, fault: str
) -> None:
    engine = engine_of(policy, tmp_path, "--reload", fault)
    try:
        with pytest.raises(RunError, match="does not load new weights by 'shared_memory'"):
            engine.publish(contract.published(policy, version=1))
    finally:
        engine.close()


@pytest.fixture
def written() -> Iterator[tuple[SharedWeights, SharedUpdate, dict[str, torch.Tensor]]]:
    tensors = {
        "matrix": torch.randn(5, 7),
        "other": torch.randn(5, 7),
        "half": torch.randn(3, 3).bfloat16(),
        "transposed": torch.randn(4, 2).T,
        "number": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.randn(9)),
    }
    memory = SharedWeights()
    yield memory, memory.write(tensors, version=4), tensors
    memory.close()


def test_what_is_read_is_what_was_written(written: Any) -> None:
    memory, update, tensors = written
    found = dict(read(update))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    memory.write({name: tensor + 1 for name, tensor in tensors.items()}, version=5)
    assert all(torch.equal(found[name], tensors[name]) for name in found), "these are copies"


@pytest.mark.parametrize("fault", ["bit", "swapped", "stale", "half stale", "dtype"])
def test_what_arrives_differently_is_refused(written: Any, fault: str) -> None:
    memory, update, tensors = written
    bytes_of = memory._memory
    if fault == "bit":
        bytes_of[update.offsets[0] + 9] ^= 1
    elif fault == "swapped":
        first, second, *rest = update.offsets
        update = replace(update, offsets=[second, first, *rest])
    elif fault == "dtype":
        update = replace(update, dtypes=["float16", *update.dtypes[1:]])
    else:
        old = copy.deepcopy(bytes_of)
        update = memory.write({n: t + 1 for n, t in tensors.items()}, version=5)
        end = len(old) if fault == "stale" else 64
        bytes_of[:end] = old[:end]
    with pytest.raises(ValueError, match=rf"weights of version {update.version}: matrix.* arrived"):
        read(update)


def test_missing_tensors_are_named(written: Any) -> None:
    _, update, _ = written
    check("did not arrive", [], update)
    with pytest.raises(ValueError, match="version 4: a, b, c and 2 more did not arrive"):
        check("did not arrive", list("abcde"), update)


def test_where_no_memory_is_shared_is_said(policy: Policy, tmp_path: Path) -> None:
    adapted = with_adapter(policy, AdapterSettings(rank=4))
    with pytest.raises(UsageError, match="'shared_memory': not possible here; use 'auto'"):
        engine_of(adapted, tmp_path)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 0.21.0\n")
    old.chmod(0o755)
    given = EngineSettings(python=str(old), weights="shared_memory")
    with pytest.raises(UsageError, match=r"is vLLM 0.21.0; at least 0.32 is needed"):
        OwnServer(policy, given, max_rows=4)
