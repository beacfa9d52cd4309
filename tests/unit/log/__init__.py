"""Unit tests of delayd.log, on a disk in memory."""
