"""What operators ask of a running cluster from a program: groups, dead letters, retries, and what they decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

import delayd
from delayd import Message
from delayd.client.admin import Letter
from delayd.testing import InMemoryBroker
from tests.conformance.public.desk import LATER, LONG, NEXT, Desk
from tests.waiting import wait_until


@pytest.fixture
def admin(desk: Desk) -> Iterator[delayd.Admin]:
    with delayd.Admin(desk.address) as made:
        yield made


@pytest.fixture
def letters(desk: Desk, admin: delayd.Admin) -> Callable[[], list[Letter]]:
    """What waits as dead letters of the group."""
    return lambda: [letter for page in admin.dead_letters(desk.subject, "g") for letter in page]


def rejected(desk: Desk, *bodies: bytes) -> None:
    """So many dead letters, which their delay server has taken."""
    for body in bodies:
        desk.send(body, key=f"key-{body.decode()}", tags=["vip"], headers={"trace": "a1"})
    for message in desk.take(desk.consumer(), len(bodies)):
        message.reject("no such order")


def test_a_group_shows_how_far_it_is(desk: Desk, admin: delayd.Admin) -> None:
    desk.send(b"1", b"2", b"3")
    desk.take(desk.consumer(), 2)
    wait_until(lambda: [place.waiting for place in admin.groups(desk.subject)] == [1])
    listed = admin.groups(desk.subject)
    assert [(place.subject, place.group, place.info.outstanding) for place in listed] == [(desk.subject, "g", 2)]
    assert listed.missing == () and listed[0].oldest_age is not None


def test_dead_letters_are_read_with_what_they_were_sent_with(
    desk: Desk, admin: delayd.Admin, letters: Callable[[], list[Letter]]
) -> None:
    rejected(desk, b"1", b"2")
    wait_until(lambda: len(letters()) == 2)
    found = letters()
    assert {letter.body for letter in found} == {b"1", b"2"}
    for letter in found:
        assert (letter.reason, letter.attempts) == ("no such order", 1)
        assert (letter.headers, letter.tags, letter.key) == ({"trace": "a1"}, ("vip",), f"key-{letter.body.decode()}")
        assert letter.dead_at is not None and letter.dead_at <= datetime.now(UTC) + timedelta(seconds=1)
    assert [(dead.group, dead.letters) for dead in admin.dead_groups(desk.subject)] == [("g", 2)]
    assert not [1 for page in admin.retries(desk.subject, "g") for _ in page]
    died = found[0].dead_at
    assert died is not None
    later = admin.dead_letters(desk.subject, "g", since=died + LATER)
    assert not list(later)


def test_dead_letters_are_sent_again_or_ended(
    desk: Desk, admin: delayd.Admin, letters: Callable[[], list[Letter]]
) -> None:
    rejected(desk, b"1")
    wait_until(lambda: len(letters()) == 1)
    assert (admin.redrive(desk.subject, "g").found, len(letters())) == (1, 1), "without a word nothing is done"
    assert admin.redrive(desk.subject, "g", dry_run=False).done == 1
    again: Message = desk.one(desk.consumer())
    assert (again.body, again.attempt, again.key, again.headers) == (b"1", 1, "key-1", {"trace": "a1"})
    again.reject("still not")
    wait_until(lambda: len(letters()) == 1)
    # It dies a second time under the key of its first life, and comes with it once more.
    assert letters()[0].key == "key-1"
    assert admin.redrive(desk.subject, "g", dry_run=False).done == 1
    consumer = desk.consumer()
    (third,) = batch = consumer.pull(1, wait=LONG)
    assert (batch.keys, third.key, third.attempt) == (["key-1"], "key-1", 1)
    third.reject("still not")
    wait_until(lambda: len(letters()) == 1)
    assert admin.purge(desk.subject, "g", dry_run=False).done == 1
    assert not letters() and not admin.dead_groups(desk.subject)


def test_what_is_to_come_again_is_read(desk: Desk, admin: delayd.Admin) -> None:
    desk.send(b"1")
    desk.one(desk.consumer()).nack(LATER, error="busy")
    wait_until(lambda: len(list(admin.retries(desk.subject, "g"))) == 1)
    (letter,) = (letter for page in admin.retries(desk.subject, "g") for letter in page)
    assert (letter.body, letter.attempts, letter.dead_at, letter.error) == (b"1", 1, None, "busy")
    assert letter.receipt.deliver_at > datetime.now(UTC)
    assert not admin.dead_groups(desk.subject)


def test_a_group_that_nobody_knows_is_named(desk: Desk, admin: delayd.Admin) -> None:
    with pytest.raises(delayd.BadArgument, match="no realtime server that lives has a group g"):
        admin.dead_letters(desk.subject, "g")


def test_without_the_secret_nothing_is_decided(desk: Desk, admin: delayd.Admin) -> None:
    desk.send(b"1")
    desk.one(desk.consumer()).nack(NEXT)
    for decide in (admin.pause, admin.resume, admin.delete_group):
        with pytest.raises(delayd.BadSetting, match="secret="):
            decide(desk.subject, "g")
    with pytest.raises(delayd.BadSetting, match="secret="):
        admin.set_quota(desk.subject, pending=1)
    assert not admin.groups(desk.subject)[0].info.paused and not admin.quotas(desk.subject)


def test_an_operator_decides_about_a_group() -> None:
    with InMemoryBroker() as broker, broker.admin() as admin, broker.producer() as producer:
        for body in (b"1", b"2"):
            producer.send("s", body, delay=timedelta(0))
        broker.clock.advance(timedelta(seconds=1))
        with broker.consumer("s", "g", prefetch=False) as consumer:
            first, second = consumer.pull(2)
            first.ack()
            second.reject("no")
            broker.clock.advance(timedelta(seconds=1))
            admin.pause("s", "g")
            assert admin.groups("s")[0].info.paused
            admin.resume("s", "g")
            assert not admin.groups("s")[0].info.paused
            assert admin.rewind("s", "g", "earliest").before == 2
            assert admin.rewind("s", "g", "earliest", dry_run=False).next == 0
            assert [message.body for message in consumer.pull(2)] == [b"1", b"2"]
            with pytest.raises(delayd.BadArgument, match="earliest"):
                admin.rewind("s", "g", "soon")
        assert admin.delete_group("s", "g") == 1, "its dead letter ends with it"
        assert not admin.groups("s")


def test_an_operator_sets_and_lifts_a_quota() -> None:
    with InMemoryBroker() as broker, broker.admin() as admin, broker.producer() as producer:
        admin.set_quota("s", pending=1)
        producer.send("s", b"1", delay=LATER)
        with pytest.raises(delayd.QuotaReached):
            producer.send("s", b"2", delay=LATER)
        ((_, quota),) = admin.quotas("s")
        assert (quota.pending, quota.pending_now) == (1, 1)
        admin.set_quota("s")
        producer.send("s", b"2", delay=LATER)


def test_the_asynchronous_form_has_the_same(desk: Desk) -> None:
    rejected(desk, b"1")

    async def bodies() -> list[bytes]:
        async with delayd.AsyncAdmin(desk.address) as admin:
            assert [place.group for place in await admin.groups(desk.subject)] == ["g"]
            pages = await admin.dead_letters(desk.subject, "g")
            return [letter.body async for page in pages for letter in page]

    wait_until(lambda: asyncio.run(bodies()) == [b"1"])


def test_both_forms_have_the_same_methods() -> None:
    def names(form: type[object]) -> set[str]:
        return {name for name in vars(form) if not name.startswith("_")}

    assert names(delayd.Admin) == names(delayd.AsyncAdmin)
