"""Copies and backups of directories, with real processes: production goes on, and nobody acts twice (rules H7, H8)."""

import asyncio
import json
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from delayd import Consumer, Producer
from delayd.errors import DelaydError
from delayd.machine.operating import WaitKind
from tests.end_to_end.cluster import (
    COMMAND_EVERY_S,
    META,
    Cluster,
    alarm_of,
    cluster,
    command,
    decide,
    log_id_of,
    logged,
    target_with_alarm,
    until_away,
)
from tests.end_to_end.older_copies import backed_up, copy_of, restore
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.pulling import pull_all
from tests.end_to_end.torture_faults import send_directly
from tests.end_to_end.trials import tries
from tests.unit.cli.runner import run
from tests.waiting import holds_once, wait_until

APART = timedelta(seconds=8)  # Both servers are started meanwhile.


@pytest.mark.parametrize("role", ["delay", "realtime"])
def test_rule_H8_a_copy_that_starts_beside_production_harms_nobody_and_serves_nobody(tmp_path: Path, role: str) -> None:
    folders = (tmp_path / str(number) for number in count())
    # A production that stands still for longer than a lease just then is away, and the copy rightly takes its place.
    holds_once(lambda: start_a_copy_beside_production(next(folders), role))


def start_a_copy_beside_production(folder: Path, role: str) -> None:
    data, elsewhere = folder / "data", folder / "copy"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        before = json.loads(command("servers", "--meta", production.meta.address, "--format", "json"))
        copy_of(data, role, elsewhere)
        with ServerProcess(role, elsewhere, {"meta": production.meta.address}) as copy:
            logged(copy, "code=fenced_instance")
            assert f"{role} server" in copy.log and "nothing_is_served_until=" in copy.log
            if role == "delay":
                with pytest.raises(DelaydError, match="may not serve"):
                    asyncio.run(send_directly(copy.address))
            production.send("2", "3")
            assert production.consumed(2) == ["2", "3"]
            # Also when production is away for longer than a lease, the copy does not take its place.
            server = getattr(production, role)
            log_id = log_id_of(production, role)
            server.kill()
            until_away(production, log_id)
            server.start()
            production.send("4")
            assert production.consumed(1) == ["4"]
            after = json.loads(command("servers", "--meta", production.meta.address, "--format", "json"))
        assert [row["address"] for row in before] == [row["address"] for row in after]
        for server in (production.delay, production.realtime):
            assert "fenced" not in server.log and "target_refused" not in server.log


