"""Stages other than reinforcement learning: supervised fine-tuning, warm-up, merging."""
