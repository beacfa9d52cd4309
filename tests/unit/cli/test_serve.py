"""Commands that run one server: every setting is an option, and the command line wins over the file."""

import threading
from dataclasses import fields
from pathlib import Path

import pytest

from cli import gateway_command
from cli.serve import from_here, server_command
from delayd.address import Endpoint
from delayd.config import CONFIGS, MetaConfig
from delayd.secret import SECRET_FILE, open_secret
from tests.waiting import DEADLINE_S

from .runner import Ran, run


def _configured(role: str, *arguments: str) -> tuple[Ran, object]:
    seen: list[object] = []

    def server(config: object) -> int:
        seen.append(config)
        return 0

    ran = run(role, *arguments, servers={role: server})
    return ran, seen[0] if seen else None


@pytest.mark.parametrize("role", CONFIGS)
def test_a_server_has_an_option_for_each_setting_and_no_other(role: str) -> None:
    options = {parameter.name for parameter in server_command(role).params}
    assert options == {each.name for each in fields(CONFIGS[role])} | {"config"}


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "delayd.toml"
    file.write_text("host = '127.0.0.2'\n[meta]\nlease_ms = 9000\nheartbeat_ms = 500\n[delay]\nhorizon_days = 1\n")
    _, config = _configured("meta", "--config", str(file), "--lease-ms", "8000")
    assert config == MetaConfig(host="127.0.0.2", lease_ms=8000, heartbeat_ms=500)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lease-ms", "50"], "lease_ms of the meta server: 50 is out of range; choose one within 100 and 3600000"),
        (["--lease-ms", "200"], "a lease lasts at least 3 heartbeats"),
        (["--config", "/no/such/file"], "/no/such/file can't be read"),
        (["--port", "many"], "'many' is not a valid integer; see delayd meta --help"),
    ],
)
def test_a_setting_that_is_wrong_starts_no_server(arguments: list[str], sentence: str) -> None:
    ran, config = _configured("meta", *arguments)
    assert config is None
    assert ran.code == 2
    assert sentence in ran.err
    assert ran.err.count("\n") == 1


def test_a_server_that_listens_everywhere_is_reached_on_this_machine() -> None:
    hosts = ("0.0.0.0", "::", "::1", "meta.internal")
    reached = [str(from_here(Endpoint(host, 7400))) for host in hosts]
    assert reached == ["127.0.0.1:7400", "[::1]:7400", "[::1]:7400", "meta.internal:7400"]


def test_a_gateway_waits_for_the_secret_that_it_was_told_and_does_not_start_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_command, "SECRET_WAIT_S", 0.2)
    for words in (("--data", str(tmp_path)), ("--secret-file", str(tmp_path / SECRET_FILE))):
        refused = run("gateway", *words)
        assert refused.code == 2 and f"waits for {tmp_path / SECRET_FILE}" in refused.err
        assert f"{tmp_path / SECRET_FILE} is missing" in refused.err
    monkeypatch.setattr(gateway_command, "SECRET_WAIT_S", DEADLINE_S)
    threading.Timer(0.2, open_secret, (str(tmp_path), "")).start()
    with pytest.raises(AssertionError, match="serves HTTP"):
        run("gateway", "--data", str(tmp_path))
