"""Each limit and answer that docs/protocol.md tells of, tried on real servers by a client written from it alone."""

import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from crc32c import crc32c

from .raw_client import (
    ACK,
    CHALLENGE,
    GROUPS,
    META_SUBJECTS,
    NACK,
    OUTCOME,
    PING,
    PROVE,
    PULL,
    ROUTES,
    SEND,
    STATUS,
    SUBJECTS,
    Head,
    Raw,
    batch,
    bodies_of,
    frame,
    listed,
    prove,
)
from .up_process import Up, up

RETIRE = 39
PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
PULL_HEAD = {"max_messages": 10, "max_bytes": 1 << 20, "wait_ms": 0, "lease_ms": 0, "consumer": "raw"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder: Path = tmp_path_factory.mktemp("protocol")
    with up(folder, "--port", "0") as running:
        yield running.until_ready()


def connection(servers: Up, role: str) -> Raw:
    return Raw(servers.ready(role)[-1].endpoint.port)


def test_the_checksum_is_the_one_that_the_page_names() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_the_zeros_behind_a_head_are_in_no_checksum_and_are_not_looked_at(servers: Up) -> None:
    with connection(servers, "delay") as raw:
        for pad in (None, b"\xff" * 7):
            raw.write(frame(PING, 7, {}, pad=pad))  # A head of one byte.
            answer = raw.read()
            assert (answer.kind, answer.flags, answer.request_id) == (PING, 1, 7)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n........", "bad_magic"),
        (b"DLY1\x02" + bytes(19), "bad_version"),
        (frame(PING, 1, {})[:20] + b"....\x80" + bytes(7), "frame_damaged"),
        (frame(PING, 0, {}), "bad_request"),
        (frame(PING, 1, {"x": b"x" * (17 << 10)}), "frame_too_large"),
        (frame(PING, 1, {}, bytes((64 << 10) + 8)), "frame_too_large"),
        (struct.pack("<IBBHIIII", 0x31594C44, 1, SEND, 0, 1, 1, (16 << 20) + (64 << 10) + 8, 0), "frame_too_large"),
        (struct.pack("<IBBHIIII", 0x31594C44, 1, SEND, 0, 1, 1, 12, 0), "frame_damaged"),
    ],
)
def test_wrong_framing_is_named_with_request_id_0_and_ends_the_connection(servers: Up, data: bytes, code: str) -> None:
    with connection(servers, "delay") as raw:
        raw.write(data)
        answer = raw.read()
        assert (answer.flags, answer.request_id, answer.code) == (3, 0, code)
        with pytest.raises(ConnectionError):
            raw.read()


@pytest.mark.parametrize(
    ("role", "kind", "head", "code"),
    [
        ("delay", 99, {}, "unknown_request"),
        ("delay", PULL, {}, "unknown_request"),
        ("delay", OUTCOME, {"log_id": 1}, "unknown_server"),
        ("realtime", PULL, {}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s"}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s", "group": "g" * 256}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s", "group": "a\nb"}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "a b", "group": "g"}, "bad_subject"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s", "group": "g", "max_messages": 0}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s", "group": "g", "max_messages": True}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s", "group": "g", "wait_ms": 1 << 63}, "bad_request"),
        ("realtime", PULL, {**PULL_HEAD, "subject": "s", "group": "g", "lease_ms": 43_200_001}, "bad_request"),
        ("realtime", ACK, {"subject": "s", "group": "g", "handles": [[1, 2, 0]]}, "bad_request"),
        ("realtime", ACK, {"subject": "s", "group": "g", "handles": [[1, 2]]}, "bad_request"),
        ("realtime", ACK, {"subject": "s", "group": "g", "handles": [[1, 2, 3]] * 32_769}, "bad_request"),
        ("meta", ROUTES, {"subjects": [f"s{number}" for number in range(2_001)], "assign": False}, "bad_request"),
        ("meta", ROUTES, {"subjects": ["a b"], "assign": True}, "bad_subject"),
    ],
)
def test_a_fault_of_a_request_is_named_and_the_connection_goes_on(
    servers: Up, role: str, kind: int, head: Head, code: str
) -> None:
    with connection(servers, role) as raw:
        answer = raw.ask(kind, head)
        assert (answer.flags, answer.code) == (3, code)
        assert answer.head["message"] and answer.head["retry_after_ms"] in (0, None)
        assert raw.ask(PING, {"a field that nobody knows": [1, 2]}).flags == 1


def test_a_refused_pull_and_an_acknowledgement_make_no_group(servers: Up) -> None:
    with connection(servers, "realtime") as raw:
        names = {"subject": "nobody", "group": "nobody"}
        assert raw.ask(PULL, {**PULL_HEAD, **names, "lease_ms": 43_200_001}).code == "bad_request"
        for kind in (ACK, NACK):
            assert raw.ask(kind, {**names, "handles": [[1, 2, 3]]}).head["stale"] == [[1, 2, 3]]
        assert raw.ask(GROUPS, {"subject": "nobody"}).head["groups"] == []
        assert raw.ask(PULL, {**PULL_HEAD, **names}).head["parts"] == []
        assert len(listed(raw.ask(GROUPS, {"subject": "nobody"}).head, "groups")) == 1


