"""Training: the loop, its stages, checkpoints, monitoring and the run directory."""
