"""Meta: each value of its state is damaged once; it serves all that the value does not concern (rule L9)."""

from __future__ import annotations

import pytest

from delayd.address import Endpoint
from delayd.testing.clock import SimClock
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.meta import Registered, Routes
from meta.core import Meta
from meta.registry import RegistryTerms
from tests.faults.harness import flip_value

SUBJECTS = ["orders.eu", "mails", "bills"]


def started(state: MemoryState) -> tuple[Meta, StepExecutor]:
    executor = StepExecutor()
    terms = RegistryTerms(lease_ms=5_000)
    return Meta(state, "META", executor, SimClock(), terms, lambda error: pytest.fail(str(error))), executor


def registered(log_id: int) -> Registered:
    return Registered("realtime", log_id, Endpoint("127.0.0.1", 7000 + log_id), 1, 1)


def routes(meta: Meta, executor: StepExecutor) -> Routes:
    heard: list[Routes] = []

    def hear(answer: object) -> None:
        assert isinstance(answer, Routes)
        heard.append(answer)

    meta.routes(SUBJECTS, True, hear)
    executor.run_all()
    return heard[0]


def known() -> MemoryState:
    state = MemoryState()
    meta, executor = started(state)
    for log_id in (1, 2):
        meta.register(registered(log_id), lambda refused: None)
        executor.run_all()
    found = routes(meta, executor).routes
    assert len(found) == len(SUBJECTS)
    meta.move("mails", 3 - found["mails"], lambda told: None)
    executor.run_all()
    return state


def test_rule_L9_a_damaged_value_of_meta_concerns_only_what_it_names() -> None:
    whole = known()
    meta, executor = started(whole.after_crash())
    before = routes(meta, executor)
    keys = whole.all_keys()
    assert {key.split(b"/")[0] for key in keys} >= {b"server", b"move"}
    for key in keys:
        state = whole.after_crash()
        flip_value(state, key)
        meta, executor = started(state)
        for log_id in (1, 2):
            meta.register(registered(log_id), lambda refused: None)
            executor.run_all()
        found = routes(meta, executor)
        if key.startswith(b"route/"):
            subject = key.split(b"/")[1].decode()
            assert found.unrouted == [subject], "it is not given to another server"
            assert [wait.what for wait in meta.waits()] == [f"messages of {subject}"]
            meta.move(subject, 2, lambda told: None)
            executor.run_all()
            assert routes(meta, executor).routes[subject] == 2 and not list(meta.waits())
            assert dict(found.routes).items() <= dict(before.routes).items()
        elif not key.startswith(b"look/"):
            assert found.routes == before.routes, key
        for log_id in (1, 2):
            meta.register(registered(log_id), lambda refused: None)
        assert {info.server.log_id for info in meta.servers("realtime")} == {1, 2}
