"""The contract of engines for vLLM in this process; run by tests/integrations/test_vllm_engine.py
with the interpreter of an environment where vLLM and groupwise are installed together."""

from __future__ import annotations

import sys

import torch

import groupwise.testing.engines as contract
from groupwise.models import load_policy
from groupwise.rollouts import VllmEngine
from groupwise.settings import EngineSettings


def main(folder: str) -> None:
    policy = load_policy(folder)
    settings = EngineSettings(memory_share=0.1, arguments=("--enforce-eager",))
    engine = VllmEngine(policy, max_rows=64, settings=settings)
    contract.check_contract(engine, policy, own_streams=True)
    for version, way in ((1, "reload"), (2, "restart")):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        figures = engine.publish(contract.published(policy, version=version))
        assert engine.way == way and figures["canary_gap"] < 1e-3, (engine.way, figures)
        contract.check_logprobs(engine, policy)
        engine.way = "restart"
    engine.close()
    print("the contract holds")


if __name__ == "__main__":
    main(sys.argv[1])
