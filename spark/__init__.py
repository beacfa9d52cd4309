"""Audits of a data directory as Spark tasks."""