def test_each_batch_of_a_send_has_its_own_fate(servers: Up) -> None:
    with connection(servers, "delay") as raw:
        bad = bytearray(batch(11, 2))
        bad[-1] ^= 1
        late = batch(11, 3, due_ms=int(time.time() * 1000) + 733 * 86_400_000, rows=3)
        poison = batch(11, 4, rows=3, headers=[b"", b"\xc1", msgpack.packb({"a": "b"})])
        found = raw.results(batch(11, 1, rows=2), bytes(bad), late, poison, batch(11, 5))
        assert [each.get("error") for each in found] == [None, "batch_malformed", "past_horizon", "bad_headers", None]
        assert [each["rows"] for each in found[1:4]] == [[], [0, 1, 2], [1]]
        assert all(each["message"] and each["retry_after_ms"] == 0 for each in found[1:4])
        assert found[4]["base_sequence"] == found[0]["base_sequence"] + 2  # type: ignore[operator]
        again = raw.results(batch(11, 1, rows=2, body=b"another"))
        assert again[0]["error"] == "batch_number_reused"


def test_what_refuses_a_whole_send(servers: Up) -> None:
    with connection(servers, "delay") as raw:
        whole = batch(12, 1)
        for body in (b"", whole[:-8], whole + bytes(8), whole + bytes(48), whole * 4_097):
            assert raw.ask(SEND, {}, body).code == "batch_malformed"
        log_id = raw.ask(STATUS, {}).head["log_id"]
        found = raw.ask(OUTCOME, {"log_id": log_id, "producer_id": 12, "producer_batch": 1}).head
        assert found["state"] == "unknown" and found["result"] is None
        # And that answer binds.
        assert raw.results(whole)[0]["error"] == "batch_number_reused"
        assert len(raw.results(*(batch(12, number, low_water=2) for number in range(2, 4_098)))) == 4_096


def test_a_connection_brings_256_producers_at_once(servers: Up) -> None:
    with connection(servers, "delay") as raw:
        for producer_id in range(10_000, 10_256):
            assert "error" not in raw.results(batch(producer_id, 1))[0]
        last = [raw.results(batch(producer_id, 1))[0] for producer_id in range(20_000, 20_100)]
        refused = [each for each in last if each.get("error") == "slow_down"]
        assert len(refused) >= 80 and all(each["retry_after_ms"] for each in refused)
        assert "error" not in raw.results(batch(10_000, 2))[0]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (batch(13, 1, subjects=[b"a", b"b"], rows=1), "batch_malformed"),  # A name that no row has.
        (batch(13, 1, subjects=[b"a", b"a"], rows=2), "batch_malformed"),
        (batch(13, 1, subjects=[b"a", b"x" * 256], rows=2), "bad_subject"),
        (batch(13, 1, headers=[b"\x80\x80"]), "bad_headers"),
        (batch(13, 1, headers=[bytes((32 << 10) + 1)]), "message_too_large"),
        (batch(13, 1, body=bytes((4 << 20) + 1)), "message_too_large"),
        (batch(13, 1, due_ms=1_700_000_000), "bad_instant"),
    ],
)
def test_what_intake_refuses_by_name(servers: Up, made: bytes, code: str) -> None:
    with connection(servers, "delay") as raw:
        assert raw.results(made)[0]["error"] == code


def test_a_message_travels_and_is_acknowledged(servers: Up) -> None:
    now_ms = int(time.time() * 1000)
    names = {"subject": "raw.travel", "group": "g"}
    with connection(servers, "delay") as delay, connection(servers, "realtime") as realtime:
        sent = delay.results(batch(14, 1, rows=3, due_ms=now_ms, subjects=[b"raw.travel"], body=b"hello"))
        assert sent[0]["count"] == 3 and sent[0]["duplicate"] is False
        assert delay.results(batch(14, 1, rows=3, due_ms=now_ms, subjects=[b"raw.travel"], body=b"hello")) == [
            {**sent[0], "duplicate": True}
        ]
        answer = realtime.ask(PULL, {**PULL_HEAD, **names, "wait_ms": 20_000})
        ((pull_first, _, count, attempt),) = listed(answer.head, "parts")
        assert (count, attempt) == (3, 1) and bodies_of(answer.body) == [b"hello"] * 3
        handles = [[answer.head["incarnation"], pull_first, count]]
        assert realtime.ask(ACK, {**names, "handles": handles}).head["stale"] == []
        found = realtime.ask(SUBJECTS, {"prefix": "raw.travel", "after": "", "limit": 10}).head
        assert found["more"] is False and [each["name"] for each in listed(found, "subjects")] == ["raw.travel"]
    with connection(servers, "meta") as meta:
        page = meta.ask(META_SUBJECTS, {"prefix": "raw.travel", "after": "", "limit": 1_000_000}).head
        assert [name for name, _ in listed(page, "subjects")] == ["raw.travel"] and page["more"] is False


def test_status_of_each_server_has_the_lists_that_the_page_names(servers: Up) -> None:
    for role in ("meta", "delay", "realtime"):
        with connection(servers, role) as raw:
            found = raw.ask(STATUS, {}).head
            assert found["role"] == role and found["waits"] == [] and found["refuses"] == []


@pytest.mark.parametrize("role", ["meta", "delay", "realtime"])
def test_a_server_serves_the_requests_of_the_page_to_those_whom_it_names(servers: Up, role: str) -> None:
    rows = re.findall(r"\n\| (\d+) \| [A-Z_]+ \| ([a-z, ]+) \| (yes|) \|", PAGE)
    assert len(rows) > 50
    secret = bytes.fromhex((servers.data / "cluster.secret").read_text().split()[0])
    with connection(servers, role) as stranger, connection(servers, role) as trusted:
        prove(trusted, secret)
        for number, served_by, needs_trust in rows:
            kind = int(number)
            if kind in (CHALLENGE, PROVE):
                continue
            is_served = role in served_by or served_by == "any"
            assert (stranger.ask(kind, {}).code == "not_trusted") == (needs_trust == "yes"), kind
            # A server that retires serves no longer.
            if kind != RETIRE:
                assert (trusted.ask(kind, {}).code == "unknown_request") != is_served, kind
