"""Findings: each message of an hour that breaks the books, and why; its figures; and what operators accept of it.

Invariants. A finding is a row of numbers until somebody reads it; its sentence is made then, so that an hour with a
million findings costs arrays only. ``scheduled == dispatched + dead + cancelled + expired + in_doubt + pending +
undecided + waiting + missing``. Lateness is counted by the steps of `delayd.machine.histogram`, so hours are summed by
adding their counts. An acceptance is a file that is whole or not there, and is never changed
(docs/formats/acceptance.md, version 1): it is read without a lock, and of two that are written at once both are kept.
"""

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from itertools import count
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.errors import BadArgument, DamagedData, DataError, NewerFormat
from delayd.hours import INSTANT_MS_MAX, hour_from_name, hour_name
from delayd.machine.disk import FILE_MODE, Disk, RealDisk, create_whole, open_named
from delayd.machine.histogram import NO_COUNTS, quantile_of
from delayd.outcome import Outcome
from delayd.reading.explanations import STEPS, Explanation
from delayd.reading.files.directory import Directory, Role
from delayd.reading.subject_figures import CLASSES, NO_SUBJECTS, SubjectFigures, SubjectSums
from delayd.secret import Secret

# A finding as it is kept, and as it is under a digest (docs/formats/acceptance.md).
FINDING = np.dtype(
    [
        ("kind", "u1"),
        ("cause", "u1"),
        ("reserved", "<u2"),
        ("subject", "<u4"),
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        ("value", "<u8"),
        ("other", "<u8"),
    ]
)
HEAD = struct.Struct("<QII")  # log_id, hour, rows.
ORDER = ("sequence", "kind", "cause", "deliver_at_ms", "value", "other", "subject")
QUANTILES = (0.5, 0.99, 0.999)
EXAMPLES = 3  # Of findings with one cause.
FOLDER = "acceptances"  # In a delay server's folder.
FILE_NAME = re.compile(r"([0-9]{10})\.[0-9]+\.note")
VERSION = 1
FILE_BYTES_MAX = 64 << 10  # Longer words than BY_MAX and REASON_MAX allow, also when each character is escaped.
BY_MAX = 200
REASON_MAX = 2_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOG_ID = re.compile(r"[0-9a-f]{16}")
HourKey = tuple[int, int]
"""The log_id of a delay server and an hour of it."""


class FindingKind(IntEnum):
    """The kind of a finding; all but LATE unbalance the books."""

    LOST = 1
    DUPLICATE = 2
    EARLY = 3
    ORPHAN = 4
    MISMATCH = 5  # The dispatch log and the target's log both have the message and differ about it.
    LATE = 6
    CONSERVATION = 7  # Totals that do not add up: of an hour, or of a delay server as a whole.


class Cause(IntEnum):
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
    OTHER_ROW = 68
    COUNTED = 70


