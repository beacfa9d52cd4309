"""Committed bytes of each format version."""
