"""Membership: which cluster a server with logs belongs to, and whether it is the only server of its log_id.

Invariant: the cluster's id is durable before it is told to anyone, and never changes: a meta of another cluster is
refused by name, and so is a server of another cluster at the address of a target. A server may serve before its meta
has answered only if its directory is where it was created, or where meta took it last: the lock there keeps every other
server out (rule H8).

     start ──new, or in its place──▶ serves ◀──registered── fenced, asks again ◀──start in another place
                                       └──meta refuses it by name──▶ fenced
"""

import logging
from collections.abc import Callable

from delayd.errors import (
    DelaydError,
    EpochOutOfRange,
    FencedInstance,
    NotReady,
    PlaceTaken,
    StaleEpoch,
    WrongCluster,
)
from delayd.machine.identity import keep_cluster_id, keep_place, known_cluster_id, known_place
from delayd.machine.operating import META, Fence, WaitKind
from delayd.machine.state import State
from delayd.net.connection import Connection
from delayd.net.trust import Guard, Proved, prove
from delayd.secret import Secret

# Refusals which mean that this server may be a copy or an older life, and what an operator can do.
_FENCING: dict[type[DelaydError], WaitKind] = {
    PlaceTaken: WaitKind.PLACE_TAKEN,
    FencedInstance: WaitKind.FENCED_INSTANCE,
    StaleEpoch: WaitKind.STALE_EPOCH,
    EpochOutOfRange: WaitKind.EPOCH_OUT_OF_RANGE,
    WrongCluster: WaitKind.WRONG_CLUSTER,
}

log = logging.getLogger(__name__)


class Membership:
    """The secret, the cluster and the place of one server; all methods belong to the loop's thread.

    `place` is the place of its folder (`delayd.machine.identity`). `fence` is put up while this server may not serve.
    `on_doubt` is called when this server may have been moved, restored or copied.
    """

    def __init__(
        self,
        secret: Secret,
        state: State,
        state_path: str,
        place: int,
        fence: Fence,
        on_doubt: Callable[[], None] = lambda: None,
    ) -> None:
        self.cluster_id = known_cluster_id(state, state_path)
        self.place = place
        self.fence = fence
        self._secret = secret
        self._state = state
        self._on_doubt = on_doubt
        self._taken_in = known_place(state)  # The place at which meta took this server last.

    def begin(self, *, fresh: bool) -> None:
        """Decide whether to serve before meta answers; `fresh`: this directory was created in this life."""
        if fresh:
            self._keep_place()
        elif self._taken_in != self.place:
            reason = NotReady("this directory lies in another place than before, and meta has not taken it there yet")
            self.fence.put_up(META, reason, WaitKind.IN_ANOTHER_PLACE)
            self._on_doubt()

    def guard(self, role: str, log_id: int) -> Guard:
        """The object that checks clients which connect to this server."""
        return Guard(self._secret, role, log_id, lambda: self.cluster_id)

    async def prove(self, connection: Connection, timeout_ms: float) -> Proved:
        """Prove to the server at the other end that this one is of its cluster. Raises as `trust.prove`."""
        return await prove(connection, self._secret, self.cluster_id, timeout_ms)

    def joined(self, cluster_id: int) -> None:
        """Meta has taken a registration: store the cluster and the place. This costs one or two fsyncs in a directory's
        life.
        """
        if cluster_id and not self.cluster_id:
            keep_cluster_id(self._state, cluster_id)
            self.cluster_id = cluster_id
            log.info("joined cluster_id=%016x", cluster_id)
        self.fence.take_down(META)
        # The place is stored only after all targets that must be asked first have answered: otherwise the next start
        # would not ask them.
        if self._taken_in != self.place and not self.fence.is_up:
            self._keep_place()

    def refused(self, error: DelaydError) -> None:
        """Meta has refused a registration by name."""
        kind = _FENCING.get(type(error))
        if kind is not None:
            self.fence.put_up(META, error, kind)
            self._on_doubt()

    def _keep_place(self) -> None:
        keep_place(self._state, self.place)
        self._taken_in = self.place
