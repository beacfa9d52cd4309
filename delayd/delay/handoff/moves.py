"""Moves: subjects that operators move to another realtime server, as meta reports them (docs/protocol.md, Meta).

Invariant: a move counts as seen when the subject's new target is noted durably, or when there was nothing to move.
Until then meta reports it again, also after a restart.
"""

import logging
from collections.abc import Sequence
from functools import partial

import msgpack

from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.errors import DamagedValue, DiskFull, key_text
from delayd.machine.executor import Done, Executor
from delayd.machine.state import State
from delayd.wire.meta import Move

SEEN_KEY = b"moves_seen"

log = logging.getLogger(__name__)


class RouteMoves:
    """Carries out the moves that meta reports; `worker` writes the number of the last move that is done."""

    def __init__(self, state: State, dispatcher: Dispatcher, worker: Executor) -> None:
        try:
            value = state.get(SEEN_KEY)
        except DamagedValue as error:
            # Meta reports all moves again; a move that is done already is not done twice.
            log.warning("value_rebuilt key=%s source=meta", key_text(error.key))
            value = None
        self.seen = 0 if value is None else int(msgpack.unpackb(value))
        self._state = state
        self._dispatcher = dispatcher
        self._worker = worker
        self._storing = False

    def take(self, moves: Sequence[Move]) -> None:
        """See delayd.net.registration.Moves."""
        done = self.seen
        for move in sorted(moves):
            subject = move.subject.encode()
            self._dispatcher.move(subject, move.log_id)
            if self._dispatcher.is_moving(subject):
                break
            done = move.number
        if done != self.seen and not self._storing:
            self._storing = True
            pairs = [(SEEN_KEY, msgpack.packb(done))]
            self._worker.submit(partial(self._state.commit, pairs), partial(self._stored, done))

    def _stored(self, number: int, ended: Done[None]) -> None:
        self._storing = False
        try:
            ended.result()
        except DiskFull as error:
            log.warning("moves_not_stored reason=%r", str(error))
        else:
            self.seen = number
