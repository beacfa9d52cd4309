"""What waits for an operator is decided on at the server that the command names."""

import json
from pathlib import Path

from delayd.config import Value
from tests.end_to_end.cluster import COMMAND_EVERY_S, cluster, command, decide, flip_value, log_id_of, stopped
from tests.end_to_end.processes import ServerProcess
from tests.unit.cli.runner import run
from tests.waiting import wait_until


def test_an_id_that_two_servers_list_is_decided_on_at_the_one_that_the_command_names(tmp_path: Path) -> None:
    with cluster(tmp_path, checkpoint_every_ms=200) as production:
        at_meta = ("--meta", production.meta.address)
        production.send("1")
        assert production.consumed(1) == ["1"]
        first = log_id_of(production, "realtime")
        own: dict[str, Value] = {"meta": production.meta.address, "checkpoint_every_ms": 200}
        with ServerProcess("realtime", tmp_path / "other", own) as other:

            def others() -> set[str]:
                rows = json.loads(command("servers", *at_meta, "--role", "realtime", "--format", "json"))
                return {str(row["log_id"]) for row in rows} - {first}

            (second,) = wait_until(others, "meta hears of it", every_s=COMMAND_EVERY_S)
            # It has no subject yet, so it gets the next one.
            production.send("2", subject="t")
            assert production.consumed(1, "t") == ["2"]
            for server, data in ((production.realtime, tmp_path), (other, tmp_path / "other")):
                with stopped(server):
                    flip_value(data / "realtime", b"group/")
            damaged = [row for row in _mendable(*at_meta) if row["decision"] == "give-up"]
            assert [(row["id"], row["log_id"]) for row in damaged] == [
                ("group/00000001", log_id) for log_id in sorted((first, second))
            ]
            refused = run("mend", "give-up", "group/00000001", *at_meta, "--data", str(tmp_path), "--yes")
            assert refused.code == 2 and "2 servers list group/00000001; say which" in refused.err, refused
            decide(production, *str(damaged[0]["command"]).split()[1:])
            assert {row["log_id"] for row in _mendable(*at_meta)} == {damaged[1]["log_id"]}


def _mendable(*options: str) -> list[dict[str, object]]:
    """The rows of what waits to be mended."""
    found: list[dict[str, object]] = json.loads(command("mend", "list", *options, "--format", "json"))
    return found
