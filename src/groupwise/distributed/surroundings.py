"""Checks that settings, versions and registered functions are equal in all processes of a run."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from groupwise import extensions
from groupwise.algorithms import ALGORITHMS
from groupwise.algorithms.binding import SLOTS
from groupwise.config import Config, build
from groupwise.errors import UsageError

COMPARED = ("groupwise", "torch", "transformers")


def surroundings() -> dict[str, str]:
    """Versions of packages, and a hash of the algorithms and of the functions that they are made
    of, with their settings and defaults."""
    extensions.discover()
    found = {name: version(name) for name in COMPARED}
    digest = hashlib.blake2b("\n".join(_registered()).encode(), digest_size=8).hexdigest()
    return {**found, "registered functions": digest}


def _registered() -> Iterator[str]:
    yield from ALGORITHMS.names()
    for slot, registry in SLOTS.items():
        for name in registry.names():
            yield f"{slot} {name}{inspect.signature(registry.get(name))}"


def compare(own: Mapping[str, str], others: Mapping[str, Mapping[str, str]], *, here: str) -> None:
    """Refuse processes whose packages or registered functions differ from those of this one.

    Args:
        own: surroundings of this process, which messages call `here`.
        others: those of the others, by how messages call them.

    Raises:
        UsageError: names the process and what differs.
    """
    for name, theirs in others.items():
        if other := {key: theirs.get(key) for key in own if theirs.get(key) != own[key]}:
            raise UsageError(
                f"{name} has {_listed(other)}, but {here} has "
                f"{_listed({key: own[key] for key in other})}; install the same packages on all "
                "machines, and give all processes the same imports."
            )


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def received(text: str) -> Config:
    """The configuration that another process sent, once what it imports is imported here.

    Raises:
        UsageError: a module is not there.
    """
    values = json.loads(text)
    extensions.load(values["imports"])
    return build(values)
