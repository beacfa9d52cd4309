"""The results of a SEND: what became of each of its batches, in one head.

Invariant: the results of 4,096 batches fit, whatever each of them says (rule E1). When they would not, sentences are
cut and fewer of the rows at fault are named, but at least one of each batch that named any. A client fails the rows
that are named and sends the others again; if more of them are at fault it is told then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from delayd.wire.frame import Head, HeadValue
from delayd.wire.room import ROWS_BYTES_MAX, cut_text, text_bytes

BATCHES_MAX = 4_096  # In one request; a client that has more of them makes larger batches.
PLAIN_BYTES_MAX = 136  # Room for the names and numbers of a result, and for the code of an error.
ROW_BYTES_MAX = 5  # A row's number in msgpack.
MESSAGE_BYTES_MIN = 96  # A sentence that is cut keeps this much.


def accepted_head(base_sequence: int, count: int, appended_at_ms: int, duplicate: bool, decided: int = 0) -> Head:
    """A batch that was taken, as one of `results`."""
    head: Head = {
        "base_sequence": base_sequence,
        "count": count,
        "appended_at_ms": appended_at_ms,
        "duplicate": duplicate,
    }
    if decided:
        head["decided"] = decided
    return head


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """A batch that was taken."""

    base_sequence: int
    count: int
    appended_at_ms: int
    duplicate: bool
    decided: int = 0  # How many of its rows met others by their keys.
    decisions: bytes = b""  # What was decided about these: as many rows of `delayd.log.ended`, in the answer's body.

    def to_head(self) -> Head:
        """As one of `results`."""
        return accepted_head(self.base_sequence, self.count, self.appended_at_ms, self.duplicate, self.decided)


@dataclass(frozen=True, slots=True)
class RefusedResult:
    """A batch that was refused by name; `rows` are those at fault, as far as it is about rows."""

    code: str
    message: str
    retry_after_ms: int
    rows: Sequence[int]
    next_free_ms: int | None = None  # Said of `quota_reached` only.


def results_head(results: Sequence[AcceptedResult | RefusedResult]) -> list[HeadValue]:
    """The field `results` of the answer."""
    refused = [each for each in results if isinstance(each, RefusedResult)]
    wanted = sum(len(text_bytes(each.message)) + ROW_BYTES_MAX * len(each.rows) for each in refused)
    if PLAIN_BYTES_MAX * len(results) + wanted <= ROWS_BYTES_MAX:
        message_bytes = rows_max = ROWS_BYTES_MAX
    else:
        # Each refused batch has the same share of the room that the plain fields leave.
        share = (ROWS_BYTES_MAX - PLAIN_BYTES_MAX * len(results)) // len(refused)
        message_bytes = max(MESSAGE_BYTES_MIN, share // 4)
        rows_max = max(1, (share - message_bytes) // ROW_BYTES_MAX)
    return [
        _head(each, message_bytes, rows_max) if isinstance(each, RefusedResult) else each.to_head() for each in results
    ]


def results_body(results: Sequence[AcceptedResult | RefusedResult]) -> list[bytes]:
    """The body of the answer: what was decided about the batches, one behind the other."""
    return [each.decisions for each in results if isinstance(each, AcceptedResult) and each.decided]


def _head(refused: RefusedResult, message_bytes: int, rows_max: int) -> Head:
    head: Head = {
        "error": refused.code,
        "message": cut_text(refused.message, message_bytes),
        "retry_after_ms": refused.retry_after_ms,
        "rows": list(refused.rows[:rows_max]),
    }
    if refused.next_free_ms is not None:
        head["next_free_ms"] = refused.next_free_ms
    return head