# What each finding says, by its kind; docs/audit.md lists them.
SENTENCES: Mapping[FindingKind, Mapping[Cause, str]] = {
    FindingKind.LOST: {
        Cause.NO_OUTCOME: "due {value} ms before the books were read, without an outcome, in no target's log, and its "
        "delay server holds it no more",
        Cause.NOT_AT_TARGET: "the dispatch log says DISPATCHED, the log of target {value:016x} does not hold it",
        Cause.NOT_FILED: "the message log holds it, and the schedule log of its hour does not",
    },
    FindingKind.DUPLICATE: {
        Cause.OUTCOMES: "the dispatch log has {value} outcomes",
        Cause.TWICE_AT_TARGET: "the realtime logs hold it {value} times",
        Cause.TWICE_SCHEDULED: "the schedule side holds it {value} times",
    },
    FindingKind.EARLY: {
        Cause.CLAIMED_EARLY: "claimed at {value}, {other} ms before it was due",
    },
    FindingKind.ORPHAN: {
        Cause.OUTCOME_UNSCHEDULED: "the dispatch log has an outcome, nothing was scheduled",
        Cause.TARGET_UNSCHEDULED: "the log of target {value:016x} holds it at offset {other}, nothing was scheduled",
        Cause.OUTCOME_MISSING: "the log of target {value:016x} holds it at offset {other}, decided, without an outcome",
        Cause.NEVER_GIVEN: "the schedule log holds it, and no message was given this sequence",
    },
    FindingKind.MISMATCH: {
        Cause.OTHER_TARGET: "the dispatch log says target {value:016x}, the log of target {other:016x} holds it",
        Cause.OTHER_OFFSET: "the dispatch log says offset {value}, the target's log holds it at {other}",
        Cause.OTHER_CLAIM: "the dispatch log says claimed at {value}, the target's log {other}",
        Cause.OTHER_APPEND: "the dispatch log says appended at {value}, the target's log {other}",
        Cause.OTHER_DUE: "scheduled for {value}, another log says {other}",
        Cause.NOT_DISPATCHED: "the dispatch log has outcome {value}, the target's log holds it at offset {other}",
        Cause.OTHER_CONTENT: "filed with the content hash {value:016x}, another log says {other:016x}",
        Cause.ACCEPTED_DUE: "accepted for {value}, filed for {other}",
        Cause.ACCEPTED_SUBJECT: "accepted for another subject than it is filed for",
        Cause.ACCEPTED_BODY: "accepted with a body of {value} bytes, filed with one of {other}",
        Cause.ACCEPTED_CONTENT: "accepted with the content hash {value:016x}, filed with {other:016x}",
        Cause.ACCEPTED_AT: "accepted at {value}, filed as accepted at {other}; 0: not past due",
        Cause.ACCEPTED_EXPIRY: "accepted to expire at {value}, filed to expire at {other}; 0: never",
        Cause.ACCEPTED_LABELS: "accepted with other labels (key, tags, ordering key, origin, flags), hash "
        "{value:016x}, than it is filed with, hash {other:016x}; 0: none",
        Cause.OTHER_HOUR: "it is due in another hour than the one whose schedule log holds it",
        Cause.FILED_ELSEWHERE: "the schedule log holds it, and the message log has it in another hour",
        Cause.OTHER_SUBJECT: "the target's log holds it under another subject",
        Cause.OTHER_BATCH: "the dispatch log says batch {value}, or another epoch, the target's log batch {other}",
        Cause.OTHER_ATTEMPT: "the dispatch log says attempt {value}, and a message is handed over once",
        Cause.NOBODY_DECIDES: "the dispatch log has outcome {value}, and nothing that was asked for leads to that",
        Cause.CANCELLED_AT_TARGET: "it was cancelled at {value}, and the target's log holds it at offset {other}",
        Cause.NOT_DECIDED: "the dispatch log says cancelled at {value}; the message log holds it, and no "
        "decision of that",
        Cause.OTHER_REASON: "the dispatch log says cancelled for reason {value}, the message log for reason {other}",
        Cause.OTHER_ROW: "the dispatch log names message {value} in its place, or another due instant of that, the "
        "message log message {other}",
        Cause.LEFT_OUT: "its body is left out of the schedule log, and it was not handed over",
    },
    FindingKind.LATE: {
        Cause.LATE: "{value} ms late",
    },
    FindingKind.CONSERVATION: {
        Cause.COUNTED: "the checkpoint counts {value} messages in the hour, its schedule log holds {other}",
    },
}
KINDS = {cause: kind for kind, sentences in SENTENCES.items() for cause in sentences}


class Finding(NamedTuple):
    """One message that breaks the books; ``hour`` counts from the epoch, ``log_id`` is its delay server's."""

    hour: int
    kind: FindingKind
    sequence: int
    deliver_at_ms: int
    subject: str
    detail: str
    log_id: int


