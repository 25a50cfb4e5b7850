"""The vLLM engine over HTTP, against a server that speaks the protocol (support/vllm_peer.py)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import groupwise.testing.engines as contract
from groupwise.config import build
from groupwise.errors import RunError, UsageError
from groupwise.models import AdapterSettings, Policy, load_policy
from groupwise.models.loading import with_adapter
from groupwise.rollouts import VllmEngine
from groupwise.rollouts.engines.vllm.base import Weights
from groupwise.rollouts.engines.vllm.files import WeightFiles, disturbed
from groupwise.rollouts.engines.vllm.process import OwnServer, _private_folder
from groupwise.rollouts.engines.vllm.server import VllmServer
from groupwise.rundir.files import read_lines
from groupwise.settings import EngineSettings
from groupwise.training.monitor.progress import NoProgress
from groupwise.training.prepare import prepare
from groupwise.types import Sampling, Stream
from small_runs import prepared, tiny
from vllm_peer import Reload, Server, interpreter, saved_policy, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    saved_policy(folder)
    return folder


@pytest.fixture
def policy(folder: Path) -> Policy:
    return saved_policy(folder)


def engine_of(server: Server, policy: Policy, **settings: object) -> VllmEngine:
    given = EngineSettings(**{"server": server.url, "patience_minutes": 5 / 60, **settings})  # pyright: ignore[reportArgumentType]
    return VllmEngine(policy, max_rows=16, settings=given)


def move(policy: Policy, *, by: float = 0.05) -> None:
    """What an update does: other weights."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def test_the_contract_of_engines(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        contract.check_contract(engine, policy, own_streams=True)
        contract.check_samples(engine, policy, count=600)


def test_every_draw_of_a_prompt_has_a_seed_of_its_own(policy: Policy) -> None:
    """Otherwise a prompt would get the same answers in every step that draws it."""
    request = contract.make_requests(1, group=8)[0]
    streams = [Stream(step=step, place=place) for step in (0, 1) for place in (0, 1)]
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        drawn = [
            [
                tuple(one.tokens)
                for group in engine.generate([replace(request, stream=s)], Sampling(max_tokens=8))
                for one in group.completions
            ]
            for s in (*streams, streams[0])
        ]
    assert drawn[0] == drawn[4]
    assert len({tuple(answers) for answers in drawn}) == 4


