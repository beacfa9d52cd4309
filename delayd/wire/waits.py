"""What waits for an operator at a server, and what the server refuses for now, as STATUS tells it (docs/protocol.md).

Invariant: an entry says what waits and why, each in at most `TEXT_MAX` bytes, and which command helps. A command is
told whole, because nobody can type one that was cut. An answer has at most `WAITS_MAX` entries, so that it always fits
a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from delayd.errors import BadRequest
from delayd.waits import Wait
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_list
from delayd.wire.room import cut_text

WAITS_MAX = 100
TEXT_MAX = 500
COMMAND_MAX = 6_000  # A path has at most 4,096 bytes, and 1,024 slots are 2,600; a hundred of these are 600 kB.


def waits_head(waits: Iterable[Wait]) -> list[HeadValue]:
    """The list as it stands in an answer: the first of them, cut."""
    sizes = (TEXT_MAX, TEXT_MAX, COMMAND_MAX)
    return [[cut_text(*each) for each in zip(wait, sizes, strict=True)] for wait in islice(waits, WAITS_MAX)]


def read_waits(head: Head, name: str) -> list[Wait]:
    """The list of an answer; BadRequest when it is something else."""
    found: list[Wait] = []
    for row in need_list(head, name):
        texts = [text for text in row if isinstance(text, str)] if isinstance(row, list) else []
        if not isinstance(row, list) or len(row) != len(Wait._fields) or len(texts) != len(row):
            raise BadRequest(f"{name} has an entry that is not three texts", field=name)
        found.append(Wait._make(texts))
    return found
