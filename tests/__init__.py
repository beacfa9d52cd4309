"""Tests of delayd, one folder for each way of testing."""