def conservation(hour: int, log_id: int, what: str) -> Finding:
    """A finding of totals, or of a file; ``hour`` 0 if it concerns no single one, ``log_id`` of the server."""
    return Finding(hour, FindingKind.CONSERVATION, 0, 0, "", what, log_id)


class CausedFindings(NamedTuple):
    """Findings that show the same way and have the same explanation: of one hour, or of many.

    ``examples`` are the latest of late messages, and the first of others. ``hour`` is the one with the most of them.
    """

    log_id: int
    hour: int
    kind: FindingKind
    cause: Cause
    why: Explanation | None  # None: nothing of the files explains a finding of this kind.
    rows: int
    first_due_ms: int
    last_due_ms: int
    late_ms_max: int  # Of LATE ones; 0 of others.
    examples: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of an hour: FINDING[n], by sequence, and the subjects and explanations that they refer to.

    The ``other`` value of a LATE one is the number of its explanation, behind STEPS.
    """

    log_id: int
    hour: int
    table: NDArray[np.void]
    subjects: tuple[str, ...]
    explanations: tuple[Explanation, ...] = ()

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
        rows = found.copy()
        rows["value"][rows["cause"] == Cause.NO_OUTCOME] = 0  # For how long it waited: more in each audit.
        rows["subject"] = np.array([number_of[name] for name in own], np.uint32)[subject]
        rows = rows[np.lexsort([rows[name] for name in reversed(ORDER)])]
        digest = hashlib.sha256(HEAD.pack(self.log_id, self.hour, len(rows)))
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

    def caused(self) -> list[CausedFindings]:
        """The findings by how they show, and by what explains them; the totals of the hour are left out."""
        table = self.table
        late = table["kind"] == FindingKind.LATE
        keys = table["cause"].astype(np.int64) << 32 | np.where(late, table["other"], 0).astype(np.int64)
        found: list[CausedFindings] = []
        for key in np.unique(keys).tolist():
            own = table[keys == key]
            kind, cause, why = FindingKind(own["kind"][0]), Cause(key >> 32), None
            shown, due_ms, late_ms_max = own[:EXAMPLES], own["deliver_at_ms"], 0
            if kind is FindingKind.LATE:
                why = (*STEPS, *self.explanations)[key & 0xFFFFFFFF]
                shown = own[np.argsort(-own["value"].astype(np.int64), kind="stable")[:EXAMPLES]]
                late_ms_max = int(own["value"].max())
            span = int(due_ms.min()), int(due_ms.max()), late_ms_max
            examples = tuple(map(self._finding, shown))
            found.append(CausedFindings(self.log_id, self.hour, kind, cause, why, len(own), *span, examples))
        return found

    def _finding(self, row: np.void) -> Finding:
        kind = FindingKind(row["kind"])
        detail = SENTENCES[kind][Cause(row["cause"])].format(value=int(row["value"]), other=int(row["other"]))
        numbers = int(row["sequence"]), int(row["deliver_at_ms"]), self.subjects[row["subject"]]
        return Finding(self.hour, kind, *numbers, detail, self.log_id)


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
    joined = joined[np.lexsort((joined["cause"], joined["kind"], joined["sequence"]))]
    return Findings(parts[0].log_id, parts[0].hour, joined, tuple(subjects), parts[0].explanations)


class ServerRows(NamedTuple):
    """Rows of an hour of which the directory of another server, a ``role`` and its ``log_id``, would say more."""

    role: Role
    log_id: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class HourSummary:
    """One hour of one delay server; ``hour`` counts from the epoch. In a sum over hours both are 0.

    Counts from ``dispatched`` to ``missing`` are classes of scheduled rows; those from ``lost`` to ``late`` count
    messages with such a finding. ``late_ms_max`` and ``lateness`` are of rows that were not past due when accepted.
    """

    log_id: int = 0
    hour: int = 0
    scheduled: int = 0
    dispatched: int = 0
    dead: int = 0
    cancelled: int = 0
    expired: int = 0
    in_doubt: int = 0
    pending: int = 0  # Not due yet.
    undecided: int = 0  # Due, without a known outcome yet: in flight.
    waiting: int = 0  # Due for longer, while a server that it needs is away or was away just now.
    # Without an outcome though all servers were up for long enough, or not where the dispatch log says.
    missing: int = 0
    lost: int = 0
    duplicate: int = 0
    early: int = 0
    orphan: int = 0
    mismatch: int = 0
    conservation: int = 0
    late: int = 0
    unproven: int = 0  # Dispatched by the dispatch log; the target's retention has removed the row.
    moved: int = 0  # Cancelled rows that live on as other rows, which are scheduled where they went.
    redriven: int = 0  # Moved rows that were dead letters, and were sent to their group again.
    past_due: int = 0  # Dispatched rows that were already due when accepted.
    late_ms_max: int = 0
    lateness: NDArray[np.int64] = field(default_factory=lambda: NO_COUNTS, repr=False)
    past_due_lateness: NDArray[np.int64] = field(default_factory=lambda: NO_COUNTS, repr=False)
    # Unproven rows of realtime servers that are not here, and rows that were drained to delay servers, here or not.
    elsewhere: tuple[ServerRows, ...] = ()
    # Of an hour it is empty in a report, which has that of the total only.
    subjects: SubjectFigures = field(default_factory=lambda: NO_SUBJECTS, repr=False)

    @property
    def balanced(self) -> bool:
        """Whether nothing is lost, doubled, early, without origin or contradictory; a late message is no imbalance."""
        faults = self.lost, self.duplicate, self.early, self.orphan, self.mismatch, self.conservation
        return not any(faults)

    @property
    def equation(self) -> str:
        """What became of the scheduled rows, as people read it: ``scheduled 3 = dispatched 2 + pending 1``."""
        classes = [(name, getattr(self, name)) for name in CLASSES]
        parts = " + ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in classes if count) or "0"
        return f"scheduled {self.scheduled:,} = {parts}"

    def late_ms(self, quantile: float) -> int | None:
        """Lateness at a quantile, such as 0.99; None when nothing was dispatched."""
        found = quantile_of(self.lateness, quantile)
        return None if found is None else min(found, self.late_ms_max)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HourSummary):
            return NotImplemented
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in FIGURES)
        return self.subjects == other.subjects and self.elsewhere == other.elsewhere and all(same)


FIGURES = tuple(figure.name for figure in fields(HourSummary))[:-2]
assert FIGURES[3 : 3 + len(CLASSES)] == CLASSES, "the classes add up to `scheduled`"
assert {outcome.word for outcome in Outcome} <= {*CLASSES}, "each outcome has a figure"
COUNTS = FIGURES[2:-2]  # The figures that are single numbers; the last of them is a maximum, the others are sums.


def join_parts(parts: Sequence[HourSummary]) -> HourSummary:
    """The figures of an hour that was audited in parts."""
    return replace(sum_up(parts), log_id=parts[0].log_id, hour=parts[0].hour)


def sum_up(hours: Iterable[HourSummary]) -> HourSummary:
    """Add up the figures of hours."""
    listed = list(hours)
    sums = {name: sum(int(getattr(hour, name)) for hour in listed) for name in COUNTS}
    sums["late_ms_max"] = max((hour.late_ms_max for hour in listed), default=0)
    subjects = SubjectSums()
    elsewhere: Counter[tuple[Role, int]] = Counter()
    for hour in listed:
        subjects.add(hour.subjects.names, hour.subjects.counts)
        elsewhere.update({(role, log_id): rows for role, log_id, rows in hour.elsewhere})
    return HourSummary(
        **sums,
        subjects=subjects.figures(),
        elsewhere=tuple(ServerRows(*server, rows) for server, rows in sorted(elsewhere.items())),
        lateness=_sum(hour.lateness for hour in listed),
        past_due_lateness=_sum(hour.past_due_lateness for hour in listed),
    )


def _sum(histograms: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    total = NO_COUNTS.copy()
    for counts in histograms:
        if counts is not NO_COUNTS:
            total += counts
    return total


class Acceptance(NamedTuple):
    """The word of an operator on an hour of one delay server; ``findings_sha256`` is the digest of what was found."""

    log_id: int
    hour: int
    findings_sha256: str
    by: str
    reason: str
    at_ms: int

    def encode(self) -> bytes:
        fields = {
            "version": VERSION,
            "log_id": f"{self.log_id:016x}",
            "hour": hour_name(self.hour),
            "findings_sha256": self.findings_sha256,
            "by": self.by,
            "reason": self.reason,
            "at_ms": self.at_ms,
        }
        return json.dumps(fields).encode()


class StoredAcceptance(NamedTuple):
    """One file; ``log_id`` and ``hour`` are of the place where it lies. It has an ``acceptance`` or an ``error``."""

    path: str
    log_id: int
    hour: int
    acceptance: Acceptance | None
    line: bytes
    signature: bytes
    error: DataError | None

    @property
    def size_bytes(self) -> int:
        return len(_file_of(self.line, self.signature)) if self.acceptance else 0


class AcceptanceState(StrEnum):
    """What an acceptance is worth; only ACCEPTED makes an audit quiet about its hour."""

    ACCEPTED = "accepted"
    DIFFERS = "differs"  # It is of other findings than those of now.
    NOT_SIGNED = "not_signed"  # Its signature is missing, or not made with this secret over these words.
    NOT_VERIFIED = "not_verified"  # Nobody gave a secret to verify it with.
    UNREADABLE = "unreadable"


class JudgedAcceptance(NamedTuple):
    """An acceptance, and what it is worth."""

    stored: StoredAcceptance
    state: AcceptanceState

    @property
    def key(self) -> HourKey:
        return self.stored.log_id, self.stored.hour


def check_words(by: str, reason: str) -> None:
    """Raise BadArgument when a name or a reason is empty, too long, or has characters that control a terminal."""
    for what, text, length_max in (("the name", by, BY_MAX), ("the reason", reason, REASON_MAX)):
        if not text.strip() or len(text) > length_max or not text.isprintable():
            raise BadArgument(f"{what} must be one line of 1 to {length_max:,} characters; it says who accepts, or why")


def write_acceptance(folder: str, acceptance: Acceptance, secret: Secret) -> str:
    """Sign an acceptance and keep it in a delay server's folder; durable on return, which is the path of its file.

    The server may run: it neither reads nor removes these files.

    Raises:
        DiskFull, NotWritable: nothing was written.
    """
    line = acceptance.encode()
    data = _file_of(line, secret.note_signature(line))
    RealDisk().make_folder(f"{folder}/{FOLDER}")
    for number in count(1):
        path = f"{folder}/{FOLDER}/{hour_name(acceptance.hour)}.{number}.note"
        try:
            create_whole(path, data, FILE_MODE)
        except FileExistsError:
            continue
        return path
    raise AssertionError("there is always a higher number")


def acceptance_files(disk: Disk, folder: str) -> list[str]:
    """The names of the acceptances in a delay server's folder; a file that a crash left unfinished is none."""
    return [name for name in disk.list_folder(f"{folder}/{FOLDER}") if FILE_NAME.fullmatch(name)]


