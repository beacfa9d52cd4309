"""What the launcher hands to the command line: the programs that it may start but must not import.

Invariant: each of them imports its program only when it is called.
"""

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from delayd.reading.books import AuditReport

ServerConfig = object

OWN_COMMAND = (sys.executable, "-m", "delayd")


class SparkAudit(Protocol):
    """Audits a data directory in Spark; the terms are those of `delayd.reading.books.audit_directory`."""

    def __call__(
        self, data: str, *, hours: Container[int], late_ms_limit: int, lost_grace_ms: int, findings_limit: int
    ) -> "AuditReport": ...


@dataclass(frozen=True, slots=True)
class Programs:
    """The three servers by role, the audit in Spark, and how delayd itself is started in another process."""

    run_server: Mapping[str, Callable[[ServerConfig], int]]
    spark_audit: SparkAudit
    command: Sequence[str] = OWN_COMMAND  # Followed by a role and its options.
