"""Handler: one function or coroutine of the user's, what it is given, and the settings that it was registered with.

What a handler gets follows from its parameters, and is decided when it is registered:

    handle(body)             the decoded body
    handle(body, message)    the decoded body and the message, when a parameter is named ``message``
    handle(message)          the message alone; its body is decoded before, so a bad one never reaches the handler

With ``pass_message=True`` the second parameter gets the message, whatever its name is. BadBody says that a body can't
be decoded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Literal

import msgpack

from delayd.client.limits import need_bool, need_timedelta, need_whole
from delayd.client.pulling.acks import Backoff
from delayd.client.pulling.consume_options import (
    BACKOFF,
    LEASE,
    ConsumedSubjects,
    ConsumerSettings,
    Start,
    exclusive_of,
    start_of,
    wanted_tags,
)
from delayd.client.pulling.message import MessageView
from delayd.errors import BadArgument, BadBody, BadSetting

CONCURRENCY = 8
CONCURRENCY_MAX = 10_000
ATTEMPTS = 5
# Without a limit of its own a coroutine has this share of its lease: then its message is given back before the lease
# ends, so it does not come again while it is at work. Nobody can end the thread of a function, so a function has no
# limit: after this share the log tells that it is slow, and its lease is extended.
LIMIT_SHARE = 5 / 6
EXTENDED_MOST = timedelta(days=1)  # A handler without any limit keeps its message for so long.

BY_LEASE: Final = "lease"
TimeLimit = timedelta | Literal["lease"] | None

MESSAGE = "message"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class HandlerSettings:
    """What a handler was registered with; a named error when a value is wrong."""

    subject: str | Sequence[str]
    group: str
    concurrency: int = CONCURRENCY
    max_attempts: int | None = ATTEMPTS
    lease: timedelta = LEASE
    time_limit: TimeLimit = BY_LEASE
    decode: Decode = "bytes"
    pass_message: bool = False
    backoff: Backoff = BACKOFF
    ordered: bool = False
    start: Start | None = None
    tags_any: Sequence[str] = ()
    tags_all: Sequence[str] = ()
    exclusive: bool | timedelta = False
    group_max_in_flight: int | None = None

    def __post_init__(self) -> None:
        # Checks these as every consumer does.
        ConsumerSettings(
            ConsumedSubjects(self.subject),
            self.group,
            self.lease,
            backoff=self.backoff,
            start=start_of(self.start, from_now=False),
            tags_any=wanted_tags("tags_any", self.tags_any),
            tags_all=wanted_tags("tags_all", self.tags_all),
            ordered=self.ordered,
            exclusive=exclusive_of(self.exclusive),
            group_max_in_flight=self.group_max_in_flight,
        )
        need_whole("concurrency", self.concurrency, 1, BadSetting, most=CONCURRENCY_MAX)
        need_bool("pass_message", self.pass_message)
        if self.max_attempts is not None:
            need_whole("max_attempts", self.max_attempts, 1, BadSetting)
        limit = self.time_limit
        if limit is None or (isinstance(limit, str) and limit == BY_LEASE):
            return
        if not timedelta(0) < need_timedelta("time_limit", limit, BadSetting) <= EXTENDED_MOST:
            raise BadSetting(f"time_limit is {limit} and must be more than 0 and at most {EXTENDED_MOST}, or None")

    @property
    def limit(self) -> timedelta | None:
        """How long a handler may take for a message; None: as long as it likes."""
        return self.lease * LIMIT_SHARE if isinstance(self.time_limit, str) else self.time_limit

    @property
    def auto_extend(self) -> timedelta | None:
        """For how long leases are extended while the handler works; None where it ends within its lease."""
        if self.limit is None:
            return max(EXTENDED_MOST, self.lease)
        return None if self.limit <= self.lease * LIMIT_SHARE else self.limit + self.lease

    @property
    def label(self) -> str:
        """What is consumed, in one text."""
        return ConsumedSubjects(self.subject).label


class Handler:
    """One registered handler. ``call`` calls it with a message; for a coroutine it returns what must be awaited."""

    def __init__(self, function: Callable[..., Any], settings: HandlerSettings) -> None:
        if not callable(function):
            raise BadArgument(f"a handler is a function or a coroutine function, and {function!r} is neither")
        if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
            raise BadArgument(f"{name_of(function)} is a generator, whose body would never run; a handler returns")
        self.is_coroutine = _is(inspect.iscoroutinefunction, function)
        self.slow_after: timedelta | None = None  # From then on the log tells that a handler without a limit is slow.
        if settings.time_limit == BY_LEASE and not self.is_coroutine:
            self.slow_after = settings.lease * LIMIT_SHARE
            settings = replace(settings, time_limit=None)
        self.settings = settings
        self.name = name_of(function)
        self.call = _caller(function, settings)

    def __repr__(self) -> str:
        return f"Handler({self.name} of {self.settings.label}, group {self.settings.group})"

    def check_apart(self, other: Handler) -> None:
        """BadArgument when both are of one group and may get messages of one subject: the group would share them, so
        each message would go to one of the two at random.
        """
        mine, others = self.settings, other.settings
        if mine.group == others.group and ConsumedSubjects(mine.subject).meets(ConsumedSubjects(others.subject)):
            both = "" if mine.label == others.label else f", and messages of {mine.label} may be of both"
            raise BadArgument(
                f"{other.name} already handles {others.label} for the group {mine.group}{both}; give {self.name} "
                "another group if both are to get each message, or subjects of its own if one is to get it"
            )


def name_of(function: object) -> str:
    """The name of a function as people know it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is(test: Callable[[object], bool], function: object) -> bool:
    # An object with `__call__` is a function of the kind that this method is.
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004


