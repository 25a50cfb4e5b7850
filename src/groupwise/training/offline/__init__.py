"""Training on data instead of on rollouts: preferences, rankings, worked conversations."""
