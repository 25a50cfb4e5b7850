"""Rewards computed by models: encoders, reward models, language-model judges."""
