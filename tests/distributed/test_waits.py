"""Every wait of a rank for the others ends, and names what is waited for and who is missing."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from groupwise.distributed.world import World
from ranks import FORK, run_ranks

WAITS: dict[str, Callable[[World], Any]] = {
    "the others to take a command": lambda world: [
        world.command(bytes(1 << 24)),  # More than a connection holds.
        world.meet("all to begin"),
    ],
    "all to begin": lambda world: world.meet("all to begin"),
    "digests": lambda world: world.gather(1, "digests"),
    "prompts": lambda world: world.scatter([1, 2, 3] if world.leads else None, "prompts"),
    "completions": lambda world: world.collect(1, "completions"),
    "sums": lambda world: world.add(torch.ones(3), "sums"),
    "rows": lambda world: world.unite(torch.ones(3), "rows"),
    "weights": lambda world: list(
        world.send({"a": torch.ones(3)} if world.leads else None, "weights")
    ),
}


def starved(world: World, name: str) -> str:
    """Rank 1 of three does not take part; what the others say."""
    if world.rank == 1:
        time.sleep(8.0)
        return "absent"
    with pytest.raises(BaseException) as caught:
        WAITS[name](world)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.cluster
@pytest.mark.parametrize("name", WAITS)
def test_a_rank_that_does_not_answer_is_named(name: str) -> None:
    said = run_ranks(3, starved, name, timeout_s=1.5, limit_s=15.0)[0]
    assert said.startswith(f"RunError: rank 0 of 3 waited for {name}: no "), said
    # A command passes from rank to rank, so rank 2 may be without it because of rank 1.
    also = ", 2" if name == "the others to take a command" else ""
    assert re.search(f"from rank 1({also})?[.] Continue with --resume[.]$", said), said


def first_of_two(folder: str, pipe: Any) -> None:
    """Rank 0 of a group whose rank 1 never starts."""
    try:
        World(dist.FileStore(str(Path(folder) / "store"), 2), 0, 2, timeout_s=1.0)
    except Exception as error:
        pipe.send(str(error))


def test_a_rank_that_never_starts_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result, end = FORK.Pipe(duplex=False)
        process = FORK.Process(target=first_of_two, args=(folder, end))
        process.start()
        found = result.poll(20)
        process.kill()
        assert found, "still waiting"
        said = result.recv()
    assert said.startswith("rank 0 of 2 waited for all ranks to start: no answer within 1 s"), said
    assert "from rank 1" in said
