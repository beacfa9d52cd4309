"""Cancel each order that is not paid in time.

An order schedules one message, due when its time to pay is over. A message need not be taken back when the customer
pays: whoever gets it looks first. The look and the change are one statement that may run twice, so a message that
comes again, as after a lost acknowledgement, does no harm.

    delayd up
    python examples/order_timeout.py --orders 10 --pay-within 2
"""

import argparse
import os
import sqlite3
import uuid
from datetime import timedelta

import delayd

SUBJECT = "orders.timeout"


def main() -> None:
    """Cancel each order that is not paid in time."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--orders", type=int, default=10, metavar="N")
    parser.add_argument("--pay-within", type=float, default=2.0, metavar="SECONDS")
    arguments = parser.parse_args()

    shop = sqlite3.connect(":memory:")
    shop.execute("create table orders (id text primary key, state text not null)")
    orders = [uuid.uuid4().hex for _ in range(arguments.orders)]
    with delayd.Producer(arguments.meta) as producer:
        for order in orders:
            # First the message, then the order: a crash between the two leaves a message without an order, which does
            # nothing. The other way round it would leave an order that nobody ever cancels.
            producer.send(SUBJECT, order.encode(), delay=timedelta(seconds=arguments.pay_within))
            shop.execute("insert into orders values (?, 'waiting')", [order])
    for order in orders[::2]:
        shop.execute("update orders set state = 'paid' where id = ? and state = 'waiting'", [order])
    print(f"{len(orders)} orders wait {arguments.pay_within:g} s for their payment, {len(orders[::2])} are paid")

    left = set(orders)
    with delayd.Consumer(arguments.meta, SUBJECT, "shop") as consumer:
        while left:
            for message in consumer.pull(wait=timedelta(seconds=5)):
                order = message.body.decode()
                change = "update orders set state = 'cancelled' where id = ? and state = 'waiting'"
                if shop.execute(change, [order]).rowcount:
                    print(f"order {order[:8]} is cancelled, {message.late_ms} ms after its time was over")
                message.ack()
                left.discard(order)
    print(*(f"{state}: {count}" for state, count in shop.execute("select state, count(*) from orders group by state")))


if __name__ == "__main__":
    main()
