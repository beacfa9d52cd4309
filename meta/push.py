"""Push targets: where gateways POST due messages to (docs/push.md), and how many gateways share that work.

Invariant: a target is told only when it is durable, and changes only when whoever changes it has seen its last version.
The keys with which POSTs are signed are told to trusted peers only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import msgpack

from delayd.errors import BadArgument, BadRequest, DamagedData, DamagedValue, key_text
from delayd.machine.clock import Clock
from delayd.machine.state import State
from delayd.wire.heads import read_row
from delayd.wire.push import TARGETS_MAX, PushTarget, check_target, take_page

log = logging.getLogger(__name__)

PREFIX = b"push/"  # `<name>` The target, as in its request.
GATEWAY_KEPT_MS = 10_000  # A gateway that has not asked for so long shares no work any more; they ask each second.
GATEWAYS_MAX = 1_000


class PushTable:
    """Belongs to the loop; it follows the state."""

    def __init__(self, state: State, path: str, clock: Clock) -> None:
        self._known: dict[str, PushTarget] = {}
        self._clock = clock
        self._gateways: dict[int, int] = {}  # When each has asked last.
        damaged: list[DamagedValue] = []
        for key, value in state.scan(PREFIX, damaged):
            try:
                target = read_row(PushTarget, msgpack.unpackb(value))
            except (ValueError, TypeError, BadRequest) as error:
                raise DamagedData(path, 0, f"the value of {key!r} is no push target ({error})") from error
            self._known[target.name] = target
        for damage in damaged:
            log.critical("push_target_lost key=%s reason=%r", key_text(damage.key), str(damage))
        self.revision = self._revision()

    def page(self, after: str) -> tuple[Sequence[PushTarget], bool]:
        """The targets of one answer, and whether there are more behind them."""
        return take_page(self._known.values(), after)

    def gateways(self, asking: int) -> int:
        """How many gateways share the work, with the one that asks; 0 is none."""
        now_ms = self._clock.monotonic_ms()
        if asking:
            self._gateways[asking] = now_ms
        if len(self._gateways) > GATEWAYS_MAX or any(
            at_ms + GATEWAY_KEPT_MS < now_ms for at_ms in self._gateways.values()
        ):
            latest = sorted(self._gateways.items(), key=lambda each: each[1])[-GATEWAYS_MAX:]
            self._gateways = {each: at_ms for each, at_ms in latest if at_ms + GATEWAY_KEPT_MS >= now_ms}
        return len(self._gateways)

    def check_change(self, target: PushTarget, was: int) -> None:
        """Raise BadArgument, BadSubject when a target can't be kept in place of its version ``was``; 0 is none."""
        check_target(target)
        known = self._known.get(target.name)
        if known is None and was:
            raise BadArgument(f"there is no push target {target.name}; see `delayd push list`")
        if known is not None and not was:
            raise BadArgument(f"there is a push target {target.name} already; give another name, or change that one")
        if known is not None and known.version != was:
            raise BadArgument(f"the push target {target.name} was changed meanwhile; look at it, and change it again")
        if known is None and len(self._known) >= TARGETS_MAX:
            raise BadArgument(f"there are {TARGETS_MAX} push targets; delete one first")

    def check_known(self, name: str) -> None:
        """Raise BadArgument when there is no target of that name."""
        if name not in self._known:
            raise BadArgument(f"there is no push target {name[:100]}; see `delayd push list`")

    def set(self, target: PushTarget) -> None:
        """Note what the state says now."""
        self._known[target.name] = target
        self.revision = self._revision()

    def remove(self, name: str) -> None:
        """Note that the state has this target no more."""
        self._known.pop(name, None)
        self.revision = self._revision()

    def _revision(self) -> int:
        # A digest, so that it differs after a restart exactly when a target does.
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._known):
            digest.update(target_value(self._known[name]))
        return int.from_bytes(digest.digest(), "big")


def target_key(name: str) -> bytes:
    """Where the state has a target."""
    return PREFIX + name.encode()


def target_value(target: PushTarget) -> bytes:
    """A target as the state has it."""
    value: bytes = msgpack.packb(target.to_head())
    return value
