"""The meta core."""
