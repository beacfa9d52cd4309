"""Tests of producers."""
