"""Memory that is kept: large buffers made again and again cost no new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from groupwise.kernels.build import allocator


def printed(script: str, *arguments: str) -> str:
    """What a script prints; skips the test where it exits with 3."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt, or products need other scratch memory here")
    assert done.returncode == 0, done.stderr
    return done.stdout


# Five times three buffers of 100 MiB, or of 800 MiB, each written to and freed: 384,000 pages of
# 4 KiB and more unless those of the previous round are reused. The first rounds let the heap reach
# its final size.
SCRIPT = """
import resource, sys, torch
from groupwise.kernels import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
def use():
    held = [torch.empty(int(sys.argv[2]) * 2**18).fill_(1.0) for _ in range(3)]
for _ in range(4):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("megabytes", [100, 800])
def test_buffers_are_made_of_pages_that_are_there(megabytes: int) -> None:
    assert int(printed(SCRIPT, "keep", str(megabytes))) < 384_000 / 10


HEAP = """
def heap():
    rows = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
    first, last = rows[0][0].split("-")
    return int(last, 16) - int(first, 16)
"""
"""The size of the heap, for the scripts below."""

# Two rounds of 64 buffers of 1 MiB, of which every other one is freed and made again. A hole is
# reused only where a buffer fits that needs as much room as the one before; otherwise the heap
# grows by about 30 MiB. A small object may take the start of a hole, which costs 1 MiB.
HOLES = """
import sys, torch
from groupwise.kernels import keep_freed_memory, select
select("auto")
if not keep_freed_memory():
    sys.exit(3)
buffers = [torch.empty(2**18) for _ in range(64)]
full = heap()
for _ in range(2):
    for start in (0, 1):
        buffers[start::2] = [None] * 32
        buffers[start::2] = [torch.empty(2**18) for _ in range(32)]
assert all(buffer.data_ptr() % 64 == 0 for buffer in buffers)
print((heap() - full) >> 20)
with torch.profiler.profile(profile_memory=True) as profile:
    torch.empty(2**20).fill_(1)
print(max(event.cpu_memory_usage for event in profile.events()))
try:
    torch.empty(2**60)
except RuntimeError as error:
    print("alloc" in str(error))
"""


def test_a_buffer_fits_the_hole_of_one_of_its_size_and_a_profile_sees_it() -> None:
    """What memory a step takes is measured by the events of the allocator."""
    if allocator() is None:
        pytest.skip("no g++ whose programs this machine loads")
    grown, profiled, failed = printed(HEAP + HOLES).split()
    assert int(grown) <= 8, "MiB"
    assert (profiled, failed) == (str(4 * 2**20), "True")


# A product needs as much scratch memory as a buffer had that was freed: (24 + 32) x 65,536 numbers
# of float32, 14 MiB. The heap grows by as much if they do not fit its hole.
SCRATCH = """
import sys, torch
from groupwise.kernels import cpu, keep_freed_memory, select
select("auto")
torch.set_num_threads(1)
if cpu.multiplies_tiles() or not keep_freed_memory():
    sys.exit(3)
def compute(left, right):
    cpu.matmul(left, right, onto=torch.zeros(len(left), right.shape[1]))
left, right = torch.ones(24, 2**16).bfloat16(), torch.ones(2**16, 32).bfloat16()
compute(left[:, :64], right[:64])
buffers = [torch.empty(56 * 2**16) for _ in range(8)]
buffers[::2] = [None] * 4
full = heap()
compute(left, right)
print((heap() - full) >> 20)
"""


def test_scratch_memory_of_a_kernel_fits_the_hole_of_a_buffer() -> None:
    if allocator() is None:
        pytest.skip("no g++ whose programs this machine loads")
    assert int(printed(HEAP + SCRATCH)) <= 4, "MiB"


def test_without_compiled_kernels_torch_keeps_its_allocator() -> None:
    """No program is compiled then; the heap grows where glibc is older than 2.38."""
    script = """
import torch
from groupwise.kernels import build, keep_freed_memory, select
select("torch")
keep_freed_memory()
print(build.allocator.cache_info().misses)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
