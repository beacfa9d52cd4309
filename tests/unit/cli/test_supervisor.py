"""What the supervisor reads of its servers and tells them."""

import pytest

from cli.child import Ready, parse_ready
from cli.supervisor import address_from_here
from delayd.config import parse_address


def test_a_ready_line_names_role_address_and_process() -> None:
    assert parse_ready("ready delay 127.0.0.1:7401 pid=42") == Ready("delay", "127.0.0.1", 7401, 42)
    assert parse_ready("ready meta ::1:7400 pid=7") == Ready("meta", "::1", 7400, 7)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ready",
        "ready delay",
        "ready delay 127.0.0.1 pid=1",
        "ready delay h:x pid=1",
        "ready delay h:1 pid=x",
        "a b c d",
    ],
)
def test_any_other_line_is_none(line: str) -> None:
    assert parse_ready(line) is None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:7400"),
        ("0.0.0.0", "127.0.0.1:7400"),
        ("::", "[::1]:7400"),
        ("::1", "[::1]:7400"),
        ("meta.internal", "meta.internal:7400"),
    ],
)
def test_a_server_that_listens_everywhere_is_reached_on_this_machine(host: str, address: str) -> None:
    assert address_from_here(host, 7400) == address
    parse_address(address)
