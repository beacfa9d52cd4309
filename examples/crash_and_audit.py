"""Kill the delay server with SIGKILL while messages fall due, and prove from the logs that each came once.

`delayd up` starts the server again. What it was handing over is in doubt then, so it asks the realtime server what it
holds before it sends anything: nothing is lost and nothing comes twice. The audit compares the logs message by message.

    delayd up --data delayd-data
    python examples/crash_and_audit.py --messages 20000 --data delayd-data
"""

import argparse
import fcntl
import os
import re
import signal
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import numpy as np

import delayd
from delayd.reading.books import audit_directory

SPREAD_MS = 4_000


def kill_delay_server(data: str) -> None:
    """Kill the delay server of this directory, as a power cut would; its LOCK has its process id while it runs."""
    with (Path(data) / "delay" / "LOCK").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = int(re.findall(r"\d+", lock.read())[0])
            os.kill(pid, signal.SIGKILL)
            print(f"kill -9 {pid}: the delay server is gone, and is started again")
        else:
            sys.exit(f"no delay server runs on {data}; give the directory that `delayd up --data` was given")


def main() -> int:
    """Crash the delay server, and audit its logs afterwards."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--data", default="delayd-data", metavar="DIR", help="as given to `delayd up`")
    parser.add_argument("--messages", type=int, default=20_000, metavar="N")
    arguments = parser.parse_args()
    count, subject = arguments.messages, f"crash.{uuid.uuid4().hex[:8]}"

    due_ms = time.time_ns() // 1_000_000 + 500 + np.arange(count) * SPREAD_MS // count
    with delayd.Producer(arguments.meta) as producer:
        producer.send_batch(subject, [b"%d" % number for number in range(count)], due_ms)
    seen = np.zeros(count, np.int64)
    killed = False
    with delayd.Consumer(arguments.meta, subject, "witness") as consumer:
        while not seen.all():
            batch = consumer.pull(wait=timedelta(seconds=5))
            seen += np.bincount(np.array(batch.bodies, "S").astype(np.int64), minlength=count)
            batch.ack()
            if not killed and seen.sum() > count / 4:
                killed = True
                kill_delay_server(arguments.data)
    print(f"the consumer has {seen.astype(bool).sum():,} of {count:,} messages, {(seen > 1).sum()} of them twice")

    total = (report := audit_directory(arguments.data, now_ms=time.time_ns() // 1_000_000)).total
    print(f"the logs: {total.equation}")
    print(f"lost {total.lost}, duplicate {total.duplicate}, early {total.early}, orphan {total.orphan}")
    return 0 if report.balanced and (seen == 1).all() else 1


if __name__ == "__main__":
    sys.exit(main())
