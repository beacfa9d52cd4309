"""Ask Spark about the logs: what became of each subject's messages, how late, and what has no outcome.

The logs of a data directory are a data source; nothing has to be registered. What is due and has no outcome may be in
flight: `delayd spark-audit` knows when that is no excuse, and has the last word. Needs `pip install 'delayd[spark]'`
and Java 17.

    delayd up --data delayd-data
    python examples/spark_audit.py --data delayd-data
"""

import argparse
import os
import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql import functions as f


def main() -> None:
    """Ask Spark about the logs of a data directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", default="delayd-data", metavar="DIR", help="as given to `delayd up`")
    parser.add_argument("--master", default="local[2]")
    arguments = parser.parse_args()

    # Else Spark starts the first `python3` of the path for its workers, and that one may not have delayd.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(arguments.master).config("spark.log.level", "ERROR")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.ui.enabled", "false").getOrCreate()
    now_ms = time.time_ns() // 1_000_000  # Before the logs are read: what comes due meanwhile is not overdue.
    messages = spark.read.format("delayd").load(arguments.data).cache()  # One row a message, from the three logs.
    by_subject = messages.groupBy("subject").agg(
        f.count("*").alias("scheduled"),
        f.count("outcome").alias("decided"),
        f.percentile_approx("late_ms", 0.5).alias("late_p50_ms"),
        f.percentile_approx("late_ms", 0.99).alias("late_p99_ms"),
    )
    by_subject.orderBy("subject").show(100, truncate=False)

    undecided = messages.where(messages.outcome.isNull())
    overdue = undecided.where(undecided.deliver_at_ms < now_ms - 10_000).count()
    early = messages.where(messages.claimed_at_ms < messages.deliver_at_ms).count()

    # Dispatch against schedule, from the logs themselves: outcomes that nothing scheduled, and doubled ones.
    message = ["log_id", "hour", "sequence"]
    dispatch = spark.read.format("delayd").option("view", "dispatch").load(arguments.data)
    doubled = dispatch.groupBy(message).count().where("count > 1").count()
    print(f"pending {undecided.count() - overdue}, overdue {overdue}, doubled {doubled}, early {early}")
    spark.stop()


if __name__ == "__main__":
    main()
