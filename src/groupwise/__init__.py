"""groupwise: critic-free reinforcement-learning post-training of reasoning language models."""

__version__ = "0.1.0"
