"""Short runs of the fuzzer against cores in memory; `python -m tests.fuzz.cores` runs long ones."""

from __future__ import annotations

import pytest

from delayd.errors import CallerError

from .delay_core import Run
from .planted import PLANTED, PLANTED_IN_REALTIME
from .realtime_core import RealtimeRun

REQUESTS = 800
SEEDS, REQUESTS_A_SEED = 16, 400  # A defect is seen in one of so many runs.


def test_rules_B2_C1_E1_each_request_is_answered_truly_and_then_nothing_is_held() -> None:
    run = Run(seed=8)
    run.requests(REQUESTS)
    assert run.counts["requests"] >= REQUESTS
    assert run.counts["answered"] and run.counts["refused"] and run.counts["compared"]
    for kind, state in (("CANCEL", "CANCELLED"), ("RESCHEDULE", "PENDING"), ("GET", "PENDING"), ("GET", "DISPATCHED")):
        assert run.counts[f"{kind} {state}"], run.counts


def test_rules_E1_Q1_consumers_are_served_truly_beside_hostile_ones_and_then_nobody_waits() -> None:
    run = RealtimeRun(seed=8)
    run.requests(3 * REQUESTS)
    assert run.counts["requests"] >= 3 * REQUESTS
    assert run.counts["answered"] and run.counts["refused"] and run.counts["acknowledged"]


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
