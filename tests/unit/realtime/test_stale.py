"""What the server says of handles that it no longer holds for the consumer that names them (rule Q1)."""

import pytest

from delayd.errors import UnknownServer
from delayd.wire.consuming import Why, read_stale
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, ready_world

FIELDS: dict[RequestType, tuple[str, list[HeadValue]]] = {
    RequestType.RETRY: ("retries", [1_000, ""]),
    RequestType.REJECT: ("rejects", ["why", ""]),
}


def _why(
    world: World, peer: SimPeer, kind: RequestType, *handles: list[int], group: str = GROUP, more: Head | None = None
) -> list[list[int]]:
    field, rest = FIELDS.get(kind, ("handles", []))
    head: Head = {"subject": SUBJECT, "group": group, field: [[*handle, *rest] for handle in handles], **(more or {})}
    if kind == RequestType.EXTEND:
        head["lease_ms"] = 1_000
    return [[*row[1:]] for row in read_stale(world.ask(peer, kind, head)[0])]


def test_each_range_has_its_own_reason() -> None:
    world, peer = ready_world([b"a", b"b", b"c", b"d"])
    ((incarnation, first, _),) = world.pull(peer).handles
    world.ack(peer, [[incarnation, first, 1]], kind=RequestType.NACK)
    world.ack(peer, [[incarnation, first + 1, 1]])
    world.pass_time(60_000)
    assert _why(world, peer, RequestType.ACK, [incarnation, first, 4], [incarnation, first + 9, 1]) == [
        [first, 1, Why.GIVEN_BACK],
        [first + 2, 2, Why.LEASE_ENDED],
        [first + 9, 1, Why.UNKNOWN],
    ]


WORDS = [RequestType.ACK, RequestType.NACK, RequestType.RETRY, RequestType.REJECT]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", [*WORDS, RequestType.EXTEND])
def test_a_word_that_names_another_server_is_refused_and_changes_nothing(kind: RequestType, many: bool) -> None:
    world, peer = ready_world([b"a"])
    ((incarnation, first, _),) = world.pull(peer).handles
    more: Head = {"subjects": [[SUBJECT, 1]]} if many else {}
    own = world.core.log_id
    with pytest.raises(UnknownServer, match=f"say it to {own + 1:016x}"):
        _why(world, peer, kind, [incarnation, first, 1], more={**more, "log_id": own + 1})
    assert _why(world, peer, kind, [incarnation, first, 1], more={**more, "log_id": own}) == []
