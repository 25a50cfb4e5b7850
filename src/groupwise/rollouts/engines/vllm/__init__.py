"""Rollouts by vLLM. Nothing here imports it but `in_process.py`, when it runs in this process."""

from groupwise.rollouts.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
