"""Tests of what delayd gives to the tests of others."""
