"""Both ends prove the secret, or nothing that needs trust is served."""

from __future__ import annotations

import asyncio

import pytest

from delayd.errors import BadRequest, NotTrusted, WrongCluster
from delayd.net.connection import Connection
from delayd.net.trust import prove
from delayd.secret import NONCE_BYTES, Exchange, Secret
from delayd.wire.frame import Head
from delayd.wire.heads import need_bytes, need_u64
from delayd.wire.requests import RequestType
from tests.trust import SECRET

from .guarded import CLUSTER, LIMIT_MS, Guarded
from .loopback import Echo, Loopback, error_of, on_loop

OTHER = Secret(b"o" * 32, "other.secret")


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, OTHER), (OTHER, SECRET)])
def test_rule_H8_a_server_with_another_secret_is_refused_by_the_side_that_dials(theirs: Secret, ours: Secret) -> None:
    async def scenario(loopback: Loopback) -> None:
        server = Guarded(theirs)
        connection = await loopback.pair(server)
        refused = await error_of(prove(connection, ours, CLUSTER, LIMIT_MS))
        assert isinstance(refused, NotTrusted) and ours.path in refused.message
        assert not server.connections[0].trusted

    on_loop(scenario)


@pytest.mark.parametrize(("theirs", "ours"), [(CLUSTER, 0xC2), (0xC2, CLUSTER)])
def test_rule_H8_two_clusters_with_one_secret_do_not_speak(theirs: int, ours: int) -> None:
    async def scenario(loopback: Loopback) -> None:
        server = Guarded(cluster_id=theirs)
        connection = await loopback.pair(server)
        refused = await error_of(prove(connection, SECRET, ours, LIMIT_MS))
        told = f"is of cluster {theirs:016x}, and its peer of {ours:016x};"  # An operator goes by which is whose.
        assert isinstance(refused, WrongCluster) and told in refused.message
        # A dialler that does not look is refused by the other side.
        exchange = await challenged(connection)
        shown: Head = {"proof": SECRET.dialler_proof(exchange), "cluster_id": ours}
        refused = await error_of(connection.request(RequestType.PROVE, shown))
        assert isinstance(refused, WrongCluster) and told in refused.message
        assert not server.connections[0].trusted

    on_loop(scenario)


def test_a_proof_can_be_neither_reflected_nor_used_twice_nor_guessed_at() -> None:
    async def scenario(loopback: Loopback) -> None:
        server = Guarded()
        connection = await loopback.pair(server)
        answer = (await connection.request(RequestType.CHALLENGE, {"nonce": b"n" * NONCE_BYTES})).head
        reflected: Head = {"proof": need_bytes(answer, "proof"), "cluster_id": CLUSTER}
        assert isinstance(await error_of(connection.request(RequestType.PROVE, reflected)), NotTrusted)
        # The challenge was used up by the wrong proof.
        assert isinstance(await error_of(connection.request(RequestType.PROVE, reflected)), BadRequest)
        exchange = await challenged(connection)
        good: Head = {"proof": SECRET.dialler_proof(exchange), "cluster_id": CLUSTER}
        other = await loopback.connect(int(connection.peer.rpartition(":")[2]))
        await challenged(other)
        assert isinstance(await error_of(other.request(RequestType.PROVE, good)), NotTrusted)
        assert not any(each.trusted for each in server.connections)
        await connection.request(RequestType.PROVE, good)
        assert [each.trusted for each in server.connections] == [True, False]

    on_loop(scenario)


NONSENSE: list[Head] = [
    {},
    {"nonce": b""},
    {"nonce": b"n" * 32, "role": "meta", "log_id": -1, "cluster_id": 0, "proof": b""},
    {"nonce": b"n" * 32, "role": "meta", "log_id": 7, "cluster_id": 0, "proof": b"p" * 32},
]


@pytest.mark.parametrize("head", NONSENSE)
def test_a_peer_that_answers_nonsense_is_not_trusted(head: Head) -> None:
    async def scenario(loopback: Loopback) -> None:
        connection = await loopback.pair(Echo(lambda peer, frame: peer.answer(frame.request_id, head)))
        assert isinstance(await error_of(prove(connection, SECRET, 0, LIMIT_MS)), NotTrusted)

    on_loop(scenario)


async def challenged(connection: Connection) -> Exchange:
    """What both sides have said once the server has answered a challenge."""
    nonce = b"n" * NONCE_BYTES
    answer = (await connection.request(RequestType.CHALLENGE, {"nonce": nonce})).head
    await asyncio.sleep(0)
    log_id, cluster_id = need_u64(answer, "log_id"), need_u64(answer, "cluster_id")
    return Exchange(nonce, need_bytes(answer, "nonce"), "realtime", log_id, cluster_id)
