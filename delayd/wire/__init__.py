"""The wire protocol without I/O: bytes in, events and bytes out."""
