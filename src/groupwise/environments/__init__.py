"""Environments reply to a model that stops in the middle of a completion to call a tool.

An environment names the stop strings after which it replies (`stops`), and replies to the text
before them. Replies become injected tokens: part of the context, never part of the loss.
Environments are registered functions that return one; their keyword-only parameters are their
settings.
"""

from groupwise.environments import calculator, python, search
from groupwise.environments.base import (
    END_OF_TURN,
    ENVIRONMENTS,
    SEARCH_TAGS,
    Choosing,
    Environment,
    Reply,
    Resuming,
    Showing,
    TagEnvironment,
    Tags,
    TagState,
    resume,
)
from groupwise.environments.by_column import by_column, check_column
from groupwise.environments.functions import FunctionEnvironment
from groupwise.environments.isolated import Ending, build_environment, in_process

__all__ = [
    "END_OF_TURN",
    "ENVIRONMENTS",
    "SEARCH_TAGS",
    "Choosing",
    "Ending",
    "Environment",
    "FunctionEnvironment",
    "Reply",
    "Resuming",
    "Showing",
    "TagEnvironment",
    "TagState",
    "Tags",
    "build_environment",
    "by_column",
    "calculator",
    "check_column",
    "in_process",
    "python",
    "resume",
    "search",
]
