"""Tests of the delay server's core, without loop, socket or real disk."""
