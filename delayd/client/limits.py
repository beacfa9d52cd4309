"""Limits: which messages are valid, checked before anything is queued; the servers hold the same limits
(docs/formats/batch.md).

Invariant: no server refuses a message that passes here because of its subject, its size or its headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import msgpack
import numpy as np

from delayd.address import META_LOCAL, META_VARIABLE, Endpoint, completed, meta_address, read_address
from delayd.batch.columns import Int64s
from delayd.batch.labels import LIFE_PREFIX, TRACE_HEADER, traceparent
from delayd.batch.names import (
    GROUP_NAME_BYTES_MAX,
    HEADERS_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    RESERVED,
    SUBJECT_BYTES_MAX,
    is_reserved,
)
from delayd.errors import BadArgument, BadSetting, BadSubject, CallerError, MessageTooLarge
from delayd.kernel import choose
from delayd.wire.heads import U32_MAX
from delayd.wire.tokens import need_token

TIMEOUT_MS_MIN, TIMEOUT_MS_MAX = 1.0, 86_400_000.0  # No timer of the system runs for longer than some weeks.

_MS, _DAY = timedelta(milliseconds=1), timedelta(days=1)

Headers = Mapping[str, str | bytes]
Item = TypeVar("Item")

NO_HEADERS = b""  # A row without headers has no map either.

_SUBJECT = re.compile(r"[A-Za-z0-9._%/-]{1,255}")


def check_subject(subject: str) -> bytes:
    """The subject as bytes; BadSubject when a server would not take it."""
    if not isinstance(subject, str):
        raise BadSubject(f"a subject is text, not {type(subject).__name__}")
    if _SUBJECT.fullmatch(subject) is None:
        raise BadSubject(f"subject {subject[:300]!r} is not 1 to {SUBJECT_BYTES_MAX} characters of [A-Za-z0-9._%/-]")
    return subject.encode("ascii")


def check_sent_subject(subject: str) -> bytes:
    """As `check_subject`, for a subject to which something is sent: the servers' own are refused, too."""
    name = check_subject(subject)
    if is_reserved(subject):
        raise BadSubject(RESERVED)
    return name


def check_group(group: str) -> None:
    """BadArgument for a name that no group may have."""
    need_text("group", group)
    if not 0 < len(group.encode("utf-8", "replace")) <= GROUP_NAME_BYTES_MAX:
        raise BadArgument(f"group {group[:300]!r} is not a name of 1 to {GROUP_NAME_BYTES_MAX} bytes")


def check_body(body: bytes, headers_bytes: int = 0) -> None:
    """BadArgument or MessageTooLarge for a body that can't be sent."""
    if not isinstance(body, bytes):
        raise BadArgument(f"a body is bytes, not {type(body).__name__}; encode it first")
    if len(body) + headers_bytes > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(
            f"a message of {len(body) + headers_bytes} bytes, headers and body, is over the limit of"
            f" {MESSAGE_BYTES_MAX}; send a reference to it instead"
        )


def check_bodies(bodies: Sequence[bytes]) -> Int64s:
    """The lengths of bodies; an error names the first row at fault."""
    lengths = _lengths(bodies)
    if lengths is None:
        row, body = next((row, body) for row, body in enumerate(bodies) if type(body) is not bytes)
        raise BadArgument(f"bodies: the body of row {row} is of type {type(body).__name__}, not bytes; encode it first")
    return np.frombuffer(lengths, np.int64)


def lengths_of(items: Sequence[bytes]) -> Int64s:
    """The length of each."""
    return np.array([len(item) for item in items], np.int64)


def lengths_of_bytes(items: Sequence[bytes]) -> Int64s | bytearray | None:
    """The length of each as an int64, and None if one is of another type than bytes itself; the twin of a compiled
    piece.
    """
    # Comprehensions, because `map` over a builtin and `fromiter` take twice as long.
    return lengths_of(items) if [type(item) for item in items].count(bytes) == len(items) else None


_lengths = choose("lengths_of", lengths_of_bytes)


def pack_headers(headers: Headers | None) -> bytes:
    """Headers as they travel, one msgpack map; empty when there are none.

    What a worker's handler sends gets the trace of its message, unless it has one of its own.
    """
    trace = traceparent.get()
    if trace and (headers is None or isinstance(headers, Mapping)):
        headers = {TRACE_HEADER: trace, **(headers or {})}
    if headers is None:
        return NO_HEADERS
    if not isinstance(headers, Mapping):
        raise BadArgument(f"headers are a mapping, not {type(headers).__name__}")
    for name, value in headers.items():
        if not _is_header(name, value):
            kinds = f"{type(name).__name__} to {type(value).__name__}"
            raise BadArgument(f"headers map text to text or bytes, not {kinds} ({name!r})")
        if name.startswith(LIFE_PREFIX):
            raise BadArgument(f"headers that begin with {LIFE_PREFIX} are the servers' own; give {name!r} another name")
    try:
        packed: bytes = msgpack.packb(dict(headers)) if headers else NO_HEADERS
    except UnicodeEncodeError as error:
        raise BadArgument(f"headers hold text that is no Unicode: {error}") from error
    if len(packed) > HEADERS_BYTES_MAX:
        raise MessageTooLarge(f"headers of {len(packed)} bytes are over the limit of {HEADERS_BYTES_MAX}")
    return packed


