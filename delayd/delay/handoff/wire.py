"""Wire: a connection to a target, and one that notices when the target says nothing any more.

When a machine loses its power, a process is stopped or a switch dies, no connection ends: TCP itself would wait for a
quarter of an hour. Invariant: the peer counts as silent only when a request, at last a PING, was unanswered for the
whole limit and nothing else was heard. An answer that waits for a slow disk is not silence, because PINGs are answered
without the disk.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError
from delayd.machine.alarms import Alarms
from delayd.wire.frame import MORE, Frame, HeadValue
from delayd.wire.requests import RequestType

OnAnswer = Callable[[Frame | DelaydError], None]


class Wire(Protocol):
    """An open connection to a target."""

    def call(
        self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer
    ) -> object:
        """Send a request; ``on_answer`` is called with each frame of the answer, or with one error."""

    def close(self) -> None:
        """End the connection."""


LOOK_MS = 1_000
# If this server did not look for so long, it stood still itself, and answers may wait in its sockets.
STOOD_STILL_MS = 2_500


class WatchedWire:
    """A `Wire` that looks each second while something is under way; ``silent`` is called when nothing is heard. All
    times are monotonic.
    """

    def __init__(self, wire: Wire, alarms: Alarms, silence_ms_max: int, silent: Callable[[], None]) -> None:
        self._wire = wire
        self._clock = alarms.clock
        self._next_look = alarms.alarm(self._look)
        self._silent = silent
        self._silence_ms_max = silence_ms_max
        self._under_way = 0
        self._heard_ms = 0  # Last sign of life; when nothing was under way, the instant of the first request.
        self._looked_ms = 0
        self._pinged = False

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        """See Wire."""
        if not self._under_way:
            self._heard_ms = self._looked_ms = self._clock.monotonic_ms()
            self._pinged = False
            if self._next_look.at_ms is None:
                self._set_alarm()
        self._under_way += 1
        self._wire.call(frame_type, head, body, partial(self._heard, on_answer))

    def close(self) -> None:
        """See Wire."""
        self._next_look.off()
        self._wire.close()

    def _look(self) -> None:
        """Send a PING when half of the limit is over; tell when the peer has been silent for the whole limit."""
        if not self._under_way:
            return
        now = self._clock.monotonic_ms()
        if now - self._looked_ms > STOOD_STILL_MS:
            self._heard_ms, self._pinged = now, False
        self._looked_ms = now
        silent_ms = now - self._heard_ms
        if silent_ms >= self._silence_ms_max:
            self._silent()
            return
        if silent_ms >= self._silence_ms_max // 2 and not self._pinged:
            self._pinged = True
            self.call(RequestType.PING, {}, (), _alive)
        self._set_alarm()

    def _set_alarm(self) -> None:
        limit_ms = self._silence_ms_max if self._pinged else self._silence_ms_max // 2
        self._next_look.at(min(self._looked_ms + LOOK_MS, self._heard_ms + limit_ms))

    def _heard(self, on_answer: OnAnswer, answer: Frame | DelaydError) -> None:
        self._heard_ms, self._pinged = self._clock.monotonic_ms(), False
        if isinstance(answer, DelaydError) or not answer.flags & MORE:
            self._under_way -= 1
        on_answer(answer)


def _alive(answer: Frame | DelaydError) -> None:
    """The answer itself is the sign of life; its contents don't matter."""