def read_acceptances(
    disk: Disk, directory: Directory, hours: Container[int] | None = None
) -> Iterator[StoredAcceptance]:
    """Read the acceptances of a delay server, of all hours or of some; those that can't be read have an error."""
    for name in acceptance_files(disk, directory.path):
        path = f"{directory.path}/{FOLDER}/{name}"
        try:
            hour = hour_from_name(name.partition(".")[0])
        except BadArgument as error:
            yield StoredAcceptance(path, directory.log_id, 0, None, b"", b"", DamagedData(path, 0, error.message))
            continue
        if hours is not None and hour not in hours:
            continue
        try:
            acceptance, line, signature = _read(disk, path)
            if (acceptance.log_id, acceptance.hour) != (directory.log_id, hour):
                raise DamagedData(path, 0, "it is of another hour or of another delay server than its place says")
        except FileNotFoundError:
            continue  # Somebody took it back just now.
        except DataError as error:
            yield StoredAcceptance(path, directory.log_id, hour, None, b"", b"", error)
        else:
            yield StoredAcceptance(path, directory.log_id, hour, acceptance, line, signature, None)


def judge(
    found: Iterable[StoredAcceptance], digests: Mapping[HourKey, str], secret: Secret | None
) -> list[JudgedAcceptance]:
    """What acceptances are worth, given the digests of today's findings; by server, hour and instant.

    Of those that fit an hour only the newest is returned, and then none that are of other findings; of these, too, the
    newest.
    """
    judged = [JudgedAcceptance(each, _state(each, digests.get((each.log_id, each.hour), ""), secret)) for each in found]
    judged.sort(key=lambda each: (*each.key, each.stored.acceptance.at_ms if each.stored.acceptance else 0))
    newest: dict[HourKey, JudgedAcceptance] = {}
    for each in judged:
        said = newest.get(each.key)
        if each.state is AcceptanceState.ACCEPTED or (
            each.state is AcceptanceState.DIFFERS and (said is None or said.state is AcceptanceState.DIFFERS)
        ):
            newest[each.key] = each
    superseded = AcceptanceState.ACCEPTED, AcceptanceState.DIFFERS
    return [each for each in judged if each.state not in superseded or newest[each.key] is each]


