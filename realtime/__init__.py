"""The realtime server: keeps due messages and serves them to consumer groups."""
