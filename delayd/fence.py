"""Fence: the reasons why a server may not serve, as meta or another server has given them (rule H8).

A copied, restored or moved directory must not act before it is certain that it is the only one with its log_id.
Invariant: while a reason stands the server gives no receipts and hands nothing over; it answers requests with a named
error.
"""

import logging

from delayd.errors import DelaydError, RetryLater, ServerFenced
from delayd.waits import Wait, WaitKind

log = logging.getLogger(__name__)

RETRY_AFTER_MS = 1_000  # The hint to clients: somebody has to decide, or a lease has to end.
META = "meta"


class Fence:
    """Reasons by who gave them: meta, or the log_id of a target. `role` and `log_id` are of this server."""

    def __init__(self, role: str, log_id: int) -> None:
        # Plain attributes, because they are read with each batch and each step.
        self.is_up = False  # This server may not serve.
        self.by_meta = False  # Meta has not taken this server, so it speaks to no other server either.
        self._role, self._log_id = role, f"{log_id:016x}"  # As commands name it.
        self._server = f"{role} server {log_id:016x}"
        self._reasons: dict[str, DelaydError] = {}
        self._waits: dict[str, Wait] = {}

    def put_up(self, by: str, reason: DelaydError, kind: WaitKind, target: str = "") -> None:
        """Stop serving because of a reason that `by` gave, `target` if it was one. Each reason is logged once."""
        known = self._reasons.get(by)
        why, role, log_id = f"{by} says {reason.code}: {reason.message}", self._role, self._log_id
        wait = kind.wait(why, server=self._server, role=role, log_id=log_id, target=target)
        self._reasons[by], self._waits[by] = reason, wait
        self._look()
        if known is None or known.code != reason.code:
            # A moved directory is taken as soon as meta was asked, so only a lasting reason is an alarm.
            level = logging.WARNING if isinstance(reason, RetryLater) else logging.CRITICAL
            log.log(
                level,
                "fenced by=%s code=%s reason=%r nothing_is_served_until=%r",
                *(by, reason.code, reason.message, wait.command),
            )

    def take_down(self, by: str) -> None:
        """Remove the reason that `by` gave."""
        if self._reasons.pop(by, None) is not None:
            del self._waits[by]
            self._look()
            log.info("unfenced by=%s serves=%s", by, "no" if self._reasons else "yes")

    def is_up_by(self, by: str) -> bool:
        """Whether a reason of `by` stands."""
        return by in self._reasons

    def error(self) -> ServerFenced:
        """The error for requests; only while the fence is up."""
        by, reason = next(iter(self._reasons.items()))
        return ServerFenced(
            f"{self._server} may not serve, {by} says {reason.code}: {reason.message}", retry_after_ms=RETRY_AFTER_MS
        )

    def check(self) -> None:
        """Raise ServerFenced while the fence is up."""
        if self._reasons:
            raise self.error()

    def waits(self) -> list[Wait]:
        """The reasons for STATUS."""
        return list(self._waits.values())

    def _look(self) -> None:
        self.is_up, self.by_meta = bool(self._reasons), META in self._reasons
