"""Ordering: the hash of an ordering key, which stands in the column ordering_key_hash (rule Q8).

Invariant: 0, or no such column, means a message without an ordering key. Two keys with one hash wait for each other.
"""

from __future__ import annotations

from hashlib import blake2b


def ordering_hash(key: bytes) -> int:
    """The hash of a key that was checked."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") or 1
