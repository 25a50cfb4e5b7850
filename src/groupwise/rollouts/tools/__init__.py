"""Tools inside rollouts: an engine that lets an environment reply in the middle of a completion."""

from groupwise.rollouts.tools.calls import InlineCalls
from groupwise.rollouts.tools.engine import ToolEngine
from groupwise.rollouts.tools.journal import ReplyJournal

__all__ = ["InlineCalls", "ReplyJournal", "ToolEngine"]
