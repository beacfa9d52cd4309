"""Audits through a local Spark session."""
