"""Handler: what it gets follows from its parameters, and settings that can't be are refused when it is registered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgpack
import pytest

import delayd
from delayd.errors import BadArgument, BadBody, BadSetting, BadSubject, BadTags, DelaydError
from delayd.worker.verdicts import Kind, verdict_of
from tests.unit.client.world import World, on_loop
from tests.unit.worker.workers import GROUP, SUBJECT, serving, settled, worker_of


def handled(register: Callable[[delayd.Worker], object], *bodies: bytes) -> World:
    """A world after a worker has settled these bodies, each once."""
    worlds: list[World] = []

    async def scenario(world: World) -> None:
        worlds.append(world)
        for body in bodies:
            world.realtime.add(body)
        worker = worker_of(world)
        register(worker)
        async with serving(worker):
            await settled(world, len(bodies))

    on_loop(scenario)
    return worlds[0]


class Called:
    """A handler that is an object."""

    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    async def __call__(self, body: bytes) -> None:
        self.seen.append(body)


def handlers(seen: list[object]) -> list[tuple[Callable[..., Any], object]]:
    """Handlers that note what they got, each with what it is to get of the body `x`."""

    def body_alone(body: bytes) -> None:
        seen.append(body)

    def body_and_message(body: bytes, message: delayd.AsyncMessage) -> None:
        seen.append((body, message.body, message.attempt))

    def message_by_keyword(body: bytes, *, message: delayd.AsyncMessage) -> None:
        seen.append((body, message.body))

    def message_alone(message: delayd.AsyncMessage) -> None:
        seen.append((message.subject, message.body))

    async def coroutine(body: bytes, message: delayd.AsyncMessage) -> None:
        seen.append((body, message.body))

    def others(body: bytes, other: int = 3, *rest: object) -> None:
        seen.append((body, other, rest))

    def bound(first: int, body: bytes) -> None:
        seen.append((first, body))

    return [
        (body_alone, b"x"),
        (body_and_message, (b"x", b"x", 1)),
        (message_by_keyword, (b"x", b"x")),
        (message_alone, (SUBJECT, b"x")),
        (coroutine, (b"x", b"x")),
        (others, (b"x", 3, ())),
        (functools.partial(bound, 1), (1, b"x")),
        (functools.partial(coroutine), (b"x", b"x")),
        (Called(seen), b"x"),
        (seen.append, b"x"),
    ]


@pytest.mark.parametrize("number", range(len(handlers([]))))
def test_a_handler_gets_what_its_parameters_ask_for(number: int) -> None:
    seen: list[object] = []
    handler, expected = handlers(seen)[number]
    handled(lambda worker: worker.on(SUBJECT, group=GROUP)(handler), b"x")
    assert seen == [expected]


def test_with_pass_message_the_second_parameter_gets_it_whatever_its_name() -> None:
    seen: list[object] = []
    handled(
        lambda worker: worker.on(SUBJECT, group=GROUP, pass_message=True)(lambda body, m: seen.append((body, m.body))),
        b"x",
    )
    assert seen == [(b"x", b"x")]


def nothing() -> None:
    """Takes nothing."""


def too_much(body: bytes, other: int) -> None:
    """Takes what nobody gives."""


def keyword(body: bytes, *, other: int) -> None:
    """The same by name."""


def generator(body: bytes) -> Any:
    """Is none."""
    yield body


@pytest.mark.parametrize(
    ("handler", "pass_message", "told"),
    [
        (nothing, False, "takes no argument"),
        (too_much, False, "a parameter 'other' that nobody fills"),
        (keyword, False, "a parameter 'other' that nobody fills"),
        (lambda body: None, True, "no second parameter"),
        (generator, False, "is a generator"),
        (5, False, "is neither"),
    ],
)
def test_a_handler_that_can_not_be_called_is_refused_when_it_is_registered(
    handler: Any, pass_message: bool, told: str
) -> None:
    worker = delayd.Worker("127.0.0.1:1")
    with pytest.raises(BadArgument, match=told):
        worker.on(SUBJECT, group=GROUP, pass_message=pass_message)(handler)
    assert not worker.handlers


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"concurrency": 0}, BadSetting),
        ({"concurrency": 1_000_000}, BadSetting),
        ({"max_attempts": 0}, BadSetting),
        ({"lease": timedelta(0)}, BadSetting),
        ({"time_limit": timedelta(0)}, BadSetting),
        ({"time_limit": timedelta(days=2)}, BadSetting),
        ({"time_limit": "long"}, BadSetting),
        ({"decode": "yaml"}, BadSetting),
        ({"backoff": 5}, BadSetting),
        ({"subject": "a b"}, BadSubject),
        ({"group": ""}, BadArgument),
        ({"start": "yesterday"}, BadArgument),
        ({"tags_any": "urgent"}, BadTags),
        ({"exclusive": timedelta(0)}, BadSetting),
        ({"exclusive": True, "subject": "a.*"}, BadSetting),
        ({"group_max_in_flight": 0}, BadSetting),
    ],
)
def test_a_setting_that_can_not_be_is_refused_by_name(settings: dict[str, Any], error: type[DelaydError]) -> None:
    with pytest.raises(error):
        delayd.Worker("127.0.0.1:1").on(**{"subject": SUBJECT, "group": GROUP, **settings})(print)


def test_leases_are_extended_only_for_handlers_that_may_outlast_them() -> None:
    worker = delayd.Worker("127.0.0.1:1")

    async def waits(body: bytes) -> None: ...

    worker.on("a", group=GROUP)(waits)
    worker.on("b", group=GROUP, lease=timedelta(minutes=12))(waits)
    worker.on("c", group=GROUP, time_limit=timedelta(seconds=7))(print)
    worker.on("d", group=GROUP, time_limit=timedelta(hours=1))(print)
    worker.on("e", group=GROUP, time_limit=None)(waits)
    worker.on("f", group=GROUP)(print)  # Nobody can end a function.
    assert [(handler.settings.limit, handler.settings.auto_extend) for handler in worker.handlers] == [
        (timedelta(seconds=50), None),
        (timedelta(minutes=10), None),
        (timedelta(seconds=7), None),
        (timedelta(hours=1), timedelta(minutes=61)),
        (None, timedelta(days=1)),
        (None, timedelta(days=1)),
    ]


def test_a_middleware_without_any_method_and_a_negative_drain_are_refused() -> None:
    with pytest.raises(BadArgument, match="no middleware"):
        delayd.Worker("127.0.0.1:1", middleware=[object()])
    with pytest.raises(BadSetting, match="drain"):
        delayd.Worker("127.0.0.1:1", drain=timedelta(seconds=-1))


@pytest.mark.parametrize(
    ("decode", "body", "expected"),
    [
        ("bytes", b"\xff", b"\xff"),
        ("json", b'{"order": 42}', {"order": 42}),
        ("msgpack", msgpack.packb({"order": 42}), {"order": 42}),
        (lambda body: int(body) + 1, b"41", 42),
    ],
)
def test_bodies_are_decoded(decode: Any, body: bytes, expected: object) -> None:
    seen: list[object] = []
    handled(lambda worker: worker.on(SUBJECT, group=GROUP, decode=decode)(seen.append), body)
    assert seen == [expected]


@pytest.mark.parametrize("error", [delayd.Reject("no such order"), BadBody("no JSON")])
def test_a_message_that_can_never_be_handled_is_rejected_with_the_reason(error: Exception) -> None:
    verdict = verdict_of(error)
    assert verdict.kind is Kind.REJECT and verdict.reason == str(error)


def test_retry_says_when_the_message_comes_again_and_any_other_error_leaves_it_to_the_back_off() -> None:
    assert verdict_of(delayd.Retry(after=timedelta(minutes=5), error="busy")) == (
        Kind.NACK,
        timedelta(minutes=5),
        "",
        "busy",
    )
    assert verdict_of(delayd.Retry()).delay is None
    assert verdict_of(ValueError("no")) == (Kind.NACK, None, "", "ValueError: no")


class Unspeakable(Exception):
    """Can't even be told."""

    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_that_has_no_text_or_too_much_is_told_anyhow() -> None:
    assert verdict_of(ValueError()).error == "ValueError"
    assert len(verdict_of(ValueError("x" * 10_000)).error) == 2_000
    assert "Unspeakable" in verdict_of(Unspeakable()).error


@pytest.mark.parametrize("wrong", [timedelta(seconds=-1), 5])
def test_a_retry_that_can_not_be_is_refused(wrong: Any) -> None:
    with pytest.raises(BadArgument):
        delayd.Retry(after=wrong)


@pytest.mark.parametrize("wrong", ["", None])
def test_a_rejection_needs_a_reason(wrong: Any) -> None:
    with pytest.raises(BadArgument):
        delayd.Reject(wrong)