def test_rule_H8_a_restarted_server_goes_on_while_meta_is_away(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        production.meta.kill()
        production.delay.kill()
        production.delay.start()
        asyncio.run(send_directly(production.delay.address, "2"))
        production.meta.start()
        assert production.consumed(1) == ["2"]


@tries(WaitKind.TARGET_REFUSES, WaitKind.ROWS_TARGET_REFUSES)
def test_rule_H8_a_restored_delay_server_is_noticed_and_goes_on_by_an_operator_s_word(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        backed_up(production, backup, "delay")
        restore(production, backup, "delay")
        logged(production.delay, "fenced by=target")
        assert alarm_of(production)
        listed = json.loads(command("servers", "--meta", production.meta.address, "--format", "json"))
        assert {row["role"]: row["state"] for row in listed} == {"delay": "fenced", "realtime": "refused"}
        with pytest.raises(DelaydError, match="may not serve"):
            asyncio.run(send_directly(production.delay.address))
        assert production.consumed(1, within_s=1) == []
        assert "accepted" in production.operator.follow(WaitKind.TARGET_REFUSES, 0)
        production.send("7")
        assert production.consumed(1) == ["7"]
        assert production.consumed(1, within_s=1) == []
        # The other line that tells of it names a command that helps, too.
        restore(production, backup, "delay", over=True)
        assert "accepted" in production.operator.follow(WaitKind.ROWS_TARGET_REFUSES, 0)


@tries(WaitKind.ORIGIN_RESTORED)
def test_rule_H8_a_restored_delay_server_that_lacks_only_outcomes_is_noticed_by_its_target(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        # Neither message leaves before the copy is made.
        production.realtime.kill()
        with Producer(production.meta.address) as producer:
            for body, delay in ((b"1", timedelta(0)), (b"2", APART)):
                producer.send("s", body, delay=delay)
        assert production.delay.terminate() == 0
        copy_of(data, "delay", backup)
        for server in (production.realtime, production.delay):
            server.start()
        # With the second message the target hears that the outcome of the first one is durable.
        assert production.consumed(1) == ["1"]
        assert production.consumed(1) == ["2"]
        restore(production, backup, "delay")
        # A later life of it is no older one: only its logs show that it was restored.
        production.delay.kill()
        production.delay.start()
        assert "accepted" in production.operator.follow(WaitKind.ORIGIN_RESTORED, 0)
        production.send("7")
        wait_until(lambda: "7" in production.consumed(1), "it comes, maybe behind the first ones")


@pytest.mark.parametrize("over", [False, True])
def test_rule_H8_a_restored_delay_server_gives_no_receipt_before_its_target_was_asked(
    tmp_path: Path, over: bool
) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        backed_up(production, backup, "delay")
        production.realtime.kill()
        # Its folder may have the inode of the one that was removed.
        restore(production, backup, "delay", over=over)
        logged(production.delay, "unfenced by=meta serves=no")
        # A message that it took now would be lost when the true directory is put back.
        with pytest.raises(DelaydError, match="may not serve"):
            asyncio.run(send_directly(production.delay.address))
        production.realtime.start()
        logged(production.delay, "code=fenced_instance")
        assert "serves=yes" not in production.delay.log.rpartition("starting role=delay")[2]


@tries(WaitKind.ROWS_TARGET_HAS_LOST)
def test_rule_H7_a_restored_realtime_server_is_noticed_and_goes_on_by_an_operator_s_word(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        backed_up(production, backup, "realtime")
        restore(production, backup, "realtime")
        logged(production.delay, "target_refused")
        # It is taken and kept meanwhile.
        production.send("7")
        assert "lost data" in alarm_of(production) or "acknowledged" in alarm_of(production)
        assert "accepted" in production.operator.follow(WaitKind.ROWS_TARGET_HAS_LOST, 0)
        # The consumers' progress was restored too, and what was lost does not come again.
        assert production.consumed(1) == ["7"]


def test_delay_and_realtime_servers_that_are_restored_together_go_on_by_themselves(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        for role in ("delay", "realtime"):
            assert getattr(production, role).terminate() == 0
            copy_of(data, role, backup)
        for role in ("delay", "realtime"):
            getattr(production, role).start()
        production.send("2", "3")
        assert production.consumed(2) == ["2", "3"]
        production.delay.kill()
        restore(production, backup, "realtime")
        shutil.rmtree(data / "delay")
        shutil.copytree(backup / "delay", data / "delay")
        production.delay.start()
        production.send("4")
        assert production.consumed(1) == ["4"]
        assert "target_refused" not in production.delay.log


@tries(WaitKind.STALE_EPOCH)
def test_a_restored_server_of_an_older_life_is_refused_until_meta_has_forgotten_the_newer_one(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        backed_up(production, backup, "delay")
        for _ in range(3):
            production.delay.kill()
            production.delay.start()
        production.send("7")
        assert production.consumed(1) == ["7"]
        restore(production, backup, "delay")
        logged(production.delay, "code=stale_epoch")
        until_away(production, log_id_of(production, "delay"))
        production.operator.follow(WaitKind.STALE_EPOCH, 0)
        target_with_alarm(production)
        assert "accepted" in production.operator.follow(WaitKind.TARGET_REFUSES, 0)
        production.send("8")
        assert production.consumed(1) == ["8"]


@tries(WaitKind.ROWS_TARGET_AWAY, WaitKind.TARGET_GIVEN_UP)
def test_a_realtime_server_that_is_gone_for_good_is_given_up_and_its_subjects_go_on_elsewhere(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        lost = log_id_of(production, "realtime")
        production.realtime.kill()
        production.send("2")
        with ServerProcess("realtime", tmp_path / "other", {"meta": production.meta.address}) as other:
            until_away(production, lost)
            assert "given up" in production.operator.follow(WaitKind.ROWS_TARGET_AWAY, 0)
            for listing in ("servers", "subjects"):
                rows = json.loads(command(listing, "--meta", production.meta.address, "--format", "json"))
                assert [row["state"] for row in rows if lost in row.values()] == ["lost"]
            told = production.operator.follow(WaitKind.TARGET_GIVEN_UP, 0)
            assert "1 subjects have no server" in told
            assert production.consumed(1) == ["2"]
            # Also after a restart nothing is sent to the lost one, which comes back.
            production.realtime.start()
            production.delay.kill()
            production.delay.start()
            production.send("3")
            assert production.consumed(1) == ["3"]
            assert "fenced" not in other.log
    assert run("audit", "--data", str(data)).code in (0, 3)


def status_of(production: Cluster) -> str:
    return run("status", "--meta", production.meta.address).out


@tries(WaitKind.LEFT_BEHIND)
def test_a_subject_is_moved_to_another_realtime_server_while_all_serve(tmp_path: Path) -> None:
    with cluster(tmp_path / "data") as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        with ServerProcess("realtime", tmp_path / "other", {"meta": production.meta.address}) as other:

            def listed() -> str:
                rows = command("servers", "--meta", production.meta.address, "--role", "realtime", "--format", "json")
                return next((str(row["log_id"]) for row in json.loads(rows) if row["address"] == other.address), "")

            moved_to = wait_until(listed, "meta lists the other realtime server", every_s=COMMAND_EVERY_S)
            production.send("left behind")
            wait_until(lambda: "2 taken" in status_of(production), "it is delivered", every_s=COMMAND_EVERY_S)
            decide(production, "route", "move", "s", "--to", moved_to)
            logged(production.delay, "subject_moves")
            production.send("2")
            assert production.consumed(1) == ["2"]
            # Nobody asks the old server for what it has, and `delayd status` says so and how to get it.
            assert "1 message of s for group g" in status_of(production)
            production.operator.follow(WaitKind.LEFT_BEHIND, 0)
            assert production.consumed(1) == ["left behind"]


def test_rule_H8_a_new_meta_is_refused_until_it_takes_the_place_of_the_lost_one_by_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        production.meta.kill()
        shutil.rmtree(data / "meta")
        production.meta.start()
        logged(production.delay, "code=wrong_cluster")
        logged(production.realtime, "code=wrong_cluster")
        production.meta.kill()
        shutil.rmtree(data / "meta")
        (ours,) = set(re.findall(r"is of cluster [0-9a-f]{16}, and its peer of ([0-9a-f]{16})", production.delay.log))
        with ServerProcess("meta", data, {**META, "cluster_id": ours}) as meta:
            for server in (production.delay, production.realtime):
                server.kill()
            with (
                ServerProcess("delay", data, {"meta": meta.address}) as delay,
                ServerProcess("realtime", data, {"meta": meta.address}) as realtime,
            ):
                again = Cluster(data, meta, delay, realtime)
                again.send("2")
                assert again.consumed(1) == ["2"]


def test_rule_H8_a_copy_of_the_whole_directory_on_other_ports_leaves_production_alone(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "copy"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        shutil.copytree(data, elsewhere)
        with cluster(elsewhere) as copy:
            # A client that asks the copy's address must be answered by the copy from its first moment on.
            copy.send("of the copy")
            assert copy.consumed(1) == ["of the copy"]
            production.send("2")
            assert production.consumed(1) == ["2"]
            assert copy.consumed(1, within_s=1) == []
        for server in (production.delay, production.realtime):
            assert "fenced" not in server.log and "target_refused" not in server.log


def test_exchanged_directories_keep_their_names_and_nothing_comes_twice(tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path / "meta", META))
        own = {"meta": meta.address}
        servers = {
            role: [stack.enter_context(ServerProcess(role, tmp_path / f"{role}{number}", own)) for number in (1, 2)]
            for role in ("delay", "realtime")
        }
        wait_until(lambda: len(names_of(meta)) == 4, "all have registered")
        before = names_of(meta)
        producer = stack.enter_context(Producer(meta.address))
        subjects = [f"s{number}" for number in range(4)]
        sent = [b"%d" % number for number in range(24)]
        for number, body in enumerate(sent):
            producer.send(subjects[number % 4], body, delay=timedelta(seconds=0 if number < 12 else 1.5))
        with Consumer(meta.address, subjects, "g") as consumer:
            got = Counter(pull_all(consumer, 6))  # The rest is delivered and not pulled, or not due.
        for role, (one, other) in servers.items():
            assert one.terminate() == other.terminate() == 0
            exchange(tmp_path / f"{role}1" / role, tmp_path / f"{role}2" / role)
            for server in (one, other):
                server.spawn()
            for server in (one, other):
                server.until_ready()
        exchanged = {one.address: other.address for one, other in servers.values()}
        exchanged |= {other: one for one, other in exchanged.items()}
        expected = {exchanged[address]: log_id for address, log_id in before.items()}
        wait_until(lambda: names_of(meta) == expected, "each is named as what it is")
        with Consumer(meta.address, subjects, "g") as consumer:
            got += Counter(pull_all(consumer, len(sent) - len(got)))
            assert got == Counter(sent)
            assert not consumer.pull(1, wait=timedelta(milliseconds=200))
        assert run("status", "--meta", meta.address).code == 0


def names_of(meta: ServerProcess) -> dict[str, str]:
    """The log_id at each address of a server that serves, as meta knows it."""
    rows = json.loads(run("servers", "--meta", meta.address, "--format", "json").out)
    return {row["address"]: row["log_id"] for row in rows if row["state"] == "serves"}


def exchange(one: Path, other: Path) -> None:
    """Give two directories each other's name."""
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)
