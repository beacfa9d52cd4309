"""The verdict on a directory: every name that the audit, `delayd log verify` and `delayd seals` give to what is wrong.

Invariant: an honest directory has none.
"""

from delayd.errors import BadArgument, DamagedData
from delayd.reading.books import audit_directory
from delayd.reading.findings import FindingKind
from delayd.reading.verify import verify_directory
from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS


def verdict(disk: MemoryDisk, now_ms: int) -> set[str]:
    """The names: kinds of findings, BROKEN of a seal, DAMAGE of a file that ends the audit, VERIFY by reading all."""
    names: set[str] = set()
    try:
        report = audit_directory(BOOKS, now_ms=now_ms, findings_limit=None, disk=disk)
        names |= {finding.kind.name for finding in report.findings if finding.kind is not FindingKind.LATE}
        names |= {"BROKEN"} if report.broken_seals else set()
        assert bool(names) == (not report.balanced)
    except DamagedData:
        names.add("DAMAGE")
    except BadArgument:
        pass  # There is no delay server's directory any more; what was one is named below.
    if not verify_directory(BOOKS, disk=disk).sound:
        names.add("VERIFY")
    return names
