"""Fuzzing of real servers: well-formed requests at the edges of every field, and broken ones; see `__main__`."""
