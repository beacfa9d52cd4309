"""Connections over TLS, on real sockets: what is sent arrives, and whoever is not who he should be is named."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from delayd.address import Access, Tls
from delayd.errors import (
    BadMagic,
    BadSetting,
    ConnectionLost,
    DelaydError,
    NotEncrypted,
    NotTrusted,
    Stopping,
    TlsRequired,
)
from delayd.net import tls
from delayd.net.connection import Connection
from delayd.net.trust import prove
from delayd.wire.frame import Frame, encode_frame
from tests.certificates import DAY, Authority, put
from tests.trust import SECRET
from tests.waiting import DEADLINE_S, until

from .guarded import CLUSTER, LIMIT_MS, Guarded
from .loopback import HOST, Echo, Loopback, error_of, on_loop

MIB = 1 << 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority, **own: str) -> Access:
    """What a client has that trusts an authority."""
    return Access(Tls(authority.ca, **own))


@asynccontextmanager
async def relay(port: int, passed: Callable[[bytes], bytes]) -> AsyncIterator[int]:
    """Stand between a client and a port of this machine: each piece that the client sends goes on as ``passed`` says.
    Yields the port for the client.
    """

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(change(data))
        except ConnectionError:
            pass  # One side is gone; the other one hears it by the close.
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(HOST, port)
        await asyncio.gather(copy(reader, server_writer, passed), copy(server_reader, writer, bytes))

    between = await asyncio.start_server(serve, HOST, 0)
    try:
        yield between.sockets[0].getsockname()[1]
    finally:
        between.close()


def seen_by(kept: bytearray) -> Callable[[bytes], bytes]:
    """Keeps what passes."""

    def keep(data: bytes) -> bytes:
        kept.extend(data)
        return data

    return keep


def test_requests_and_answers_of_all_sizes_arrive_as_they_were_sent(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(), access=Access(authority.server()))
        client = await loopback.connect(port, access=trusting(authority))
        bodies = [os.urandom(size) for size in (0, 8, 16_384, 16_392, 300 * 1024, 5 * MIB, 20 * MIB)]
        bodies += [b"%8d" % n for n in range(3_000)]
        answers = await asyncio.gather(*(client.request(20, {"n": n}, [body]) for n, body in enumerate(bodies)))
        assert [bytes(answer.body) for answer in answers] == bodies
        assert [answer.head["n"] for answer in answers] == list(range(len(bodies)))

    on_loop(scenario)


def test_nothing_of_a_message_can_be_read_on_the_way(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(), access=Access(authority.server()))
        seen = bytearray()
        async with relay(port, seen_by(seen)) as between:
            client = await loopback.connect(between, access=trusting(authority))
            body = b"nobody else reads this  "
            assert bytes((await client.request(20, {"name": body.decode()}, [body])).body) == body
        assert len(seen) > len(body) and b"nobody" not in seen and b"DLY1" not in seen

    on_loop(scenario)


def test_bytes_that_were_changed_on_the_way_end_the_connection_and_reach_nobody(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        echo = Echo()
        _, port = await loopback.serve(echo, access=Access(authority.server()))
        changes = False

        def change(data: bytes) -> bytes:
            return data[:-1] + bytes([data[-1] ^ 1]) if changes else data

        async with relay(port, change) as between:
            client = await loopback.connect(between, access=trusting(authority))
            await client.request(20, {})
            changes = True
            assert isinstance(await error_of(client.request(20, {"changed": True})), ConnectionLost)
            await client.closed
        assert [frame.head for frame in echo.received_frames] == [{}]

    on_loop(scenario)


def test_a_client_without_tls_is_told_that_the_port_takes_nothing_else(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(), access=Access(authority.server()))
        client = await loopback.connect(port)
        refused = await error_of(client.request(20, {}))
        assert isinstance(refused, TlsRequired) and "delayds://" in refused.message
        await client.closed

    on_loop(scenario)


def test_a_client_with_tls_is_told_that_a_server_has_none(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        echo = Echo()
        _, port = await loopback.serve(echo)
        refused = await error_of(loopback.connect(port, access=trusting(authority)))
        assert isinstance(refused, NotEncrypted) and "speaks no TLS" in refused.message
        await until(lambda: bool(echo.ends))
        assert isinstance(echo.ends[0], BadMagic) and "the peer speaks TLS" in echo.ends[0].message

    on_loop(scenario)


@pytest.mark.parametrize(
    ("names", "ends", "told"),
    [
        (["meta.example"], DAY, f"for another name than {HOST}"),
        (["10.0.0.1"], DAY, f"for another name than {HOST}"),
        ([HOST], -timedelta(hours=1), "has expired; its operator must put a new one"),
    ],
)
def test_a_certificate_that_is_not_the_servers_or_over_is_refused_by_name(
    authority: Authority, names: list[str], ends: timedelta, told: str
) -> None:
    async def scenario(loopback: Loopback) -> None:
        echo = Echo()
        _, port = await loopback.serve(echo, access=Access(authority.server("server", *names, ends=ends)))
        refused = await error_of(loopback.connect(port, access=trusting(authority)))
        assert isinstance(refused, NotEncrypted) and told in refused.message
        assert not echo.connections

    on_loop(scenario)


def test_a_certificate_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(loopback: Loopback) -> None:
        other = Authority(tmp_path, "other")
        _, port = await loopback.serve(Echo(), access=Access(other.server()))
        for access in (trusting(authority), Access(Tls())):
            refused = await error_of(loopback.connect(port, access=access))
            assert isinstance(refused, NotEncrypted) and "nobody trusted here has signed" in refused.message
            assert access.tls is not None and (access.tls.ca or "this machine trusts") in refused.message
        assert "it trusts no authority that has signed" in caplog.text and "(tls_cert)" in caplog.text

    on_loop(scenario)


def test_a_client_may_name_the_name_that_the_certificate_has(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(), access=Access(authority.server("server", "meta.example")))
        client = await loopback.connect(port, access=trusting(authority, name="meta.example"))
        await client.request(20, {})

    on_loop(scenario)


def test_an_older_tls_than_1_2_is_not_spoken(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(), access=Access(authority.server()))
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(authority.ca)
        with pytest.warns(DeprecationWarning):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(HOST, port, ssl=old, server_hostname=HOST)

    on_loop(scenario)


def test_a_server_may_ask_for_certificates_of_its_clients_and_both_sides_say_what_helps(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(loopback: Loopback) -> None:
        echo, stranger = Echo(), Authority(tmp_path, "stranger")
        access = Access(authority.server()._replace(client_ca=authority.ca))
        _, port = await loopback.serve(echo, access=access)
        theirs = stranger.sign("theirs", "client")
        over = authority.sign("over", "client", ends=-timedelta(hours=1))
        for own, told in (
            (
                {},
                "takes nobody without a certificate that an authority in its tls_client_ca has signed; give one",
            ),
            (theirs._asdict(), f"has signed {theirs.cert}, the certificate of this side; have"),
            (over._asdict(), f"{over.cert}, has expired; put a new one into that file"),
        ):
            # However much this side has sent by then, it hears why.
            for body in ((), (bytes(1 << 20),)):
                client = await loopback.connect(port, access=trusting(authority, **own))
                lost = await error_of(client.request(20, {}, body))
                assert isinstance(lost, ConnectionLost) and told in lost.message, (own, lost)
        for told in ("and tls_client_ca asks for one", f"no authority in {authority.ca} (tls_client_ca) has signed"):
            assert told in caplog.text, told
        assert "tls_broken" not in caplog.text
        old = trusting(authority, **theirs._asdict())
        assert old.tls is not None
        monkeypatch.setattr(tls.dialling_context(old.tls), "maximum_version", ssl.TLSVersion.TLSv1_2)
        refused = await error_of(loopback.connect(port, access=old))
        assert isinstance(refused, NotEncrypted) and "ends the handshake: no authority" in refused.message
        assert not echo.connections
        mine = authority.sign("mine", "client")
        client = await loopback.connect(port, access=trusting(authority, **mine._asdict()))
        await client.request(20, {})

    on_loop(scenario)


def test_a_new_certificate_is_taken_without_a_restart_and_a_broken_one_is_refused_in_the_log(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(loopback: Loopback) -> None:
        server = authority.server()
        _, port = await loopback.serve(Echo(), access=Access(server))
        client = await loopback.connect(port, access=trusting(authority))
        first = client.channel
        put(server.cert, b"no certificate\n")
        await until(lambda: "tls_unreadable" in caplog.text)
        assert (await loopback.connect(port, access=trusting(authority))).channel == first
        authority.server()
        await until(lambda: "tls_changed" in caplog.text)
        renewed = await loopback.connect(port, access=trusting(authority))
        assert renewed.channel and renewed.channel != first
        await renewed.request(20, {})
        await client.request(20, {})  # A connection goes on as it began.

    with caplog.at_level(logging.INFO, "delayd.net.tls"):
        on_loop(scenario)


def test_a_file_that_cannot_be_used_is_named_at_the_start(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.server(), authority.sign("other", HOST)
    (tmp_path / "text").write_text("no PEM")
    os.chmod(tmp_path / "text", 0o600)
    public = authority.sign("public", HOST)
    os.chmod(public.key, 0o644)
    missing = str(tmp_path / "missing")

    async def scenario(loopback: Loopback) -> None:
        for bad, setting, told in (
            (good._replace(cert=missing), "tls_cert", "No such file"),
            (good._replace(key=missing), "tls_key", "No such file"),
            (good._replace(key=other.key), "tls_cert", "does not go with the key"),
            (good._replace(key=str(tmp_path / "text")), "tls_cert", "does not go with the key"),
            (good._replace(ca=str(tmp_path / "text")), "tls_ca", "holds no certificates"),
            (good._replace(client_ca=missing), "tls_client_ca", "No such file"),
            (good._replace(cert=public.cert, key=public.key), "tls_key", "chmod 600"),
        ):
            refused = await error_of(loopback.serve(Echo(), access=Access(bad)))
            assert isinstance(refused, BadSetting) and told in refused.message, bad
            assert refused.details["setting"] == setting

    on_loop(scenario)


def test_a_peer_that_ends_no_handshake_is_ended_and_holds_up_no_stop(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(loopback: Loopback) -> None:
        echo = Echo()
        server, port = await loopback.serve(echo, access=Access(authority.server()))
        reader, writer = await asyncio.open_connection(HOST, port)
        await until(lambda: len(server.connections) == 1)
        await server.close()
        assert await reader.read() == b"" and not server.connections
        writer.close()
        monkeypatch.setattr(tls, "HANDSHAKE_S", 0.1)
        server, port = await loopback.serve(echo, access=Access(authority.server()))
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"\x16\x03\x01")
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.connections)
        assert not echo.connections

    on_loop(scenario)


def test_a_server_that_stops_says_so_over_tls(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        server, port = await loopback.serve(Echo(), access=Access(authority.server()))
        client = await loopback.connect(port, access=trusting(authority))
        await client.request(20, {})
        async with asyncio.timeout(DEADLINE_S):
            await server.close()
            await client.closed
        assert isinstance((await error_of(client.request(20, {}))).__cause__, Stopping)

    on_loop(scenario)


def test_a_slow_reader_holds_up_its_own_requests_and_no_more_memory_is_used(authority: Authority) -> None:
    async def scenario(loopback: Loopback) -> None:
        echo = Echo()
        _, port = await loopback.serve(echo, access=Access(authority.server()))
        context = tls.dialling_context(Tls(authority.ca))
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context, server_hostname=HOST, limit=1 << 16)
        client = await loopback.connect(port, access=trusting(authority))
        body = bytes(MIB)
        for n in range(1, 65):
            writer.write(b"".join(encode_frame(20, n, {}, [body])))
        await until(lambda: any(not connection.writable for connection in echo.connections))
        slow = next(connection for connection in echo.connections if not connection.writable)
        assert slow.buffered_bytes < 16 * MIB
        await client.request(20, {})
        got = 0
        async with asyncio.timeout(DEADLINE_S):
            while got < 64 * MIB:
                got += len(await reader.read(1 << 20))
        writer.close()

    on_loop(scenario)


def test_rule_H8_a_proof_that_somebody_in_between_passes_on_is_worth_nothing(authority: Authority) -> None:
    """The one in between has a certificate that the dialler trusts, and no secret."""

    async def scenario(loopback: Loopback) -> None:
        guarded = Guarded(SECRET)
        _, port = await loopback.serve(guarded, access=Access(authority.server()))
        direct = await loopback.connect(port, access=trusting(authority))
        await prove(direct, SECRET, CLUSTER, LIMIT_MS)
        to_server = await loopback.connect(port, access=trusting(authority))
        tasks: set[asyncio.Task[None]] = set()

        def pass_on(connection: Connection, frame: Frame) -> None:
            async def ask() -> None:
                try:
                    connection.answer(frame.request_id, (await to_server.request(frame.type, frame.head)).head)
                except DelaydError as error:
                    connection.answer_error(frame.request_id, error)

            tasks.add(asyncio.get_running_loop().create_task(ask()))

        _, between = await loopback.serve(Echo(pass_on), access=Access(authority.server("between")))
        dialler = await loopback.connect(between, access=trusting(authority))
        refused = await error_of(prove(dialler, SECRET, CLUSTER, LIMIT_MS))
        assert isinstance(refused, NotTrusted)
        assert [connection.trusted for connection in guarded.connections] == [True, False]

    on_loop(scenario)
