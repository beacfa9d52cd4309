"""The program ``delayd spark-audit``: an audit of a data directory by a local Spark session.

Invariant: Spark is imported only when somebody asks for an audit. When it can't run, one sentence says what to
install.
"""

import time
from collections.abc import Container

from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS
from delayd.reading.books import FINDINGS_LIMIT, AuditReport

from .session import open_session

MASTER = "local[2]"


def audit(
    data: str,
    *,
    now_ms: int | None = None,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    findings_limit: int | None = FINDINGS_LIMIT,
    master: str | None = MASTER,
    tasks: int | None = None,
) -> AuditReport:
    """Audit a data directory in Spark, with the figures of `delayd.reading.books.audit_directory`.

    Example::

        report = audit("/var/lib/delayd", tasks=8)
        print(report.balanced, report.total.lost)

    Args:
        data: the directory; each task must be able to read it under this path.
        now_ms: the wall clock; None reads it.
        hours: which hours to audit, counted since the epoch; None for all.
        late_ms_limit: a message that left later than this after it was due is LATE.
        lost_grace_ms: a due message without an outcome is LOST only when it was due longer ago than this.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        master: the Spark master, when there is no session yet; None leaves it to `spark-submit`.
        tasks: how many tasks share the hours; None takes three for each core of this machine.

    Raises:
        BadSetting: pyspark or Java is missing or too old.
        BadArgument: there is nothing to audit.
        DataError: a file can't be read.
    """
    session = open_session(master)
    from .audit import audit_data

    wall_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return audit_data(session, data, wall_ms, hours, late_ms_limit, lost_grace_ms, findings_limit, tasks)
