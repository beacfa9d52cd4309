"""Findings: each message that breaks the books, and why.

Invariant: a finding is a row of numbers until somebody reads it; its sentence is made then, so that an hour with a
million findings costs arrays only.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class FindingKind(IntEnum):
    """The kind of a finding; all but LATE unbalance the books."""

    LOST = 1
    DUPLICATE = 2
    EARLY = 3
    ORPHAN = 4
    MISMATCH = 5  # The dispatch log and the target's log both have the message and differ about it.
    LATE = 6
    CONSERVATION = 7  # Totals that do not add up: of an hour, or of a delay server as a whole.


class Reason(IntEnum):
    """The way a finding shows; its ``value`` and ``other`` fill the sentence."""

    NO_OUTCOME = 1
    NOT_AT_TARGET = 2
    NOT_FILED = 4
    OUTCOMES = 10
    TWICE_AT_TARGET = 11
    TWICE_SCHEDULED = 12
    CLAIMED_EARLY = 20
    OUTCOME_UNSCHEDULED = 30
    TARGET_UNSCHEDULED = 31
    OUTCOME_MISSING = 32
    NEVER_GIVEN = 33
    OTHER_TARGET = 40
    OTHER_OFFSET = 41
    OTHER_CLAIM = 42
    OTHER_APPEND = 43
    OTHER_DUE = 44
    NOT_DISPATCHED = 45
    OTHER_CONTENT = 46
    LATE = 50
    ACCEPTED_DUE = 51
    ACCEPTED_SUBJECT = 52
    ACCEPTED_BODY = 53
    ACCEPTED_CONTENT = 54
    OTHER_HOUR = 55
    FILED_ELSEWHERE = 56
    OTHER_SUBJECT = 57
    OTHER_BATCH = 58
    OTHER_ATTEMPT = 59
    NOBODY_DECIDES = 60
    LEFT_OUT = 61
    ACCEPTED_AT = 62
    CANCELLED_AT_TARGET = 63
    ACCEPTED_EXPIRY = 64
    ACCEPTED_LABELS = 67
    NOT_DECIDED = 65
    OTHER_REASON = 66
    COUNTED = 70


SENTENCES = {
    Reason.NO_OUTCOME: "due {value} ms before the books were read, without an outcome, in no target's log, and its "
    "delay server holds it no more",
    Reason.NOT_AT_TARGET: "the dispatch log says DISPATCHED, the log of target {value:016x} does not hold it",
    Reason.OUTCOMES: "the dispatch log has {value} outcomes",
    Reason.TWICE_AT_TARGET: "the realtime logs hold it {value} times",
    Reason.TWICE_SCHEDULED: "the schedule side holds it {value} times",
    Reason.CLAIMED_EARLY: "claimed at {value}, {other} ms before it was due",
    Reason.OUTCOME_UNSCHEDULED: "the dispatch log has an outcome, nothing was scheduled",
    Reason.TARGET_UNSCHEDULED: "the log of target {value:016x} holds it at offset {other}, nothing was scheduled",
    Reason.OUTCOME_MISSING: "the log of target {value:016x} holds it at offset {other}, decided, without an outcome",
    Reason.OTHER_TARGET: "the dispatch log says target {value:016x}, the log of target {other:016x} holds it",
    Reason.OTHER_OFFSET: "the dispatch log says offset {value}, the target's log holds it at {other}",
    Reason.OTHER_CLAIM: "the dispatch log says claimed at {value}, the target's log {other}",
    Reason.OTHER_APPEND: "the dispatch log says appended at {value}, the target's log {other}",
    Reason.OTHER_DUE: "scheduled for {value}, another log says {other}",
    Reason.NOT_DISPATCHED: "the dispatch log has outcome {value}, the target's log holds it at offset {other}",
    Reason.OTHER_CONTENT: "filed with the content hash {value:016x}, another log says {other:016x}",
    Reason.LATE: "{value} ms late",
    Reason.NOT_FILED: "the message log holds it, and the schedule log of its hour does not",
    Reason.NEVER_GIVEN: "the schedule log holds it, and no message was given this sequence",
    Reason.ACCEPTED_DUE: "accepted for {value}, filed for {other}",
    Reason.ACCEPTED_SUBJECT: "accepted for another subject than it is filed for",
    Reason.ACCEPTED_BODY: "accepted with a body of {value} bytes, filed with one of {other}",
    Reason.ACCEPTED_CONTENT: "accepted with the content hash {value:016x}, filed with {other:016x}",
    Reason.ACCEPTED_AT: "accepted at {value}, filed as accepted at {other}; 0: not past due",
    Reason.ACCEPTED_EXPIRY: "accepted to expire at {value}, filed to expire at {other}; 0: never",
    Reason.ACCEPTED_LABELS: "accepted with other labels (key, tags, ordering key, origin, flags), hash {value:016x}, "
    "than it is filed with, hash {other:016x}; 0: none",
    Reason.OTHER_HOUR: "it is due in another hour than the one whose schedule log holds it",
    Reason.FILED_ELSEWHERE: "the schedule log holds it, and the message log has it in another hour",
    Reason.OTHER_SUBJECT: "the target's log holds it under another subject",
    Reason.OTHER_BATCH: "the dispatch log says batch {value}, or another epoch, the target's log batch {other}",
    Reason.OTHER_ATTEMPT: "the dispatch log says attempt {value}, and a message is handed over once",
    Reason.NOBODY_DECIDES: "the dispatch log has outcome {value}, and nothing that was asked for leads to that",
    Reason.CANCELLED_AT_TARGET: "it was cancelled at {value}, and the target's log holds it at offset {other}",
    Reason.NOT_DECIDED: "the dispatch log says cancelled at {value}; the message log holds it, and no decision of that",
    Reason.OTHER_REASON: "the dispatch log says cancelled for reason {value}, the message log for reason {other}",
    Reason.LEFT_OUT: "its body is left out of the schedule log, and it was not handed over",
    Reason.COUNTED: "the checkpoint counts {value} messages in the hour, its schedule log holds {other}",
}

FINDING = np.dtype(
    [
        ("kind", "u1"),
        ("reason", "u1"),
        ("hour", "<u4"),
        ("subject", "<u4"),
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        ("value", "<u8"),
        ("other", "<u8"),
    ]
)
# The rows under a digest, and their order (docs/formats/acceptance.md).
DIGESTED = np.dtype(
    [
        ("kind", "u1"),
        ("reason", "u1"),
        ("reserved", "<u2"),
        ("subject", "<u4"),
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        ("value", "<u8"),
        ("other", "<u8"),
    ]
)
HEAD = struct.Struct("<QII")  # log_id, hour, rows.
ORDER = ("sequence", "kind", "reason", "deliver_at_ms", "value", "other", "subject")


class Finding(NamedTuple):
    """One message that breaks the books; ``hour`` counts from the epoch, ``log_id`` is its delay server's."""

    hour: int
    kind: FindingKind
    sequence: int
    deliver_at_ms: int
    subject: str
    detail: str
    log_id: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of an hour: FINDING[n], by sequence, and the subjects that they refer to."""

    log_id: int
    table: NDArray[np.void]
    subjects: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Finding]:
        return (self._finding(row) for row in self.table)

    @property
    def sha256(self) -> str:
        """The digest of the findings that unbalance the books, in hex; empty when there are none.

        It is the same whenever these findings are the same: also when the hour was read in parts, and later.
        """
        found = self.table[self.table["kind"] != FindingKind.LATE]
        if not len(found):
            return ""
        used, subject = np.unique(found["subject"], return_inverse=True)
        own = [self.subjects[number] for number in used.tolist()]
        # Parts of an hour number their subjects anew, so only names are the same in each audit.
        names = sorted(set(own))
        number_of = {name: number for number, name in enumerate(names)}
        rows = np.zeros(len(found), DIGESTED)
        for name in ("kind", "reason", "sequence", "deliver_at_ms", "value", "other"):
            rows[name] = found[name]
        rows["value"][rows["reason"] == Reason.NO_OUTCOME] = 0  # For how long it waited: more in each audit.
        rows["subject"] = np.array([number_of[name] for name in own], np.uint32)[subject]
        rows = rows[np.lexsort([rows[name] for name in reversed(ORDER)])]
        digest = hashlib.sha256(HEAD.pack(self.log_id, int(found["hour"][0]), len(rows)))
        digest.update(rows.tobytes())
        for name in names:
            text = name.encode()
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.hexdigest()

    def first(self, limit: int | None) -> list[Finding]:
        """At most ``limit`` findings that unbalance the books, and at most ``limit`` others; None for all."""
        late = self.table["kind"] == FindingKind.LATE
        rows = np.concatenate((np.flatnonzero(~late)[:limit], np.flatnonzero(late)[:limit]))
        return [self._finding(row) for row in self.table[rows]]

    def _finding(self, row: np.void) -> Finding:
        detail = SENTENCES[Reason(row["reason"])].format(value=int(row["value"]), other=int(row["other"]))
        return Finding(
            hour=int(row["hour"]),
            kind=FindingKind(row["kind"]),
            sequence=int(row["sequence"]),
            deliver_at_ms=int(row["deliver_at_ms"]),
            subject=self.subjects[row["subject"]],
            detail=detail,
            log_id=self.log_id,
        )


def join_findings(parts: Sequence[Findings]) -> Findings:
    """The findings of an hour that was audited in parts."""
    if len(parts) == 1:
        return parts[0]
    tables, subjects = [], list[str]()
    for part in parts:
        table = part.table.copy()
        table["subject"] += np.uint32(len(subjects))
        tables.append(table)
        subjects += part.subjects
    joined = np.concatenate(tables)
    joined = joined[np.lexsort((joined["reason"], joined["kind"], joined["sequence"]))]
    return Findings(parts[0].log_id, joined, tuple(subjects))
