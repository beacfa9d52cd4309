"""Fakes that stand in for disk, clock, executor and state, for tests here and elsewhere."""
