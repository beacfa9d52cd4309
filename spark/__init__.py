"""Audits of a data directory as Spark tasks, and its logs as a Spark data source (docs/audit.md, docs/spark-tables.md).

A map, from the outside in.

    session     the program ``delayd spark-audit``, and the Spark session
    audit       the pure audit of `delayd.reading`, some hours a task
    source      the data source ``spark.read.format("delayd")``
    sink        ``frame.write.format("delayd")``: rows become scheduled messages
    pipelines   ``delayd spark JOB``: questions about the books of a fleet, one job each
"""
