"""Answers are what `delayd.wire.requests` declares: each request is asked of real servers in this process."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import pytest

import delayd
from delayd.batch.columns import Buffer, ProducerPart
from delayd.client.asking import ask
from delayd.embedded import Embedded
from delayd.errors import DelaydError
from delayd.net.calls import Calls, OnAnswer
from delayd.net.connection import Connection
from delayd.secret import SECRET_FILE, Secret, read_secret
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.push import PushTarget
from delayd.wire.requests import RequestType
from delayd.wire.tokens import TokenRecord
from tests.batches import messages as batch
from tests.fuzz.declared import faults

# Their answers need damage, a restored copy, or a server that is away or retired.
SHOWN_ELSEWHERE = {
    *(RequestType.MEND, RequestType.TARGET_LOST, RequestType.TARGET_ACCEPT, RequestType.ORIGIN_ACCEPT),
    *(RequestType.FORGET_SERVER, RequestType.RETIRE),
}
SOON = timedelta(milliseconds=1)
LATER = timedelta(hours=3)
WAIT = timedelta(seconds=20)
A_TOKEN = TokenRecord("a", bytes(32), "send:>")
TARGET = PushTarget("a", "a", "https://example.com/", "push/a", f"whsec_{'A' * 40}")


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[RequestType, list[Head]]]:
    """The heads of all answers, whoever asked."""
    found: dict[RequestType, list[Head]] = defaultdict(list)
    plain = Calls.ask

    def asked(
        self: Calls,
        frame_type: int,
        head: Mapping[str, HeadValue],
        body: Sequence[Buffer],
        on_answer: OnAnswer,
        timeout_ms: float | None,
        *,
        now: bool = False,
    ) -> int:
        def hear(answer: Frame | DelaydError) -> None:
            if isinstance(answer, Frame):
                found[RequestType(frame_type)].append(answer.head)
            on_answer(answer)

        return plain(self, frame_type, head, body, hear, timeout_ms, now=now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calls, "ask", asked)
        folder = tmp_path_factory.mktemp("answers")
        with delayd.open(folder) as home:
            use_messages(home)
            asyncio.run(ask_servers(home.address, read_secret(str(folder / SECRET_FILE))))
    yield found


def use_messages(home: Embedded) -> None:
    """Ask what programs ask."""
    with home.producer() as producer, home.consumer("a", "g") as consumer, home.admin() as admin:
        for _ in range(4):
            producer.send("a", b"x", delay=SOON)
        receipt = producer.send("a", b"x", delay=LATER, key="k")
        producer.get("a", receipt=receipt)
        producer.reschedule("a", key="k", delay=2 * LATER)
        list(producer.pending("a"))
        producer.cancel("a", key="k")
        producer.recurring("daily", "a", b"x", cron="@daily")
        producer.send("a", b"x", delay=LATER, spread=timedelta(minutes=1))
        producer.outcome(delayd.SendHandle(receipt.log_id, 7, 7))
        messages = [message for _ in range(4) for message in consumer.pull(1, wait=WAIT)]
        messages[0].extend(timedelta(seconds=40))
        messages[0].ack()
        messages[1].nack(timedelta(0))
        messages[2].nack(LATER)
        messages[3].reject("no")
        with home.consumer(["a", "b"], "many") as many:
            many.pull(1, wait=timedelta(0))
        admin.groups()
        admin.set_quota("b", pending=7)
        admin.quotas()
        admin.pause("a", "g")
        admin.rewind("a", "g", "earliest", dry_run=True)
        admin.delete_group("a", "g")


async def ask_servers(address: str, secret: Secret) -> None:
    """Ask what operators and servers ask, besides."""
    async with ask.meta(address) as meta:
        servers = await ask.known_servers(meta)
        await ask.prove(meta, secret)
        delay, realtime = sorted(servers, key=lambda each: each.role)
        asked: Head = {"subject": "a", "to": realtime.log_id}
        slots: Head = {"slots": bytes(128)}
        of_meta: list[tuple[RequestType, Head]] = [
            (RequestType.SERVERS, {"role": None}),
            (RequestType.META_SUBJECTS, {"prefix": "", "after": "", "limit": 10}),
            (RequestType.MOVE_ROUTE, asked),
            (RequestType.SLOTS, {"wanted": bytes(128)}),
            (RequestType.MOVE_SLOTS, {**slots, "versions": bytes(4_096), "to": delay.log_id, "lost": False}),
            (RequestType.SETTLE_SLOTS, {}),
            (RequestType.CORDON_SERVER, {"log_id": delay.log_id, "standing": "serving"}),
            (RequestType.SET_PUSH_TARGET, {**TARGET.to_head(), "was": 0}),
            (RequestType.PUSH_TARGETS, {"after": ""}),
            (RequestType.DELETE_PUSH_TARGET, {"name": "a"}),
            (RequestType.TOKEN, {"token": "none"}),
            (RequestType.SET_TOKEN, {**A_TOKEN.to_head(), "is_new": True}),
            (RequestType.TOKENS, {"after": ""}),
            (RequestType.REVOKE_TOKEN, {"name": "a"}),
        ]
        for kind, head in of_meta:
            await tried(meta, kind, head)
        for server in servers:
            async with ask.connected(server.endpoint) as connection:
                await ask.prove(connection, secret)
                walk: Head = {"hour": 0, "sequence": 0, "until_sequence": 0}
                of_each: list[tuple[RequestType, Head]] = [
                    (RequestType.PING, {}),
                    (RequestType.STATUS, {}),
                    (RequestType.TRUST_CLOCK, {}),
                    (RequestType.MEND_LIST, {"after": "", "limit": 10}),
                    (RequestType.CHECKPOINT, {}),
                    (RequestType.TARGETS, {"after": 0}),
                    (RequestType.DUE_HOURS, {"after": 0}),
                    (RequestType.RELEASE_SLOTS, slots),
                    (RequestType.DRAIN, {"to": 0, "slots": None, **walk}),
                    (RequestType.PULL_END, {"subject": "a", "group": "g"}),
                    (RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 10}),
                    (RequestType.UNFINISHED, {"schedules": [["a", "daily"]]}),
                ]
                for kind, head in of_each:
                    if server.role in kind.terms.servers:
                        await tried(connection, kind, head)
                cut = await connection.request(RequestType.CUT, {"hold_ms": 0})
                await connection.request(RequestType.CUT_READY, {"cut": cut.head["cut"]})
                if server.role == "delay":
                    data = batch([b"x"], due=[int(time.time() * 1_000) + 9_000_000], part=ProducerPart(7, 1, 0))
                    await connection.request(RequestType.SEND_DRAINED, {}, [data])
                    await connection.request(RequestType.SEND, {}, [data])
                    sent: Head = {"log_id": server.log_id, "producer_id": 7, "producer_batch": 1}
                    found = await connection.request(RequestType.OUTCOME, sent)
                    assert found.head["state"] == "accepted"


async def tried(connection: Connection, kind: RequestType, head: Head) -> None:
    """Ask; a refusal is no answer."""
    with suppress(DelaydError):
        await connection.request(kind, head, timeout_ms=20_000)


@pytest.mark.parametrize("kind", RequestType, ids=lambda kind: kind.name)
def test_an_answer_has_the_fields_that_are_declared(heard: dict[RequestType, list[Head]], kind: RequestType) -> None:
    answers = heard[kind]
    assert answers or kind in SHOWN_ELSEWHERE
    assert [said for head in answers if (said := faults(kind.terms.answer, head))] == []
