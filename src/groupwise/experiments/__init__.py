"""Experiments: compare algorithms on paired seeds by a plan fixed in advance."""

from groupwise.experiments.analysis import Analysis, analyse
from groupwise.experiments.plan import Arm, Plan, Tuning, make_plan, read_plan
from groupwise.experiments.results import Result, read_results
from groupwise.experiments.running import (
    Experiment,
    analysis_of,
    compare,
    planned,
    report,
    run_plan,
    write_plan,
)

__all__ = [
    "Analysis",
    "Arm",
    "Experiment",
    "Plan",
    "Result",
    "Tuning",
    "analyse",
    "analysis_of",
    "compare",
    "make_plan",
    "planned",
    "read_plan",
    "read_results",
    "report",
    "run_plan",
    "write_plan",
]
