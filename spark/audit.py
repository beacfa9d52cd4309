"""The audit as Spark tasks.

First tasks scan the realtime logs by segments, then each runs the same pure `audit_hour` on some of the hours.

Invariant: the driver fixes what is read (rule P3) before the tasks for hours run, and a task does no more than a
command without Spark does for the same segments or hours; so the figures are equal.
"""

import os
import pickle
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from delayd.errors import BadArgument, DelaydError, error_by_code
from delayd.hours import hour_from_name, hour_name
from delayd.machine.disk import RealDisk
from delayd.machine.histogram import NO_COUNTS
from delayd.reading.archive.archive_audit import ArchivedResult, HourFiles, audit_archived
from delayd.reading.archive.store import open_store
from delayd.reading.arrow import TIMESTAMP
from delayd.reading.audit import AuditTerms
from delayd.reading.books import AuditReport, HourResult, audit_plan, seal_books
from delayd.reading.explanations import Explanation
from delayd.reading.files.directory import Role
from delayd.reading.files.stored_groups import LogMoved, until_still
from delayd.reading.files.target_index import PIECE_BYTES, Chunk, LogPiece, Scan, scan_piece, split_piece
from delayd.reading.findings import (
    COUNTS,
    Cause,
    CausedFindings,
    Finding,
    FindingKind,
    HourSummary,
    ServerRows,
    conservation,
)
from delayd.reading.fleet import Fleet, plan_fleet
from delayd.reading.plan import AuditPlan
from delayd.reading.proved import ProvedHours
from delayd.reading.subject_figures import FIGURES as SUBJECT_FIGURES
from delayd.reading.subject_figures import SubjectFigures

TASKS_A_CORE = 3  # A task costs 60 to 75 ms, and an hour may be much longer than another.
MOVED = "log_moved"  # The error code of a task whose files went away: the audit starts again.
ROWS_MAX = 1_000  # Of hours or findings in a batch: a batch for each hour costs as much as the audit of a small hour.
SCANNED = pa.schema(
    [
        ("piece", pa.int64()),
        ("number", pa.int64()),
        ("chunk", pa.binary()),
        ("error_code", pa.string()),
        ("error", pa.string()),
    ]
)
FINDING = pa.struct(
    [
        ("kind", pa.string()),
        ("sequence", pa.int64()),
        ("deliver_at_ms", pa.int64()),
        ("deliver_at", TIMESTAMP),
        ("subject", pa.string()),
        ("detail", pa.string()),
    ]
)
CAUSED_FIGURES = ("rows", "first_due_ms", "last_due_ms", "late_ms_max")
# All findings of an hour that show the same way and have the same explanation; ``what`` is null without one.
CAUSED = pa.struct(
    [
        ("kind", pa.string()),
        *((name, pa.int64()) for name in ("cause", *CAUSED_FIGURES)),
        *((name, pa.string()) for name in ("what", "role", "server", "target")),
        *((name, pa.int64()) for name in ("from_ms", "until_ms")),
        ("examples", pa.list_(FINDING)),
    ]
)
SUBJECT = pa.struct([("subject", pa.string()), *((name, pa.int64()) for name in SUBJECT_FIGURES)])
# What was found of an hour of an archive besides its figures, which are null unless it was ``audited``.
ARCHIVED = pa.struct(
    [
        ("audited", pa.bool_()),
        ("faults", pa.list_(pa.struct([("log_id", pa.string()), ("hour", pa.string()), ("detail", pa.string())]))),
        ("deleted_rows", pa.int64()),
    ]
)
ELSEWHERE = pa.struct([("role", pa.string()), ("server", pa.string()), ("rows", pa.int64())])
# Steps of a histogram that were counted, and their counts: most hours have a few of the 608 steps, or none.
STEPS = pa.list_(pa.struct([("step", pa.int64()), ("count", pa.int64())]))
HOUR = pa.schema(
    [
        ("part", pa.int64()),
        ("log_id", pa.string()),
        ("hour", pa.string()),
        *((name, pa.int64()) for name in COUNTS),
        ("lateness", STEPS),
        ("past_due_lateness", STEPS),
        ("elsewhere", pa.list_(ELSEWHERE)),
        ("subjects", pa.list_(SUBJECT)),
        ("findings_count", pa.int64()),
        ("findings", pa.list_(FINDING)),
        ("caused", pa.list_(CAUSED)),
        ("findings_sha256", pa.string()),
        ("seal_differs", pa.list_(pa.string())),  # Null: there is no seal that the hour can be held against.
        ("archived", ARCHIVED),  # Null: the hour was audited from a data directory.
        ("error_code", pa.string()),
        ("error", pa.string()),
    ]
)


