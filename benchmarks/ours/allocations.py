"""What torch's own allocator gives out on a CPU, buffers inside operators included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def traced(function: Callable[[], Any]) -> list[tuple[int, int]]:
    """(address, bytes) of every allocation of a call, and (address, −bytes) of every release, in
    order."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    found: list[tuple[int, int, int]] = []
    results: Any = profile.profiler.kineto_results  # pyright: ignore
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if "Allocation" in type(event.extra_fields).__name__:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(pointer, size) for _, pointer, size in sorted(found, key=lambda one: one[0])]


def peak(allocations: list[tuple[int, int]]) -> int:
    """The most bytes that were given out at one time; what was there before does not count."""
    live = highest = 0
    held: dict[int, int] = {}
    for pointer, size in allocations:
        if size > 0:
            held[pointer] = size
            live += size
            highest = max(highest, live)
        else:
            live -= held.pop(pointer, 0)
    return highest
