"""Lateness: how many messages of each subject were due on each day, what became of them, and how late they left."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from .run import AskedView

READS = {
    "lifecycle": AskedView(
        "subject string, deliver_at timestamp, body_bytes long, state string, outcome string, late_ms long"
    )
}
QUANTILES = {"late_p50_ms": 0.5, "late_p99_ms": 0.99, "late_p999_ms": 0.999}
ACCURACY = 10_000  # A quantile is off by at most this part of the rows.
WAITS = ("PENDING", "UNDECIDED", "WAITING")


def lateness(messages: DataFrame, *, late_limit_ms: int) -> DataFrame:
    """Count the rows of ``lifecycle`` by the day on which they were due, and by subject.

    Args:
        messages: the table ``lifecycle``.
        late_limit_ms: a message that left later than this counts as late.
    """
    day = f.to_date("deliver_at").alias("day")
    figures = {
        "scheduled": f.count("*"),
        "dispatched": f.count_if(f.col("outcome") == "DISPATCHED"),
        **{state.lower(): _count("state", state) for state in ("CANCELLED", "EXPIRED", "DEAD", "IN_DOUBT", "LOST")},
        "pending": _count("state", *WAITS),
        "body_bytes": f.sum("body_bytes"),
        "late": f.count_if(f.col("late_ms") > late_limit_ms),
        **{name: f.percentile_approx("late_ms", at, ACCURACY) for name, at in QUANTILES.items()},
        "late_max_ms": f.max("late_ms"),
    }
    return (
        messages.groupBy(day, "subject")
        .agg(*(made.alias(name) for name, made in figures.items()))
        .orderBy("day", "subject")
    )


def _count(column: str, *values: str) -> Column:
    return f.count_if(f.col(column).isin(*values))