class ArchivedPart(NamedTuple):
    """Hours of archives that one task audits."""

    hours: tuple[HourFiles, ...]
    terms: AuditTerms


def audit_data(
    session: SparkSession,
    places: Sequence[str],
    now_ms: int,
    hours: Container[int] | None,
    late_ms_limit: int,
    lost_grace_ms: int,
    findings_limit: int | None,
    tasks: int | None = None,
    proved: ProvedHours | None = None,
) -> AuditReport:
    """Audit directories and archives in a Spark session, as `delayd.reading.fleet.audit_fleet` does without one.

    Example::

        now_ms = time.time_ns() // 1_000_000
        report = audit_data(session, ["/var/lib/delayd", "s3://books/delayd"], now_ms, None, 1_000, 10_000, 1_000)
        print(report.balanced, report.total.lost)

    Args:
        session: where the tasks run. Each worker finds the places under the same paths.
        places: data directories, or copies, and archives.
        now_ms: the wall clock, in milliseconds since the epoch.
        hours: which hours to audit, counted since the epoch; None for all.
        late_ms_limit: a message that left later than this after it was due is LATE.
        lost_grace_ms: a due message without an outcome is LOST only when it was due longer ago than this.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        tasks: how many tasks share the hours; None takes three for each core.
        proved: sealed hours to leave out, by the digests of their seals; see `delayd.reading.proved`.

    Raises:
        BadArgument: ``tasks`` is below 1, or there is nothing to audit.
    """
    tasks = tasks_of(tasks)  # Before anything is read.

    def audit() -> AuditReport:
        fleet = plan_fleet(
            RealDisk(),
            places,
            now_ms=now_ms,
            hours=hours,
            late_ms_limit=late_ms_limit,
            lost_grace_ms=lost_grace_ms,
            scan=scan_in(session),
            proved=proved,
        )
        return collect_frame(session, fleet, findings_limit, tasks)

    return until_still(" ".join(places), audit)


def scan_in(session: SparkSession, bytes_min: int = PIECE_BYTES) -> Scan:
    """A scan of realtime logs by tasks, each of which reads some segments; the driver scans what is too little for two.

    Args:
        session: where the tasks run.
        bytes_min: a task reads at least this much.
    """

    def scan(pieces: Sequence[LogPiece]) -> Iterator[Chunk]:
        disk = RealDisk()
        parts = [part for piece in pieces for part in split_piece(disk, piece, bytes_min)]
        if len(parts) < 2 or sum(part.stop - part.start for part in parts) < bytes_min:
            for part in parts:
                yield from scan_piece(disk, part)
            return
        rows = _numbered(session, parts).mapInArrow(_scan_pieces, from_arrow_schema(SCANNED)).toArrow()
        for row in rows.sort_by([("piece", "ascending"), ("number", "ascending")]).to_pylist():
            _raise_error(row["error_code"], row["error"])
            yield pickle.loads(row["chunk"])

    return scan


def collect_frame(
    session: SparkSession, fleet: Fleet, findings_limit: int | None, tasks: int | None = None
) -> AuditReport:
    """Audit the hours of a fleet. Raises LogMoved when files went away meanwhile."""
    tasks = tasks_of(tasks)
    parts = parts_of(fleet, tasks)
    rows = audit_frame(session, parts, findings_limit).toArrow().to_pylist() if parts else []
    return report_of(rows, fleet, findings_limit)


def parts_of(fleet: Fleet, tasks: int) -> list[AuditPlan | ArchivedPart]:
    """Cut a fleet for so many tasks: the hours of its directories, and those of its archives."""
    hours, terms = fleet.archived_hours(), fleet.plan.terms
    archived = [ArchivedPart(tuple(hours[part::tasks]), terms) for part in range(min(tasks, len(hours)))]
    return [*fleet.plan.split(tasks), *archived]


def report_of(rows: Sequence[dict[str, Any]], fleet: Fleet, findings_limit: int | None) -> AuditReport:
    """Make the report on a fleet from the rows of an `audit_frame`. Raises LogMoved when files went away meanwhile."""
    for row in rows:
        _raise_error(row["error_code"], row["error"])
    live = (_decode(row) for row in rows if row["archived"] is None)
    archived = (_decode_archived(row) for row in rows if row["archived"] is not None)
    return fleet.report(live, archived, findings_limit)


def tasks_of(wanted: str | int | None) -> int:
    """How many tasks share the hours; None takes three for each core. Raises BadArgument for a number below 1."""
    if wanted is None:
        return TASKS_A_CORE * (os.cpu_count() or 1)
    if not str(wanted).isdecimal() or int(wanted) < 1:
        raise BadArgument(f"tasks {wanted!r} is no number of tasks: give 1 or more, or leave it out")
    return int(wanted)


