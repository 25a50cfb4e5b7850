"""Rollouts by vLLM. Nothing here imports it but `inside.py`, when it runs in this process."""

from groupwise.rollouts.vllm.contract import VllmSettings
from groupwise.rollouts.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "VllmSettings"]
