"""Trust: both ends of a connection prove that they have the cluster's secret (docs/protocol.md, Trust; rule H8).

Invariant: `Connection.trusted` is set only here, after a proof that was made for this connection. Requests that change
a server, or could stop it, are served on trusted connections only.

     dialler                                   server
     CHALLENGE {nonce} ───────────────────────▶
     ◀─────────────── {nonce, role, log_id, cluster_id, proof}
     PROVE {proof, cluster_id} ───────────────▶  trusted
     ◀──────────────────────────────────── {}

`Membership` says which cluster a server with logs belongs to, and whether it is the only server of its log_id.
Invariant: the cluster's id is durable before it is told to anyone, and never changes: a meta of another cluster is
refused by name, and so is a server of another cluster at the address of a target. A server may serve before its meta
has answered only if its directory is where it was created, or where meta took it last: the lock there keeps every other
server out.

     start ──new, or in its place──▶ serves ◀──registered── fenced, asks again ◀──start in another place
                                       └──meta refuses it by name──▶ fenced
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from delayd.address import TOKEN_VARIABLE
from delayd.errors import (
    BadRequest,
    DelaydError,
    EpochOutOfRange,
    FencedInstance,
    NotAllowed,
    NotReady,
    NotTrusted,
    PlaceTaken,
    ServerRetired,
    StaleEpoch,
    UnknownRequest,
    WrongCluster,
)
from delayd.machine.identity import keep_cluster_id, keep_place, known_cluster_id, known_place
from delayd.machine.operating import META, Fence, WaitKind
from delayd.machine.state import State
from delayd.net.connection import PROOF, Connection
from delayd.net.tokens import TokenBook, keep_tokens, now_ms, read_kept
from delayd.secret import NONCE_BYTES, Exchange, Secret
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_bytes,
    need_str,
    need_u64,
)
from delayd.wire.requests import RequestType
from delayd.wire.tokens import Right, TokenPage

log = logging.getLogger(__name__)

# Requests of servers and of operators: they register, hand messages over, or change what a server keeps or serves.
NEEDS_TRUST = frozenset(kind for kind in RequestType if kind.terms.trusted)
GUARDED = PROOF | NEEDS_TRUST
# These change nothing, or are one of many pieces of what was told before.
NOT_TOLD = frozenset({RequestType.TOKENS, RequestType.CUT_READY, RequestType.DRAIN})
# Fields that a line about an administrative request has, if the request has them.
TOLD = ("name", "subject", "group", "role", "log_id", "to", "id", "decision", "rights")


class Proved(NamedTuple):
    """The server at the other end, which has proved the secret. `cluster_id` is 0 while it does not know its own."""

    role: str
    log_id: int
    cluster_id: int


class Guard:
    """The side that was dialled: it answers challenges, takes tokens, and refuses what a peer may not ask for."""

    def __init__(
        self, secret: Secret, role: str, log_id: int, cluster_id: Callable[[], int], book: TokenBook | None = None
    ) -> None:
        self._secret = secret
        self._book = book or TokenBook()
        self._role = role
        self._log_id = log_id
        self._cluster_id = cluster_id
        # One for each connection that has begun to prove itself; it is forgotten with the connection.
        self._begun: WeakKeyDictionary[Connection, Exchange] = WeakKeyDictionary()

    def serves(self, connection: Connection, frame: Frame) -> bool:
        """Answer a request of the proof itself; False for any other request, which the server may serve.

        Raises:
            NotTrusted: the request needs a proof that this connection has not given, or the proof is wrong.
            WrongCluster: the peer has the secret and belongs to another cluster.
            NotAllowed: the request needs a token, or one with another right.
            BadToken: the token that it shows is not valid.
            SlowDown: the peer's token has used what it has of this second.
        """
        if frame.type not in GUARDED and not self._book.is_closed:
            return False
        if frame.type not in PROOF:
            self._check(connection, frame)
            return False
        if frame.type == RequestType.CHALLENGE:
            connection.answer(frame.request_id, self._answer(connection, frame.head))
        elif frame.type == RequestType.TOKEN:
            connection.answer(frame.request_id, self._enter(connection, frame.head))
        else:
            self._prove(connection, frame.head)
            connection.answer(frame.request_id, {})
        return True

    def _check(self, connection: Connection, frame: Frame) -> None:
        """Raise when the peer may not ask this."""
        needs_trust, entry = frame.type in NEEDS_TRUST, connection.entry
        if not connection.trusted:
            if entry is not None:
                entry.check(frame)
            elif needs_trust:
                name = RequestType(frame.type).name
                raise NotTrusted(
                    f"{name} is for servers and operators of this cluster; prove its secret first: "
                    "give the file with --secret-file, or the data directory that holds it with --data"
                )
            else:
                raise NotAllowed(
                    f"this {self._role} server asks for a token; give one as token= or in {TOKEN_VARIABLE}"
                )
        if needs_trust and frame.type not in NOT_TOLD and Right.ADMINISTER in RequestType(frame.type).terms.needs:
            by = entry.name if entry is not None and not connection.trusted else "the secret"
            told = " ".join(f"{name}={frame.head[name]!r}" for name in TOLD if name in frame.head)
            name = RequestType(frame.type).name
            log.info("administered request=%s by=%r peer=%s told=%r", name, by, connection.peer, told)

    def _enter(self, connection: Connection, head: Head) -> Head:
        """Take a token."""
        first = connection.entry is None
        entry = self._book.enter(connection, need_str(head, "token"))
        if entry is None:
            return {"name": "", "rights": "", "expires_ms": 0, "now_ms": now_ms()}
        if first:
            connection.closed.add_done_callback(lambda _: self._book.leave(connection))
        record = entry.meter.record
        return {"name": record.name, "rights": record.rights, "expires_ms": record.expires_ms, "now_ms": now_ms()}

    def _answer(self, connection: Connection, head: Head) -> Head:
        nonce = _nonce(head)
        own = self._role, self._log_id, self._cluster_id()
        exchange = Exchange(nonce, os.urandom(NONCE_BYTES), *own, connection.channel)
        self._begun[connection] = exchange
        return {
            "nonce": exchange.server_nonce,
            "role": exchange.role,
            "log_id": exchange.log_id,
            "cluster_id": exchange.cluster_id,
            "proof": self._secret.server_proof(exchange),
        }

    def _prove(self, connection: Connection, head: Head) -> None:
        # A challenge serves for one try, so that a connection can't be used to guess.
        exchange = self._begun.pop(connection, None)
        if exchange is None:
            raise BadRequest("a proof without a challenge before it")
        if not self._secret.is_dialler_proof(need_bytes(head, "proof"), exchange):
            raise NotTrusted(
                f"the proof is wrong: the peer's secret is not the one of this {self._role} server; copy the file "
                f"{os.path.basename(self._secret.path)} from the machine of the meta server"
            )
        check_cluster(exchange.cluster_id, need_u64(head, "cluster_id"), f"this {self._role} server")
        connection.trusted = True


async def prove(connection: Connection, secret: Secret, cluster_id: int, timeout_ms: float) -> Proved:
    """For the side that dials: check that the server has the secret, and prove that this side has it.

    `cluster_id` is this side's own, 0 if it knows none. One round trip for each of the two frames.

    Raises:
        NotTrusted: the server does not have the secret, or says that this side does not.
        WrongCluster: it has the secret and belongs to another cluster.
        DelaydError: as Connection.request.
    """
    nonce = os.urandom(NONCE_BYTES)
    try:
        answer = (await connection.request(RequestType.CHALLENGE, {"nonce": nonce}, (), timeout_ms)).head
        role, log_id = need_str(answer, "role"), need_u64(answer, "log_id")
        exchange = Exchange(nonce, _nonce(answer), role, log_id, need_u64(answer, "cluster_id"), connection.channel)
        proof = need_bytes(answer, "proof")
    except (BadRequest, UnknownRequest) as error:
        raise NotTrusted(f"{connection.peer} answers no challenge, so it is no server of this cluster") from error
    if not secret.is_server_proof(proof, exchange):
        raise NotTrusted(
            f"{connection.peer} does not have this cluster's secret ({secret.path}): it is another cluster's, or its "
            "secret is to be copied from the machine of the meta server"
        )
    check_cluster(exchange.cluster_id, cluster_id, f"the {role} server at {connection.peer}")
    shown: Head = {"proof": secret.dialler_proof(exchange), "cluster_id": cluster_id}
    await connection.request(RequestType.PROVE, shown, (), timeout_ms)
    return Proved(role, log_id, exchange.cluster_id)


def check_cluster(its: int, peers: int, who: str) -> None:
    """Refuse the ids of `who` and of its peer when both are known and differ. Raises WrongCluster."""
    if its and peers and its != peers:
        raise WrongCluster(
            f"{who} is of cluster {its:016x}, and its peer of {peers:016x}; give the address of the right meta server, "
            "and do not mix data directories of two clusters"
        )


def _nonce(head: Head) -> bytes:
    nonce = need_bytes(head, "nonce")
    if len(nonce) != NONCE_BYTES:
        raise BadRequest(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}", field="nonce")
    return nonce


# Refusals which mean that this server may be a copy or an older life, and what an operator can do.
_FENCING: dict[type[DelaydError], WaitKind] = {
    PlaceTaken: WaitKind.PLACE_TAKEN,
    FencedInstance: WaitKind.FENCED_INSTANCE,
    ServerRetired: WaitKind.RETIRED,
    StaleEpoch: WaitKind.STALE_EPOCH,
    EpochOutOfRange: WaitKind.EPOCH_OUT_OF_RANGE,
    WrongCluster: WaitKind.WRONG_CLUSTER,
}


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
        self.tokens = TokenBook()
        read_kept(state, state_path, self.tokens)
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
        return Guard(self._secret, role, log_id, lambda: self.cluster_id, self.tokens)

    async def prove(self, connection: Connection, timeout_ms: float) -> Proved:
        """Prove to the server at the other end that this one is of its cluster. Raises as `trust.prove`."""
        return await prove(connection, self._secret, self.cluster_id, timeout_ms)

    def heard_tokens(self, page: TokenPage) -> None:
        """Take the tokens that meta knows; durable on return."""
        keep_tokens(self._state, page)
        self.tokens.take(page)
        log.info("tokens_taken count=%d", len(page.tokens))

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
            # A retired server held nothing any more, so no target has to be asked what it holds.
            if not isinstance(error, ServerRetired):
                self._on_doubt()

    def _keep_place(self) -> None:
        keep_place(self._state, self.place)
        self._taken_in = self.place
