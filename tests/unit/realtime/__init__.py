"""Tests of the realtime server's core, without loop, socket or real disk."""
