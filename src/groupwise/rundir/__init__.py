"""The run directory: its files and its lock."""
