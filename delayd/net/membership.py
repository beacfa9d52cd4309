"""Membership: which cluster a server with logs belongs to, as its meta said when it first took a registration.

Invariant: the cluster's id is durable before it is told to anyone, and never changes: a meta of another cluster is
refused by name, and so is a server of another cluster at the address of a target (rule H8).
"""

import logging

from delayd.identity import keep_cluster_id, known_cluster_id
from delayd.net.connection import Connection
from delayd.net.trust import Guard, Proved, prove
from delayd.secret import Secret
from delayd.state import State

log = logging.getLogger(__name__)


class Membership:
    """The secret and the cluster of one server; all methods belong to the loop's thread."""

    def __init__(self, secret: Secret, role: str, state: State, state_path: str) -> None:
        self.cluster_id = known_cluster_id(state, state_path)
        self._secret = secret
        self._role = role
        self._state = state

    def guard(self, log_id: int) -> Guard:
        """What checks those who connect to this server."""
        return Guard(self._secret, self._role, log_id, lambda: self.cluster_id)

    async def prove(self, connection: Connection, timeout_ms: float) -> Proved:
        """Show the server at the other end that this one is of its cluster. Raises as `trust.prove`."""
        return await prove(connection, self._secret, self.cluster_id, timeout_ms)

    def joined(self, cluster_id: int) -> None:
        """Meta has taken a registration: this is the cluster from now on. One fsync in a directory's life."""
        if cluster_id and not self.cluster_id:
            keep_cluster_id(self._state, cluster_id)
            self.cluster_id = cluster_id
            log.info("joined cluster_id=%016x", cluster_id)
