"""The books balance while a realtime server is away, and when it is back: what waits is called waiting."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from delayd import Producer
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.plan import LifeState
from tests.waiting import wait_until

from .processes import ServerProcess

GRACE_MS = 700  # Far less than the servers are away.
BACK_GRACE_MS = 20_000  # A delay server dials again with back-off, and others may need the machine.


def audit_until(data: Path, met: Callable[[AuditReport], bool], grace_ms: int = GRACE_MS) -> AuditReport:
    """Audit again and again until something holds; at no moment anything is wrong."""
    reports: list[AuditReport] = []

    def holds() -> bool:
        reports.append(audit_directory(str(data), now_ms=time.time_ns() // 1_000_000, lost_grace_ms=grace_ms))
        assert reports[-1].balanced, reports[-1].findings
        return met(reports[-1])

    wait_until(holds, lambda: reports[-1])
    return reports[-1]


def test_what_is_due_waits_for_a_realtime_server_that_is_away_and_just_back(tmp_path: Path) -> None:
    # The checkpoint file says when each was seen last.
    often = {"checkpoint_every_ms": 100}
    with (
        ServerProcess("meta", tmp_path) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address, **often}) as realtime,
        ServerProcess("delay", tmp_path, {"meta": meta.address, **often}),
        Producer(meta.address) as producer,
    ):
        producer.send("orders", b"first", delay=timedelta(0))
        audit_until(tmp_path, lambda report: report.total.dispatched == 1)
        realtime.kill()
        producer.send("orders", b"second", delay=timedelta(0))
        report = audit_until(tmp_path, lambda report: report.total.waiting == 1)
        assert [(life.role, life.state) for life in report.missed] == [("realtime", LifeState.AWAY)]
        realtime.start()
        report = audit_until(tmp_path, lambda report: report.total.dispatched == 2, BACK_GRACE_MS)
        assert report.total.waiting == 0 and not report.missed
