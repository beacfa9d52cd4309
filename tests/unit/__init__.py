"""Tests of one part at a time; the folders mirror the sources."""
