"""Checkpoints: reading, writing, retention."""
