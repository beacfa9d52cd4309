"""Audits of a data directory as Spark tasks, and its logs as a Spark data source."""