def need_timedelta(name: str, value: timedelta, error: type[CallerError] = BadArgument) -> timedelta:
    """Check a length of time that a caller gave; ``error`` says how to write it if it is anything else."""
    if not isinstance(value, timedelta):
        raise error(f"{name} must be a timedelta, not {type(value).__name__}; write timedelta(seconds=5)")
    return value


def need_ms(name: str, value: float, least: float, most: float) -> None:
    """Raise BadSetting unless this is a number of milliseconds within ``least`` and ``most``."""
    if not is_number(value):
        raise BadSetting(f"{name} must be a number of milliseconds, not {type(value).__name__}")
    if not least <= value <= most:
        raise BadSetting(f"{name} is {value} and must lie within {least:g} and {most:g}")


def need_connect_timeout(value: timedelta | None) -> None:
    """BadSetting unless this is a time for which a call may try to connect, or None: as long as it may take."""
    if value is not None and not _MS <= need_timedelta("connect_timeout", value, BadSetting) <= _DAY:
        raise BadSetting(f"connect_timeout is {value} and must lie within 1 ms and a day; None: as long as timeout_ms")


def unreached_s(timeout_ms: float, connect_timeout: timedelta | None) -> float:
    """How much of a time limit is left when a call gives up because no connection could be made; 0 without a limit of
    its own for that.
    """
    return 0.0 if connect_timeout is None else max(0.0, timeout_ms / 1000 - connect_timeout.total_seconds())


def need_bool(name: str, value: bool) -> bool:
    """Raise BadSetting unless this is True or False."""
    if not isinstance(value, bool):
        raise BadSetting(f"{name} is True or False, not {type(value).__name__}")
    return value


def need_whole(
    name: str, value: int, least: int, error: type[CallerError] = BadArgument, *, most: int = U32_MAX
) -> int:
    """Check a whole number of ``least`` to ``most`` that a caller gave; ``error`` for anything else.

    By default ``most`` is what a number has room for on the wire.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} must be a whole number, not {type(value).__name__}")
    if not least <= value <= most:
        raise error(f"{name} is {value} and must lie within {least} and {most}")
    return value


def need_text(name: str, value: str) -> str:
    """Check a text that a caller gave; BadArgument for anything else."""
    if not isinstance(value, str):
        raise BadArgument(f"{name} is text, not {type(value).__name__}")
    return value


def need_callable(name: str, value: object) -> None:
    """Raise BadArgument unless a caller gave a function."""
    if not callable(value):
        raise BadArgument(f"{name} is a function, not {type(value).__name__}")


def need_listed(name: str, values: Iterable[Item], what: str) -> list[Item]:
    """The items of a list that a caller gave; BadArgument for anything else, a text among them."""
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or not isinstance(values, Iterable):
        raise BadArgument(f"{name} must be a list of {what}, not {type(values).__name__}")
    return list(values)


def need_address(address: str, *, hint: str = "") -> Endpoint:
    """Host and port of ``host:port``, or of ``[host]:port`` for IPv6; BadArgument when a text is neither.

    ``hint`` is added to the error for a text without a port, which may have been meant as something else.
    """
    if not isinstance(address, str):
        raise BadArgument(f"an address is text such as {META_LOCAL}, not {type(address).__name__}")
    found = read_address(address)
    if isinstance(found, str):
        raise BadArgument(found if ":" in address else found + hint)
    return found


def need_meta(address: str | None, token: str | None = None, *, others: str = "") -> str:
    """The address of meta that a client was given, or by default the environment's, with all that it needs to be let in
    there (`delayd.address.completed`); BadArgument when it is none.

    ``others`` names the client's further arguments, for the error when one of them was given in place of the address.
    """
    if address is None:
        address = meta_address(None)
        if isinstance(found := read_address(address), str):
            raise BadArgument(f"{META_VARIABLE}: {found}")
    hint = f"; the first argument is where meta listens; leave it out to take that of {META_VARIABLE}"
    need_address(address, hint=f"{hint}, or of this machine{others and f', and name {others}'}")
    if token is not None:
        need_token(need_text("token", token))
    return completed(address, token)


def is_number(value: object) -> bool:
    """Whether a caller gave a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_header(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, str | bytes)
