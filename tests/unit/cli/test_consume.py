"""What ``delayd consume`` writes of a message, whatever its producer sent."""

import json

import pytest

from cli.consume_command import WRITERS
from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind, DispatchPart
from delayd.client.pulling.message import MessageColumns, MessageView, Pulled, PulledPart
from tests.batches import messages

NAMES = {"text", "json", "raw"}


def view(headers: bytes) -> MessageView:
    """The second of three messages, whose neighbours have good headers."""
    part = DispatchPart(1, 1, 1, 0, 0, 0, 0)
    packed = [b"\x81\xa1a\xa1b", headers, b""]
    data = messages([b"x", b"order 42", b"y"], headers=packed, sequences=range(3), kind=BatchKind.DISPATCH, part=part)
    pulled = Pulled("orders", 1, (PulledPart(parse(data), range(3), 0, 1, received_at_ms=5_000),), 0.0)
    return MessageView(MessageColumns(pulled), 1)


@pytest.mark.parametrize("headers", [b"\xc1\xff", b"\x81\xa1a", b"\x07", b"\x81\xa1a\x1b"])
def test_rule_E2_a_message_whose_headers_can_not_be_decoded_is_shown(headers: bytes) -> None:
    assert set(WRITERS) == NAMES
    text = WRITERS["text"](view(headers)).decode()
    assert "headers that can't be decoded" in text and text.endswith("  order 42\n") and text[:-1].isprintable()
    found = json.loads(WRITERS["json"](view(headers)))
    assert found["body"] == "order 42" and found["headers_base64"] and "headers" not in found
    assert WRITERS["raw"](view(headers)) == b"order 42\n"
