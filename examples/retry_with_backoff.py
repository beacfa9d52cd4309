"""Call a service that fails, and try again after 1, 2, 4, … times the first delay, until it works or is given up.

The wait is a new message, so a worker is free meanwhile, and a restart of anything forgets no try. The next try is kept
before this one is acknowledged: a crash between the two repeats a call, and never loses one.

    delayd up
    python examples/retry_with_backoff.py --first-delay 0.5 --tries 5
"""

import argparse
import os
import random
import uuid
from datetime import timedelta

import delayd

SUBJECT = "webhooks.call"
GIVEN_UP = "webhooks.given-up"
JITTER = 0.2  # This share of the delay is random: calls that failed together do not all come back at one instant.


def call(name: str, number: int) -> None:
    """Stand in for a service that is back at the third try, and for one that is gone."""
    if name.startswith("gone") or number < 3:
        raise ConnectionError("503 Service Unavailable")


def main() -> None:
    """Retry with exponential back-off."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--first-delay", type=float, default=0.5, metavar="SECONDS")
    parser.add_argument("--tries", type=int, default=5, metavar="N")
    arguments = parser.parse_args()

    run = uuid.uuid4().hex[:8]
    open_calls = {f"{kind}/{run}" for kind in ("shaky", "gone")}
    with (
        delayd.Producer(arguments.meta) as producer,
        delayd.Consumer(arguments.meta, SUBJECT, "caller") as consumer,
    ):
        for name in sorted(open_calls):
            producer.send(SUBJECT, name.encode(), delay=timedelta(0))
        while open_calls:
            for message in consumer.pull(wait=timedelta(seconds=5)):
                name, number = message.body.decode(), int(message.headers.get("try", "1"))
                try:
                    call(name, number)
                    print(f"{name}: try {number} worked")
                    open_calls.discard(name)
                except ConnectionError as error:
                    if number < arguments.tries:
                        wait_s = arguments.first_delay * 2 ** (number - 1) * random.uniform(1 - JITTER, 1 + JITTER)
                        headers = {"try": str(number + 1)}
                        producer.send(SUBJECT, message.body, delay=timedelta(seconds=wait_s), headers=headers)
                        print(f"{name}: try {number} failed ({error}), the next one in {wait_s:.2f} s")
                    else:
                        producer.send(GIVEN_UP, message.body, delay=timedelta(0), headers={"error": str(error)})
                        print(f"{name}: given up after {number} tries")
                        open_calls.discard(name)
                message.ack()


if __name__ == "__main__":
    main()
