"""Which cases there are, in which sizes, and who is compared with whom.

Invariant: a side of a case ends within its limit, whoever runs it (`bench.runs`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bench import herd, schedule
from bench.figures import Figures
from bench.steady import redis_steady, steady

DELAYD, REDIS, REDIS_PY = "delayd", "redis", "redis_py"

Side = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure."""

    name: str  # On the command line.
    title: str
    sides: Mapping[str, Side]  # In the order in which they take turns.
    rate: str = ""  # The figure, more of which is better, whose quotient is told.
    runs: int = 3
    limit_s: int = 60  # Of one run of one side.


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; messages, unless the name says otherwise."""

    batches: int
    redis_batches: int
    singles: int
    herd: int
    steady_s: int
    rates: tuple[int, ...]


SIZES = {
    "tiny": Sizes(batches=20_000, redis_batches=10_000, singles=4_000, herd=5_000, steady_s=1, rates=(500,)),
    "quick": Sizes(
        batches=1_000_000, redis_batches=300_000, singles=100_000, herd=200_000, steady_s=5, rates=(5_000, 20_000)
    ),
    "full": Sizes(
        batches=2_000_000, redis_batches=1_000_000, singles=200_000, herd=200_000, steady_s=10, rates=(5_000, 20_000)
    ),
}


def cases(size: str) -> list[Case]:
    """All cases in a size."""
    of = SIZES[size]
    return [
        Case(
            "batches",
            "schedule, batches of 500",
            {
                DELAYD: partial(schedule.batches, of.batches),
                REDIS: partial(schedule.redis_batches, of.redis_batches),
                REDIS_PY: partial(schedule.redis_py_batches, of.redis_batches),
            },
            rate="messages_s",
        ),
        Case(
            "singles",
            "schedule singles, 1,000 senders",
            {
                DELAYD: partial(schedule.singles, of.singles),
                REDIS: partial(schedule.redis_singles, of.singles),
                REDIS_PY: partial(schedule.redis_py_singles, of.singles),
            },
            rate="messages_s",
        ),
        Case(
            "herd",
            f"herd of {of.herd:,}",
            {DELAYD: partial(herd.herd, of.herd), REDIS: partial(herd.redis_herd, of.herd)},
            rate="messages_s",
        ),
        *(
            Case(
                f"steady-{rate}",
                f"steady {rate:,}/s",
                {DELAYD: partial(steady, rate, of.steady_s), REDIS: partial(redis_steady, rate, of.steady_s)},
            )
            for rate in of.rates
        ),
    ]
