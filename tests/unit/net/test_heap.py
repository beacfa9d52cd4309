"""A server gives back what it no longer holds, in a process of its own, for the limits are those of a whole process."""

import subprocess
import sys

# As a checkpoint does: large arrays come and go first, then ones of a megabyte, below which something stays alive.
CHILD = """
import numpy as np
from delayd.net.machine import bound_heap
bound_heap()
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) >> 10
np.ones(30 << 20, np.uint8)
before = resident()
kept = []
arrays = []
for _ in range(200):
    arrays.append(np.ones(1 << 20, np.uint8))
    kept.append(bytearray(4000))
held = resident()
del arrays
print(held - before, resident() - before)
"""


def test_freed_arrays_go_back_to_the_system_though_small_blocks_behind_them_stay() -> None:
    told = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    held_mib, left_mib = map(int, told.split())
    assert held_mib >= 190 and left_mib <= 20