def audit_frame(
    session: SparkSession,
    parts: Sequence[AuditPlan | ArchivedPart],
    findings_limit: int | None,
    tasks: int | None = None,
) -> DataFrame:
    """Audit the hours of plans. The frame has one row for each hour: number of its plan, figures, and first findings.

    Args:
        session: where the tasks run.
        parts: the parts of one plan, or plans of many directories, and hours of archives; at least one.
        findings_limit: how many findings to keep of each hour, None for all.
        tasks: how many tasks share the parts; None takes one task for each part.
    """

    def audit(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, part in _of_numbered(batches):
            yield from audit_part(number, part, findings_limit)

    return _numbered(session, parts, tasks).mapInArrow(audit, from_arrow_schema(HOUR))


def audit_part(number: int, part: AuditPlan | ArchivedPart, findings_limit: int | None) -> Iterator[pa.RecordBatch]:
    """What one task does with the part of this number; an error that the driver must act on is a row."""
    rows: list[dict[str, object]] = []
    findings = 0
    try:
        for row, count in _audited(part, findings_limit):
            rows.append({"part": number, **row})
            findings += count
            if len(rows) >= ROWS_MAX or findings >= ROWS_MAX:
                yield pa.RecordBatch.from_pylist(rows, HOUR)
                rows, findings = [], 0
    except (LogMoved, DelaydError) as error:
        rows.append({"part": number, **_error(error)})
    if rows:
        yield pa.RecordBatch.from_pylist(rows, HOUR)


def _audited(part: AuditPlan | ArchivedPart, findings_limit: int | None) -> Iterator[tuple[dict[str, object], int]]:
    """The hours of a part as rows, each with how many findings it has."""
    if isinstance(part, ArchivedPart):
        stores = cache(open_store)
        for hour in part.hours:
            found = audit_archived(hour, part.terms, findings_limit, stores)
            yield _encode_archived(found), 0 if found.hour is None else found.hour.findings_count
        return
    disk = RealDisk()
    for result in audit_plan(disk, part, None, seal_books(disk, part), findings_limit):
        yield _encode(result), result.findings_count


def _numbered(session: SparkSession, work: Sequence[object], tasks: int | None = None) -> DataFrame:
    """What tasks shall do, in its order; None takes one task for each."""
    table = pa.table({"number": range(len(work)), "work": [pickle.dumps(each) for each in work]})
    # Repartition by range: a hash would put two of them into one task and none into another.
    return session.createDataFrame(table).repartitionByRange(tasks or len(work), "number")


def _of_numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        for number, work in zip(batch.column("number").to_pylist(), batch.column("work").to_pylist(), strict=True):
            yield number, pickle.loads(work)


def _scan_pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for piece, work in _of_numbered(batches):
        row: dict[str, object] = {"piece": piece, "number": -1}
        try:
            for number, chunk in enumerate(scan_piece(RealDisk(), work)):
                yield pa.RecordBatch.from_pylist([{**row, "number": number, "chunk": pickle.dumps(chunk)}], SCANNED)
        except (LogMoved, DelaydError) as error:
            yield pa.RecordBatch.from_pylist([{**row, **_error(error)}], SCANNED)


def _error(error: LogMoved | DelaydError) -> dict[str, str]:
    if isinstance(error, LogMoved):
        return {"error_code": MOVED, "error": str(error)}
    return {"error_code": error.code, "error": error.message}


def _encode(result: HourResult) -> dict[str, object]:
    summary = result.summary
    row: dict[str, object] = {name: getattr(summary, name) for name in COUNTS}
    row |= {
        "log_id": f"{summary.log_id:016x}",
        "hour": hour_name(summary.hour),
        "findings_count": result.findings_count,
    }
    row |= {"findings_sha256": result.sha256, "seal_differs": result.differs}
    row |= {"lateness": _steps(summary.lateness), "past_due_lateness": _steps(summary.past_due_lateness)}
    row["elsewhere"] = [
        {"role": role.value, "server": f"{log_id:016x}", "rows": rows} for role, log_id, rows in summary.elsewhere
    ]
    names = ("subject", *SUBJECT_FIGURES)
    subjects = zip(summary.subjects.names, summary.subjects.counts.tolist(), strict=True)
    row["subjects"] = [dict(zip(names, (name, *counts), strict=True)) for name, counts in subjects]
    row["findings"] = [_finding_row(each) for each in result.findings]
    row["caused"] = [_caused_row(each) for each in result.caused]
    return row


def _encode_archived(found: ArchivedResult) -> dict[str, object]:
    log_id, hour = found.key
    row: dict[str, object] = {"log_id": f"{log_id:016x}", "hour": hour_name(hour)}
    row |= {} if found.hour is None else _encode(found.hour)
    faults = [
        {"log_id": f"{each.log_id:016x}", "hour": hour_name(each.hour), "detail": each.detail} for each in found.faults
    ]
    archived = {"audited": found.hour is not None, "faults": faults, "deleted_rows": found.deleted_rows}
    return {**row, "seal_differs": found.differs, "archived": archived}


def _finding_row(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.kind.name,
        "sequence": finding.sequence,
        "deliver_at_ms": finding.deliver_at_ms,
        "deliver_at": finding.deliver_at_ms * 1_000,
        "subject": finding.subject,
        "detail": finding.detail,
    }


def _caused_row(caused: CausedFindings) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(caused, name) for name in CAUSED_FIGURES}
    row |= {"kind": caused.kind.name, "cause": int(caused.cause)}
    row["examples"] = [_finding_row(each) for each in caused.examples]
    if caused.why is not None:
        what, role, log_id, from_ms, until_ms, target = caused.why
        row |= {"what": what, "role": role, "server": f"{log_id:016x}", "target": f"{target:016x}"}
        row |= {"from_ms": from_ms, "until_ms": until_ms}
    return row


