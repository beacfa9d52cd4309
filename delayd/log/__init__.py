"""Logs on disk: segments of checksummed groups, recovery, checkpoint and the kinds of log."""
