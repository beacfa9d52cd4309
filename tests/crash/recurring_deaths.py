"""A short workload of recurring schedules, and what must hold after a death at each of its operations."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from delayd.batch.names import RECURRING_SUBJECT
from delayd.errors import RetryLater
from delayd.hours import INSTANT_MS_MAX
from delayd.recurrence.deciding import RunPolicy
from delayd.recurrence.recurrence import Recurrence
from delayd.wire.asked import (
    AskedKeys,
    AskedWindow,
    CancelAnswer,
    Content,
    decode_answers,
    encode_asked_keys,
    read_piece,
)
from delayd.wire.recurring import RecurringRecord, RecurringRequest, RecurringSpec, RecurringWish, body_of
from delayd.wire.requests import RequestType
from tests.batches import bodies_of
from tests.crash.delay_deaths import Death
from tests.worlds.delay import World

SECOND, TWO_SECONDS = timedelta(seconds=1), timedelta(seconds=2)
SUBJECTS = ("each", "other", "late")
RECURRING = RECURRING_SUBJECT.encode()


def spec(subject: str, every: timedelta, body: bytes = b"body") -> RecurringSpec:
    return RecurringSpec(Recurrence(every=every), RunPolicy(misfire="all"), subject, body)


class RecurringDeath(Death):
    """One death; callers of the next life repeat what they asked for."""

    def work(self, world: World) -> None:
        """Schedules are made, changed, paused and run beside their occurrences, over a checkpoint and an hour's end."""
        put(world, "each", SECOND)
        put(world, "other", TWO_SECONDS)
        world.pass_ms(1_200)
        world.checkpoint()
        world.pass_ms(1_100)
        ask(world, RecurringWish.PAUSE, "other")
        put(world, "late", SECOND)
        world.pass_ms(1_000)
        ask(world, RecurringWish.RESUME, "other")
        ask(world, RecurringWish.RUN, "late", number=77)
        world.checkpoint()
        world.pass_ms(1_500)
        world.sweep()

    def finish(self, world: World, *, sealing: bool) -> None:
        """Go on, ask again, and compare what came with what the records say."""
        world.own_all_keys()
        world.pass_ms(1_000)
        for name, every in (("each", SECOND), ("other", TWO_SECONDS), ("late", SECOND)):
            put(world, name, every)
        ask(world, RecurringWish.RUN, "late", number=77)
        ask(world, RecurringWish.RUN, "late", number=77)
        world.pass_ms(500)
        for name in SUBJECTS:
            ask(world, RecurringWish.PAUSE, name)
        world.pass_ms(3_000)
        check_each_once(world)
        if sealing:
            for name in SUBJECTS:
                delete(world, name)
            world.check_sealing()


def put(world: World, name: str, every: timedelta) -> None:
    """Make a schedule; one that is there stays."""
    ask(world, RecurringWish.PUT, name, of=spec(name, every))


def ask(world: World, wish: RecurringWish, name: str, *, number: int = 0, of: RecurringSpec | None = None) -> None:
    """Ask until it is answered: while a row is on its way, a server wants to be asked again."""
    request = RecurringRequest(wish, name.encode(), spec=of, number=number)
    body = b"" if of is None else b"".join(body_of(of.encode()))
    for _ in range(20):
        if world.clock.now_ms() % 500 == 0:
            world.pass_ms(30)  # So that nobody takes what runs now for an occurrence.
        try:
            world.ask(RequestType.RECUR, request.to_head(world.server.log_id), body)
        except RetryLater:
            world.pass_ms(100)
        else:
            return
    raise AssertionError(f"{wish} of {name} is refused for seconds")


def delete(world: World, name: str) -> None:
    """End a schedule."""
    body = encode_asked_keys(AskedKeys(RECURRING, [name.encode()]))
    _, answer = world.ask(RequestType.CANCEL, {"log_id": world.server.log_id}, body)
    assert decode_answers(answer)["answer"].tolist() == [CancelAnswer.CANCELLED]


def records(world: World) -> dict[str, RecurringRecord]:
    """All schedules that the server has, by name."""
    window = AskedWindow(RECURRING, 0, INSTANT_MS_MAX, rows_max=100, content=Content.WHOLE)
    piece = read_piece(*world.ask(RequestType.FIND, window.to_head(world.server.log_id)))
    assert piece.batch is not None, "there are some"
    return {record.spec.subject: record for record in map(RecurringRecord.decode, bodies_of(piece.batch))}


def check_each_once(world: World) -> None:
    """What came of each schedule is what its record says, without a gap or a double."""
    found = records(world)
    assert found.keys() == set(SUBJECTS), "each schedule is there once"
    came: dict[str, Counter[int]] = {name: Counter() for name in SUBJECTS}
    for target in world.outside.targets.values():
        for kept in target.log:
            came[kept.subject.decode()].update(kept.deliver_at_ms)
            assert all(kept.part.claimed_at_ms >= due for due in kept.deliver_at_ms), "it was early"
    for name, record in found.items():
        step_ms = record.spec.recurrence.every // timedelta(milliseconds=1)  # type: ignore[operator]
        recurred = {due_ms: count for due_ms, count in came[name].items() if due_ms % step_ms == 0}
        assert set(recurred.values()) <= {1}, f"an occurrence of {name} came twice: {recurred}"
        assert len(recurred) == record.sent, f"of {name} {len(recurred)} came, and {record.sent} were sent"
        first_ms = record.created_ms
        both = record.sent + sum(record.skipped.values())
        assert both == record.spec.recurrence.count(first_ms, record.decided_ms), f"one of {name} is missing"
        runs = sum(count for due_ms, count in came[name].items() if due_ms % step_ms)
        assert runs == (name == "late"), f"{runs} of {name} came besides its occurrences"
