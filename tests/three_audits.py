"""Three audits of one plan of a data directory, live or stopped: with numpy, in Spark, and as SQL over an export.

Invariant: what is read is fixed once, so that three audits of a running server's files must agree to the last row.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from delayd.machine.disk import RealDisk
from delayd.reading.books import AuditReport
from delayd.reading.export import export_plan
from delayd.reading.files.stored_groups import until_still
from delayd.reading.findings import COUNTS
from delayd.reading.fleet import Fleet, plan_fleet

from .sql_audit import SqlReport, audit_by_sql, differences

DIFFERENCES_MAX = 20


@dataclass(frozen=True)
class Audits:
    """What the three say; ``differences`` is empty when they agree."""

    report: AuditReport
    spark: AuditReport | None
    sql: SqlReport
    differences: list[str]

    @property
    def line(self) -> str:
        """One line for people: what each found to be scheduled, and whether all agree in everything."""
        spark = "-" if self.spark is None else self.spark.total.scheduled
        sql = sum(figures["scheduled"] or 0 for figures in self.sql.hours.values())
        verdict = "DIFFER" if self.differences else "agree"
        return f"audit numpy={self.report.total.scheduled} spark={spark} sql={sql} {verdict}"


def audit_three_ways(data: Path, now_ms: int, folder: Path, *, spark: bool) -> Audits:
    """Audit a directory; the export goes to ``folder``, which is emptied first. Spark takes ten seconds to start."""
    disk = RealDisk()

    def audit() -> Audits:
        shutil.rmtree(folder, ignore_errors=True)
        fleet = plan_fleet(disk, (str(data),), now_ms=now_ms)
        report = fleet.audit()
        export_plan(disk, fleet.plan, str(folder), tails=fleet.tails)
        sql = audit_by_sql(folder)
        told = differences(report, sql)
        in_spark = _in_spark(fleet) if spark else None
        if in_spark is not None and in_spark != report:
            told += report_differences(report, in_spark)
        return Audits(report, in_spark, sql, told[:DIFFERENCES_MAX])

    return until_still(str(data), audit)


def report_differences(report: AuditReport, spark: AuditReport) -> list[str]:
    """What the reports of numpy and Spark say differently, when they are not equal."""
    told = [
        f"{name} is {getattr(report.total, name)} with numpy, {getattr(spark.total, name)} in Spark"
        for name in COUNTS
        if getattr(report.total, name) != getattr(spark.total, name)
    ]
    told += [f"only numpy finds {row}" for row in set(report.findings) - set(spark.findings)]
    told += [f"only Spark finds {row}" for row in set(spark.findings) - set(report.findings)]
    told += [
        f"{ours} with numpy, {theirs} in Spark"
        for ours, theirs in zip(report.seals, spark.seals, strict=False)
        if ours != theirs
    ]
    told += [
        f"the digests of findings of hour {hour} differ"
        for log_id, hour in report.findings_sha256.keys() | spark.findings_sha256.keys()
        if report.findings_sha256.get((log_id, hour)) != spark.findings_sha256.get((log_id, hour))
    ]
    return told or ["numpy and Spark give reports that differ in an hour"]


def _in_spark(fleet: Fleet) -> AuditReport:
    # Spark is an extra: tests that do not ask for it import none of it.
    from spark.audit import collect_frame
    from spark.session import open_session

    return collect_frame(open_session("local[2]"), fleet, None)
