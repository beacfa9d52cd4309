"""Setting quotas in a world, and reading how much of them is used."""

from __future__ import annotations

from delayd.delay.quotas.quotas import QuotaUse
from delayd.errors import DelaydError
from delayd.log.control import QuotaLimits
from tests.worlds.delay import World

SUBJECT = b"orders.eu"


def set_quota(world: World, limits: QuotaLimits, subject: bytes = SUBJECT) -> DelaydError | None:
    """Set a quota and let everything happen that takes no time; the answer."""
    told: list[DelaydError | None] = []
    world.core.set_quota(subject, limits, told.append)
    world.settle()
    (answer,) = told
    return answer


def use(world: World, subject: bytes = SUBJECT) -> QuotaUse:
    world.settle()
    (found,) = (each for each in world.core.asked.quotas.listing() if each.subject == subject)
    return found


def pending(world: World, subject: bytes = SUBJECT) -> int:
    found = use(world, subject)
    assert found.counted
    return found.rows
