"""The meta server: knows which servers are alive and which of them serves a subject."""
