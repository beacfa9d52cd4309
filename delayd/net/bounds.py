"""Bounds: how much of a server its peers may use; a server has the defaults, and tests set some of them low."""

from dataclasses import dataclass

from delayd.config import CONNECTION_BYTES_MAX
from delayd.net.budget import UNFINISHED_BYTES_MAX, UNTAKEN_BYTES_MAX
from delayd.wire.frame import BODY_BYTES_MAX

REQUESTS_MAX = 1024  # Unanswered requests on one connection; docs/protocol.md.


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one server: first those of each connection, then those of all connections together."""

    body_bytes_max: int = BODY_BYTES_MAX
    requests_max: int = REQUESTS_MAX
    in_flight_bytes_max: int = CONNECTION_BYTES_MAX  # Four batches at their limit; the last one may go beyond it.
    connections_max: int | None = None  # None: as many as the process may open files for.
    unfinished_bytes_max: int = UNFINISHED_BYTES_MAX
    untaken_bytes_max: int = UNTAKEN_BYTES_MAX


BOUNDS = Bounds()
