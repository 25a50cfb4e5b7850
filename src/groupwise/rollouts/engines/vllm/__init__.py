"""Rollouts by vLLM. Only `in_process.py` imports vLLM."""

from groupwise.rollouts.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
