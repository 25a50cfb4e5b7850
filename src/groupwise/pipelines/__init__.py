"""Pipelines: stages in a TOML file, each of which runs a command, in order and resumable."""

from groupwise.config.recipes import packaged_pipelines
from groupwise.pipelines import eval_stage as eval_stage
from groupwise.pipelines import report_stage as report_stage
from groupwise.pipelines import row_stages as row_stages
from groupwise.pipelines.plan import Pipeline, Stage, read_pipeline
from groupwise.pipelines.running import StageState, plan_table, run_pipeline

__all__ = [
    "Pipeline",
    "Stage",
    "StageState",
    "packaged_pipelines",
    "plan_table",
    "read_pipeline",
    "run_pipeline",
]