def test_after_an_update_the_server_writes_with_the_new_weights(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        before = list(engine.generate(contract.make_requests(2), Sampling(max_tokens=4)))
        assert {c.versions for group in before for c in group.completions} == {((0, 0),)}
        for version in (1, 2):
            move(policy)
            figures = engine.publish(contract.published(policy, version=version))
            assert figures["canary_gap"] < 1e-4
            assert engine.way == "reload" and server.said[-1] == "/v1/completions"
            contract.check_logprobs(engine, policy)
            after = next(iter(engine.generate(contract.make_requests(1), Sampling(max_tokens=4))))
            assert {c.versions for c in after.completions} == {((0, version),)}


@pytest.mark.parametrize("fault", ["ignored", "scrambled", "stale_cache"])
def test_an_update_that_went_wrong_without_a_word_is_found(policy: Policy, fault: str) -> None:
    with served(policy.model.name_or_path, reload=fault) as server:
        engine = engine_of(server, policy)
        with pytest.raises(RunError, match="does not load new weights by 'reload'"):
            list(engine.generate(contract.make_requests(4), Sampling(max_tokens=4)))


def test_a_way_that_breaks_later_stops_the_run(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        move(policy)
        engine.publish(contract.published(policy, version=1))
        server.reload = "ignored"
        move(policy)
        with pytest.raises(RunError, match="engine.canary_limit = 0.1: after new weights"):
            engine.publish(contract.published(policy, version=2))


@pytest.mark.parametrize("fault", ["ignored", "altered", "rounded", "stale_cache"])
def test_small_faults_of_later_updates_are_found(policy: Policy, fault: Reload) -> None:
    """All of them stay far below the absolute limit, as the updates themselves do."""
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        list(engine.generate(contract.make_requests(4), Sampling(max_tokens=4)))
        for version in (1, 2, 3):
            move(policy, by=1e-5)
            assert engine.publish(contract.published(policy, version=version))["canary_gap"] < 1e-4
        server.reload = fault
        with pytest.raises(RunError, match="nats on average, and by|followed .*% of the learner"):
            for version in range(4, 12):
                move(policy, by=1e-5)
                engine.publish(contract.published(policy, version=version))


def test_weights_that_are_no_numbers_are_said_and_not_sent(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        list(engine.generate(contract.make_requests(1), Sampling(max_tokens=2)))
        good = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        with torch.no_grad():
            policy.model.get_input_embeddings().weight[7] = float("nan")
        with pytest.raises(RunError, match="the policy's weights compute NaN"):
            engine.publish(contract.published(policy, version=1))
        assert all(p.isfinite().all() for p in server.model.parameters())
        policy.model.load_state_dict(good, strict=False)
        engine.publish(contract.published(policy, version=2))
        contract.check_logprobs(engine, policy)


@pytest.mark.parametrize("by", [0.05, 1e-5])
def test_weights_of_an_earlier_run_are_replaced(policy: Policy, by: float) -> None:
    with served(policy.model.name_or_path) as server:
        move(policy, by=by)  # Resumed from a checkpoint; the server has the model of the start.
        engine = engine_of(server, policy)
        contract.check_logprobs(engine, policy)
        theirs = server.model.state_dict()
        for name, own in policy.model.named_parameters():
            assert torch.equal(theirs[name], own), name


def test_a_server_with_another_model_is_refused_by_name(policy: Policy, tmp_path: Path) -> None:
    other = saved_policy(tmp_path / "other", seed=1).model.name_or_path
    with served(other) as server, pytest.raises(UsageError, match="log-probabilities differ") as no:
        engine_of(server, policy)
    assert f"serves {other!r}" in str(no.value)
    assert repr(policy.model.name_or_path) in str(no.value)


def test_a_server_with_another_tokenizer_is_refused(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        server.tokenizer = _swapped(server.tokenizer)
        with pytest.raises(UsageError, match="whose tokenizer is not that of"):
            engine_of(server, policy)


def _swapped(tokenizer: object) -> object:
    """The tokenizer with two letters exchanged, as another model of the family may have it."""
    from tokenizers import Tokenizer

    changed = copy.deepcopy(tokenizer)
    text = tokenizer.backend_tokenizer.to_str()  # pyright: ignore[reportAttributeAccessIssue]
    text = text.replace('"h":', '"\\u0000":').replace('"t":', '"h":').replace('"\\u0000":', '"t":')
    changed._tokenizer = Tokenizer.from_str(text)  # pyright: ignore[reportAttributeAccessIssue]
    return changed


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"version": "0.9.1"}, "is vLLM 0.9.1; at least 0.15 is needed"),
        ({"raw": True}, "processed_logprobs"),
    ],
)
def test_a_server_that_cannot_serve_is_refused(
    policy: Policy, settings: dict[str, object], message: str
) -> None:
    with served(policy.model.name_or_path, **settings) as server:
        with pytest.raises((UsageError, RunError), match=message):
            engine = engine_of(server, policy)
            list(engine.generate(contract.make_requests(1), Sampling(max_tokens=2)))


def test_what_to_start_a_server_with_is_said(policy: Policy) -> None:
    with served(policy.model.name_or_path, developer=False) as server:
        engine = engine_of(server, policy)
        with pytest.raises(RunError, match="VLLM_SERVER_DEV_MODE=1"):
            engine.publish(contract.published(policy, version=1))
    with served(policy.model.name_or_path, context=40) as server:
        engine = engine_of(server, policy)
        with pytest.raises(UsageError, match="larger --max-model-len"):
            list(engine.generate(contract.make_requests(1), Sampling(max_tokens=64)))


