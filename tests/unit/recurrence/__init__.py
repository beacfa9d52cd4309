"""Unit tests of delayd.recurrence: no clock, no file."""
