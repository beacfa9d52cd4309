"""Tests of the index of keys."""
