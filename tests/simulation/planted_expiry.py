"""Bugs to plant in what becomes of messages that expire (rule S8)."""

from __future__ import annotations

from delayd.batch.gather import Gathered
from delayd.delay.handoff.sender import Sender
from delayd.delay.rows import Rows
from tests.worlds.patches import Bugs, Patch, changed


def _end_none(
    self: Sender, rows: Rows, gathered: Gathered, subject: bytes, claimed_at_ms: int
) -> tuple[Rows, Gathered]:
    return rows, gathered


IN_EXPIRY: Bugs = {
    "S8: what has expired leaves": [Patch(Sender, "_end_expired", _end_none)],
    "S8: messages end a second before they expire": [
        Patch(
            Sender,
            "_end_expired",
            changed(Sender._end_expired, "expires <= claimed_at_ms", "expires <= claimed_at_ms + 1_000"),
        )
    ],
    "S8: the outcome EXPIRED is not written": [
        Patch(
            Sender,
            "_end_expired",
            changed(Sender._end_expired, 'self._outcomes.record(int(rows["hour"][0]), part, _nothing)', "pass"),
        )
    ],
}
