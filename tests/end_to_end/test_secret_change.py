"""The secret of a running cluster is changed in steps, and nothing stops (docs/security.md, The cluster's secret)."""

from __future__ import annotations

from pathlib import Path

from delayd.secret import SECRET_FILE
from tests.end_to_end.cluster import cluster, command
from tests.trust import KEY, put_secrets
from tests.unit.cli.runner import run

NEW = bytes(range(32, 64))


def test_the_secret_of_a_running_cluster_is_changed_without_a_stop(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production:
        old = tmp_path / "old"
        put_secrets(old, KEY)
        for number, step in enumerate([(KEY, NEW), (NEW, KEY), (NEW,)]):
            put_secrets(data / SECRET_FILE, *step)
            # An operator proves, and so do servers that start or connect anew; the others serve on.
            options = ("--meta", production.meta.address, "--data", str(data))
            command("subjects", "set", "s", "--pending", str(100 + number), *options)
            restarted = production.realtime if number % 2 else production.delay
            restarted.kill()
            restarted.start()
            production.send(str(number))
            assert production.consumed(1) == [str(number)]
        for server in (production.meta, production.delay, production.realtime):
            assert "not_trusted" not in server.log and server.running
        options = ("--meta", production.meta.address, "--secret-file", str(old))
        refused = run("subjects", "set", "s", "--pending", "5", *options)
        assert refused.code != 0 and "secret" in refused.err
