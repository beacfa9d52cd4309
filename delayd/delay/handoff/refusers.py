"""Refusers: targets that refuse this server because they take it for one restored from a copy; kept in the state (rule
H8).

A server that a target has fenced off gives no receipts, and neither does its next life: each start asks these targets
before it serves anybody. An operator may *accept*: the target shall forget what it has heard of this server. Invariant:
this decision counts until the target has forgotten once, and no longer. Later batches may be in doubt there, and a
target that forgot them would take them twice.

     refused ──▶ noted ──operator: accept──▶ accepted ──the target has forgotten, durably noted──▶ gone ──▶ greeted
                   └──────────────────────a hello is heard, or the target is lost────────────────▶ gone
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgpack

from delayd.errors import DamagedValue, DiskFull, DiskReserve, key_text
from delayd.machine.executor import Done, Executor
from delayd.machine.state import State

PREFIX = b"refuser/"

Stored = Callable[[DiskReserve | None], None]
"""Called when the change is durable, with None, or with the reason why nothing was stored."""

log = logging.getLogger(__name__)


class Refusers:
    """Refusing targets by log_id; for the loop alone. `worker` writes to the state, in the order of the calls here."""

    def __init__(self, state: State, worker: Executor) -> None:
        self._state = state
        self._worker = worker
        damaged: list[DamagedValue] = []
        # Whether an operator has accepted that the target forgets what it has heard of this server.
        self._accepted = {_log_id(key): bool(msgpack.unpackb(value)) for key, value in state.scan(PREFIX, damaged)}
        for error in damaged:
            # The key names the target that is to be asked first; an operator must repeat a decision about it.
            log.warning("value_rebuilt key=%s source=%s", key_text(error.key), "its key")
            self._accepted[_log_id(error.key)] = False

    def __contains__(self, target: object) -> bool:
        return target in self._accepted

    def is_accepted(self, target: int) -> bool:
        """Whether an operator has decided that the target shall forget what it has heard."""
        return self._accepted.get(target, False)

    def note(self, target: int) -> None:
        """Note that the target refuses this server; on a full disk the next refusal tries again."""
        if target not in self._accepted:
            self._accepted[target] = False

            def stored(refused: DiskReserve | None) -> None:
                if refused is not None:
                    self._accepted.pop(target, None)

            self._commit([(_key(target), msgpack.packb(False))], [], stored)

    def accepting(self, target: int) -> tuple[bytes, bytes]:
        """The pair that the transaction of an operator's decision stores; call `accept` when it is durable."""
        return _key(target), msgpack.packb(True)

    def accept(self, target: int) -> None:
        """An operator's decision is durable."""
        self._accepted[target] = True

    def losing(self, target: int) -> bytes:
        """The key that the transaction removes which gives the target up; call `lose` when it is durable."""
        return _key(target)

    def lose(self, target: int) -> None:
        """Forget a target that was given up."""
        self._accepted.pop(target, None)

    def settle(self, target: int, settled: Stored) -> None:
        """Forget a target that accepts this server again; ``settled`` is called when that is durable."""
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
