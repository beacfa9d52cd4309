"""Ordering: the hash of an ordering key, which stands in the column ordering_key_hash (rule Q8).

Invariant: 0, or no such column, means a message without an ordering key. Two keys with one hash wait for each other.
"""

from __future__ import annotations

from hashlib import blake2b

from delayd.errors import BadKey
from delayd.limits import KEY_BYTES_MAX


def ordering_hash(key: str | bytes) -> int:
    """The hash of a key; BadKey when it is empty or too long, or no text or bytes."""
    if isinstance(key, str):
        try:
            packed = key.encode()
        except UnicodeEncodeError as error:
            raise BadKey(f"ordering_key {key[:300]!r} can't be written as UTF-8: {error.reason}") from error
    elif isinstance(key, bytes):
        packed = key
    else:
        raise BadKey(f"an ordering_key is text or bytes, not {type(key).__name__}")
    if not 0 < len(packed) <= KEY_BYTES_MAX:
        raise BadKey(f"an ordering_key has 1 to {KEY_BYTES_MAX} bytes, and this one has {len(packed)}")
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") or 1