def _caller(function: Callable[..., Any], settings: HandlerSettings) -> Callable[[MessageView], Any]:
    decode = decoder_of(settings.decode)
    takes = _takes(function, settings.pass_message)
    if takes == (True, None):
        return lambda message: function(decode(message))
    if takes == (True, ""):
        return lambda message: function(decode(message), message)
    if takes == (True, MESSAGE):
        return lambda message: function(decode(message), message=message)

    def alone(message: MessageView) -> Any:
        decode(message)
        return function(message)

    return alone


def _takes(function: Callable[..., Any], pass_message: bool) -> tuple[bool, str | None]:
    """Whether a handler takes the body, and how it takes the message: not (None), as second ("") or by its name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True, "" if pass_message else None  # A function of C need not say what it takes.
    name = name_of(function)
    first = [each for each in parameters if each.kind in _POSITIONAL]
    rest = any(each.kind == inspect.Parameter.VAR_POSITIONAL for each in parameters)
    if not first and not rest:
        raise BadArgument(f"{name} takes no argument; a handler takes the body, as in `def {name}(body)`")
    takes: tuple[bool, str | None]
    if pass_message:
        if len(first) < 2 and not rest:
            raise BadArgument(f"{name} has pass_message=True and no second parameter that could get the message")
        takes, given = (True, ""), 2
    elif first and first[0].name == MESSAGE:
        takes, given = (False, ""), 1
    elif any(each.name == MESSAGE and each.kind in _NAMED for each in parameters):
        takes, given = (True, MESSAGE), 1
    else:
        takes, given = (True, None), 1
    empty = inspect.Parameter.empty
    for each in [*first[given:], *(each for each in parameters if each.kind == inspect.Parameter.KEYWORD_ONLY)]:
        if each.default is empty and not (each.name == MESSAGE and takes[1] == MESSAGE):
            raise BadArgument(
                f"{name} has a parameter {each.name!r} that nobody fills; a handler takes the body, and the message in "
                "a parameter named 'message' or with pass_message=True"
            )
    return takes


Decode = Literal["bytes", "json", "msgpack"] | Callable[[bytes], Any]
Decoder = Callable[[MessageView], Any]


def decoder_of(decode: Decode) -> Decoder:
    """The decoder that a handler asked for; BadSetting when there is none of that name."""
    if callable(decode):
        return _by(decode)
    named = _DECODERS.get(str(decode))
    if named is None:
        raise BadSetting(f"decode is {decode!r} and must be 'bytes', 'json', 'msgpack' or a function of the bytes")
    return named


def _by(decode: Callable[[bytes], Any]) -> Decoder:
    def decoded(message: MessageView) -> Any:
        try:
            return decode(message.body)
        except Exception as error:
            raise BadBody(f"the body of {message!r} can't be decoded: {type(error).__name__}: {error}") from error

    return decoded


def _bytes(message: MessageView) -> bytes:
    return message.body


def _json(message: MessageView) -> Any:
    return message.json()


def _msgpack(message: MessageView) -> Any:
    try:
        return msgpack.unpackb(message.body)
    except ValueError as error:
        raise BadBody(f"the body of {message!r} is no msgpack: {type(error).__name__} {error}") from error


_DECODERS: dict[str, Decoder] = {"bytes": _bytes, "json": _json, "msgpack": _msgpack}
