"""Rewards computed from text alone."""
