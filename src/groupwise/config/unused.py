"""Settings that nothing reads beside the others of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groupwise.config.schema import Config


def unused_settings(config: Config) -> list[str]:
    """A line for each second learner that has settings although the algorithm does not train it,
    and for a correction of ratios that are 1.

    Example:
        >>> from groupwise.config import build
        >>> config = build({"algorithm": {"name": "grpo"}, "token_reward": {"model": "folder"}})
        >>> [line.partition(", ")[0] for line in unused_settings(config)]
        ['token_reward.model: not used']
    """
    from groupwise.algorithms import ALGORITHMS, bind
    from groupwise.algorithms.binding import SECOND_LEARNERS

    algorithm = bind(config.algorithm.name, config.algorithm.overrides())
    chosen, correction, said = algorithm.second_learner, algorithm.row.correction.name, []
    if config.update.proximal == "sampler" and correction != "none":
        said.append(
            f"algorithm.correction.name = {correction!r}: not used, because update.proximal = "
            "'sampler' clips against the sampler's probabilities, which need no correction."
        )
    for section in SECOND_LEARNERS.values():
        own = getattr(config, section)
        changed = list(_changed(own.model_dump(), type(own)().model_dump(), section))
        if changed and section != chosen:
            having = sorted(row for row in ALGORITHMS if bind(row).second_learner == section)
            said.append(
                f"{', '.join(changed)}: not used, because algorithm {config.algorithm.name!r} has "
                f"no {section}; algorithms with one: {', '.join(having)}."
            )
    return said


def _changed(values: Any, defaults: Any, path: str) -> Iterator[str]:
    """The dotted path of every value that differs from its default."""
    if isinstance(values, dict) and isinstance(defaults, dict):
        for name, value in values.items():
            yield from _changed(value, defaults.get(name), f"{path}.{name}")
    elif values != defaults:
        yield path
