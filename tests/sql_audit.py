"""The audit by a third way: SQL in DuckDB over an export or an archive, compared with what delayd's own audit says.

Invariant: nothing here knows a rule of the audit; the SQL does, from the page, and shares no code with it.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import duckdb

from delayd.hours import hour_name
from delayd.reading.books import AuditReport
from delayd.reading.findings import QUANTILES, HourSummary

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT, ARCHIVE = EXAMPLES / "audit.sql", EXAMPLES / "archive.sql"
# What the SQL counts of each subject, of which only delayd has figures of findings.
SUBJECT_FIGURES = (
    *("scheduled", "dispatched", "dead", "cancelled", "expired", "in_doubt", "pending", "undecided", "waiting"),
    *("missing", "moved", "redriven"),
)
QUANTILE_NAMES = ("late_p50_ms", "late_p99_ms", "late_p999_ms")
QUANTILE_ERROR = 0.03  # The histogram of delayd's audit errs by half a step, and the SQL rounds its rank.

HourKey = tuple[str, str]  # The delay server and the hour, as an export names them.


@dataclass(frozen=True)
class SqlReport:
    """Figures by hour, those by subject, and how often each message has each kind of finding."""

    hours: dict[HourKey, dict[str, int | None]]
    findings: Counter[tuple[str, str, int, str]]
    columns: Sequence[str]
    subjects: dict[str, list[int]]  # In the order of SUBJECT_FIGURES.


def audit_by_sql(folder: Path) -> SqlReport:
    """Audit an export in Parquet."""
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("set enable_progress_bar = false")
        connection.execute(f"set file_search_path = '{folder}'")
        connection.execute(SCRIPT.read_text())
        found = connection.execute("from hours")
        columns = [column[0] for column in found.description or ()]
        rows = [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
        findings = connection.execute("select log_id, hour, sequence, finding from findings").fetchall()
        sums = ", ".join(f"sum({name})" for name in SUBJECT_FIGURES)
        subjects = connection.execute(f"select subject, {sums} from subjects group by subject").fetchall()
    hours = {(row.pop("log_id"), row.pop("hour")): row for row in rows}
    return SqlReport(
        hours,
        Counter((row[0], row[1], row[2], row[3]) for row in findings),
        columns,
        {row[0]: [*row[1:]] for row in subjects},
    )


def audit_archive_by_sql(archive: Path, folder: Path) -> tuple[SqlReport, dict[HourKey, str]]:
    """Audit an archive by its files alone, with tables in a new ``folder``; and the states of its seals."""
    for name in ("accepted", "decision", "schedule", "dispatch", "message", "hour"):
        (folder / name).mkdir(parents=True)
    with chdir(folder), duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("set enable_progress_bar = false")
        connection.execute(f"set variable archive = '{archive}'")
        connection.execute(ARCHIVE.read_text())
        states = connection.execute("select log_id, hour, state from seals").fetchall()
    return audit_by_sql(folder), {(log_id, hour): state for log_id, hour, state in states}


def differences(report: AuditReport, found: SqlReport) -> list[str]:
    """What delayd's audit and the SQL say differently; ``report`` must name all of its findings."""
    told: list[str] = []
    hours = {(f"{hour.log_id:016x}", hour_name(hour.hour)): hour for hour in report.hours}
    for key in sorted(hours.keys() | found.hours.keys()):
        hour, figures = hours.get(key), found.hours.get(key)
        if figures is None:
            # An hour of which no log holds a row is in no table.
            if hour is not None and (hour.scheduled or hour.orphan):
                told.append(f"{key}: the SQL does not know this hour, delayd says {hour}")
        elif hour is None:
            told.append(f"{key}: delayd does not know this hour, the SQL says {figures}")
        else:
            told += [f"{key}: {difference}" for difference in _of_hour(hour, figures)]
    ours = report.total.subjects
    figures_of = zip(*(ours.of(name).tolist() for name in SUBJECT_FIGURES), strict=True)
    # Subjects of which only findings speak have no scheduled row.
    of_subject = {name: [*counts] for name, counts in zip(ours.names, figures_of, strict=True) if any(counts)}
    if of_subject != found.subjects:
        told.append(f"by subject delayd says {of_subject}, the SQL {found.subjects}")
    expected = Counter(
        (f"{finding.log_id:016x}", hour_name(finding.hour), finding.sequence, finding.kind.name)
        for finding in report.findings
    )
    told += [f"only delayd finds {row} {count} times more" for row, count in (expected - found.findings).items()]
    told += [f"only the SQL finds {row} {count} times more" for row, count in (found.findings - expected).items()]
    return told


def _of_hour(hour: HourSummary, figures: dict[str, int | None]) -> list[str]:
    told: list[str] = []
    for name, figure in figures.items():
        if name in QUANTILE_NAMES:
            ours = hour.late_ms(QUANTILES[QUANTILE_NAMES.index(name)])
            slack = 1 + QUANTILE_ERROR * (figure or 0)
        else:
            ours, slack = getattr(hour, name), 0
        if ours != figure and (ours is None or figure is None or abs(ours - figure) > slack):
            told.append(f"{name} is {ours} by delayd, {figure} by SQL")
    return told
