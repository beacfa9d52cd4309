"""Requests about messages, on the real core."""
