"""How large a request may be: by its type, by the server that reads it, and by whether its peer is trusted.

Invariant: a request that needs no room is refused at its header when it claims some. So a stranger can make a server
hold only as many bytes as the requests need that a stranger may send (rule B1).
"""

from collections.abc import Mapping
from typing import NamedTuple

from delayd.wire.frame import BODY_BYTES_MAX, HEAD_BYTES_MAX, SEND_BODY_BYTES_MAX, Room
from delayd.wire.requests import RequestType

# Room for names and numbers: three texts at their longest, and fields that this version ignores.
HEAD_BYTES_PLAIN = 16 << 10
# A body of a request that should have none is read up to this size, and only that request is refused.
STRAY_BODY_BYTES_MAX = 64 << 10
ASKED_BODY_BYTES_MAX = 2 << 20  # One batch of 65,536 rows, 24 bytes each.
PLACES_BODY_BYTES_MAX = 512 << 10  # 65,536 instants.
MOVES_BODY_BYTES_MAX = 3 << 20  # The same with 32 bytes each.

# The heads of these hold lists that clients make.
_LISTS = (
    RequestType.ROUTES,
    RequestType.ACK,
    RequestType.NACK,
    RequestType.RETRY,
    RequestType.REJECT,
    RequestType.EXTEND,
    RequestType.SUBSCRIBE,
)


class RequestLimits(NamedTuple):
    """Limits by type of request: `plain` is the limit of every other type."""

    plain: Room
    by_type: Mapping[int, Room]
    by_type_trusted: Mapping[int, Room]
    bodies: frozenset[int]  # The types of request that have a body at this server.


def request_limits(bodies: Mapping[int, int], trusted_bodies: Mapping[int, int]) -> RequestLimits:
    """The limits of a server that takes bodies of these types and sizes: from anyone, and from trusted peers."""
    lists = {kind: Room(HEAD_BYTES_MAX, STRAY_BODY_BYTES_MAX) for kind in _LISTS}
    anyone = lists | {kind: Room(HEAD_BYTES_PLAIN, size) for kind, size in bodies.items()}
    trusted = anyone | {kind: Room(HEAD_BYTES_PLAIN, size) for kind, size in trusted_bodies.items()}
    plain = Room(HEAD_BYTES_PLAIN, STRAY_BODY_BYTES_MAX)
    return RequestLimits(plain, anyone, trusted, frozenset((*bodies, *trusted_bodies)))


META_LIMITS = request_limits({}, {})
DELAY_LIMITS = request_limits(
    {
        RequestType.SEND: SEND_BODY_BYTES_MAX,
        RequestType.CANCEL: ASKED_BODY_BYTES_MAX,
        RequestType.GET: ASKED_BODY_BYTES_MAX,
        RequestType.PLACES: PLACES_BODY_BYTES_MAX,
        RequestType.RESCHEDULE: MOVES_BODY_BYTES_MAX,
    },
    {RequestType.SEND_AGAIN: SEND_BODY_BYTES_MAX, RequestType.SEND_DRAINED: SEND_BODY_BYTES_MAX},
)
REALTIME_LIMITS = request_limits({}, {RequestType.DISPATCH: BODY_BYTES_MAX})
