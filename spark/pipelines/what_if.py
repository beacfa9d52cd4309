"""What if: the same schedule at another rate, or before another number of servers: how long messages would wait."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from .forecast import is_dead_letter
from .run import AskedView

READS = {"lifecycle": AskedView("deliver_at timestamp, state string, tags array<string>", "tags")}
DAY_S = 86_400


def what_if(messages: DataFrame, *, rate: float, servers: int, per_server: int) -> DataFrame:
    """Let what was due second by second, times ``rate``, wait for servers that together take so many a second.

    An example with a capacity of 10: 25 messages are due in one second, and 5 in the next. The queue has 15 behind the
    first second and 10 behind the second; the last message waits for a second.

    Args:
        messages: the table ``lifecycle``; cancelled messages and dead letters are no work.
        rate: 1.5 is half as much again.
        servers: how many there would be.
        per_server: how many messages a second each of them takes.
    """
    capacity = servers * per_server
    worked = messages.where((f.col("state") != "CANCELLED") & ~is_dead_letter())
    second = f.unix_seconds("deliver_at")
    due = worked.groupBy(second.alias("second")).agg((f.count("*") * rate).alias("messages"))
    # A queue has what came since it was empty, less what the servers took meanwhile. It was empty where the sum of all
    # messages, less the capacity of all seconds, was lowest.
    so_far = Window.orderBy("second").rowsBetween(Window.unboundedPreceding, 0)
    arrived = f.sum("messages").over(so_far)
    behind = arrived - capacity * f.col("second")
    queues = (
        due.withColumn("behind", behind)
        .withColumn("before", f.col("behind") - f.col("messages") + capacity)
        .withColumn("queue", f.greatest(f.col("behind") - f.min("before").over(so_far), f.lit(0.0)))
    )
    at = f.timestamp_seconds("second")
    return (
        queues.groupBy(f.to_date(at).alias("day"))
        .agg(
            f.sum("messages").cast("long").alias("messages"),
            f.lit(capacity).cast("long").alias("capacity_per_s"),
            f.round(f.sum("messages") / (capacity * DAY_S), 4).alias("busy_share"),
            f.max("messages").cast("long").alias("busiest_messages"),
            f.max("queue").cast("long").alias("queue_max"),
            f.max_by(at, "queue").alias("queue_max_at"),
            (f.max("queue") * 1_000 / capacity).cast("long").alias("wait_ms_max"),
        )
        .orderBy("day")
    )
