"""Waits: what waits for an operator at a server, and what the server refuses for now, as STATUS tells it
(docs/protocol.md).

Invariant: an entry says what waits, why, and which command helps, each in at most `TEXT_MAX` bytes; an answer has at
most `WAITS_MAX` of them, so that it always fits a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from delayd.errors import BadRequest
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import need_list
from delayd.wire.room import cut_text

WAITS_MAX = 100
TEXT_MAX = 500
FREE_SPACE = "free space on its disk, or move --data to a larger one"


class Wait(NamedTuple):
    """One state; one in the list ``waits`` needs an operator to end, one in ``refuses`` ends by itself."""

    what: str  # The messages or actions that wait or are refused: `1,200 messages of orders.eu`.
    why: str  # A sentence without its full stop.
    command: str = ""  # The command or action for an operator; empty when there is nothing to do but wait.


def waits_head(waits: Iterable[Wait]) -> list[HeadValue]:
    """The list as it stands in an answer: the first of them, cut."""
    return [[cut_text(text, TEXT_MAX) for text in wait] for wait in islice(waits, WAITS_MAX)]


def clock_waits(role: str) -> Wait:
    """The entry of a server whose clock was not confirmed by anything (rule T1)."""
    held = {"delay": "deliveries after a restart of the machine, and sealing", "realtime": "retention"}[role]
    return Wait(
        f"what can't be undone: {held}",
        "the wall clock jumped, or the machine was restarted, and no other clock has confirmed it yet",
        f"compare it: delayd clock --role {role}; if it is right: delayd clock --role {role} --trust",
    )


def read_waits(head: Head, name: str) -> list[Wait]:
    """The list of an answer; BadRequest when it is something else."""
    found: list[Wait] = []
    for row in need_list(head, name):
        texts = [text for text in row if isinstance(text, str)] if isinstance(row, list) else []
        if not isinstance(row, list) or len(row) != len(Wait._fields) or len(texts) != len(row):
            raise BadRequest(f"{name} has an entry that is not three texts", field=name)
        found.append(Wait._make(texts))
    return found
