"""Which servers there are, and which of them are alive: a lease that each registration renews.

Invariant: a server that registered within the last lease, in monotonic time, is alive, and one that did not is not; the
epoch kept for a log_id never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from delayd.clock import Clock
from delayd.errors import FencedInstance, SlowDown, StaleEpoch
from delayd.wire.meta import SERVERS_MAX, Registered, ServerInfo

Key = tuple[str, int]  # Role and log_id.


@dataclass(slots=True)
class _Known:
    server: Registered
    stored: Registered | None  # As the state has it.
    seen_ms: int
    alive: bool = True  # Until its lease ends; False at once when another server registers at its address.


class Registry:
    """Servers by role and log_id, in memory."""

    def __init__(self, clock: Clock, lease_ms: int, stored: Iterable[Registered]) -> None:
        self._clock = clock
        self._lease_ms = lease_ms
        # Nobody could register while meta was away, so each known server has a whole lease from now on.
        now_ms = clock.monotonic_ms()
        self._known = {(each.role, each.log_id): _Known(each, each, now_ms) for each in stored}

    def __len__(self) -> int:
        return len(self._known)

    def hear(self, server: Registered) -> bool:
        """Renew a lease; whether the state does not hold this registration yet.

        Raises:
            StaleEpoch: a newer life of this server has registered.
            FencedInstance: another process of the same epoch is alive: the directory was copied.
        """
        key = (server.role, server.log_id)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(server, None, 0)
        elif known.server != server:
            self._check_newer(known, server)
        known.server = server
        known.seen_ms = self._clock.monotonic_ms()
        known.alive = True
        if known.stored == server:
            return False
        self._end_others_at(server)
        return True

    def stored(self, server: Registered) -> None:
        """The state holds this registration."""
        known = self._known.get((server.role, server.log_id))
        if known is not None:
            known.stored = server

    def make_room(self, server: Registered, needed: Callable[[Registered], bool]) -> Registered | None:
        """Forget the server that was unseen the longest when there is no place for a new one; returns it.

        Servers that are alive or `needed` stay; SlowDown when all others are.
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

    def live(self, role: str) -> list[int]:
        """The log_ids of the servers of a role that are alive, lowest first."""
        return sorted(
            known.server.log_id for known in self._known.values() if known.server.role == role and self._is_alive(known)
        )

    def servers(self, role: str | None = None) -> list[ServerInfo]:
        """All that are known, by role and log_id, alive or not."""
        return [self._info(self._known[key]) for key in sorted(self._known) if role is None or key[0] == role]

    def find(self, role: str, log_ids: Iterable[int]) -> list[ServerInfo]:
        """Those of a role that are known among some log_ids, lowest first."""
        keys = ((role, log_id) for log_id in sorted(set(log_ids)))
        return [self._info(self._known[key]) for key in keys if key in self._known]

    def _check_newer(self, known: _Known, server: Registered) -> None:
        heard = known.server
        if server.epoch < heard.epoch:
            raise StaleEpoch(
                f"epoch {server.epoch} of {server.role} server {server.log_id} is over: epoch {heard.epoch} registered "
                f"from {heard.host}:{heard.port}; stop this process"
            )
        if server.epoch == heard.epoch and self._is_alive(known):
            raise FencedInstance(
                f"{heard.host}:{heard.port} (pid {heard.pid}) is {server.role} server {server.log_id} in epoch "
                f"{server.epoch}; stop this process, which runs on a copy of its directory"
            )

    def _end_others_at(self, server: Registered) -> None:
        # Two servers can't listen at one address, so what was there before is gone, whatever its lease says.
        for known in self._known.values():
            if known.server != server and (known.server.host, known.server.port) == (server.host, server.port):
                known.alive = False

    def _is_alive(self, known: _Known) -> bool:
        return known.alive and self._clock.monotonic_ms() - known.seen_ms < self._lease_ms

    def _info(self, known: _Known) -> ServerInfo:
        return ServerInfo(known.server, self._is_alive(known), self._clock.monotonic_ms() - known.seen_ms)
