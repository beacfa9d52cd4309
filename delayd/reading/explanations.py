"""Explanations: times in which servers handed nothing over, by their own files, and which of them made messages late.

Two sources. A checkpoint notes when its server stood still, or doubted its clock (docs/formats/checkpoint.md, `gaps`).
A realtime server's log holds each hello of a delay server, durable before any batch of that session: what was due
before it, and left after it, waited for a restart or a new connection.

Invariant: nothing is guessed. A message is explained by the time that covers most of its wait, and only when that is
half of the wait at least; each other one is said to be without a known cause, with the step that was late.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.log.checkpoint import read_gaps
from delayd.machine.clock import SET_BACK, STOOD_STILL
from delayd.machine.disk import Disk
from delayd.reading.files.directory import Directory, Role
from delayd.reading.files.row_arrays import UInt64s
from delayd.reading.files.target_index import TargetIndex

RESTARTED, CONNECTED = "restarted", "connected anew"


class Explanation(NamedTuple):
    """Why messages left late: what a server did from one instant to another, by its own clock.

    ``until_ms`` is 0 of one that names no more than the step that was late: nobody knows why it was.
    """

    what: str  # As a trace names it, RESTARTED, CONNECTED, or the step.
    role: str = ""
    log_id: int = 0
    from_ms: int = 0
    until_ms: int = 0
    target_log_id: int = 0  # Only messages to this realtime server were kept; 0: all.

    @property
    def is_known(self) -> bool:
        """Whether it says why."""
        return self.until_ms > 0


CLAIMED_LATE, APPENDED_LATE = Explanation("claimed late"), Explanation("claimed in time, appended late")
STEPS = (CLAIMED_LATE, APPENDED_LATE)
"""What is known of each late message. An explanation's number counts from these."""


def read_explanations(
    disk: Disk, delay: Directory, realtimes: Sequence[Directory], index: TargetIndex
) -> tuple[Explanation, ...]:
    """What may have kept messages of a delay server. Raises DamagedData when a checkpoint can't be read."""
    found = [each for server in (delay, *realtimes) for each in _gaps(disk, server)]
    found += _sessions(delay.log_id, index)
    return tuple(sorted(found, key=lambda each: (each.from_ms, each.until_ms, each)))


def _gaps(disk: Disk, server: Directory) -> Iterator[Explanation]:
    for gap in read_gaps(disk, server.path, server.log_id)[1]:
        # A realtime server takes messages also while it doubts its clock. A clock that was set back shows no message
        # as late: it shows the instant at which one is due a second time.
        if gap.what == STOOD_STILL or (server.role == Role.DELAY and gap.what != SET_BACK):
            target = server.log_id if server.role == Role.REALTIME else 0
            yield Explanation(gap.what, server.role, server.log_id, gap.from_ms, gap.until_ms, target)


def _sessions(origin: int, index: TargetIndex) -> Iterator[Explanation]:
    """Each hello of a delay server but its first at a target, from the last batch of the session before it on."""
    batches = index.batches
    for number, target in enumerate(index.targets):
        hellos = index.hellos.get((number, origin), ())
        if not hellos:
            continue
        own = np.flatnonzero((batches["origin_log_id"] == origin) & (batches["target"] == number))
        offsets, epoch = batches["offset"][own], 0
        for hello in hellos:
            before = int(np.searchsorted(offsets, np.uint64(hello.offset)))
            if before:
                last = batches[own[before - 1]]
                what = RESTARTED if hello.epoch != (epoch or int(last["epoch"])) else CONNECTED
                since_ms = int(last["appended_at_ms"])
                yield Explanation(what, Role.DELAY, origin, since_ms, hello.at_ms, target.log_id)
            epoch = hello.epoch


def explain(
    explanations: Sequence[Explanation],
    from_ms: Int64s,
    until_ms: Int64s,
    claimed_in_time: NDArray[np.bool_],
    to: UInt64s,
) -> NDArray[np.int64]:
    """For each message the number of its explanation in ``(*STEPS, *explanations)``.

    A message waited from ``from_ms`` until ``until_ms``, and went to the target ``to``.
    """
    number = claimed_in_time.astype(np.int64)
    # What does not cover half of a wait is no explanation of it.
    covered = (until_ms - from_ms) // 2
    first_ms, last_ms = int(from_ms.min(initial=0)), int(until_ms.max(initial=0))
    for place, each in enumerate(explanations, len(STEPS)):
        if each.from_ms >= last_ms or each.until_ms <= first_ms:
            continue
        own = np.minimum(until_ms, each.until_ms) - np.maximum(from_ms, each.from_ms)
        if each.target_log_id:
            own[to != np.uint64(each.target_log_id)] = 0
        better = own > covered
        number[better], covered[better] = place, own[better]
    return number
