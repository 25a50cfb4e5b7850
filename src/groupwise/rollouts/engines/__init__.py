"""Engines: implementations of the Engine protocol."""
