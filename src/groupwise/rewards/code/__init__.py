"""Rewards for programs, judged by running them in a sandbox."""
