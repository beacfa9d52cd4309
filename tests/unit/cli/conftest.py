"""What tests of the command line share."""

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
