"""What is pending can be listed, with what each message holds."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import delayd
from tests.conformance.public.desk import LATER, Desk


def test_pages_have_each_pending_message_once(desk: Desk) -> None:
    receipts = desk.send(b"1", b"22", delay=LATER)
    receipts += desk.send(b"333", delay=timedelta(days=300), key="three", tags=["vip", "eu"])
    pages = desk.producer.pending(desk.subject)
    found = [message for page in pages for message in page]
    assert [(m.receipt.sequence, m.size, m.key, m.tags) for m in found] == [
        (receipts[0].sequence, 1, None, ()),
        (receipts[1].sequence, 2, None, ()),
        (receipts[2].sequence, 3, "three", ("vip", "eu")),
    ]
    assert [message.deliver_at for message in found] == [receipt.deliver_at for receipt in receipts]
    assert all(message.body is None and message.headers is None for message in found)
    assert (pages.found, pages.in_flight, pages.unread) == (3, 0, 0)


def test_contents_come_on_request(desk: Desk) -> None:
    desk.send(b"body", delay=LATER, headers={"trace": "a1"})
    (message,) = (m for page in desk.producer.pending(desk.subject, contents=True) for m in page)
    assert (message.body, message.headers, message.size) == (b"body", {"trace": "a1"}, 4)


def test_large_messages_come_on_pages_of_their_own(desk: Desk) -> None:
    bodies = [bytes([number]) * 3_000_000 for number in range(3)]
    desk.send(*bodies, delay=LATER)
    pages = list(desk.producer.pending(desk.subject, contents=True))
    assert [m.body for page in pages for m in page] == bodies and len(pages) == 3


def test_a_window_a_tag_and_a_key_choose_messages(desk: Desk) -> None:
    now = datetime.now(UTC)
    desk.send(b"soon", delay=LATER, key="soon")
    desk.send(b"later", delay=10 * LATER, key="later", tags=["vip"])

    def bodies(**chosen: object) -> list[bytes | None]:
        pages = desk.producer.pending(desk.subject, contents=True, **chosen)  # type: ignore[arg-type]
        return [m.body for page in pages for m in page]

    assert bodies(due_before=now + 5 * LATER) == [b"soon"]
    assert bodies(due_from=now + 5 * LATER) == [b"later"]
    assert bodies(tag="vip") == [b"later"] and bodies(tag="none") == []
    assert bodies(key="soon") == [b"soon"] and bodies(key="never") == []
    assert bodies(key="soon", due_from=now + 5 * LATER) == []
    assert desk.producer.cancel(desk.subject, key="soon") is delayd.CancelAnswer.CANCELLED
    assert bodies(key="soon") == [] and bodies() == [b"later"]


def test_pages_of_a_size_go_on_where_earlier_ones_ended(desk: Desk) -> None:
    for number in range(7):
        desk.send(b"%d" % number, delay=LATER if number % 2 else 300 * LATER, tags=["odd"] if number % 2 else None)

    def walked(page_size: int, tag: str | None = None) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        resume: str | None = None
        while resume != "":
            pages = desk.producer.pending(desk.subject, contents=True, page_size=page_size, tag=tag, resume=resume)
            page = next(iter(pages), None)
            found += [] if page is None else [[message.body or b"" for message in page]]
            resume = pages.resume
        return found

    for size in (1, 2, 3, 10):
        pages = walked(size)
        assert sorted(body for page in pages for body in page) == [b"%d" % number for number in range(7)]
        assert max(map(len, pages)) == min(size, 7)
        assert sorted(body for page in walked(size, "odd") for body in page) == [b"1", b"3", b"5"]
    for wrong in (0, -1, True, 65_537):
        with pytest.raises(delayd.BadArgument, match="page_size"):
            desk.producer.pending(desk.subject, page_size=wrong)
    with pytest.raises(delayd.BadArgument, match="resume"):
        desk.producer.pending(desk.subject, resume="nowhere")


def test_a_receipt_chooses_its_message_as_long_as_it_is_pending(desk: Desk) -> None:
    first, second = desk.send(b"1", b"2", delay=LATER, ttl=300 * LATER)
    (page,) = desk.producer.pending(desk.subject, receipt=second, contents=True)
    (message,) = page
    assert (message.body, message.ordered) == (b"2", False) and message.expires_at_ms is not None
    moved = desk.producer.reschedule(desk.subject, receipt=second, delay=2 * LATER).receipt
    assert moved is not None
    for receipt in (second, moved):
        (page,) = desk.producer.pending(desk.subject, receipt=receipt)
        assert page.sequences.tolist() == [moved.sequence]
    desk.producer.cancel(desk.subject, receipt=first)
    assert not list(desk.producer.pending(desk.subject, receipt=first))


def test_a_page_is_a_receipt_of_its_messages(desk: Desk) -> None:
    desk.send(b"1", b"2", delay=LATER)
    (page,) = desk.producer.pending(desk.subject)
    answers = desk.producer.cancel_batch(desk.subject, receipt=page)
    assert answers.tolist() == [delayd.CancelAnswer.CANCELLED] * 2
    assert not list(desk.producer.pending(desk.subject))


def test_an_asynchronous_producer_has_the_same_pages(desk: Desk) -> None:
    desk.send(b"1", b"22", delay=LATER)

    async def sizes() -> list[int]:
        async with delayd.AsyncProducer(desk.address) as producer:
            return [m.size async for page in producer.pending(desk.subject) for m in page]

    assert asyncio.run(sizes()) == [1, 2]
