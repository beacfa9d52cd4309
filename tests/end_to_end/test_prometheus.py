"""A real Prometheus reads real servers, and each alert fires when its time has come (docs/metrics.md).

The alerts read a page on which everything is wrong. The waits of minutes before an alert fires are a second here.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from delayd.config import Value
from tests.certificates import Authority
from tests.end_to_end.measured import admin_port, measured
from tests.end_to_end.processes import ServerProcess
from tests.unit.pages import ROOT
from tests.waiting import DEADLINE_S, wait_until

RULES = ROOT / "deploy" / "prometheus" / "delayd.rules.yml"
HOST = "127.0.0.1"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed: apt-get install prometheus",
)


class Trouble:
    """A cluster in which everything is wrong, and each scrape finds it worse; ``calm`` is one without any trouble."""

    def __init__(self, *, calm: bool) -> None:
        self._calm = calm
        self._scrapes = 0

    def page(self) -> bytes:
        self._scrapes += 1
        number, now_s = self._scrapes, time.time()
        # Each figure as it is when nothing is wrong, and when something is.
        figures = {
            "oldest_overdue_seconds": (0.04, 100),
            "targets_away": (0, 1),
            "quarantined_entries": (0, 2),
            "free_bytes": (1 << 40, max(0, (2 << 30) - number * (10 << 20))),
            "message_log_end_bytes": (3 << 30, 3 << 30),
            "message_log_replay_bytes": ((3 << 30) - 1, 0),
            "dead_letters": (7, number),
            "fenced": (0, 1),
            "clock_confirmed": (1, 0),
            "clock_seconds": (now_s, now_s + 3_600),
            "start_time_seconds": (1_000_000, now_s),
            "connections": (5, 4_000),
            "connections_max": (4_096, 4_096),
            "loop_wait_seconds_max": (0.02, 3),
            "waits": (0, 1),
            "refuses": (0, 1),
        }
        lines = [
            f'delayd_{name}{{role="delay",server="d1"}} {wrong if not self._calm else right}'
            for name, (right, wrong) in figures.items()
        ]
        place = 'server="r1",subject="orders",group="billing"'
        lines.append(f"delayd_group_oldest_seconds{{{place}}} {5 if self._calm else 7_200}")
        for name, labels, value_s in (
            ("lateness_durable", 'role="realtime",server="r1"', 0.003 if self._calm else 60),
            ("log_commit", 'role="delay",server="d1",log="message log"', 0.0003 if self._calm else 2),
        ):
            lines.append(f"# TYPE delayd_{name}_seconds histogram")
            for bound in ("0.001", "0.004", "1.024", "131.072", "+Inf"):
                count = 10 * number * (value_s < float(bound))
                lines.append(f'delayd_{name}_seconds_bucket{{{labels},le="{bound}"}} {count}')
        return "\n".join([*lines, ""]).encode()


@contextmanager
def served(trouble: Trouble) -> Iterator[int]:
    """Serve its page; the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = trouble.page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)
        server.server_close()


class Prometheus:
    """A running one."""

    def __init__(self, port: int, log: Path) -> None:
        self._port, self._log = port, log

    def get(self, path: str) -> Any:
        line = http.client.HTTPConnection(HOST, self._port, timeout=DEADLINE_S)
        try:
            line.request("GET", path)
            answer = line.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return json.loads(body)["data"] if body.startswith(b"{") else body
        finally:
            line.close()

    def ask(self, expression: str) -> dict[str, float]:
        """The value of an expression, by instance."""
        found = self.get(f"/api/v1/query?query={quote(expression)}")["result"]
        return {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}

    def firing(self) -> set[str]:
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def is_ready(self) -> bool:
        try:
            return bool(self.get("/-/ready"))
        except (OSError, AssertionError, http.client.HTTPException):
            return False

    @property
    def log(self) -> str:
        return self._log.read_text()


