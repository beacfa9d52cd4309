"""Tests of how the delay server files its message log under hours."""
