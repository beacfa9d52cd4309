"""Draining: what an operator's command asks of a delay server whose pending messages move to others, piece by piece
(docs/protocol.md, DRAIN; docs/drain.md).
"""

from __future__ import annotations

from typing import NamedTuple

from delayd.errors import BadRequest
from delayd.wire.finding import Place
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_u32,
    need_u64,
)
from delayd.wire.slots import SlotSet, need_slots, slots_bytes


class DrainOrder(NamedTuple):
    """One piece of a walk through the pending messages."""

    to: int  # The delay server that gets them; 0: they are only counted.
    slots: SlotSet | None  # Messages whose keys fall into these slots; None: those without a key.
    place: Place = Place()
    until_sequence: int = 0

    def to_head(self) -> dict[str, HeadValue]:
        """As the head of DRAIN."""
        return {
            "to": self.to,
            "slots": None if self.slots is None else slots_bytes(self.slots),
            "hour": self.place.hour,
            "sequence": self.place.sequence,
            "until_sequence": self.until_sequence,
        }


class DrainProgress(NamedTuple):
    """What became of one piece."""

    found: int  # Pending messages that the piece looked at.
    drained: int  # Those of them that leave, durably decided.
    in_flight: int
    unread: int  # Schedule logs that could not be read.
    leaving: int  # Messages that have been decided about and that no other server has taken yet.
    left: int  # At the end of a walk through slots: messages with keys of them that are still here.
    until_sequence: int
    place: Place | None  # Where the next piece begins; None at the end.

    def to_head(self) -> dict[str, HeadValue]:
        """As the head of the answer."""
        head: dict[str, HeadValue] = {**self._asdict()}
        head["next"] = None if self.place is None else list(self.place)
        del head["place"]
        return head


def read_drain_order(head: Head) -> DrainOrder:
    """Read the head of DRAIN; BadRequest when it is none."""
    slots = None if head.get("slots") is None else need_slots(head, "slots")
    place = Place(need_u32(head, "hour"), need_u64(head, "sequence"))
    return DrainOrder(need_u64(head, "to"), slots, place, need_u64(head, "until_sequence"))


def read_drain_progress(head: Head) -> DrainProgress:
    """Read the answer to DRAIN; BadRequest when it is none."""
    match head.get("next"):
        case None:
            place = None
        case [int(hour), int(sequence)] if hour >= 0 and sequence >= 0:
            place = Place(hour, sequence)
        case _:
            raise BadRequest("next is no hour and sequence", field="next")
    return DrainProgress(
        found=need_int(head, "found"),
        drained=need_int(head, "drained"),
        in_flight=need_int(head, "in_flight"),
        unread=need_int(head, "unread"),
        leaving=need_int(head, "leaving"),
        left=need_int(head, "left"),
        until_sequence=need_u64(head, "until_sequence"),
        place=place,
    )
