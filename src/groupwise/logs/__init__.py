"""What a run writes down and shows: its directory, its progress, and experiment trackers."""

from groupwise.logs.files import RunLog, printable, read_lines, surroundings, without_secrets
from groupwise.logs.progress import Progress, show_progress
from groupwise.logs.trackers import Tracker, make_trackers

__all__ = [
    "Progress",
    "RunLog",
    "Tracker",
    "make_trackers",
    "printable",
    "read_lines",
    "show_progress",
    "surroundings",
    "without_secrets",
]
