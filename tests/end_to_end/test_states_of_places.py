"""States of servers that were moved, copied or restored, or are of another cluster: status says the way out."""

from __future__ import annotations

import shutil
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import msgpack

from delayd.machine.identity import EPOCH_STEPS_MAX
from delayd.machine.operating import WaitKind
from delayd.machine.state import LmdbState
from tests.end_to_end.cluster import META, Cluster, cluster, log_id_of, until_away
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.trials import tries

LEASE_MS = 8_000  # A server that has just ended is taken for alive while another one starts, on a busy machine too.


def moved(production: Cluster, server: ServerProcess, folder: Path) -> ServerProcess:
    """The same server with its folder in another place; it has to be started."""
    shutil.copytree(production.data / server.role, folder / server.role)
    return server.elsewhere(folder)


@tries(WaitKind.IN_ANOTHER_PLACE, WaitKind.TARGET_NOT_ASKED, WaitKind.TARGET_HAS_LOST)
def test_a_directory_that_was_moved_serves_when_all_who_know_it_were_asked(tmp_path: Path) -> None:
    with cluster(tmp_path / "data") as production:
        meta, delay, realtime = production.meta, production.delay, production.realtime
        backup = tmp_path / "backup"
        production.send("1")
        assert production.consumed(1) == ["1"]
        assert realtime.terminate() == 0
        shutil.copytree(production.data / "realtime", backup)
        realtime.start()
        production.send("2")
        assert production.consumed(1) == ["2"]
        assert meta.terminate() == delay.terminate() == realtime.terminate() == 0
        # Meta was not asked.
        with moved(production, delay, tmp_path / "one") as one:
            alone = production.operator._replace(server=one.address)
            alone.until_told(WaitKind.IN_ANOTHER_PLACE)
            meta.start()
            alone.until_gone(WaitKind.IN_ANOTHER_PLACE)
            # The realtime server was not asked either; it comes back without what was delivered last.
            production.operator.until_told(WaitKind.TARGET_NOT_ASKED)
            shutil.rmtree(production.data / "realtime")
            shutil.copytree(backup, production.data / "realtime")
            realtime.start()
            production.operator.follow(WaitKind.TARGET_HAS_LOST, 0)
            production.send("3")
            assert production.consumed(1) == ["3"]
            assert one.terminate() == 0
        realtime.kill()
        # It is gone for good.
        shutil.copytree(tmp_path / "one/delay", tmp_path / "two/delay")
        with delay.elsewhere(tmp_path / "two"):
            until_away(production, log_id_of(production, "realtime"))
            production.operator.follow(WaitKind.TARGET_NOT_ASKED, 0, 1)


@tries(WaitKind.PLACE_TAKEN, WaitKind.FENCED_INSTANCE)
def test_a_copy_waits_for_the_end_of_a_lease_and_serves_when_the_other_one_is_stopped(tmp_path: Path) -> None:
    with cluster(tmp_path / "data", lease_ms=LEASE_MS) as production:
        delay = production.delay
        production.send("1")
        copy = moved(production, delay, tmp_path / "copy")
        delay.kill()
        with copy:
            alone = production.operator._replace(server=copy.address)
            alone.until_told(WaitKind.PLACE_TAKEN)
            alone.until_gone(WaitKind.PLACE_TAKEN)
            delay.start()
            alone = production.operator._replace(server=delay.address)
            alone.until_told(WaitKind.FENCED_INSTANCE)
            # The other one is stopped, and this one is started again.
            assert copy.terminate() == delay.terminate() == 0
            delay.start()
            alone.until_gone(WaitKind.FENCED_INSTANCE)


@tries(WaitKind.WRONG_CLUSTER, WaitKind.EPOCH_OUT_OF_RANGE, WaitKind.QUOTAS_NOT_KNOWN)
def test_a_server_at_the_wrong_meta_or_with_an_impossible_number_or_new_says_what_to_do(tmp_path: Path) -> None:
    with cluster(tmp_path / "data", lease_ms=LEASE_MS) as production, ServerProcess("meta", tmp_path, META) as wrong:
        delay, operator = production.delay, production.operator
        own = dict(delay.settings)
        production.send("1")
        assert delay.terminate() == 0
        delay.settings = own | {"meta": wrong.address}
        delay.start()
        alone = operator._replace(server=delay.address)
        alone.until_told(WaitKind.WRONG_CLUSTER)
        assert delay.terminate() == 0
        delay.settings = own
        delay.start()
        alone.until_gone(WaitKind.WRONG_CLUSTER)
        assert delay.terminate() == 0
        add_starts(production.data / "delay/state.lmdb", 2 * EPOCH_STEPS_MAX)
        delay.start()
        alone.until_told(WaitKind.EPOCH_OUT_OF_RANGE)
        until_away(production, log_id_of(production, "delay"))
        alone.follow(WaitKind.EPOCH_OUT_OF_RANGE, 0)
        # The only one that knows the quotas is alive, and does not answer.
        delay.signal(SIGSTOP)
        with ServerProcess("delay", tmp_path / "new", own) as new:
            alone = operator._replace(server=new.address)
            alone.until_told(WaitKind.QUOTAS_NOT_KNOWN)
            delay.signal(SIGCONT)
            alone.until_gone(WaitKind.QUOTAS_NOT_KNOWN)


def add_starts(folder: Path, starts: int) -> None:
    """Write into a state that its server was started so often more."""
    state = LmdbState(str(folder))
    stored = state.get(b"identity")
    assert stored is not None
    form, log_id, epoch = msgpack.unpackb(stored)
    values = (form, log_id, epoch + starts)
    state.commit([(b"epoch", msgpack.packb(values[2])), (b"identity", msgpack.packb(values))])
    state.close()
