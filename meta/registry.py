"""Registry: which servers exist, and which of them are alive: each registration renews a server's lease.

Invariant: a server that registered within the last lease, in monotonic time, is alive, and one that did not is not. The
epoch kept for a log_id never falls. No server takes the place of one that is alive: two processes with one log_id in
two places are a server and a copy of it, and the one that holds the lease stays (rule H8).

     newcomer, other place ──first is alive──▶ PlaceTaken ──first registers again──▶ FencedInstance: it is a copy
                                                   └──first's lease ends──▶ taken: the server was moved

Some delay servers get no new messages, by an operator's word, and some have left the cluster for good (docs/drain.md).
Invariant: a retired server never registers again, whoever starts its directory.

     serving ◀──uncordon──▶ cordoned ──retire──▶ retired
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from delayd.errors import (
    BadArgument,
    BadRequest,
    DamagedValue,
    FencedInstance,
    PlaceTaken,
    ServerRetired,
    SlowDown,
    StaleEpoch,
    UnknownServer,
    key_text,
)
from delayd.machine.clock import Clock
from delayd.machine.identity import check_epoch
from delayd.machine.state import State
from delayd.wire.meta import SERVERS_MAX, Cordons, Registered, ServerInfo

Key = tuple[str, int]  # Role and log_id.


@dataclass(slots=True)
class _KnownServer:
    server: Registered
    stored: Registered | None  # The registration in the state.
    seen_ms: int
    alive: bool = True  # True until its lease ends; False at once when another server registers at its address.
    heard: bool = False  # It has registered in this life of meta.
    contender: Registered | None = None  # The last server that asked for its place while it was alive.
    contended_ms: int = 0  # When that contender first asked.


@dataclass(frozen=True, slots=True)
class RegistryTerms:
    """How long a registration counts, and whether those of earlier lives do.

    `moved` says that meta's own directory lies in another place than before. Then it may be a copy, and it may remember
    the addresses of the original's servers: clients are told of a server only after it has registered here.
    """

    lease_ms: int
    moved: bool = False


class Registry:
    """Servers by role and log_id, in memory."""

    def __init__(self, clock: Clock, terms: RegistryTerms, stored: Iterable[Registered]) -> None:
        self._clock = clock
        self._lease_ms, self._moved = terms.lease_ms, terms.moved
        # No server could register while meta was away, so each known server has a whole lease from now on.
        now_ms = clock.monotonic_ms()
        self._known = {
            (each.role, each.log_id): _KnownServer(each, each, now_ms, alive=self._may_be_there(each))
            for each in stored
        }

    def __len__(self) -> int:
        return len(self._known)

    def hear(self, server: Registered) -> bool:
        """Renew a lease; return whether the state lacks this registration.

        Raises:
            StaleEpoch: a newer life of this server has registered.
            EpochOutOfRange: no server can have started this often.
            PlaceTaken: a server with this log_id was alive in another place a moment ago; ask again.
            FencedInstance: that server is alive: the newcomer runs on a copy of its directory.
        """
        key = (server.role, server.log_id)
        known = self._known.get(key)
        heard_epoch = 0 if known is None else known.server.epoch
        check_epoch(server.epoch, heard_epoch, f"{server.role} server {server.log_id:016x}")
        if known is None:
            known = self._known[key] = _KnownServer(server, None, 0)
        elif known.server != server:
            self._check_newer(known, server)
        if known.server != server:
            known.contender = None
        known.server = server
        known.seen_ms = self._clock.monotonic_ms()
        known.alive = known.heard = True
        if known.stored == server:
            return False
        self._end_others_at(server)
        return True

    def stood_still(self, ms: int) -> None:
        """No server could register for so long: each lease ends so much later, but none begins later than now."""
        now_ms = self._clock.monotonic_ms()
        for known in self._known.values():
            known.seen_ms = min(known.seen_ms + ms, now_ms)
            known.contended_ms = min(known.contended_ms + ms, now_ms)

    def holds(self, server: Registered) -> bool:
        """Whether the state has exactly this registration."""
        known = self._known.get((server.role, server.log_id))
        return known is not None and known.stored == server

    def stored(self, server: Registered) -> None:
        """Note that the state holds this registration."""
        known = self._known.get((server.role, server.log_id))
        if known is not None:
            known.stored = server

    def make_room(self, server: Registered, needed: Callable[[Registered], bool]) -> Registered | None:
        """Forget the server that was unseen the longest when there is no place for a new one; returns it.

        Servers that are alive or `needed` are not forgotten; SlowDown when every server is one of these.
        """
        if (server.role, server.log_id) in self._known or len(self._known) < SERVERS_MAX:
            return None
        idle = [known for known in self._known.values() if not self._is_alive(known) and not needed(known.server)]
        if not idle:
            message = f"meta knows {SERVERS_MAX} servers, and each of them is alive or has subjects; stop some of them"
            raise SlowDown(message, retry_after_ms=self._lease_ms)
        forgotten = min(idle, key=lambda known: known.seen_ms).server
        del self._known[(forgotten.role, forgotten.log_id)]
        return forgotten

    def forget(self, role: str, log_id: int) -> Registered:
        """Find the server that an operator wants to forget; nothing is changed yet. Raises UnknownServer,
        BadArgument.
        """
        known = self._known.get((role, log_id))
        if known is None:
            raise UnknownServer(f"meta knows no {role} server {log_id:016x}; see `delayd servers`")
        if self._is_alive(known):
            raise BadArgument(
                f"{role} server {log_id:016x} is alive at {known.server.endpoint}; stop it for good, "
                "wait until its lease has ended, and say it again"
            )
        return known.server

    def find_any(self, role: str, log_id: int) -> Registered:
        """The last registration of a server that is known, alive or not."""
        return self._known[(role, log_id)].server

    def begin_anew(self, server: Registered) -> None:
        """Take any epoch of this server from now on; the state says so already."""
        known = self._known[(server.role, server.log_id)]
        known.server = known.stored = server
        known.alive = known.heard = False
        known.contender = None

    def remove(self, role: str, log_id: int) -> None:
        """Forget a server; the state has forgotten it already."""
        self._known.pop((role, log_id), None)

    def live(self, role: str) -> list[int]:
        """The log_ids of the servers of a role that are alive, lowest first."""
        return sorted(
            known.server.log_id for known in self._known.values() if known.server.role == role and self._is_alive(known)
        )

    def servers(self, role: str | None = None) -> list[ServerInfo]:
        """All known servers, by role and log_id, alive or not."""
        found = (self._known[key] for key in sorted(self._known) if role is None or key[0] == role)
        return [self._info(known) for known in found if self._is_told(known)]

    def find(self, role: str, log_ids: Iterable[int]) -> list[ServerInfo]:
        """The known servers of a role among some log_ids, lowest first."""
        keys = ((role, log_id) for log_id in sorted(set(log_ids)))
        return [self._info(self._known[key]) for key in keys if key in self._known and self._is_told(self._known[key])]

    def has(self, role: str, log_id: int) -> bool:
        """Whether a server is known, even if clients are not told of it."""
        return (role, log_id) in self._known

    def _check_newer(self, known: _KnownServer, server: Registered) -> None:
        heard = known.server
        if server.epoch < heard.epoch:
            raise StaleEpoch(
                f"epoch {server.epoch} of {server.role} server {server.log_id:016x} is over: epoch {heard.epoch} "
                f"registered from {heard.endpoint}; stop this process"
            )
        if not self._is_alive(known) or (server.epoch > heard.epoch and _in_one_place(server, heard)):
            return
        now_ms = self._clock.monotonic_ms()
        if known.contender != server:
            known.contender, known.contended_ms = server, now_ms
        who = f"{heard.endpoint} (pid {heard.pid}) is {server.role} server {server.log_id:016x}"
        if known.seen_ms > known.contended_ms:
            raise FencedInstance(
                f"{who} in epoch {heard.epoch} and alive; stop this process, which runs on a copy of its directory"
            )
        lease_ends_ms = known.seen_ms + self._lease_ms - now_ms
        raise PlaceTaken(
            f"{who} and was alive {now_ms - known.seen_ms} ms ago, from another place; this process is taken when "
            f"that one's lease has ended, in {lease_ends_ms} ms",
            retry_after_ms=lease_ends_ms,
        )

    def _end_others_at(self, server: Registered) -> None:
        # Two servers can't listen at one address, so the server that was there before is gone, whatever its lease says.
        for known in self._known.values():
            if known.server != server and known.server.endpoint == server.endpoint:
                known.alive = False

    def _is_told(self, known: _KnownServer) -> bool:
        return known.heard or self._may_be_there(known.server)

    def _may_be_there(self, server: Registered) -> bool:
        """Whether a server may still listen where it did in meta's life before. Those of a home within a program don't:
        their addresses ended with the home.
        """
        return not (self._moved or server.endpoint.is_inside)

    def _is_alive(self, known: _KnownServer) -> bool:
        return known.alive and self._clock.monotonic_ms() - known.seen_ms < self._lease_ms

    def _info(self, known: _KnownServer) -> ServerInfo:
        seen_ms_ago = self._clock.monotonic_ms() - known.seen_ms
        return ServerInfo(known.server, self._is_alive(known), seen_ms_ago, known.heard)


def _in_one_place(one: Registered, other: Registered) -> bool:
    """Whether two lives of a server lie in one folder, so that the older one has ended (rule L7)."""
    if one.place and other.place:
        return one.place == other.place
    return one.endpoint == other.endpoint


PREFIX = b"cordon/"  # `<u64 log_id>` A delay server that takes no new messages.

log = logging.getLogger(__name__)


class ServerStanding(Enum):
    """How an operator wants a delay server to be used."""

    SERVING = "serving"
    CORDONED = "cordoned"
    RETIRED = "retired"


def read_standing(name: str) -> ServerStanding:
    """The standing of this name; BadRequest when there is none."""
    try:
        return ServerStanding(name)
    except ValueError:
        names = ", ".join(each.value for each in ServerStanding)
        raise BadRequest(f"standing is {name!r} and must be one of {names}", field="standing") from None


class CordonTable:
    """Belongs to the loop; it follows the state."""

    def __init__(self, state: State) -> None:
        self._known: dict[int, ServerStanding] = {}
        damaged: list[DamagedValue] = []
        for key, value in state.scan(PREFIX, damaged):
            self._known[int.from_bytes(key[len(PREFIX) :], "big")] = ServerStanding(value.decode())
        for damage in damaged:
            log.warning("value_lost key=%s", key_text(damage.key))

    def of(self, log_id: int) -> ServerStanding:
        """How a server is used."""
        return self._known.get(log_id, ServerStanding.SERVING)

    def set(self, log_id: int, standing: ServerStanding) -> None:
        """Note what the state says now."""
        if standing is ServerStanding.SERVING:
            self._known.pop(log_id, None)
        else:
            self._known[log_id] = standing

    def check(self, log_id: int) -> None:
        """Raise ServerRetired for a server that was."""
        if self.of(log_id) is ServerStanding.RETIRED:
            raise ServerRetired(f"an operator has retired the delay server {log_id:016x} for good")

    def check_change(self, log_id: int, standing: ServerStanding, live: Iterable[int]) -> None:
        """Raise BadArgument when a server can't be used so from now on; ``live`` are the servers that are alive."""
        before = self.of(log_id)
        name = f"the delay server {log_id:016x}"
        if before is ServerStanding.RETIRED:
            raise BadArgument(f"{name} is retired for good")
        if standing is ServerStanding.RETIRED and before is not ServerStanding.CORDONED:
            raise BadArgument(f"{name} takes new messages; cordon and drain it first")
        if standing is ServerStanding.CORDONED and not self.open(each for each in live if each != log_id):
            raise BadArgument(f"no delay server but {name} is alive and takes new messages; start another one first")

    def open(self, log_ids: Iterable[int]) -> list[int]:
        """Those of some servers that take new messages."""
        return [log_id for log_id in log_ids if log_id not in self._known]

    def told(self, live: Iterable[int]) -> Cordons:
        """What servers are told with each registration."""
        if not self._known:
            return Cordons(frozenset(), frozenset())
        return Cordons(frozenset(self._known), frozenset(self.open(live)))

    def mark(self, infos: Iterable[ServerInfo]) -> list[ServerInfo]:
        """The same servers, with the word `cordoned` for those that are."""
        return [
            info._replace(cordoned=info.server.role == "delay" and info.server.log_id in self._known) for info in infos
        ]


def key_of(log_id: int) -> bytes:
    """Where the state has the standing of a server."""
    return PREFIX + log_id.to_bytes(8, "big")
