"""Memory of a message in flight at the realtime server, by messages a pull: ``python -m bench.in_flight``.

One JSON line for each number: bytes a run of messages that were pulled together, and bytes a message.
"""

import json
import tracemalloc

from delayd.log.pull import PullEntry, PullOp
from realtime.groups import Group
from realtime.subject_index import Subject

RUNS = 65_536  # As many as one group may hold when it is alone.
FIRST = 10_000_000  # So that numbers are objects of their own, as they are in a server that has run for a while.


def run_bytes(each: int) -> float:
    """Bytes of a run when each pull gets so many messages."""
    group = Group(1, Subject("orders"), "g", FIRST)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for first in range(FIRST, FIRST + RUNS * each, each):
            group.apply(PullEntry(PullOp.PULL, 1, 1, 1 << 60, first, first, each, 0, 60_000), FIRST)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / RUNS


if __name__ == "__main__":
    for each in (1, 10, 100):
        size = run_bytes(each)
        print(json.dumps({"messages_a_pull": each, "run_b": round(size, 1), "message_b": round(size / each, 2)}))
