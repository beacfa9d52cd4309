"""Tests of the delay server's timers: the wheel, and how hours are loaded into it."""
