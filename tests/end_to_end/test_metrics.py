"""What servers say to Prometheus is true, complete and cheap (docs/metrics.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import delayd
from delayd.client.asking import ask
from delayd.config import parse_address
from delayd.wire.frame import Head
from delayd.wire.metrics import GROUP_OLDEST, METRICS, OF_GATEWAY, OF_ROLE, RETRIES_PREFIX, RETRIES_WAITING, TOP
from delayd.wire.requests import RequestType
from tests.end_to_end.measured import Measured, admin_port, asked, gateway, measured, read, scrape, until
from tests.end_to_end.processes import ServerProcess
from tests.waiting import DEADLINE_S

DAY = timedelta(days=1)
# What a server tells only in a state in which this test does not bring it.
RARE = {"delayd_held"}
OCCURRENCES = ("ran", "paused", "too_old", "missed", "superseded", "too_many", "overlap", "restored")


def status_of(server: ServerProcess) -> Head:
    async def told() -> Head:
        async with ask.connected(parse_address(server.address)) as connection:
            return await ask.ask(connection, RequestType.STATUS, {})

    return asyncio.run(told())


def consume(meta: str, subject: str, group: str, count: int) -> None:
    with delayd.Consumer(meta, subject, group=group) as consumer:
        for number, message in enumerate(consumer, 1):
            message.ack()
            if number == count:
                return


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    with measured(tmp_path_factory.mktemp("measured")) as servers:
        yield servers


def test_each_message_is_counted_once_from_its_send_to_its_acknowledgement(servers: Measured) -> None:
    before, meta = scrape(servers.realtime), servers.meta.address
    with delayd.Producer(meta) as producer:
        producer.send_batch("counted", [b"x"] * 40, delay=timedelta(milliseconds=20))
        for _ in range(10):
            producer.send("counted", b"x", delay=timedelta(milliseconds=20))
        far = producer.send("counted", b"x", delay=timedelta(days=400))
        producer.send("counted", b"x", delay=timedelta(hours=7))
        moved = producer.send("counted", b"x", delay=timedelta(hours=7))
        producer.reschedule("counted", receipt=moved, delay=timedelta(hours=8))
        producer.cancel("counted", receipt=producer.send("counted", b"x", delay=DAY))
    consume(meta, "counted", "g", 50)

    def ended(how: str) -> float:
        return scrape(servers.delay).one("delayd_ended_messages_total", how=how)

    until(lambda: ended("dispatched") >= 50 and ended("cancelled") == 1 and ended("moved") == 1, "outcomes are durable")
    after, delay = scrape(servers.realtime), scrape(servers.delay)

    def grown(name: str, **labels: str) -> float:
        return after.one(name, **labels) - before.one(name, **labels)

    assert grown("delayd_arrived_messages_total") == 50
    assert grown("delayd_lateness_durable_seconds_count") == grown("delayd_lateness_delivered_seconds_count") == 50
    assert grown("delayd_lateness_durable_seconds_bucket", le="+Inf") == 50
    durable, delivered = (grown(f"delayd_lateness_{until}_seconds_sum") for until in ("durable", "delivered"))
    assert 0 < durable < 50 * DEADLINE_S and 0 < delivered < 50 * DEADLINE_S
    assert grown("delayd_consumed_messages_total", what="acknowledged") == 50
    assert grown("delayd_log_commit_seconds_count", log="message log") >= 1
    assert grown("delayd_log_commit_seconds_count", log="pull log") >= 1
    assert delay.one("delayd_log_commit_seconds_count", log="message log") >= 12
    assert delay.one("delayd_log_commit_seconds_sum", log="message log") > 0
    pending = {due: delay.one("delayd_pending_messages", due=due) for due in ("overdue", "minute", "hour")}
    assert pending == {"overdue": 0, "minute": 0, "hour": 0}
    assert delay.one("delayd_pending_messages", due="day") == 2
    assert delay.one("delayd_pending_messages", due="further") == 1
    furthest_s = delay.one("delayd_furthest_due_timestamp_seconds")
    assert 0 < furthest_s - far.deliver_at_ms / 1_000 <= 3_600
    assert delay.one("delayd_oldest_overdue_seconds") == 0


def test_each_occurrence_is_counted_once_by_whether_it_ran_or_why_it_did_not(servers: Measured) -> None:
    def counted() -> dict[str, float]:
        page = scrape(servers.delay)
        return {how: page.one("delayd_occurrences_total", how=how) for how in OCCURRENCES}

    assert set(counted().values()) == {0}
    with delayd.Producer(servers.meta.address) as producer:
        producer.recurring("tick", "ticks", b"x", every=timedelta(seconds=1))
        producer.run_recurring("tick")
        until(lambda: counted()["ran"] >= 2, "occurrences ran")
        decided = producer.pause_recurring("tick").decided_until
        until(lambda: datetime.now(UTC) > decided + timedelta(seconds=2), "occurrences are passed over")
        resumed = producer.resume_recurring("tick")
        assert resumed.skipped["paused"] >= 1
        assert counted()["paused"] == resumed.skipped["paused"], "as the schedule itself says"
        last = producer.pause_recurring("tick")
        assert counted()["ran"] == last.sent, "what was run by hand is no occurrence"
        assert sum(counted().values()) == last.sent + sum(last.skipped.values())
        producer.delete_recurring("tick")


def test_what_is_due_and_not_taken_is_overdue_by_its_age(tmp_path: Path) -> None:
    with measured(tmp_path) as servers:
        servers.realtime.kill()
        with delayd.Producer(servers.meta.address) as producer:
            producer.send("late", b"x", delay=timedelta(0))
            producer.send("late", b"x", delay=timedelta(seconds=50))

        def overdue() -> float:
            return scrape(servers.delay).one("delayd_oldest_overdue_seconds")

        until(lambda: overdue() > 1.5, "it waits")
        found = scrape(servers.delay)
        assert found.one("delayd_pending_messages", due="overdue") == 1
        assert found.one("delayd_pending_messages", due="minute") == 1
        servers.realtime.start()
        until(lambda: overdue() < 0.5, "it was taken")


def test_a_page_has_each_metric_of_its_server_and_no_other(servers: Measured) -> None:
    with delayd.Producer(servers.meta.address) as producer:
        producer.send("complete", b"x", delay=timedelta(0))
        consume(servers.meta.address, "complete", "g", 1)
        producer.send_batch("complete", [b"x"] * 2, delay=timedelta(0))
        until(lambda: GROUP_OLDEST.name in scrape(servers.realtime).names, "they wait for the group")
    until(lambda: bool(scrape(servers.delay).of("delayd_dead_letters")), "dead letters are counted")
    found: set[str] = set()
    for server in servers:
        page = scrape(server)
        found |= page.names
        log_id = status_of(server)["log_id"]
        assert isinstance(log_id, int)
        assert {labels["server"] for _, labels, _ in page.samples} == {f"{log_id:016x}"}
        assert not {each.metric.name for each in OF_ROLE[server.role]} - page.names - {"delayd_late_seconds"}
    assert found <= {metric.name for metric in METRICS}
    wanted = {metric.name for metric in METRICS} - {each.name for each in (*OF_GATEWAY, RETRIES_WAITING)}
    assert wanted - found <= RARE | {"delayd_late_seconds"}  # Nothing was late in the last ten seconds.


def test_each_counter_of_status_is_a_metric_with_the_same_figure(servers: Measured) -> None:
    for server in servers:
        named = {name for sources in (OF_ROLE[""], OF_ROLE[server.role]) for each in sources for name in each.names}
        counters = status_of(server)["counters"]
        assert isinstance(counters, dict)
        lacking = {name for name in counters if name not in named and not name.startswith(RETRIES_PREFIX)}
        # These are told by others: the sum of what is pending by when it is due, and the number of connections.
        assert lacking <= {"pending"}
        page = scrape(server)
        for name in ("accepted_rows", "messages", "routes"):
            if name in counters:
                (source,) = [each for each in OF_ROLE[server.role] if name in each.names]
                assert page.one(source.metric.name) == counters[name]


def test_the_gateway_says_the_same_of_all_servers(servers: Measured, tmp_path: Path) -> None:
    with gateway(servers.meta.address, tmp_path) as port:
        page = read(asked(port, "/metrics")[1])
        assert asked(port, "/readyz")[0] == asked(port, "/healthz")[0] == 200
    own = scrape(servers.delay)
    name = "delayd_accepted_messages_total"
    assert page.one(name, role="delay") == own.one(name)
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    assert own.names - histograms <= page.names
    with gateway("127.0.0.1:1", tmp_path) as port:
        status, why = asked(port, "/readyz")
        assert status == 503 and "127.0.0.1:1 does not answer" in why


def test_of_a_thousand_subjects_the_page_names_those_that_wait_most_and_lists_all_when_asked(
    servers: Measured,
) -> None:
    meta = servers.meta.address
    subjects = [f"many.{number:04}" for number in range(1_000)]
    with delayd.Consumer(meta, "many.>", group="all", prefetch=False) as consumer:
        consumer.pull(1, timedelta(0))  # It subscribes.
        with delayd.Producer(meta) as producer:
            for subject in subjects:
                producer.send_nowait(subject, b"x", delay=timedelta(0))
            producer.send_batch("many.0500", [b"x"] * 30, delay=timedelta(0))
            producer.flush()
        until(lambda: scrape(servers.realtime).one("delayd_groups") >= 1_000, "each subject has its group")
        until(lambda: scrape(servers.realtime).one("delayd_groups_waiting_messages") >= 1_030, "all have arrived")
        page = scrape(servers.realtime)
    waiting = page.of("delayd_group_waiting_messages")
    assert len(waiting) == TOP and max(waiting) == page.one("delayd_group_waiting_messages", subject="many.0500") == 31
    listed = scrape(servers.realtime, "/metrics/subjects?match=many.%2A")
    told = {labels["subject"]: value for name, labels, value in listed.samples if name.endswith("_waiting_messages")}
    assert told.keys() == set(subjects) and told["many.0500"] == 31 and told["many.0501"] == 1
    alone = scrape(servers.realtime, "/metrics/subjects?match=many.0007")
    assert [labels["subject"] for _, labels, _ in alone.samples] == ["many.0007"] * 3
    cpu_ms = min(cost_ms(servers.realtime, "/metrics") for _ in range(5))
    assert cpu_ms <= 50, f"a scrape costs {cpu_ms} ms"
    status, told_why = asked(admin_port(servers.delay), "/metrics/subjects")
    assert status == 400 and "realtime server" in told_why


def cost_ms(server: ServerProcess, path: str) -> float:
    """What ten scrapes cost the server's processor, by one of them."""

    def used() -> int:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    port, before = admin_port(server), used()
    for _ in range(10):
        assert asked(port, path)[0] == 200
    return used() - before  # Ticks of 10 ms, divided by ten.


