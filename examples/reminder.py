"""Remind customers months ahead, in the morning where they live.

A date is turned into an instant in the customer's own time zone, so summer time is right whenever it begins. A reminder
whose time is past leaves at once, and its receipt says so.

    delayd up
    python examples/reminder.py --days-before 30
"""

import argparse
import os
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import delayd

SUBJECT = "contracts.reminder"
MORNING = time(9)


def main() -> None:
    """Remind customers before their contracts end."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--days-before", type=int, default=30, metavar="DAYS")
    arguments = parser.parse_args()

    today = datetime.now(UTC).date()
    contracts: list[tuple[str, str, date]] = [
        ("ada", "Europe/Berlin", today + timedelta(days=365)),
        ("grace", "America/New_York", today + timedelta(days=220)),
        ("linus", "Asia/Tokyo", today + timedelta(days=arguments.days_before - 1)),  # His reminder is overdue.
    ]
    with delayd.Producer(arguments.meta) as producer:
        for customer, zone, ends in contracts:
            morning = datetime.combine(ends - timedelta(days=arguments.days_before), MORNING, ZoneInfo(zone))
            receipt = producer.send(SUBJECT, customer.encode(), deliver_at=morning, headers={"ends": ends.isoformat()})
            when = "is past, so it leaves at once" if receipt.was_due else f"is {morning - datetime.now(UTC)} ahead"
            print(f"{customer}: {morning.isoformat()} {when}; kept as {receipt.sequence}")

    with delayd.Consumer(arguments.meta, SUBJECT, "mailer") as consumer:
        for message in consumer.pull(wait=timedelta(seconds=10)):
            print(f"mail to {message.body.decode()}: your contract ends on {message.headers['ends']!s}")
            message.ack()


if __name__ == "__main__":
    main()
