"""Refusers: targets that take this server for one that was restored from a copy, kept in the state (rule H8).

A server that a target has fenced off gives no receipts, and neither does its next life: each start asks these targets
before it serves anybody. Invariant: an operator's word that such a target shall take this server counts until the
target has forgotten what it had heard, and never longer: by then batches may be in doubt there, and a target that
forgets these takes them twice.

     refused ──▶ noted ──operator: accept──▶ accepted ──the target has forgotten, durably noted──▶ gone ──▶ greeted
                   └──────────────────────a hello is heard, or the target is lost────────────────▶ gone
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgpack

from delayd.errors import DamagedValue, DiskFull, DiskReserve, key_text
from delayd.executor import Done, Executor
from delayd.state import State

PREFIX = b"refuser/"

Stored = Callable[[DiskReserve | None], None]
"""Hears that something is durable, or why nothing of it was stored."""

log = logging.getLogger(__name__)


class Refusers:
    """By log_id; for the loop alone. `worker` writes to the state, in the order of what is said here."""

    def __init__(self, state: State, worker: Executor) -> None:
        self._state = state
        self._worker = worker
        damaged: list[DamagedValue] = []
        # Whether an operator has accepted that the target forgets what it had heard of this server.
        self._accepted = {_log_id(key): bool(msgpack.unpackb(value)) for key, value in state.scan(PREFIX, damaged)}
        for error in damaged:
            # The key says which target is to be asked first; a word on it must be said again.
            log.warning("value_rebuilt key=%s source=%s", key_text(error.key), "its key")
            self._accepted[_log_id(error.key)] = False

    def __contains__(self, target: object) -> bool:
        return target in self._accepted

    def is_accepted(self, target: int) -> bool:
        """Whether an operator has decided that the target shall forget what it had heard."""
        return self._accepted.get(target, False)

    def note(self, target: int) -> None:
        """The target refuses this server; it is tried again with the next refusal if the disk is full."""
        if target not in self._accepted:
            self._accepted[target] = False

            def stored(refused: DiskReserve | None) -> None:
                if refused is not None:
                    self._accepted.pop(target, None)

            self._commit([(_key(target), msgpack.packb(False))], [], stored)

    def accepting(self, target: int) -> tuple[bytes, bytes]:
        """What the transaction of an operator's word puts; `accept` when it is durable."""
        return _key(target), msgpack.packb(True)

    def accept(self, target: int) -> None:
        """An operator's word is durable."""
        self._accepted[target] = True

    def losing(self, target: int) -> bytes:
        """What the transaction removes that gives the target up; `lose` when it is durable."""
        return _key(target)

    def lose(self, target: int) -> None:
        """The target is spoken to no more."""
        self._accepted.pop(target, None)

    def settle(self, target: int, settled: Stored) -> None:
        """The target has nothing against this server any more; ``settled`` hears when that is durable."""
        if target not in self._accepted:
            settled(None)
            return
        accepted = self._accepted.pop(target)

        def stored(refused: DiskReserve | None) -> None:
            if refused is not None:
                self._accepted.setdefault(target, accepted)
            settled(refused)

        self._commit([], [_key(target)], stored)

    def _commit(self, puts: Sequence[tuple[bytes, bytes]], removes: Sequence[bytes], stored: Stored) -> None:
        def written(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                stored(DiskReserve(f"nothing was stored: {error.message}"))
            else:
                stored(None)

        self._worker.submit(partial(self._state.commit, puts, removes), written)


def _key(target: int) -> bytes:
    return PREFIX + target.to_bytes(8, "big")


def _log_id(key: bytes) -> int:
    return int.from_bytes(key[len(PREFIX) :], "big")
