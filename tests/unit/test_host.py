"""Hosts: what can't be connected to is told before anyone tries."""

import pytest

from delayd.address import host_fault
from delayd.config import load_config, parse_address
from delayd.errors import BadRequest, BadSetting
from delayd.wire.frame import Head
from delayd.wire.meta import read_registered, read_servers

BAD = [
    "",
    "a" * 64 + ".com",
    "a..b",
    ".a",
    "a b",
    "a\n",
    "a\0b",
    "http://a",
    "a:b",
    "fe80::1%",
    "\udcff",
    "ü" * 63 + ".com",
    "a." * 127,
    "[::1]",
]


def registered(host: str) -> Head:
    return {"role": "delay", "log_id": 7, "host": host, "port": 7401, "epoch": 1, "pid": 5}


@pytest.mark.parametrize("host", BAD)
def test_rule_E1_a_host_that_can_not_be_is_refused_where_it_enters(host: str) -> None:
    assert host_fault(host)
    with pytest.raises(BadRequest, match="host"):
        read_registered(registered(host))
    if host and not host.startswith("["):
        for setting in ("host", "advertise_host"):
            with pytest.raises(BadSetting, match=setting):
                load_config("realtime", None, {setting: host})
        with pytest.raises(BadSetting, match="meta"):
            parse_address(f"{host}:7400")


def test_rule_E1_a_server_of_an_answer_that_can_not_be_is_left_out_and_the_others_stay() -> None:
    seen: Head = {"alive": True, "seen_ms_ago": 0, "heard": True}
    heads = [{**registered("delay-1"), **seen}, {**registered("a" * 64), **seen}, {**registered("delay-2"), **seen}]
    assert [info.server.endpoint.host for info in read_servers({"servers": heads})] == ["delay-1", "delay-2"]
