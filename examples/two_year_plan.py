"""Schedule the instalments of two years at once, see that later ones are refused, and read the plan from the disk.

Two years are the horizon: an instant past it is an error at the call, never a date that was quietly changed. What is
scheduled can be listed at any time, by anybody who may read the data directory, also while no server runs.

    delayd up --data delayd-data
    python examples/two_year_plan.py --customers 100 --data delayd-data
"""

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from datetime import UTC, date, datetime, time

import numpy as np

import delayd

MONTHS = 24


def first_of_month(ahead: int) -> datetime:
    """Nine in the morning on the first day of a month; ``1`` is next month."""
    today = datetime.now(UTC).date()
    month = 12 * today.year + today.month - 1 + ahead
    return datetime.combine(date(month // 12, month % 12 + 1, 1), time(9), UTC)


def main() -> int:
    """A plan for two years."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--data", default="delayd-data", metavar="DIR", help="as given to `delayd up`")
    parser.add_argument("--customers", type=int, default=100, metavar="N")
    arguments = parser.parse_args()

    subject = f"instalments.{uuid.uuid4().hex[:8]}"
    months = [int(first_of_month(ahead).timestamp() * 1000) for ahead in range(1, MONTHS + 1)]
    bodies = [
        f"customer {number}, instalment {month}" for number in range(arguments.customers) for month in range(MONTHS)
    ]
    with delayd.Producer(arguments.meta) as producer:
        receipt = producer.send_batch(subject, [body.encode() for body in bodies], np.tile(months, arguments.customers))
        print(f"{len(receipt):,} instalments are kept, the last ones for {first_of_month(MONTHS):%d %B %Y}")
        try:
            producer.send(subject, b"too far", deliver_at=first_of_month(MONTHS + 2))
        except delayd.CallerError as error:
            print(f"refused: {error}")

    command = ("schedule", "hours", "--data", arguments.data, "--subject", subject, "--limit", "0", "--format", "json")
    listed = subprocess.run([sys.executable, "-m", "delayd", *command], check=True, stdout=subprocess.PIPE).stdout
    plan: Counter[str] = Counter()
    for hour in json.loads(listed):
        plan[f"{hour['hour'][:4]}-{hour['hour'][4:6]}"] += hour["pending"]
    for month, count in sorted(plan.items()):
        print(f"{month}: {count:,} instalments")
    return 0 if list(plan.values()) == [arguments.customers] * MONTHS else 1


if __name__ == "__main__":
    sys.exit(main())
