"""What waits for an operator at a server, and what the server refuses for now, as STATUS tells it (docs/protocol.md).

Invariant: an entry says what waits and why, each in at most `TEXT_MAX` bytes, and which command helps. A command is
told whole, because nobody can type one that was cut. A list has at most `WAITS_MAX` entries and `WAITS_BYTES_MAX`, so
that an answer with two of them always fits a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from delayd.errors import BadRequest
from delayd.machine.operating import Wait
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_list
from delayd.wire.room import TEXT_PREFIX_BYTES_MAX, cut_text, text_bytes

WAITS_MAX = 100
TEXT_MAX = 500
COMMAND_MAX = 6_000  # A path has at most 4,096 bytes, and 1,024 slots are 2,600.
WAITS_BYTES_MAX = 384 << 10  # A hundred entries at a usual length are a tenth of it.
_SIZES = (TEXT_MAX, TEXT_MAX, COMMAND_MAX)


def waits_head(waits: Iterable[Wait]) -> list[HeadValue]:
    """The list as it stands in an answer: as many of the first ones as there is room for."""
    rows: list[HeadValue] = []
    left = WAITS_BYTES_MAX
    for wait in islice(waits, WAITS_MAX):
        row: list[HeadValue] = [cut_text(*each) for each in zip(wait, _SIZES, strict=True)]
        left -= sum(len(text_bytes(str(text))) + TEXT_PREFIX_BYTES_MAX for text in row)
        if left < 0:
            break
        rows.append(row)
    return rows


def read_waits(head: Head, name: str) -> list[Wait]:
    """The list of an answer; BadRequest when it is something else."""
    found: list[Wait] = []
    for row in need_list(head, name):
        texts = [text for text in row if isinstance(text, str)] if isinstance(row, list) else []
        if not isinstance(row, list) or len(row) != len(Wait._fields) or len(texts) != len(row):
            raise BadRequest(f"{name} has an entry that is not three texts", field=name)
        found.append(Wait._make(texts))
    return found