@contextmanager
def prometheus(folder: Path, targets: list[int], rules: str, terms: str = "") -> Iterator[Prometheus]:
    """Run one that reads these ports; ``terms`` are more lines of its job."""
    folder.mkdir(exist_ok=True)
    (folder / "delayd.rules.yml").write_text(rules)
    addresses = json.dumps([f"{HOST}:{port}" for port in targets])
    job = f"  - job_name: delayd\n    static_configs: [{{targets: {addresses}}}]\n{terms}"
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
        "rule_files: [delayd.rules.yml]\n"
        f"scrape_configs:\n{job}"
    )
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = ["prometheus", "--config.file", str(folder / "prometheus.yml"), "--web.listen-address", f"{HOST}:{port}"]
    command += ["--storage.tsdb.path", str(folder / "data"), "--log.level", "warn"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    running = Prometheus(port, folder / "log")
    try:
        wait_until(running.is_ready, lambda: f"Prometheus is ready\n{running.log}")
        yield running
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def hurried() -> str:
    """The alerts, whose waits are a second."""
    rules, count = re.subn(r"^( +for:) \w+$", r"\1 1s", RULES.read_text(), flags=re.MULTILINE)
    assert count >= 10
    return rules


def test_each_alert_fires_when_everything_is_wrong_and_none_when_nothing_is(tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    with (
        served(Trouble(calm=False)) as wrong,
        served(Trouble(calm=True)) as right,
        socket.socket() as nobody,
    ):
        nobody.bind((HOST, 0))  # It does not listen: a server that is down.
        down = nobody.getsockname()[1]
        with (
            prometheus(tmp_path / "wrong", [wrong, down], hurried()) as one,
            prometheus(tmp_path / "right", [right], hurried()) as other,
        ):
            wait_until(lambda: one.firing() == names, lambda: f"{names - one.firing()} fire\n{one.log}")
            # By then the other one has judged as often. On a busy machine it may miss a scrape, which counts as down.
            scraped = "count_over_time(delayd_waits[5m])"
            wait_until(lambda: other.ask(scraped).get(f"{HOST}:{right}", 0) > 5, lambda: "it has read the page, too")
            assert other.firing() <= {"DelaydDown"}


def test_it_reads_each_real_server(tmp_path: Path) -> None:
    with measured(tmp_path / "data") as servers:
        ports = [admin_port(server) for server in servers]
        with prometheus(tmp_path / "prometheus", ports, hurried()) as reader:
            instances = {f"{HOST}:{port}" for port in ports}
            wait_until(lambda: reader.ask("up") == dict.fromkeys(instances, 1.0), lambda: "all are read")
            assert set(reader.ask("delayd_clock_seconds")) == instances
            delay, realtime = (f"{HOST}:{admin_port(each)}" for each in (servers.delay, servers.realtime))
            assert set(reader.ask("delayd_pending_messages{due='further'}")) == {delay}
            assert set(reader.ask("delayd_lateness_durable_seconds_count")) == {realtime}
            types = {name: each[0]["type"] for name, each in reader.get("/api/v1/metadata").items()}
            assert types["delayd_lateness_durable_seconds"] == "histogram"
            assert types["delayd_accepted_messages_total"] == "counter"


def test_it_reads_a_server_at_an_address_that_others_reach_as_the_page_says(tmp_path: Path) -> None:
    own = Authority(tmp_path).server()
    shown: dict[str, Value] = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": own.ca, "require_token": True}
    with ServerProcess("meta", tmp_path / "data", {"admin_port": 0, "admin_host": "0.0.0.0", **shown}) as meta:
        command = [sys.executable, "-m", "delayd", "token", "create", "prometheus", "--allow", "inspect:>"]
        command += ["--meta", f"delayds://{meta.address}?ca={own.ca}", "--data", str(tmp_path / "data")]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout.strip()
        folder = tmp_path / "prometheus"
        folder.mkdir()
        (folder / "delayd.token").write_text(text)
        page = (ROOT / "docs" / "metrics.md").read_text()
        (terms,) = re.findall(r"^    scheme: https\n(?:    +.*\n)*", page, re.MULTILINE)
        assert {"/etc/prometheus/delayd.token", "/etc/prometheus/ca.pem"} == set(re.findall(r"/etc/[\w/.]+", terms))
        terms = terms.replace("/etc/prometheus/ca.pem", own.ca).replace("/etc/prometheus", str(folder))
        (port,) = re.findall(r"admin_listening role=meta host=0\.0\.0\.0 port=(\d+)", meta.log)
        with prometheus(folder, [int(port)], hurried(), terms) as reader:
            wait_until(lambda: reader.ask("up") == {f"{HOST}:{port}": 1.0}, lambda: f"it is read\n{reader.log}")
