"""Anomalies: days on which a subject's volume, lateness or share of failures left the range of the days before."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from delayd.batch.names import RETRY_PREFIX

from .lateness import ACCURACY
from .run import AskedView

READS = {"lifecycle": AskedView("subject string, deliver_at timestamp, state string, late_ms long")}
FAILED = ("DEAD", "EXPIRED", "IN_DOUBT", "LOST")
# What is looked at, and the least by which it may differ from its usual range without a word.
FLOORS = {"messages": 1.0, "late_p99_ms": 100.0, "failed_share": 0.01}
FLOOR_SHARE = 0.1  # The same as a part of the upper quartile: a subject may send as much on every day.
DAYS_MIN = 5  # From fewer days nobody knows what is usual.


def anomalies(messages: DataFrame, *, days: int, factor: float) -> DataFrame:
    """Compare each day before today with the ``days`` before it, by quartiles, which a single bad day hardly moves.

    An example with a factor of 3: quartiles of 900 and 1,000 messages a day make 600 to 1,300 usual.

    Args:
        messages: the table ``lifecycle``.
        days: how many days before a day say what is usual.
        factor: how many times the distance of the quartiles a value may lie below or above them.
    """
    past = Window.partitionBy("subject", "figure").orderBy("day").rowsBetween(-days, -1)
    low, high = f.col("quartiles")[0], f.col("quartiles")[1]
    spread = f.greatest(high - low, FLOOR_SHARE * high, _floor())
    known = (
        _with_silent_days(_by_day(messages))
        .unpivot(["day", "subject"], [*FLOORS], "figure", "value")
        .withColumn("quartiles", f.percentile("value", f.array(f.lit(0.25), f.lit(0.75))).over(past))
        .withColumn("days", f.count("value").over(past))
        .where(f.col("days") >= DAYS_MIN)
    )
    found = known.select(
        "day",
        "subject",
        "figure",
        "value",
        f.greatest(low - factor * spread, f.lit(0.0)).alias("usual_low"),
        (high + factor * spread).alias("usual_high"),
        "days",
    )
    return found.where(~f.col("value").between(f.col("usual_low"), f.col("usual_high"))).orderBy(
        "day", "subject", "figure"
    )


def _by_day(messages: DataFrame) -> DataFrame:
    day = f.to_date("deliver_at")
    rows = messages.where(~f.col("subject").startswith(RETRY_PREFIX) & (day < f.current_date()))
    return rows.groupBy("subject", day.alias("day")).agg(
        f.count("*").cast("double").alias("messages"),
        f.percentile_approx("late_ms", 0.99, ACCURACY).cast("double").alias("late_p99_ms"),
        (f.count_if(f.col("state").isin(*FAILED)) / f.count("*")).alias("failed_share"),
    )


def _with_silent_days(figures: DataFrame) -> DataFrame:
    """Also the days on which nothing of a subject was due, from its first day to the last day of all subjects."""
    begun = figures.groupBy("subject").agg(f.min("day").alias("first"))
    last = figures.agg(f.max("day").alias("last"))
    every = begun.crossJoin(last).select("subject", f.explode(f.sequence("first", "last")).alias("day"))
    return every.join(figures, ["subject", "day"], "left").fillna(0.0, ["messages"])


def _floor() -> Column:
    cases = [f.when(f.col("figure") == name, floor) for name, floor in FLOORS.items()]
    return f.coalesce(*cases)
