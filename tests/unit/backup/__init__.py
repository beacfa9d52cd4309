"""Unit tests of delayd.backup, on a disk in memory."""
