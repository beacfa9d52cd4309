"""Which cases there are, in which sizes, and who is compared with whom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bench import (
    again,
    cancels,
    crowded,
    edge,
    fair,
    far,
    herd,
    inspected,
    keys,
    memory,
    near,
    pending,
    restart,
    schedule,
    steady,
    streams,
    worker,
    written,
    years,
)
from bench.figures import Figures
from bench.messages import BATCH_ROWS, UNDER_WAY

DELAYD, REDIS, REDIS_PY = "delayd", "redis", "redis_py"

RATES = (5_000, 20_000)
SUBJECTS_RATE = 5_000

Side = Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure."""

    name: str  # On the command line.
    title: str
    sides: Mapping[str, Side]  # In the order in which they take turns.
    quotient: str = ""  # The figure that is compared: how many times as good as Redis.
    more_is_better: bool = True
    runs: int = 3
    limit_s: int = 60  # One run of one side ends within this time.


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the cases, in messages unless the name says otherwise."""

    batches: int
    singles: int
    cancels: int  # In columns; a quarter of them one by one.
    keys_pending: int
    crowded: tuple[int, int, int]  # Messages that wait, that were just cancelled, and hours in which those were due.
    herds: tuple[int, ...]
    steady_s: int
    settle_s: int  # The longest delay less the shortest one; 0 in a tiny run.
    rate_divisor: int  # A tiny run must work while other tests run.
    subjects: tuple[tuple[int, int], ...]  # Pairs: how many subjects, and how many of them have a consumer.
    listed: int  # Subjects of a single consumer.
    near_s: tuple[int, int]  # Seconds of the flood, and of the checkpoint behind it.
    edge: tuple[int, int]  # Seconds of the flood, and messages that the coming hour holds.
    inspected: tuple[int, int]  # Turns of five seconds, and messages that are looked at.
    far: int
    restarts: tuple[int, ...]
    redis_restart_max: int  # With more messages Redis takes minutes to fill.
    memory: int  # 0 leaves the case out.
    written: int
    fair: tuple[int, int, int]  # Shared by workers of 1 ms, of 0.3 s and of 10 s a message.
    worked: int  # Messages that one worker handles.
    streams: int  # Messages that one group consumes.
    again: int  # Messages that come a second time.
    years: int  # Messages of two years in memory.
    long_runs: int  # Cases that take long are run so often.


SIZES = {
    "tiny": Sizes(
        batches=20_000,
        singles=2_000,
        cancels=4_000,
        keys_pending=4_000,
        crowded=(2_000, 4_000, 20),
        herds=(5_000,),
        steady_s=1,
        settle_s=0,
        rate_divisor=20,
        subjects=((20, 5),),
        listed=20,
        near_s=(1, 1),
        edge=(4, 1_000),
        inspected=(1, 1_000),
        far=1_000,
        restarts=(5_000,),
        redis_restart_max=5_000,
        memory=10_000,
        written=5_000,
        fair=(1_000, 16, 4),
        worked=500,
        streams=5_000,
        again=50,
        years=1_000,
        long_runs=1,
    ),
    "quick": Sizes(
        batches=1_000_000,
        singles=50_000,
        cancels=200_000,
        keys_pending=200_000,
        crowded=(200_000, 400_000, 2_000),
        herds=(200_000,),
        steady_s=2,
        settle_s=4,
        rate_divisor=1,
        subjects=((1_000, 50),),
        listed=1_000,
        near_s=(2, 6),
        edge=(12, 200_000),
        inspected=(2, 200_000),
        far=500_000,
        restarts=(1_000_000,),
        redis_restart_max=1_000_000,
        memory=0,  # Buffers of a fixed size would be most of what fewer than two million add.
        written=200_000,
        fair=(20_000, 600, 12),
        worked=20_000,
        streams=200_000,
        again=2_000,
        years=100_000,
        long_runs=1,
    ),
    "full": Sizes(
        batches=2_000_000,
        singles=200_000,
        cancels=400_000,
        keys_pending=1_000_000,
        crowded=(1_000_000, 2_000_000, 10_000),
        herds=(200_000, 1_000_000),
        steady_s=10,
        settle_s=4,
        rate_divisor=1,
        subjects=((1_000, 50), (5_000, 50), (1_000, 1_000)),
        listed=1_000,
        near_s=(10, 30),
        edge=(20, 1_000_000),
        inspected=(6, 200_000),
        far=5_000_000,
        restarts=(1_000_000, 10_000_000),
        redis_restart_max=1_000_000,
        memory=2_000_000,
        written=1_000_000,
        fair=(20_000, 600, 12),
        worked=20_000,
        streams=400_000,
        again=5_000,
        years=1_000_000,
        long_runs=3,
    ),
}


def cases(size: str) -> list[Case]:
    """All cases in a size; where time runs out, the last ones run once."""
    of = SIZES[size]
    return [
        *_schedule(of),
        *_cancels(of),
        *_herds(of),
        *_steady(of),
        *_near(of),
        *_inspected(of),
        *_stored(of),
        *_fair(of),
        *_worked(of),
        *_streams(of),
        *_again(of),
        *_years(of),
    ]


def _streams(of: Sizes) -> list[Case]:
    shapes = [(1, consumers, of.streams) for consumers in (1, 10, 100)]
    # Each group gets all messages.
    shapes.append((100, 1, max(of.streams // 50, BATCH_ROWS)))
    return [
        Case(
            f"streams-{consumers}" if groups == 1 else f"streams-{groups}-groups",
            f"pull and acknowledge, 100 at a time: groups: {groups}, consumers of each: {consumers}",
            {
                DELAYD: partial(streams.streams, messages, groups, consumers),
                REDIS: partial(streams.redis_streams, messages, groups, consumers),
            },
            "messages_s",
        )
        for groups, consumers, messages in shapes
    ]


def _again(of: Sizes) -> list[Case]:
    return [
        Case(
            "again-lease",
            "how late messages come again whose lease of 1 s ended",
            {DELAYD: partial(again.after_lease, of.again)},
        ),
        Case(
            "again-nack",
            "how late messages come again after nack(delay=1 s)",
            {DELAYD: partial(again.after_nack, of.again)},
        ),
    ]


def _years(of: Sizes) -> list[Case]:
    return [
        Case(
            "years",
            f"two years in memory with {of.years:,} messages, pulled, acknowledged and 1 % tried again",
            {DELAYD: partial(years.years, of.years)},
            runs=of.long_runs,
            limit_s=120,
        ),
        Case(
            "years-worked",
            f"the same with {of.years // 500:,} messages and a worker, for which the clock stops at each of them",
            {DELAYD: partial(years.worked, of.years // 500)},
            runs=of.long_runs,
            limit_s=120,
        ),
    ]


def _worked(of: Sizes) -> list[Case]:
    # The peers are slower, and their rates do not depend on how many messages there are.
    fewer = max(of.worked // 4, 100)
    return [
        Case(
            "work",
            "messages handled by one worker, handlers that are functions",
            {
                DELAYD: partial(worker.functions, of.worked),
                "dramatiq": partial(worker.dramatiq, fewer),
                "celery": partial(worker.celery, fewer),
            },
            "messages_s",
        ),
        Case(
            "work-coroutines",
            "messages handled by one worker, handlers that are coroutines",
            {DELAYD: partial(worker.coroutines, of.worked)},
            "messages_s",
        ),
    ]


def _fair(of: Sizes) -> list[Case]:
    paces = zip(("1ms", "300ms", "10s"), (0.001, 0.3, 10.0), of.fair, strict=True)
    return [
        Case(
            f"fair-{name}",
            f"{messages:,} messages of {name} each, shared by four workers",
            {DELAYD: partial(fair.fair, messages, each_s)},
            runs=1,
            limit_s=200,
        )
        for name, each_s, messages in paces
    ]


def _schedule(of: Sizes) -> list[Case]:
    return [
        Case(
            "batches",
            "schedule, batches of 500",
            {
                DELAYD: partial(schedule.batches, of.batches),
                REDIS: partial(schedule.redis_batches, of.batches),
                REDIS_PY: partial(schedule.redis_py_batches, of.batches),
            },
            "messages_s",
        ),
        Case(
            "singles",
            "schedule singles, 1,000 senders",
            {
                DELAYD: partial(schedule.singles, of.singles),
                REDIS: partial(schedule.redis_singles, of.singles),
                REDIS_PY: partial(schedule.redis_py_singles, of.singles),
            },
            "messages_s",
        ),
    ]


def _cancels(of: Sizes) -> list[Case]:
    singles = of.cancels // 4
    return [
        Case(
            "cancels",
            "cancel by receipt, 1,000 in flight",
            {
                DELAYD: partial(cancels.cancel_by_receipt, singles),
                REDIS: partial(cancels.redis_cancel, singles, 1, schedule.SENDERS),
            },
            "messages_s",
        ),
        Case(
            "crowded",
            "single get and cancel, by an empty server and a crowded one",
            {DELAYD: partial(crowded.crowded, *of.crowded)},
            runs=1,
            limit_s=300,
        ),
        Case(
            "cancels-500",
            "cancel by receipt, columns of 500",
            {
                DELAYD: partial(cancels.cancel_receipts_in_columns, of.cancels),
                REDIS: partial(cancels.redis_cancel, of.cancels, BATCH_ROWS, UNDER_WAY),
            },
            "messages_s",
        ),
        Case(
            "keys-500",
            f"send with new keys, columns of 500, {of.keys_pending:,} keys pending",
            {DELAYD: partial(keys.send_keys_in_columns, of.cancels, of.keys_pending)},
            "messages_s",
        ),
        Case(
            "cancel-keys-500",
            f"cancel by key, columns of 500, {of.keys_pending:,} other keys pending",
            {DELAYD: partial(keys.cancel_keys_in_columns, of.cancels, of.keys_pending)},
            "messages_s",
        ),
        Case(
            "pending",
            f"page through {of.keys_pending:,} pending messages",
            {DELAYD: partial(pending.pages, of.keys_pending)},
            "messages_s",
            limit_s=120,
        ),
    ]


def _herds(of: Sizes) -> list[Case]:
    return [
        Case(
            f"herd-{messages}",
            f"herd of {messages:,}",
            {
                DELAYD: partial(herd.herd, messages),
                REDIS: partial(herd.redis_herd, messages),
                REDIS_PY: partial(herd.redis_py_herd, messages),
            },
            "messages_s",
            limit_s=120,
        )
        for messages in of.herds
    ]


def _steady(of: Sizes) -> list[Case]:
    rates = [rate // of.rate_divisor for rate in RATES]
    many = SUBJECTS_RATE // of.rate_divisor
    return [
        *(
            Case(
                f"steady-{rate}",
                f"steady {rate:,}/s",
                {
                    DELAYD: partial(steady.steady, rate, of.steady_s, of.settle_s),
                    REDIS: partial(steady.redis_steady, rate, of.steady_s, of.settle_s),
                },
            )
            for rate in rates
        ),
        *(
            Case(
                f"subjects-{count}" + "-all" * (consumed == count),
                f"{count:,} subjects at {many:,}/s, consumers of {consumed:,}",
                {DELAYD: partial(steady.subjects, many, of.steady_s, of.settle_s, count, consumed)},
                runs=1 if consumed == count else of.long_runs,
            )
            for count, consumed in of.subjects
        ),
        *(
            Case(
                f"subjects-{of.listed}-{how}",
                f"{of.listed:,} subjects at {many:,}/s, one consumer of {'a list' if how == 'list' else 'a pattern'}",
                {DELAYD: partial(steady.together, many, of.steady_s, of.settle_s, of.listed, how == "list")},
                runs=of.long_runs,
            )
            for how in ("list", "pattern")
        ),
    ]


def _near(of: Sizes) -> list[Case]:
    return [
        Case(
            "near",
            "near messages, 1,000/s, while far ones flood in and are filed",
            {DELAYD: partial(near.near, *of.near_s)},
            runs=of.long_runs,
            limit_s=180,
        ),
        Case(
            "edge",
            "near messages, 1,000/s, over an hour's edge while far ones flood in",
            {DELAYD: partial(edge.edge, *of.edge)},
            runs=of.long_runs,
            limit_s=180,
        ),
    ]


def _inspected(of: Sizes) -> list[Case]:
    turns, pending = of.inspected
    return [
        Case(
            "inspected",
            f"1,000/s while find, forecast and top look at {pending:,} others",
            {DELAYD: partial(inspected.inspected, turns, pending)},
            runs=of.long_runs,
            limit_s=180,
        )
    ]


def _stored(of: Sizes) -> list[Case]:
    restarts = []
    for messages in of.restarts:
        sides: dict[str, Side] = {DELAYD: partial(restart.restart, messages)}
        if messages <= of.redis_restart_max:
            sides[REDIS] = partial(restart.redis_restart, messages)
        title = f"restart after SIGKILL with {messages:,} pending"
        restarts.append(Case(f"restart-{messages}", title, sides, "first_dispatch_s", False, of.long_runs, limit_s=240))
    memories = []
    if of.memory:
        sides = {DELAYD: partial(memory.memory, of.memory), REDIS: partial(memory.redis_memory, of.memory)}
        title = f"memory of a pending message, {of.memory:,} pending"
        memories.append(Case("memory", title, sides, runs=1, limit_s=180))
    return [
        Case(
            "far",
            f"{of.far:,} due over two years, until all are filed",
            {DELAYD: partial(far.far, of.far), REDIS: partial(far.redis_far, of.far)},
            "messages_s",
            runs=of.long_runs,
            limit_s=240,
        ),
        *restarts,
        *memories,
        Case(
            "written",
            "bytes written to disk for a message of 200 bytes",
            {DELAYD: partial(written.written, of.written), REDIS: partial(written.redis_written, of.written)},
            runs=1,
            limit_s=90,
        ),
    ]
