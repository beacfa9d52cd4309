"""Quota: the limits of one subject, and their value in a delay server's state (docs/quotas.md)."""

from typing import NamedTuple, cast

import msgpack

QUOTA_PREFIX = b"quota/"


class Limits(NamedTuple):
    """What may be pending for a subject; None is no limit."""

    per_second: int | None = None
    pending: int | None = None
    pending_bytes: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self != NO_LIMITS

    def share(self, place: int, servers: int) -> "Limits":
        """The part of each limit that one of several delay servers has; the parts of all add up to the limit.

        An example: of 100 messages the servers 0, 1 and 2 have 34, 33 and 33.
        """
        return Limits(*(None if most is None else most // servers + (place < most % servers) for most in self))


NO_LIMITS = Limits()


def quota_key(subject: bytes) -> bytes:
    """The key of a subject's quota in the state."""
    return QUOTA_PREFIX + subject


def encode_limits(limits: Limits) -> bytes:
    """The value of a quota in the state."""
    return cast(bytes, msgpack.packb(list(limits)))


def decode_limits(value: bytes) -> Limits:
    """Read what `encode_limits` has encoded."""
    return Limits._make(cast("list[int | None]", msgpack.unpackb(value)))
