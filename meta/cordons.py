"""Cordons: the delay servers that get no new messages, by an operator's word, and those that left the cluster for good
(docs/drain.md).

     serving ◀──uncordon──▶ cordoned ──retire──▶ retired

Invariant: a retired server never registers again, whoever starts its directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum

from delayd.errors import BadArgument, BadRequest, DamagedValue, FencedInstance, key_text
from delayd.machine.state import State
from delayd.wire.meta import Cordons, ServerInfo

PREFIX = b"cordon/"

log = logging.getLogger(__name__)


class Standing(Enum):
    """How an operator wants a delay server to be used."""

    SERVING = "serving"
    CORDONED = "cordoned"
    RETIRED = "retired"


def read_standing(name: str) -> Standing:
    """The standing of this name; BadRequest when there is none."""
    try:
        return Standing(name)
    except ValueError:
        names = ", ".join(each.value for each in Standing)
        raise BadRequest(f"standing is {name!r} and must be one of {names}", field="standing") from None


class CordonTable:
    """Belongs to the loop; it follows the state."""

    def __init__(self, state: State) -> None:
        self._known: dict[int, Standing] = {}
        damaged: list[DamagedValue] = []
        for key, value in state.scan(PREFIX, damaged):
            self._known[int.from_bytes(key[len(PREFIX) :], "big")] = Standing(value.decode())
        for damage in damaged:
            log.warning("value_lost key=%s", key_text(damage.key))

    def of(self, log_id: int) -> Standing:
        """How a server is used."""
        return self._known.get(log_id, Standing.SERVING)

    def set(self, log_id: int, standing: Standing) -> None:
        """Note what the state says now."""
        if standing is Standing.SERVING:
            self._known.pop(log_id, None)
        else:
            self._known[log_id] = standing

    def check(self, log_id: int) -> None:
        """Raise FencedInstance for a server that was retired."""
        if self.of(log_id) is Standing.RETIRED:
            raise FencedInstance(f"an operator has retired the delay server {log_id:016x} for good; stop this process")

    def check_change(self, log_id: int, standing: Standing, live: Iterable[int]) -> None:
        """Raise BadArgument when a server can't be used so from now on; ``live`` are the servers that are alive."""
        before = self.of(log_id)
        name = f"the delay server {log_id:016x}"
        if before is Standing.RETIRED:
            raise BadArgument(f"{name} is retired for good")
        if standing is Standing.RETIRED and before is not Standing.CORDONED:
            raise BadArgument(f"{name} takes new messages; cordon and drain it first")
        if standing is Standing.CORDONED and not self.open(each for each in live if each != log_id):
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