def _state(stored: StoredAcceptance, digest: str, secret: Secret | None) -> AcceptanceState:
    if stored.acceptance is None:
        return AcceptanceState.UNREADABLE
    if secret is None:
        return AcceptanceState.NOT_VERIFIED
    if not secret.is_note_signature(stored.signature, stored.line):
        return AcceptanceState.NOT_SIGNED
    return AcceptanceState.ACCEPTED if stored.acceptance.findings_sha256 == digest else AcceptanceState.DIFFERS


def _file_of(line: bytes, signature: bytes) -> bytes:
    text = line + b"\n" + signature.hex().encode() + b"\n"
    return text + f"{crc32c(text):08x}\n".encode()


def _read(disk: Disk, path: str) -> tuple[Acceptance, bytes, bytes]:
    with closing(open_named(disk, path)) as file:
        data = file.pread(FILE_BYTES_MAX, 0)
    line, _, rest = data.partition(b"\n")
    digits = rest.partition(b"\n")[0]
    try:
        signature = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        signature = b""
    if _file_of(line, signature) != data:
        raise DamagedData(path, 0, "its checksum differs, or it does not have three lines")
    return _decode(path, line), line, signature


def _decode(path: str, line: bytes) -> Acceptance:
    try:
        fields: object = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    match fields:
        case {"version": int(version)} if version > VERSION:
            raise NewerFormat(path, version, VERSION)
        case {
            "version": 1,
            "log_id": str(log_id),
            "hour": str(hour),
            "findings_sha256": str(sha256),
            "by": str(by),
            "reason": str(reason),
            "at_ms": int(at_ms),
        } if _LOG_ID.fullmatch(log_id) and _SHA256.fullmatch(sha256) and 0 <= at_ms <= INSTANT_MS_MAX:
            try:
                check_words(by, reason)
                return Acceptance(int(log_id, 16), hour_from_name(hour), sha256, by, reason, at_ms)
            except BadArgument as error:
                raise DamagedData(path, 0, error.message) from error
    raise DamagedData(path, 0, "it is no acceptance of findings")
