"""Replies of environments where several processes sample: each keeps a journal in the run
directory."""

from __future__ import annotations

import uuid
from pathlib import Path

from groupwise.config import Config
from groupwise.config.connect import configured_engine
from groupwise.models import Policy
from groupwise.rollouts.tools import ReplyJournal, ToolEngine
from groupwise.types import Engine


def sampling_engine(config: Config, policy: Policy) -> Engine:
    """The engine of one of several processes, with a journal if it has an environment."""
    engine = configured_engine(config, policy)
    if isinstance(engine, ToolEngine) and config.environment is not None:
        engine.journal = ReplyJournal(
            Path(config.output) / "journal",
            environment=config.environment.model_dump_json(),
            writer=uuid.uuid4().hex[:12],
        )
    return engine