def test_a_server_that_is_held_or_stops_says_so(tmp_path: Path) -> None:
    with measured(tmp_path) as servers:
        with delayd.Producer(servers.meta.address) as producer:
            producer.send("held", b"x", delay=DAY)
        port = admin_port(servers.delay)
        assert asked(port, "/readyz") == (200, "ready\n")
        servers.delay.kill()
        (log,) = sorted((tmp_path / "delay" / "message").iterdir())
        whole = log.read_bytes()
        log.write_bytes(whole[:10] + bytes([whole[10] ^ 1]) + whole[11:])
        servers.delay.start_held()
        until(lambda: admin_port(servers.delay) != port, "it says its new port")
        port = admin_port(servers.delay)
        assert asked(port, "/healthz")[0] == 200
        for path in ("/readyz", "/metrics"):
            status, why = asked(port, path)
            assert status == 503 and "delayd mend list" in why
        log.write_bytes(whole)
        servers.delay.until_ready()
        until(lambda: asked(port, "/readyz")[0] == 200, "it serves")
        assert scrape(servers.delay).one("delayd_pending_messages", due="day") >= 0


def test_without_being_asked_a_server_has_no_such_port(tmp_path: Path) -> None:
    with ServerProcess("meta", tmp_path) as meta:
        assert "admin_listening" not in meta.log
    with ServerProcess("meta", tmp_path / "a", {"admin_port": 0}) as meta:
        taken = ServerProcess("meta", tmp_path / "b", {"admin_port": admin_port(meta)})
        taken.spawn()
        assert taken.wait() == 2 and "choose another host or port" in taken.log
