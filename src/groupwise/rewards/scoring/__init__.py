"""Scoring of groups, in process or in a pool of workers."""
