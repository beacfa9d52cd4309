"""How large a request may be: by its type, by the server that reads it, and by whether its peer is trusted.

Invariant: a request that needs no room is refused at its header when it claims some. So a stranger can make a server
hold only as many bytes as the requests need that a stranger may send (rule B1).
"""

from collections.abc import Mapping
from typing import NamedTuple

from delayd.wire.frame import HEAD_BYTES_MAX, Room
from delayd.wire.requests import DELAY, META, REALTIME, RequestType

# Room for names and numbers: three texts at their longest, and fields that this version ignores.
HEAD_BYTES_PLAIN = 16 << 10
# A body of a request that should have none is read up to this size, and only that request is refused.
STRAY_BODY_BYTES_MAX = 64 << 10


class RequestLimits(NamedTuple):
    """Limits by type of request: `plain` is the limit of every other type."""

    plain: Room
    by_type: Mapping[int, Room]
    by_type_trusted: Mapping[int, Room]
    bodies: frozenset[int]  # The types of request that have a body at this server.


def _limits_of(role: str) -> RequestLimits:
    lists: dict[int, Room] = {
        kind: Room(HEAD_BYTES_MAX, STRAY_BODY_BYTES_MAX) for kind in RequestType if kind.terms.has_lists
    }
    here = [kind for kind in RequestType if role in kind.terms.servers and kind.terms.body_bytes_max]
    bodies = {kind: Room(HEAD_BYTES_PLAIN, kind.terms.body_bytes_max) for kind in here}
    of_anyone = {kind: room for kind, room in bodies.items() if not kind.terms.trusted}
    return RequestLimits(
        Room(HEAD_BYTES_PLAIN, STRAY_BODY_BYTES_MAX), lists | of_anyone, lists | bodies, frozenset(bodies)
    )


META_LIMITS, DELAY_LIMITS, REALTIME_LIMITS = _limits_of(META), _limits_of(DELAY), _limits_of(REALTIME)
