"""Generators of prompts."""
