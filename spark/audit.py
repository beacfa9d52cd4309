"""The audit as Spark tasks.

First tasks scan the realtime logs by segments, then each runs the same pure `audit_hour` on some of the hours.

Invariant: the driver fixes what is read (rule P3) before the tasks for hours run, and a task does no more than a
command without Spark does for the same segments or hours; so the figures are equal.
"""

import os
import pickle
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from delayd.errors import BadArgument, DelaydError, error_by_code
from delayd.hours import hour_from_name, hour_name
from delayd.machine.disk import RealDisk
from delayd.reading.arrow import TIMESTAMP
from delayd.reading.books import AuditReport, Collected, audit_plan, plan_faults, seal_books
from delayd.reading.explanations import Explanation
from delayd.reading.files.stored_groups import LogMoved, until_still
from delayd.reading.files.target_index import PIECE_BYTES, Chunk, LogPiece, Scan, scan_piece, split_piece
from delayd.reading.findings import (
    COUNTS,
    NO_COUNTS,
    Cause,
    CausedFindings,
    Finding,
    FindingKind,
    Findings,
    HourSummary,
)
from delayd.reading.plan import AuditPlan, plan_audit
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
        ("subjects", pa.list_(SUBJECT)),
        ("findings_count", pa.int64()),
        ("findings", pa.list_(FINDING)),
        ("caused", pa.list_(CAUSED)),
        ("findings_sha256", pa.string()),
        ("seal_differs", pa.list_(pa.string())),  # Null: there is no seal that the hour can be held against.
        ("error_code", pa.string()),
        ("error", pa.string()),
    ]
)


def audit_data(
    session: SparkSession,
    data: str,
    now_ms: int,
    hours: Container[int] | None,
    late_ms_limit: int,
    lost_grace_ms: int,
    findings_limit: int | None,
    tasks: int | None = None,
) -> AuditReport:
    """Audit a data directory in a Spark session; `delayd.reading.books.audit_directory` does the same without Spark.

    Example::

        now_ms = time.time_ns() // 1_000_000
        report = audit_data(session, "/var/lib/delayd", now_ms, None, 1_000, 10_000, 1_000)
        print(report.balanced, report.total.lost)

    Args:
        session: where the tasks run. Each worker finds the directory under the same path.
        data: the directory that `delayd up --data` was given, or a copy.
        now_ms: the wall clock, in milliseconds since the epoch.
        hours: which hours to audit, counted since the epoch; None for all.
        late_ms_limit: a message that left later than this after it was due is LATE.
        lost_grace_ms: a due message without an outcome is LOST only when it was due longer ago than this.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        tasks: how many tasks share the hours; None takes three for each core.

    Raises:
        BadArgument: ``tasks`` is below 1, or there is nothing to audit.
    """
    tasks = tasks_of(tasks)  # Before anything is read.

    def audit() -> AuditReport:
        plan, _ = plan_audit(RealDisk(), data, now_ms, hours, late_ms_limit, lost_grace_ms, scan=scan_in(session))
        return collect_frame(session, data, now_ms, plan, findings_limit, tasks)

    return until_still(data, audit)


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
    session: SparkSession, data: str, now_ms: int, plan: AuditPlan, findings_limit: int | None, tasks: int | None = None
) -> AuditReport:
    """Audit the hours of a plan. Raises LogMoved when files went away meanwhile."""
    parts = plan.split(tasks_of(tasks))
    rows = audit_frame(session, parts, findings_limit).toArrow().to_pylist() if parts else []
    return report_of(rows, data, plan, findings_limit)


def report_of(rows: Iterable[dict[str, Any]], data: str, plan: AuditPlan, findings_limit: int | None) -> AuditReport:
    """Make the report on a plan from the rows of an `audit_frame`. Raises LogMoved when files went away meanwhile."""
    collected = Collected(findings_limit)
    books = seal_books(RealDisk(), plan)
    for row in rows:
        _raise_error(row["error_code"], row["error"])
        summary = _decode(row)
        log_id, hour = summary.log_id, summary.hour
        findings = [_finding(log_id, hour, each) for each in row["findings"]]
        caused = [_caused(log_id, hour, each) for each in row["caused"]]
        collected.add(summary, findings, caused, row["findings_sha256"])
        book = books[summary.log_id]
        # An hour that sealed after the driver had read the seals has none to compare with.
        if row["seal_differs"] is not None and book.has_standing(summary.hour):
            book.note(summary.hour, row["seal_differs"])
    return collected.report(data, plan.origins[0].terms, plan, books, plan_faults(RealDisk(), plan, books))


