"""What the launcher hands to the command line: the programs that it may start but must not import.

Invariant: each of them imports its program only when it is called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ServerConfig = object


@dataclass(frozen=True, slots=True)
class Programs:
    """The three servers by role, and the audit in Spark."""

    run_server: Mapping[str, Callable[[ServerConfig], int]]
    spark_audit: Callable[[str], object]
