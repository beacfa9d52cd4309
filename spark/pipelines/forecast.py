"""Forecast: what falls due from now on, second by second, against what the receivers can take."""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from delayd.batch.labels import DEAD_TAG

from .lateness import WAITS
from .run import AskedView

READS = {
    "lifecycle": AskedView(
        "subject string, state string, deliver_at timestamp, body_bytes long, tags array<string>", "tags"
    )
}


def forecast(messages: DataFrame, *, capacity: int, quotas: Mapping[str, int]) -> DataFrame:
    """Sum up what is pending by the day on which it is due, for all subjects together and for those with a quota.

    Args:
        messages: the table ``lifecycle``.
        capacity: how many messages a second all consumers together can take.
        quotas: the same of single subjects.
    """
    of_subject = _seconds(messages)
    rows = [(None, capacity), *quotas.items()]
    limits = messages.sparkSession.createDataFrame(rows, "quota_of string, limit_per_s long")
    each = of_subject.where(f.col("subject").isin(*quotas)).select("second", "subject", "messages", "body_bytes")
    total = of_subject.groupBy("second").agg(
        f.lit(None).cast("string").alias("subject"),
        f.sum("messages").alias("messages"),
        f.sum("body_bytes").alias("body_bytes"),
    )
    seconds = total.unionByName(each).join(f.broadcast(limits), f.col("subject").eqNullSafe(f.col("quota_of")))
    over = f.greatest(f.col("messages") - f.col("limit_per_s"), f.lit(0))
    days = seconds.groupBy(f.to_date("second").alias("day"), "subject", "limit_per_s").agg(
        f.sum("messages").alias("messages"),
        f.sum("body_bytes").alias("body_bytes"),
        f.max_by("second", "messages").alias("busiest_at"),
        f.max("messages").alias("busiest_messages"),
        f.count_if(over > 0).alias("seconds_over"),
        f.sum(over).alias("messages_over"),
    )
    return days.orderBy("day", f.col("subject").asc_nulls_first())


def hot_instants(messages: DataFrame, *, top: int) -> DataFrame:
    """Find the seconds in which most of what is pending is due, the fullest first.

    Args:
        messages: the table ``lifecycle``.
        top: how many seconds to name.
    """
    seconds = (
        _seconds(messages)
        .groupBy("second")
        .agg(
            f.sum("messages").alias("messages"),
            f.sum("body_bytes").alias("body_bytes"),
            f.count("*").alias("subjects"),
            f.max_by("subject", "messages").alias("top_subject"),
            f.max("messages").alias("top_messages"),
        )
    )
    return seconds.orderBy(f.col("messages").desc(), "second").limit(top)


def is_dead_letter() -> Column:
    """Whether a row is a dead letter of a group, or was one before somebody moved it."""
    return f.coalesce(f.array_contains("tags", DEAD_TAG), f.lit(False))


def _seconds(messages: DataFrame) -> DataFrame:
    """What is pending, by second and subject. A dead letter only waits to be looked at, so it is no work to come."""
    second = f.date_trunc("second", "deliver_at").alias("second")
    pending = messages.where(f.col("state").isin(*WAITS) & ~is_dead_letter())
    return pending.groupBy(second, "subject").agg(
        f.count("*").alias("messages"), f.sum("body_bytes").alias("body_bytes")
    )
