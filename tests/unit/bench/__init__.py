"""Tests of what the benchmarks do with their figures; none of them measures anything."""
