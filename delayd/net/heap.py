"""Heap: when the C allocator gives memory back to the system.

glibc gives large blocks mappings of their own, which go back to the system when they are freed. It raises the size from
which it does so to the largest such block that was freed, up to 32 MiB. Smaller blocks then stay in the heaps of its
threads: a server that filed a million messages would keep a hundred megabytes for nobody. Both limits are fixed here
instead.
"""

import ctypes

M_TRIM_THRESHOLD = -1  # Numbers of mallopt(3).
M_MMAP_THRESHOLD = -3

MMAP_BYTES = 1 << 20  # Each touch of a new page of a mapping costs a fault: frames and their arrays stay below this.
# Free memory that stays at the end of a heap: enough for a frame, or each frame would grow the heap anew.
TRIM_BYTES = 8 << 20


def bound_heap() -> None:
    """Fix the limits, for the whole process; nothing happens where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
