"""The wire protocol, without a socket."""
