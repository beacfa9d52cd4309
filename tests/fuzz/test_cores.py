"""Short runs of the fuzzer against cores in memory; `python -m tests.fuzz.cores` runs long ones."""

from __future__ import annotations

import pytest

from delayd.errors import CallerError
from delayd.wire.requests import RequestType

from .delay_core import STOPS, Run
from .fields import DECLARED, Read
from .planted import PLANTED, PLANTED_IN_REALTIME
from .realtime_core import RealtimeRun

REQUESTS = 800
# What servers read outside of their cores, what is refused before all of it is read, and what is seldom drawn.
NOT_IN_CORES = {RequestType.CHALLENGE, RequestType.PROVE, RequestType.TOKEN, RequestType.CUT, RequestType.CUT_READY}
SELDOM_READ = {RequestType.HELLO, RequestType.DRAIN, *STOPS}
SEEDS, REQUESTS_A_SEED = 16, 400  # A defect is seen in one of so many runs.


def test_rules_B2_C1_E1_each_request_is_answered_truly_and_then_nothing_is_held() -> None:
    run = Run(seed=8)
    run.requests(REQUESTS)
    assert run.counts["requests"] >= REQUESTS
    assert run.counts["answered"] and run.counts["refused"] and run.counts["compared"]
    assert_each_field_is_read("delay", run.read)
    for kind, state in (("CANCEL", "CANCELLED"), ("RESCHEDULE", "PENDING"), ("GET", "PENDING"), ("GET", "DISPATCHED")):
        assert run.counts[f"{kind} {state}"], run.counts


def test_rules_E1_Q1_consumers_are_served_truly_beside_hostile_ones_and_then_nobody_waits() -> None:
    run = RealtimeRun(seed=8)
    run.requests(4 * REQUESTS)
    assert run.counts["requests"] >= 4 * REQUESTS
    assert run.counts["answered"] and run.counts["refused"] and run.counts["acknowledged"]
    assert_each_field_is_read("realtime", run.read)


def assert_each_field_is_read(role: str, read: Read) -> None:
    """Each field that is declared for a request of this server was read at least once."""
    kinds = {kind for kind in RequestType if role in kind.terms.servers} - NOT_IN_CORES - SELDOM_READ
    assert not [f"{kind.name} {name}" for kind in kinds for name in DECLARED[kind] if (kind, name) not in read]


@pytest.mark.parametrize("name", PLANTED_IN_REALTIME)
def test_a_bug_that_is_planted_in_a_realtime_server_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in PLANTED_IN_REALTIME[name]:
        monkeypatch.setattr(*bug)
    with pytest.raises(AssertionError):
        RealtimeRun(seed=8).requests(3 * REQUESTS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_that_is_planted_in_a_delay_server_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in PLANTED[name]:
        monkeypatch.setattr(*bug)
    assert any(_is_seen(seed) for seed in range(SEEDS))


def _is_seen(seed: int) -> bool:
    try:
        Run(seed).requests(REQUESTS_A_SEED)
    except (AssertionError, CallerError):
        return True
    return False
