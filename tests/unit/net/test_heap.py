"""A server gives back what it no longer holds, in a process of its own, for heap and limits are a whole process's."""

import subprocess
import sys

# As a checkpoint and a herd do: large arrays come and go first, then smaller ones, below which something stays alive.
CHILD = """
import numpy as np
from delayd.net.machine import bound_heap, give_back
bound_heap()
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) >> 10
np.ones(30 << 20, np.uint8)
before = resident()
kept = []
arrays = []
for _ in range(60):
    arrays += [np.ones(each << 20, np.uint8) for each in (1, 3)]
    kept.append(bytearray(4000))
held = resident()
del arrays
give_back()
print(held - before, resident() - before)
"""


def test_freed_arrays_go_back_to_the_system_though_small_blocks_behind_them_stay() -> None:
    told = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    held_mib, left_mib = map(int, told.split())
    assert held_mib >= 230 and left_mib <= 20


# The frames of a herd: each has two buffers of megabytes, which are freed before those of the next one are there.
FRAMES = """
import resource
import numpy as np
from delayd.net.machine import bound_heap
bound_heap()
def frames(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        received = np.ones(2_100_000, np.uint8)
        kept = received.tobytes()
        del received, kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
frames(5)
print(frames(50))
"""


def test_buffers_of_frames_are_used_again_without_a_fault_for_each_page() -> None:
    faults = int(subprocess.run([sys.executable, "-c", FRAMES], capture_output=True, text=True, check=True).stdout)
    assert faults < 50, "50 frames of 1,000 pages"
