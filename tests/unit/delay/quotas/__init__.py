"""Quotas of subjects, on the real core."""
