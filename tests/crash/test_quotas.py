"""A server with quotas dies at each of its disk operations: quotas that were answered are kept, and counts are right.

What is pending is compared with what the logs of the next life say: accepted, without an outcome, and not cancelled.
"""

from __future__ import annotations

import pytest

from delayd.errors import DelaydError
from delayd.log.control import NO_LIMITS, QuotaLimits
from tests.crash.delay_deaths import LaterDeath
from tests.worlds.delay import Remains, World, small_slots, wanted

HOUR_MS = 3_600_000
PARTS = 2
MAILS, TEXTS = b"mails", b"texts"
SETTINGS = {"segment_bytes": 4_096, "tail_bytes": 0, "load_ahead_ms": 1_000, "checkpoint_every_ms": HOUR_MS}

Told = dict[bytes, list[QuotaLimits]]  # By subject: the quotas that it may have, the oldest one first.


def set_quota(world: World, told: Told, subject: bytes, limits: QuotaLimits) -> None:
    told.setdefault(subject, [NO_LIMITS]).append(limits)

    def done(error: DelaydError | None) -> None:
        assert error is None
        told[subject] = [limits]

    world.core.set_quota(subject, limits, done)
    world.settle()


def work(world: World, told: Told) -> None:
    world.send([*wanted(3, 400, "near", MAILS), *wanted(4, 2 * HOUR_MS, "far", MAILS), *wanted(2, 500, "t", TEXTS)])
    world.settle()
    set_quota(world, told, MAILS, QuotaLimits(pending=60, per_second=40))
    world.checkpoint()
    world.send(wanted(5, 2 * HOUR_MS, "more", MAILS))
    world.cancel(world.receipts("far-0", "near-0"))
    set_quota(world, told, TEXTS, QuotaLimits(pending_bytes=4_000))
    world.pass_ms(600)
    world.cancel(world.receipts("more-1"))
    set_quota(world, told, MAILS, QuotaLimits(pending=50))
    world.checkpoint()
    world.send([*wanted(3, 40 * HOUR_MS, "later", MAILS), *wanted(3, 900, "soon", TEXTS)])
    world.pass_ms(500)
    set_quota(world, told, TEXTS, NO_LIMITS)


def check(remains: Remains, told: Told) -> None:
    world = World(remains, seed=2, **SETTINGS)  # type: ignore[arg-type]
    quotas = {use.subject: use.limits for use in world.core.asked.quotas.listing()}
    for subject, allowed in told.items():
        assert quotas.get(subject, NO_LIMITS) in allowed, f"{subject!r} has {quotas.get(subject)}, not one of {allowed}"
    world.pass_ms(1_100)
    for number in list(world.outside.unanswered):
        world.send_again(number)
    world.pass_ms(1_100)
    ended = world.outcomes().keys() | world.cancelled().keys()
    for use in world.core.asked.quotas.listing():
        pending = [
            len(body)
            for sent, accepted in world.outside.accepted.values()
            for row, (_, subject, body) in enumerate(sent.wanted)
            if subject == use.subject and accepted.base_sequence + row not in ended
        ]
        assert use.counted
        assert (use.rows, use.bytes) == (len(pending), sum(pending)), use.subject
    world.drain(50 * HOUR_MS)
    world.check_books()
    assert all(use.rows == use.bytes == 0 for use in world.core.asked.quotas.listing())


@pytest.mark.parametrize("part", range(PARTS))
def test_rule_E3_quotas_and_counts_are_right_after_a_death_at_each_operation(part: int) -> None:
    def death_at(at: int | None) -> tuple[LaterDeath, Told]:
        told: Told = {}
        return LaterDeath(at, SETTINGS, lambda world: work(world, told)), told

    with small_slots():
        operations = death_at(None)[0].operations
        assert len(operations) > 40
        for at in range(1 + part, len(operations) + 2, PARTS):
            death, told = death_at(at)
            for how, remains in death.each_next():
                try:
                    check(remains, told)
                except AssertionError as error:
                    raise AssertionError(f"{how}, operation {at}: {error}") from error