def _decode(row: dict[str, Any]) -> HourResult:
    log_id, hour = int(row["log_id"], 16), hour_from_name(row["hour"])
    counts = {name: int(row[name]) for name in COUNTS}
    lateness, past_due = (_counts(row[name]) for name in ("lateness", "past_due_lateness"))
    of_subject = [[each[name] for name in SUBJECT_FIGURES] for each in row["subjects"]]
    subjects = SubjectFigures(
        tuple(each["subject"] for each in row["subjects"]),
        np.array(of_subject, np.int64).reshape(-1, len(SUBJECT_FIGURES)),
    )
    elsewhere = tuple(
        ServerRows(Role(each["role"]), int(each["server"], 16), int(each["rows"])) for each in row["elsewhere"]
    )
    summary = HourSummary(log_id, hour, **counts)  # type: ignore[arg-type]  # Each of these figures is a number.
    return HourResult(
        replace(summary, lateness=lateness, past_due_lateness=past_due, elsewhere=elsewhere, subjects=subjects),
        [_finding(log_id, hour, each) for each in row["findings"]],
        [_caused(log_id, hour, each) for each in row["caused"]],
        row["findings_sha256"],
        row["seal_differs"],
    )


def _decode_archived(row: dict[str, Any]) -> ArchivedResult:
    said, differs = row["archived"], row["seal_differs"]
    key = int(row["log_id"], 16), hour_from_name(row["hour"])
    result = _decode(row)._replace(differs=None) if said["audited"] else None
    faults = tuple(
        conservation(hour_from_name(each["hour"]), int(each["log_id"], 16), each["detail"]) for each in said["faults"]
    )
    return ArchivedResult(key, result, None if differs is None else tuple(differs), faults, int(said["deleted_rows"]))


def _finding(log_id: int, hour: int, row: dict[str, Any]) -> Finding:
    numbers = row["sequence"], row["deliver_at_ms"]
    return Finding(hour, FindingKind[row["kind"]], *numbers, row["subject"], row["detail"], log_id)


def _caused(log_id: int, hour: int, row: dict[str, Any]) -> CausedFindings:
    why = None
    if row["what"] is not None:
        server, target = int(row["server"], 16), int(row["target"], 16)
        why = Explanation(row["what"], row["role"], server, row["from_ms"], row["until_ms"], target)
    kind, cause = FindingKind[row["kind"]], Cause(row["cause"])
    examples = tuple(_finding(log_id, hour, each) for each in row["examples"])
    figures = (int(row["rows"]), int(row["first_due_ms"]), int(row["last_due_ms"]), int(row["late_ms_max"]))
    return CausedFindings(log_id, hour, kind, cause, why, *figures, examples)


def _steps(counts: NDArray[np.int64]) -> list[dict[str, int]]:
    return [{"step": step, "count": int(counts[step])} for step in np.flatnonzero(counts).tolist()]


def _counts(steps: Sequence[dict[str, int]]) -> NDArray[np.int64]:
    if not steps:
        return NO_COUNTS
    counts = NO_COUNTS.copy()
    counts[[each["step"] for each in steps]] = [each["count"] for each in steps]
    return counts


def _raise_error(code: str | None, message: str) -> None:
    if code == MOVED:
        raise LogMoved(message)
    if code is not None:
        raise error_by_code(code, message)
