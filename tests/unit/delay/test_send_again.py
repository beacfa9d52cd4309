"""What comes again: a realtime server's batches, taken once, and names that only servers may use (rule Q2)."""

import msgpack
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.names import retry_subject
from delayd.delay.requests import Requests
from delayd.log.pull import RetryRow
from delayd.testing.clock import START_MS
from delayd.wire.frame import Frame
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from realtime.retries import RetriedRows, retry_batch
from tests.batches import messages
from tests.unit.delay.answers import Answers
from tests.worlds.delay import World
from tests.worlds.dispatch_batches import dispatch_batch

HOUR_MS = 3_600_000
SUBJECT = retry_subject(0xB0B, 3)


def _again(number: int = 1, subject: str = SUBJECT, reason: str = "") -> bytes:
    stored = parse(dispatch_batch(1, [b"a", b"b"]))
    how = RetryRow(1, 0, 0, 2, 1, START_MS + HOUR_MS, reason, "no")
    return retry_batch(ProducerPart(77, number, number), subject, [RetriedRows(stored, 0, how)], START_MS)


def _ask(world: World, kind: RequestType, body: bytes) -> dict[str, object]:
    requests = Requests(world.core, world.clock, dict)
    peer = Answers()
    requests.received(peer, Frame(kind, 0, 1, {}, memoryview(body)))
    world.settle()
    (head,) = peer.heads
    (result,) = need_maps(head, "results")
    return dict(result)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (_again(subject="orders"), "bad_subject"),
        (messages([b"a"], due=[START_MS + HOUR_MS], subjects=[SUBJECT.encode()], part=ProducerPart(7, 1, 1)), None),
    ],
)
def test_what_is_no_retry_batch_is_refused_by_name(body: bytes, code: str | None) -> None:
    assert _ask(World(), RequestType.SEND_AGAIN, body)["error"] == (code or "batch_malformed")


def _plain(**more: object) -> bytes:
    return messages([b"a"], due=[START_MS + HOUR_MS], part=ProducerPart(7, 1, 1), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (_again(), "batch_malformed"),
        (_plain(subjects=[SUBJECT.encode()]), "bad_subject"),
        (_plain(tags=[["eu", "%dead"]]), "bad_tags"),
        (_plain(headers=[msgpack.packb({"delayd.attempt": "9"})]), "bad_headers"),
    ],
)
def test_a_client_can_not_send_what_only_servers_may(body: bytes, code: str) -> None:
    assert _ask(World(), RequestType.SEND, body)["error"] == code


@pytest.mark.parametrize(
    "body",
    [
        _plain(subjects=[b"a%retry/b"]),
        _plain(tags=[["50%", "a%b"]]),
        _plain(headers=[msgpack.packb({"x": "delayd.attempt", "my-delayd.x": "1"})]),
    ],
)
def test_names_that_only_look_like_it_are_the_clients_own(body: bytes) -> None:
    assert _ask(World(), RequestType.SEND, body)["count"] == 1
