"""What the launcher hands to the command line: the programs that it may start but must not import.

Invariant: each of them imports its program only when it is called.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ServerConfig = object

OWN_COMMAND = (sys.executable, "-m", "delayd")


@dataclass(frozen=True, slots=True)
class Programs:
    """The three servers by role, the audit in Spark, and how delayd itself is started in another process."""

    run_server: Mapping[str, Callable[[ServerConfig], int]]
    spark_audit: Callable[[str], object]
    command: Sequence[str] = OWN_COMMAND  # Followed by a role and its options.
