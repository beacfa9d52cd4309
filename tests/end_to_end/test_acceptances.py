"""Findings of running servers that an operator accepts: what a restored realtime server has lost for good."""

import json
from pathlib import Path
from typing import NamedTuple

from delayd.machine.operating import WaitKind
from tests.end_to_end.cluster import COMMAND_EVERY_S, cluster, command
from tests.end_to_end.older_copies import backed_up, restore
from tests.unit.cli.runner import run
from tests.waiting import wait_until

WHO = ("--by", "ann", "--reason", "disk 3 was lost, #4711", "--yes")
LOST = ["3", "4", "5", "6"]  # What `backed_up` delivers after the copy.


class Told(NamedTuple):
    """What an audit says, of which hours, and what it says of acceptances."""

    code: int
    balanced: bool
    lost: int
    hours: set[str]
    acceptances: list[dict[str, str]]


def audit(data: Path) -> Told:
    ran = run("audit", "--data", str(data), "--format", "json")
    report = json.loads(ran.out)
    hours = {finding["hour"] for finding in report["findings"]}
    return Told(ran.code, report["balanced"], report["total"]["lost"], hours, report["acceptances"])


def test_what_a_restored_realtime_server_has_lost_is_accepted_beside_running_servers(tmp_path: Path) -> None:
    data, older, kept, again = (tmp_path / name for name in ("data", "older", "kept", "again"))
    with cluster(data) as production:
        backed_up(production, older, "realtime")
        restore(production, older, "realtime")
        production.operator.follow(WaitKind.ROWS_TARGET_HAS_LOST, 0)
        wait_until(lambda: audit(data).lost == len(LOST), "the audit names what is lost", every_s=COMMAND_EVERY_S)
        assert audit(data).code == 3
        for hour in audit(data).hours:
            command("audit", "--data", str(data), "--accept", hour, *WHO)
        quiet = audit(data)
        assert (quiet.code, quiet.balanced, quiet.lost) == (0, False, len(LOST))
        # The servers go on and start with the new files beside theirs, and a backup of them has these, too.
        production.send("7")
        assert production.consumed(1) == ["7"]
        production.delay.kill()
        production.delay.start()
        assert audit(data).code == 0
        assert run("backup", str(kept), "--data", str(data), "--meta", production.meta.address).code == 0
    assert run("restore", str(kept), "--data", str(again)).code == 0
    for folder in (kept, again):
        paths = [each | {"path": each["path"].replace(str(data), str(folder))} for each in quiet.acceptances]
        assert (audit(folder).code, audit(folder).acceptances) == (0, paths)
