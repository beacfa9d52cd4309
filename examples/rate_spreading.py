"""Spread a newsletter to a million recipients evenly over the night, instead of all at midnight.

Each recipient gets an instant of its own, computed as one array; the delay server then is the rate limiter, and the
workers that send mail need no timer and no sleep.

    delayd up --data newsletter-data
    python examples/rate_spreading.py --recipients 1000000 --hours 8 --watch 3
"""

import argparse
import os
import time
import uuid
from datetime import timedelta

import numpy as np

import delayd

PIECE = 100_000  # Bodies that this program holds at a time.


def main() -> None:
    """Spread messages evenly over a time."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--recipients", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--hours", type=float, default=8.0, help="how long the night is")
    parser.add_argument("--start-in", type=float, default=5.0, metavar="SECONDS", help="time to schedule all of them")
    parser.add_argument("--watch", type=int, default=3, metavar="SECONDS", help="how long to watch what comes")
    arguments = parser.parse_args()

    subject = f"newsletter.{uuid.uuid4().hex[:8]}"
    night_ms = int(arguments.hours * 3_600_000)
    begins_ms = time.time_ns() // 1_000_000 + int(arguments.start_in * 1000)
    began = time.monotonic()
    with delayd.Producer(arguments.meta) as producer:
        for first in range(0, arguments.recipients, PIECE):
            numbers = np.arange(first, min(first + PIECE, arguments.recipients))
            bodies = [b"recipient %d" % number for number in numbers.tolist()]
            producer.send_batch(subject, bodies, begins_ms + numbers * night_ms // arguments.recipients)
    took_s = time.monotonic() - began
    rate = arguments.recipients * 1000 / night_ms
    print(
        f"{arguments.recipients:,} messages are kept after {took_s:.2f} s; {rate:g} a second over {arguments.hours:g} h"
    )

    watched_ms = min(1000 * arguments.watch, night_ms)
    watched = -(-arguments.recipients * watched_ms // night_ms)  # Rounded up: the first one comes at once.
    counts = np.zeros(arguments.watch, np.int64)
    with delayd.Consumer(arguments.meta, subject, "mailer") as consumer:
        while counts.sum() < watched:
            batch = consumer.pull(wait=timedelta(seconds=5))
            seconds = (batch.deliver_at_ms - begins_ms) // 1000
            counts += np.bincount(seconds[seconds < arguments.watch], minlength=arguments.watch)
            batch.ack(wait=False)
    for second, count in enumerate(counts.tolist(), 1):
        print(f"second {second}: {count:,} messages")


if __name__ == "__main__":
    main()
