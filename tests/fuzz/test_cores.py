"""Short runs of the fuzzer against cores in memory; `python -m tests.fuzz.cores` runs long ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delayd.delay.ending import message_requests
from delayd.delay.ending.claims import Claims
from delayd.delay.ending.taken_names import TakenNames
from delayd.delay.ending.wanted import wanted_of
from delayd.errors import CallerError
from realtime.pulls import Pulls

from .delay_core import Run
from .realtime_core import RealtimeRun

REQUESTS = 800
SEEDS, REQUESTS_A_SEED = 8, 400  # A defect is seen in one of so many runs.


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


def test_waiting_pulls_that_outlive_their_connections_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pulls, "disconnected", lambda self, peer: None)
    monkeypatch.setattr(Pulls, "wake", lambda self: None)
    with pytest.raises(AssertionError):
        RealtimeRun(seed=8).requests(3 * REQUESTS)


def _keep_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(message_requests.MessageRequests, "_give_room_back", lambda self, rows: None)


def _keep_look_ups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TakenNames, "end", lambda self, watch: None)


def _claim_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "claim", lambda self, wanted, places: None)


def _refuse_what_comes_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(message_requests, "wanted_newest", lambda asked, told: wanted_of(asked))


def _believe_made_up_receipts(patch: pytest.MonkeyPatch) -> None:
    from_wanted = message_requests.MessageRequests.states

    def states(self, wanted, nowhere, looked_up, places=None):  # type: ignore[no-untyped-def]
        told, claimable = from_wanted(self, wanted, nowhere, looked_up, places)
        told["state"][told["state"] == 0] = 1
        return told, claimable

    patch.setattr(message_requests.MessageRequests, "states", states)


def _forget_tries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(message_requests.MessageRequests, "_pin", lambda self, request: False)


def _tell_another_instant(patch: pytest.MonkeyPatch) -> None:
    from_states = message_requests.MessageRequests._told

    def told(self, request, states):  # type: ignore[no-untyped-def]
        states["decided_at_ms"] += request.looks + (request.looked_up is not None)
        return from_states(self, request, states)

    patch.setattr(message_requests.MessageRequests, "_told", told)


DEFECTS = [
    _forget_tries,
    _tell_another_instant,
    _keep_room,
    _keep_look_ups,
    _claim_nothing,
    _refuse_what_comes_together,
    _believe_made_up_receipts,
]


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_defect_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(_is_seen(seed) for seed in range(SEEDS))


def _is_seen(seed: int) -> bool:
    try:
        Run(seed).requests(REQUESTS_A_SEED)
    except (AssertionError, CallerError):
        return True
    return False
