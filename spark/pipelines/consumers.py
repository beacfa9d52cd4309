"""Consumers: what became of messages in groups of consumers: attempts, retries, dead letters, time to acknowledge."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from delayd.batch.names import RETRY_PREFIX

from .forecast import is_dead_letter
from .run import AskedView

NAMES = ("log_id", "group_id", "subject", "consumers")
COUNTS = ("pulled", "redelivered", "acknowledged", "given_back", "sent_back", "lapsed", "outstanding", "gaps")
TIMES = ("ack_ms_total", "ack_ms_max")
READS = {
    "consumption": AskedView(
        ", ".join([*(f"{name} string" for name in NAMES), *(f"{name} long" for name in (*COUNTS, *TIMES))])
    ),
    "lifecycle": AskedView("subject string, state string, reason string, tags array<string>", "tags"),
}
# A group at one realtime server; also the columns by which frames here are joined.
GROUP = ["server", "number"]


def consumers(groups: DataFrame, messages: DataFrame) -> DataFrame:
    """Sum up the work of each group, with the messages that it gave back to come again, and its dead letters.

    Args:
        groups: the table ``consumption``, which covers pull logs as far as they are kept.
        messages: the table ``lifecycle``, whose rows of retry subjects are those that groups have sent back.
    """
    rows, retry = _by_id(groups), _is_of_retries()
    names = f.broadcast(_names(rows.where(~retry)))
    own = rows.where(~retry).withColumnRenamed("consumers", "group")
    of_retries = rows.where(retry).drop("subject", "consumers").join(names, GROUP, "left")
    sent_back = _sent_back(messages).join(f.broadcast(rows.select(*GROUP).distinct()), GROUP).join(names, GROUP, "left")
    counts = (*COUNTS, *(name for name in sent_back.columns if name not in (*GROUP, "subject", "group")))
    acknowledged, total_ms = f.sum("acknowledged"), f.sum("ack_ms_total")
    return (
        own.unionByName(of_retries)
        .unionByName(sent_back, allowMissingColumns=True)
        .groupBy("subject", "group")
        .agg(
            *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in counts),
            f.when(acknowledged > 0, f.round(total_ms / acknowledged).cast("long")).alias("ack_ms_mean"),
            f.when(acknowledged > 0, f.max("ack_ms_max")).alias("ack_ms_max"),
        )
        .orderBy("subject", "group")
    )


def _by_id(groups: DataFrame) -> DataFrame:
    """The same rows, each with the group that it belongs to: messages that come again come by a group on the retry
    subject, whose work counts for that one.
    """
    retry = _is_of_retries()
    server, number = _group_of_subject()
    return groups.withColumns(
        {
            "server": f.when(retry, server).otherwise(f.col("log_id")),
            "number": f.when(retry, number).otherwise(f.col("group_id")),
        }
    ).select(*GROUP, "subject", "consumers", *COUNTS, *TIMES)


def _names(own: DataFrame) -> DataFrame:
    """Subject and name of each group. Earlier versions gave ids again: an id of two groups is left out, because nobody
    knows whose messages came again under it.
    """
    names = own.select(*GROUP, "subject", f.col("consumers").alias("group")).distinct()
    alone = names.groupBy(*GROUP).agg(f.count(f.lit(1)).alias("groups")).where("groups = 1").select(*GROUP)
    return names.join(alone, GROUP)


def _sent_back(messages: DataFrame) -> DataFrame:
    ended, moved = f.col("state") == "CANCELLED", f.col("reason").eqNullSafe("MOVED")
    counts = {
        "retries": ~is_dead_letter(),
        "dead_waiting": is_dead_letter() & (f.col("state") == "PENDING"),
        "dead_redriven": is_dead_letter() & ended & moved,
        "dead_purged": is_dead_letter() & ended & ~moved,
    }
    server, number = _group_of_subject()
    rows = messages.where(f.col("subject").startswith(RETRY_PREFIX))
    chosen = (f.count_if(condition).alias(name) for name, condition in counts.items())
    return rows.groupBy(server.alias("server"), number.alias("number")).agg(*chosen)


def _is_of_retries() -> Column:
    return f.coalesce(f.col("subject").startswith(RETRY_PREFIX), f.lit(False))


def _group_of_subject() -> tuple[Column, Column]:
    """The log_id and the group_id in a retry subject, as tables write them."""
    server, number = (f.split_part(f.col("subject"), f.lit("/"), f.lit(part)) for part in (2, 3))
    return server, f.lower(f.lpad(f.conv(number, 10, 16), 8, "0"))
