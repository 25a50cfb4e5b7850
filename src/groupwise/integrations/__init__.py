"""Interfaces of other projects on groupwise, and functions of groupwise inside other projects."""
