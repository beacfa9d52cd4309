"""How large a request may be: by its type, by the server that reads it, and by whether its peer is trusted.

Invariant: a request that needs no room is refused at its header when it claims some, so what a stranger can make a
server hold is what the types that it may ask for need (rule B1).
"""

from collections.abc import Mapping
from typing import NamedTuple

from delayd.wire.frame import BODY_BYTES_MAX, HEAD_BYTES_MAX, SEND_BODY_BYTES_MAX, Room
from delayd.wire.requests import RequestType

HEAD_BYTES_PLAIN = 16 << 10  # Names and numbers: three texts at their longest, and what this version ignores.
STRAY_BODY_BYTES_MAX = 64 << 10  # A body where none belongs: so far it is read, and refused for its request alone.

_LISTS = (RequestType.ROUTES, RequestType.ACK, RequestType.NACK)  # Their heads hold lists that clients make.


class RequestLimits(NamedTuple):
    """By type of request: `plain` is what every other type gets."""

    plain: Room
    by_type: Mapping[int, Room]
    by_type_trusted: Mapping[int, Room]
    bodies: frozenset[int]  # The types that have one at this server.


def request_limits(bodies: Mapping[int, int], trusted_bodies: Mapping[int, int]) -> RequestLimits:
    """The limits of a server that takes bodies of these types and sizes: from anyone, and from trusted peers."""
    lists = {kind: Room(HEAD_BYTES_MAX, STRAY_BODY_BYTES_MAX) for kind in _LISTS}
    anyone = lists | {kind: Room(HEAD_BYTES_PLAIN, size) for kind, size in bodies.items()}
    trusted = anyone | {kind: Room(HEAD_BYTES_PLAIN, size) for kind, size in trusted_bodies.items()}
    plain = Room(HEAD_BYTES_PLAIN, STRAY_BODY_BYTES_MAX)
    return RequestLimits(plain, anyone, trusted, frozenset((*bodies, *trusted_bodies)))


META_LIMITS = request_limits({}, {})
DELAY_LIMITS = request_limits({RequestType.SEND: SEND_BODY_BYTES_MAX}, {})
REALTIME_LIMITS = request_limits({}, {RequestType.DISPATCH: BODY_BYTES_MAX})
