"""Benchmarks: real servers on loopback, one JSON line a result, always bounded and never a test."""
