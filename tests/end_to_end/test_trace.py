"""``delayd trace`` follows a message through the files of live and of dead servers."""

import json
import shutil
import signal
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path

import delayd
from tests.end_to_end.cluster import cluster
from tests.end_to_end.draining import open_fleet
from tests.unit.cli.runner import run
from tests.waiting import holds_once, wait_until


def steps(data: Path, sequence: int, subject: str = "s") -> list[dict[str, object]]:
    ran = run("trace", subject, str(sequence), "--data", str(data), "--format", "json")
    assert ran.code == 0, ran.err
    found: list[dict[str, object]] = json.loads(ran.out)
    return found


def but_due(found: list[dict[str, object]]) -> list[object]:
    """The steps without `due`, which a message that is due at once has before or after `accepted`."""
    return [step["step"] for step in found if step["step"] != "due"]


def test_each_step_of_a_message_is_found_with_its_file_and_byte(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production:
        with delayd.Producer(production.meta.address) as producer:
            first = producer.send("s", b"1", delay=timedelta(0))
            later = producer.send("s", b"2", delay=timedelta(hours=3))
        # Live: it was accepted, and no checkpoint has filed it yet, or one has.
        live = steps(data, later.sequence)
        assert live[0]["step"] == "accepted" and live[-1]["step"] == "next"
        assert "waits for" in str(live[-1]["detail"])
        assert production.consumed(1) == ["1"]
        for server in (production.delay, production.realtime):
            assert server.terminate() == 0
    found = steps(data, first.sequence)
    assert but_due(found) == [
        "accepted",
        "filed",
        "claimed",
        "appended",
        "indexed",
        "pulled",
        "acknowledged",
    ]
    for step in found:
        path = Path(str(step["file"]))
        assert path.is_relative_to(data) and 64 <= int(str(step["byte"])) < path.stat().st_size
    times = [int(str(step["at_ms"])) for step in found if step["at_ms"] is not None]
    assert times == sorted(times)
    waiting = steps(data, later.sequence)
    assert [step["step"] for step in waiting] == ["accepted", "filed", "next"]
    for columns in ("80", "40"):
        shown = run(
            "trace", "s", str(first.sequence), "--data", str(data), environment={"COLUMNS": columns, "LINES": ""}
        )
        assert shown.code == 0 and "acknowledged" in shown.out
        assert all(len(line) <= int(columns) for line in shown.out.splitlines()), shown.out
    table = run("trace", "s", str(first.sequence), "--data", str(data), "--format", "csv").out.splitlines()
    assert len(table) == len(found) + 1
    # What is not here is said, and everything else is shown.
    shutil.rmtree(data / "realtime")
    ran = run("trace", "s", str(first.sequence), "--data", str(data), "--format", "json")
    assert ran.code == 0 and "not seen: what became of it at realtime server" in ran.err
    assert but_due(json.loads(ran.out)) == ["accepted", "filed", "claimed"]
    for subject, sequence in (("s", "999"), ("other", str(first.sequence))):
        refused = run("trace", subject, sequence, "--data", str(data))
        assert refused.code == 2 and "never accepted here" in refused.err


def test_a_trace_says_when_a_message_was_due_and_how_late_each_server_was(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production:
        with delayd.Producer(production.meta.address) as producer:
            past = producer.send("s", b"1", deliver_at=datetime.now(UTC) - timedelta(minutes=1))
            assert production.consumed(1) == ["1"]
            # The target is away when the second one is due.
            assert production.realtime.terminate() == 0
            soon = producer.send("s", b"2", delay=timedelta(seconds=1))
        wait_until(lambda: datetime.now(UTC) > soon.deliver_at + timedelta(seconds=0.3))
        production.realtime.start()
        assert production.consumed(1) == ["2"]
        for server in (production.delay, production.realtime):
            assert server.terminate() == 0
    for receipt, order in ((past, ["due", "accepted", "filed"]), (soon, ["accepted", "filed", "due"])):
        found = steps(data, receipt.sequence)
        assert [step["step"] for step in found[:5]] == [*order, "claimed", "appended"]
        named = {str(step["step"]): step for step in found}
        assert named["due"]["at_ms"] == receipt.deliver_at_ms
        base_ms = max(receipt.deliver_at_ms, receipt.accepted_at_ms)
        for step in found:
            late_ms = int(str(step["at_ms"])) - base_ms if step["step"] in ("claimed", "appended") else None
            assert step["late_ms"] == late_ms
        listed = run("dispatch", "show", "--data", str(data), "--format", "json").out
        (row,) = (each for each in json.loads(listed) if each["sequence"] == receipt.sequence)
        assert row["late_ms"] == named["appended"]["late_ms"]
    assert int(str(named["appended"]["late_ms"])) >= 300
    shown = run("trace", "s", str(soon.sequence), "--data", str(data)).out.splitlines()
    assert shown[0].split()[:3] == ["step", "at", "late"]
    (line,) = (each for each in shown if each.startswith("appended"))
    assert line.split()[2][0].isdigit() and line.split()[3] in ("ms", "s"), line
    # A receipt's word is its sequence at its delay server, unless it is called a key.
    by_receipt = ("trace", "s", soon.token, "--data", str(data))
    assert run(*by_receipt).out.splitlines() == shown
    assert run(*by_receipt, "--server", f"{soon.log_id:016x}").out.splitlines() == shown
    for more, said in ((("--server", "1"), "the receipt is of delay server"), (("--key",), "of that subject and key")):
        refused = run(*by_receipt, *more)
        assert refused.code == 2 and said in refused.err


def test_a_message_is_followed_over_all_its_lives(tmp_path: Path) -> None:
    data = tmp_path / "data"
    soon, wait = timedelta(seconds=0.05), timedelta(seconds=10)
    with cluster(data) as production:
        meta = production.meta.address
        with (
            delayd.Producer(meta) as producer,
            delayd.Consumer(meta, "s", "g", max_attempts=2, prefetch=False) as consumer,
            delayd.Consumer(meta, "s", "other", prefetch=False) as other,
        ):
            sent = producer.send("s", b"1", delay=timedelta(0))
            other.pull(1, wait=wait).ack()
            for error in ("first", "second"):
                consumer.pull(1, wait=wait).nack(soon, error=error)
            dead = ("dead", "redrive", "s", "g", "--meta", meta, "--yes")
            wait_until(lambda: "sent again 1 " in run(*dead).out)
            consumer.pull(1, wait=wait).reject("really", error="bad")
            # Its delay server has it.
            wait_until(
                lambda: '"dead":1' in run("dead", "list", "--meta", meta, "--format", "json").out.replace(" ", "")
            )
        for server in (production.delay, production.realtime):
            assert server.terminate() == 0
    found = steps(data, sent.sequence)
    arrives = ["claimed", "appended", "indexed", "pulled"]
    assert but_due(found) == [
        *("accepted", "filed", *arrives, "acknowledged", "pulled", "retried"),
        *("accepted", "filed", *arrives, "rejected"),
        *("accepted", "filed", "moved", "accepted", "filed", *arrives, "rejected"),
        *("accepted", "filed", "next"),
    ]
    told = [str(step["detail"]) for step in found if step["step"] in ("retried", "rejected", "next")]
    assert told[0].startswith("group g, due ") and told[0].endswith(": first")
    assert told[1:3] == ["group g: its attempts are over: 2 of 2", "group g: really"]
    assert told[3].endswith("waits for an operator, as a dead letter (`delayd dead`)")


def test_a_trace_says_that_a_server_stood_still_when_the_message_was_due(tmp_path: Path) -> None:
    tries = count()
    # On a machine that stands still itself the message leaves before its server is stopped.
    holds_once(lambda: _stopped_when_due(tmp_path / str(next(tries))))


def _stopped_when_due(data: Path) -> None:
    with cluster(data) as production, delayd.Producer(production.meta.address) as producer:
        producer.send("s", b"0", delay=timedelta(0))
        assert production.consumed(1) == ["0"]
        receipt = producer.send("s", b"1", delay=timedelta(seconds=1))
        production.delay.signal(signal.SIGSTOP)
        wait_until(lambda: datetime.now(UTC) > receipt.deliver_at + timedelta(seconds=1.2))
        production.delay.signal(signal.SIGCONT)
        assert production.consumed(1) == ["1"]
        assert "stood_still ms=" in production.delay.log
        for server in (production.delay, production.realtime):
            assert server.terminate() == 0
    found = steps(data, receipt.sequence)
    names = [step["step"] for step in found]
    assert "stood still" in names and names.index("stood still") < names.index("claimed"), names
    (still,) = (step for step in found if step["step"] == "stood still")
    assert str(still["detail"]).startswith(f"the delay server {receipt.log_id:016x}, for ")
    assert Path(str(still["file"])).name == "checkpoint" and int(str(still["byte"])) % (4 << 20) == 64
    times = [int(str(step["at_ms"])) for step in found if step["at_ms"] is not None]
    assert times == sorted(times)


def test_a_message_is_followed_to_the_delay_servers_of_its_next_lives(tmp_path: Path) -> None:
    data, wait = tmp_path / "all", timedelta(seconds=10)
    data.mkdir()
    with open_fleet(tmp_path) as fleet:
        servers = {"delay-old": fleet.old, "delay-new": fleet.new, "realtime": fleet.realtime}
        for name, folder in zip(servers, (fleet.old_data, fleet.new_data, fleet.data), strict=True):
            (data / name).symlink_to(folder / name.partition("-")[0])
        meta = fleet.meta.address
        with delayd.Consumer(meta, "s", "g", prefetch=False) as consumer, delayd.Producer(meta) as producer:
            consumer.pull(1, wait=wait).ack()
            sent = producer.send("s", b"1", delay=timedelta(0))
            own = f"{sent.log_id:016x}"
            assert fleet.command("cordon", own).code == 0
            taken = consumer.pull(1, wait=wait)
            waits_at, lives = "", 1
            # The realtime server hears a heartbeat later which delay servers take messages.
            while waits_at in ("", own):
                taken.nack(timedelta(seconds=1))
                waits_at = str(wait_until(partial(_retries, meta))[0]["delay_log_id"])
                taken, lives = consumer.pull(1, wait=wait), lives + 1
            taken.nack(timedelta(hours=1))
            assert fleet.command("uncordon", own).code == 0
            wait_until(lambda: "moved 1 message " in fleet.command("drain", waits_at).out)
        for server in servers.values():
            assert server.terminate() == 0
    trace = ("trace", "s", sent.token, "--data", str(data))
    found = json.loads(run(*trace, "--format", "json").out)
    life = ["accepted", "filed", "claimed", "appended", "indexed", "pulled", "retried"]
    assert but_due(found) == [*life * lives, "accepted", "filed", "drained", "accepted", "filed", "next"]
    of_step = [str(step["log_id"]) for step in found]
    at = [index for index, step in enumerate(found) if step["step"] == "accepted"]
    assert [of_step[index] == own for index in at] == [*[True] * (lives - 1), False, False, True], of_step
    # Without the directory of that delay server its next life is not seen.
    (data / Path(found[at[lives]]["file"]).relative_to(data).parts[0]).unlink()
    ran = run(*trace)
    assert ran.code == 0 and "not seen: its next life: the directory of delay server" in ran.err


def _retries(meta: str) -> list[dict[str, object]]:
    told = run("groups", "retries", "s", "g", "--meta", meta, "--format", "json").out
    found: list[dict[str, object]] = json.loads(told)
    return found


def test_a_trace_names_each_group_that_has_not_pulled_the_message(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production, delayd.Producer(production.meta.address) as producer:
        meta = production.meta.address
        for group in ("early", "moved", "gone", "idle"):
            with delayd.Consumer(meta, "s", group) as consumer:
                assert not len(consumer.pull(1, wait=timedelta(0)))
        sent = producer.send("s", b"1", delay=timedelta(0))
        assert production.consumed(1) == ["1"]
        secret = ("--meta", meta, "--data", str(data), "--yes")
        assert run("groups", "rewind", "s", "moved", "--to", "latest", *secret).code == 0
        assert run("groups", "delete", "s", "gone", *secret).code == 0
        for server in (production.delay, production.realtime):
            assert server.terminate() == 0
    waits = str(steps(data, sent.sequence)[-1]["detail"]).partition("waits for ")[2]
    assert waits == "a consumer of group early that pulls it; and a consumer of group idle that pulls it"