def tasks_of(wanted: str | int | None) -> int:
    """How many tasks share the hours; None takes three for each core. Raises BadArgument for a number below 1."""
    if wanted is None:
        return TASKS_A_CORE * (os.cpu_count() or 1)
    if not str(wanted).isdecimal() or int(wanted) < 1:
        raise BadArgument(f"tasks {wanted!r} is no number of tasks: give 1 or more, or leave it out")
    return int(wanted)


def audit_frame(
    session: SparkSession, parts: Sequence[AuditPlan], findings_limit: int | None, tasks: int | None = None
) -> DataFrame:
    """Audit the hours of plans. The frame has one row for each hour: number of its plan, figures, and first findings.

    Args:
        session: where the tasks run.
        parts: the parts of one plan, or plans of many directories; at least one.
        findings_limit: how many findings to keep of each hour, None for all.
        tasks: how many tasks share the parts; None takes one task for each part.
    """

    def audit(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, plan in _of_numbered(batches):
            yield from audit_part(number, plan, findings_limit)

    return _numbered(session, parts, tasks).mapInArrow(audit, from_arrow_schema(HOUR))


def audit_part(part: int, plan: AuditPlan, findings_limit: int | None) -> Iterator[pa.RecordBatch]:
    """What one task does with the plan of this number; an error that the driver must act on is a row."""
    disk = RealDisk()
    rows: list[dict[str, object]] = []
    findings = 0
    try:
        for found, summary, differs in audit_plan(disk, plan, None, seal_books(disk, plan)):
            rows.append({"part": part, **_encode(found, summary, findings_limit, differs)})
            findings += len(found)
            if len(rows) >= ROWS_MAX or findings >= ROWS_MAX:
                yield pa.RecordBatch.from_pylist(rows, HOUR)
                rows, findings = [], 0
    except (LogMoved, DelaydError) as error:
        rows.append({"part": part, **_error(error)})
    if rows:
        yield pa.RecordBatch.from_pylist(rows, HOUR)


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


def _encode(
    found: Findings, summary: HourSummary, findings_limit: int | None, seal_differs: list[str] | None
) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(summary, name) for name in COUNTS}
    row |= {"log_id": f"{summary.log_id:016x}", "hour": hour_name(summary.hour), "findings_count": len(found)}
    row |= {"findings_sha256": found.sha256, "seal_differs": seal_differs}
    row |= {"lateness": _steps(summary.lateness), "past_due_lateness": _steps(summary.past_due_lateness)}
    names = ("subject", *SUBJECT_FIGURES)
    subjects = zip(summary.subjects.names, summary.subjects.counts.tolist(), strict=True)
    row["subjects"] = [dict(zip(names, (name, *counts), strict=True)) for name, counts in subjects]
    row["findings"] = [_finding_row(each) for each in found.first(findings_limit)]
    row["caused"] = [_caused_row(each) for each in found.caused()]
    return row


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


def _decode(row: dict[str, Any]) -> HourSummary:
    log_id, hour = int(row["log_id"], 16), hour_from_name(row["hour"])
    counts = {name: int(row[name]) for name in COUNTS}
    lateness, past_due = (_counts(row[name]) for name in ("lateness", "past_due_lateness"))
    of_subject = [[each[name] for name in SUBJECT_FIGURES] for each in row["subjects"]]
    subjects = SubjectFigures(
        tuple(each["subject"] for each in row["subjects"]),
        np.array(of_subject, np.int64).reshape(-1, len(SUBJECT_FIGURES)),
    )
    return HourSummary(log_id, hour, **counts, lateness=lateness, past_due_lateness=past_due, subjects=subjects)


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
