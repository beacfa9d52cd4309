"""Schedule a million messages for the next seconds in one call, take them all, and show that each came once.

Columns go in and columns come out: a message is a row of arrays, and Python makes no object for it but its body.

    delayd up
    python examples/batch_of_a_million.py --count 1000000
"""

import argparse
import os
import sys
import time
import uuid
from datetime import timedelta

import numpy as np

import delayd

SPREAD_MS = 1_000  # All of them fall due within one second.


def main() -> int:
    """A million messages at once."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--count", type=int, default=1_000_000, metavar="N")
    arguments = parser.parse_args()
    count, subject = arguments.count, f"million.{uuid.uuid4().hex[:8]}"

    bodies = [b"%d" % number for number in range(count)]
    due_ms = time.time_ns() // 1_000_000 + 2_000 + np.arange(count) * SPREAD_MS // count
    began = time.monotonic()
    with delayd.Producer(arguments.meta) as producer:
        receipt = producer.send_batch(subject, bodies, due_ms)
    took_s = time.monotonic() - began
    print(f"{len(receipt):,} messages are kept, on disk, after {took_s:.2f} s: {count / took_s:,.0f} a second")

    seen = np.zeros(count, np.int64)
    early, latest_ms = 0, 0
    with delayd.Consumer(arguments.meta, subject, "counter", max_messages=10_000) as consumer:
        while seen.sum() < count:
            batch = consumer.pull(wait=timedelta(seconds=5))
            early += int((batch.late_ms < 0).sum())
            latest_ms = max(latest_ms, int(batch.late_ms.max(initial=0)))
            seen += np.bincount(np.array(batch.bodies, "S").astype(np.int64), minlength=count)
            batch.ack(wait=False)
    took_s = time.time() - due_ms[0] / 1000
    print(f"all came within {took_s:.2f} s of the first instant, the latest {latest_ms} ms after its own")
    print(f"missing {(seen == 0).sum()}, twice {(seen > 1).sum()}, early {early}")
    return 0 if (seen == 1).all() and not early else 1


if __name__ == "__main__":
    sys.exit(main())