def test_a_dead_server_is_named_with_what_to_type(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        server.die()
        with pytest.raises(RunError, match="does not answer") as dead:
            engine_of(server, policy, patience_minutes=0.3 / 60)
    assert "vllm serve" in str(dead.value) and "engine.patience_minutes" in str(dead.value)


def test_a_server_that_dies_and_comes_back_gets_the_newest_weights(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        move(policy)
        engine.publish(contract.published(policy, version=1))
        alone = {
            group.prompt.id: [tuple(one.tokens) for one in group.completions]
            for group in engine.generate(contract.make_requests(), Sampling(max_tokens=8))
        }
        server.dies_after = 3
        found = {}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for group in engine.generate(contract.make_requests(), Sampling(max_tokens=8)):
                found[group.prompt.id] = [tuple(one.tokens) for one in group.completions]
        # The seeds are those of the requests, so what is asked again is drawn again.
        assert found == alone
        assert any("Restoring it with the newest weights" in str(one.message) for one in said)
        contract.check_logprobs(engine, policy)


class Adapters:
    """The adapters of a server, which outlive the runs that load them."""

    def __init__(self) -> None:
        self.url, self.held = "http://127.0.0.1:1", set[str]()

    def post(self, path: str, body: Mapping[str, Any], **_: Any) -> None:
        name = body["lora_name"]
        if path.endswith("/load_lora_adapter"):
            assert name not in self.held
            self.held.add(name)
        else:
            self.held.remove(name)

    def close(self) -> None: ...


def test_adapters_of_two_runs_on_a_server_have_different_names(policy: Policy) -> None:
    server = Adapters()
    weights = Weights(folder=Path(), base="base", rank=2, dtype="float32", version=0)
    runs = [VllmServer(server.url, policy, max_rows=1, patience_s=1) for _ in range(2)]
    for run in runs:
        run.client = cast(Any, server)
        run.renew(weights, "adapter")
        run.renew(weights, "adapter")
    assert len(server.held) == 2, "the second run began before the first one had ended"
    for run in runs:
        run.close()
    assert not server.held


def test_a_disturbed_model_is_exactly_itself_again(policy: Policy) -> None:
    adapted = with_adapter(saved_policy(Path(policy.model.name_or_path)), AdapterSettings(rank=4))
    for model in (policy.model, adapted.model):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with disturbed(model):
            learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
            same = [name for name, p in learning.items() if torch.equal(p, before[name])]
            assert learning and not same
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_files_with_a_head_of_its_own_are_the_same_model(policy: Policy) -> None:
    assert policy.model.config.tie_word_embeddings
    files = WeightFiles(policy, untied=True)
    again = load_policy(files.write(contract.published(policy, version=3)).folder)
    files.close()
    assert policy.model.config.tie_word_embeddings
    assert not again.model.config.tie_word_embeddings
    head, embedding = again.model.get_output_embeddings(), again.model.get_input_embeddings()
    assert head.weight is not embedding.weight and torch.equal(head.weight, embedding.weight)
    ids = torch.arange(12, 40)[None]
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, policy.model(ids).logits)


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_a_thousand_clean_transfers_by_files_raise_no_alarm(policy: Policy) -> None:
    """The canary is compared at each; any alarm would be an error of `publish`."""
    gaps = []
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        for version in range(1, 1001):
            torch.manual_seed(version)
            with torch.no_grad():
                for each in policy.model.parameters():
                    each.add_(1e-4 * torch.randn_like(each))
            published = contract.published(policy, version=version)
            gaps.append(engine.publish(published)["canary_gap"])
        engine.close()
    print(f"largest gap of {len(gaps)} transfers: {max(gaps):.2g} nats")
    assert len(gaps) == 1000 and max(gaps) < 1e-4


def test_gaps_that_are_no_numbers_are_infinite(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy)
        assert engine.canary.gap(engine.sampler) < 1e-4
        with torch.no_grad():
            policy.model.get_input_embeddings().weight.fill_(float("nan"))
        assert engine.canary.gap(engine.sampler) == math.inf


def test_memory_is_given_back_while_the_model_learns(policy: Policy) -> None:
    with served(policy.model.name_or_path) as server:
        engine = engine_of(server, policy, sleep=True)
        list(engine.generate(contract.make_requests(1), Sampling(max_tokens=2)))
        assert server.said[-1] == "/sleep?level=1"
        asked = len(server.said)
        engine.publish(contract.published(policy, version=1))
        assert server.said[asked] == "/wake_up"


def test_a_run_corrects_for_what_the_sampler_reports(tmp_path: Path) -> None:
    """The server reports probabilities 1.2 times too small, so every ratio of the learner's own
    probability to the sampler's is 1.2, and with `tis` the gradient is 1.2 times as long."""
    folder, policy = str(tmp_path / "model"), tiny()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    norms = {}
    for correction in ("none", "tis"):
        output = tmp_path / correction
        with served(folder, context=policy.context, skew=-math.log(1.2)) as server:
            ready = prepared(
                output,
                f"model.path={folder}",
                "steps=2",
                "engine.name=vllm",
                f"engine.server={server.url}",
                "engine.canary_limit=0.5",
                f"algorithm.correction.name={correction}",
            )
            ready.trainer.run()
            ready.close()
        first, _ = read_lines(output / "metrics.jsonl")
        norms[correction] = first["grad_norm"]
        assert first["sampler_ratio_gap"] == pytest.approx(0.2, abs=1e-4)
        assert first["sampler_gap"] == pytest.approx(math.log(1.2), abs=1e-4)
        assert first["sampler_ess"] == pytest.approx(1.0), "all ratios are equal"
        assert first["canary_gap"] == pytest.approx(math.log(1.2), abs=1e-3)
    assert norms["tis"] == pytest.approx(1.2 * norms["none"], rel=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"engine": {"python": "x"}}, "engine.python = 'x': applies to vLLM only"),
        (
            {"engine": {"name": "vllm", "python": "x", "server": "y"}},
            "engine.server = 'y': cannot be combined with engine.python",
        ),
        (
            {"engine": {"name": "vllm"}, "watchdog": {"limit_minutes": 4.0}},
            "watchdog.limit_minutes = 4: must be greater than engine.patience_minutes",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(settings)


def test_truncated_sampling_is_refused_where_a_learner_needs_its_probabilities_alone(
    tmp_path: Path,
) -> None:
    settings = {"engine": {"name": "vllm"}, "sampling": {"top_p": 0.9}, "output": str(tmp_path)}
    build(settings)  # as an evaluation reads it
    config = build({**settings, "rewards": [{"name": "exact_answer"}]})
    with pytest.raises(
        UsageError,
        match=r"sampling\.top_p = 0\.9: vLLM does not report which "
        "tokens",
    ):
        prepare(config, progress=NoProgress())
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_server_that_ends_at_its_start_says_how(policy: Policy, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && exec echo 0.32.0\necho OSError: full; exit 3\n")
    python.chmod(0o755)
    server = OwnServer(policy, EngineSettings(python=str(python)), max_rows=4)
    weights = Weights(folder=tmp_path, base=None, rank=0, dtype="float32", version=0)
    with pytest.raises(RunError, match=r"ended with status 3 .*\n.*OSError: full"):
        server.start(weights)
    server.close()


def test_ways_that_cannot_be_are_refused(policy: Policy, folder: Path) -> None:
    with served(policy.model.name_or_path) as server:
        with pytest.raises(UsageError, match="engine.weights = 'restart': not possible here"):
            engine_of(server, policy, weights="restart")
    with pytest.raises(UsageError, match="is not a Python that can be run"):
        OwnServer(policy, EngineSettings(python=str(folder / "python")), max_rows=4)
    with pytest.raises(UsageError, match="vLLM is not installed in this environment"):
        VllmEngine(policy)
    nowhere = with_adapter(policy, AdapterSettings(rank=4))
    nowhere.model.peft_config["default"].base_model_name_or_path = None
    with served(str(folder)) as server, pytest.raises(UsageError, match="model.path"):
        engine_of(server, replace(policy, model=nowhere.model))


def test_a_server_that_is_started_here_answers_this_user_alone(
    policy: Policy, tmp_path: Path
) -> None:
    given = EngineSettings(python=str(interpreter(tmp_path)), patience_minutes=1.0)
    engine = VllmEngine(policy, max_rows=16, settings=given)
    contract.check_logprobs(engine, policy)
    server = engine.sampler
    assert isinstance(server, OwnServer) and server.process is not None
    assert server.socket.is_socket() and server.socket.parent.stat().st_mode & 0o077 == 0
    import psutil

    listening = [c for c in psutil.Process(server.process.pid).net_connections("inet")]
    assert not listening, "no port, which other users could ask"
    engine.close()
    assert not server.socket.parent.exists()


def test_a_long_temporary_folder_has_no_room_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with _private_folder() as place:
        assert len(place) < 90 and Path(place).stat().st_mode & 0o077 == 0
