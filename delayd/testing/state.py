"""State in memory, with the same contract as `LmdbState`; a commit may be an operation of a fake disk.

Invariant: a commit is either wholly there or not at all, also after a simulated crash in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delayd.errors import DamagedValue
from delayd.machine.operating import Wait
from delayd.machine.state import check_key, check_pairs, check_stored, with_checksum
from delayd.testing.disk import MemoryDisk

NAME = "state"  # Stands for the path of a file.


class MemoryState:
    """Pass the ``disk`` of the same server to have each commit counted there, as one operation and one sync."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.commits = 0
        self._disk = disk
        self._pairs: dict[bytes, bytes] = {}  # The stored bytes: values with their checksums.
        self._durable: dict[bytes, bytes] | None = None  # Kept only while the last commit's sync was skipped.

    def after_crash(self, disk: MemoryDisk | None = None) -> MemoryState:
        """The state that the next start finds: every commit that returned. Dying at a commit is the same as dying
        before it.
        """
        state = MemoryState(disk)
        state._pairs = dict(self._pairs if self._durable is None else self._durable)
        return state

    def get(self, key: bytes) -> bytes | None:
        """Value of a key, or None; DamagedValue when it does not check."""
        self._check_alive()
        check_key(key)
        stored = self._pairs.get(key)
        return None if stored is None else check_stored(NAME, key, stored)

    def scan(self, prefix: bytes, damaged: list[DamagedValue] | None = None) -> list[tuple[bytes, bytes]]:
        """Pairs whose key begins with ``prefix``, in key order."""
        self._check_alive()
        stored = [(key, self._pairs[key]) for key in sorted(self._pairs) if key.startswith(prefix)]
        return check_pairs(NAME, stored, damaged)

    def all_keys(self) -> list[bytes]:
        """All keys, for tests that damage each of them."""
        return sorted(self._pairs)

    def flip(self, key: bytes, bit: int = 0) -> None:
        """Flip one bit of the bytes that are stored under a key."""
        stored = bytearray(self._pairs[key])
        stored[bit // 8 % len(stored)] ^= 1 << bit % 8
        self._pairs[key] = bytes(stored)

    def waits(self) -> list[Wait]:
        """Nobody replaces what is in memory."""
        return []

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        """Remove, then put."""
        self._check_alive()
        pairs = dict(puts)
        for key in (*pairs, *removes):
            check_key(key)
        if self._disk is None or self._disk.count_sync("commit", "state", None):
            self._durable = None
        elif self._durable is None:
            self._durable = dict(self._pairs)
        self.commits += 1
        for key in removes:
            self._pairs.pop(key, None)
        self._pairs.update((key, with_checksum(key, value)) for key, value in pairs.items())

    def close(self) -> None:
        """Nothing is held."""

    def _check_alive(self) -> None:
        if self._disk is not None:
            self._disk.before_each()
            self._disk.check_alive()
