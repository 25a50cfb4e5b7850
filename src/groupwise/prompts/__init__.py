"""Prompts: sources, order, and rendering for a model."""
