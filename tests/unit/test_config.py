"""Configurations: what is valid, and how the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from delayd.address import Endpoint
from delayd.config import (
    CONFIGS,
    DelayConfig,
    MetaConfig,
    RealtimeConfig,
    Value,
    load_config,
)
from delayd.errors import BadSetting


def test_servers_of_one_machine_share_neither_port_nor_folder() -> None:
    configs = [kind() for kind in CONFIGS.values()]
    assert [config.port for config in configs] == [7400, 7401, 7402]
    assert [config.folder for config in configs] == [
        "delayd-data/meta",
        "delayd-data/delay",
        "delayd-data/realtime",
    ]
    assert DelayConfig().meta == RealtimeConfig().meta == "127.0.0.1:7400"


def test_options_win_over_the_role_s_table_and_that_over_the_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "delayd.toml"
    file.write_text(
        'data = "/srv/delayd"\nport = 1\nhost = "10.0.0.1"\ninsecure = true\n'
        '[meta]\nport = 2\nlease_ms = 9_000\n[delay]\nport = "wrong"\n'
    )
    config = load_config("meta", str(file), {"port": 3})
    assert config == MetaConfig(data="/srv/delayd", host="10.0.0.1", insecure=True, port=3, lease_ms=9_000)


@pytest.mark.parametrize(
    ("text", "named", "fix"),
    [
        ("prt = 1", "prt", "port"),
        ("[dely]\nport = 1", "dely", "delay"),
        ('port = "7400"', "port", "whole number"),
        ("port = true", "port", "whole number"),
        ("lease_ms = 5.0", "lease_ms", "whole number"),
        ("exit_with_stdin = 1", "exit_with_stdin", "true or false"),
        ("host = 1", "host", "text"),
        ('data = ""', "data", "leave it out"),
        ("port = 65536", "port", "65535"),
        ("port = ", "config", "correct it"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_the_name_of_the_setting(
    tmp_path: Path, text: str, named: str, fix: str
) -> None:
    file = tmp_path / "meta.toml"
    file.write_text(text)
    with pytest.raises(BadSetting, match=fix) as refused:
        load_config("meta", str(file))
    assert refused.value.details["setting"] == named


def test_a_file_that_is_not_there_and_a_role_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="can't be read"):
        load_config("meta", str(tmp_path / "none.toml"))
    with pytest.raises(BadSetting, match="meta, delay, realtime"):
        load_config("broker")


@pytest.mark.parametrize(
    ("role", "given", "named"),
    [
        ("meta", {"lease_ms": 2_999}, "lease_ms"),
        ("delay", {"replay_lag_bytes_max": 1 << 20}, "replay_lag_bytes_max"),
        ("delay", {"intake_queue_bytes_max": 1 << 20}, "intake_queue_bytes_max"),
        ("delay", {"free_bytes_far": 1 << 20}, "free_bytes_far"),
        ("delay", {"undecided_bytes_max": 1 << 20}, "undecided_bytes_max"),
        ("delay", {"frames_in_flight_max": 8, "undecided_bytes_max": 120 << 20}, "frames_in_flight_max"),
        ("delay", {"horizon_days": 733}, "horizon_days"),
        ("delay", {"meta": "localhost"}, "meta"),
        ("realtime", {"lease_ms": 60_000, "lease_ms_max": 59_999}, "lease_ms"),
        ("meta", {"admin_port": 0, "admin_host": "0.0.0.0"}, "admin_host"),
        ("meta", {"admin_port": 0, "admin_host": "::", "require_token": True}, "admin_host"),
        ("delay", {"admin_port": 7411, "admin_host": "node-1", "tls_cert": "c", "tls_key": "k"}, "admin_host"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(
    role: str, given: Mapping[str, Value], named: str
) -> None:
    with pytest.raises(BadSetting, match=f"^{named} ") as refused:
        load_config(role, None, given)
    assert refused.value.details["setting"] == named


def test_an_admin_port_that_others_reach_has_the_tls_of_its_server_or_is_insecure() -> None:
    files = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca"}
    reached = load_config("realtime", None, {"admin_port": 7, "admin_host": "::", "require_token": True, **files})
    assert reached.admin == Endpoint("::", 7, reached.access) and reached.access.tls is not None
    here = load_config("realtime", None, {"admin_port": 7, "require_token": True, **files})
    assert here.admin == Endpoint("127.0.0.1", 7)
    for given in ({"insecure": True, "admin_port": 7}, {}):
        assert load_config("realtime", None, {"admin_host": "0.0.0.0", **given}).insecure == bool(given)


def test_what_is_advertised_is_the_host_unless_it_is_said() -> None:
    bound = DelayConfig(host="10.0.0.1", insecure=True).listens._replace(port=7)
    assert DelayConfig(host="10.0.0.1", insecure=True).advertised(bound) == Endpoint("10.0.0.1", 7)
    assert RealtimeConfig(host="10.0.0.1", advertise_host="r1", insecure=True).advertised(bound) == Endpoint("r1", 7)


def test_an_ipv6_host_may_stand_in_brackets() -> None:
    config = RealtimeConfig(host="[::1]", port=7, advertise_host="[fe80::1]")
    assert config.listens == Endpoint("::1", 7)
    assert config.advertised(config.listens) == Endpoint("fe80::1", 7)


def test_rule_L8_on_one_disk_sends_are_refused_long_before_what_is_pending() -> None:
    delay, realtime = DelayConfig(), RealtimeConfig()
    assert delay.free_bytes_far > delay.free_bytes_all >= 8 * realtime.free_bytes_all > 0
