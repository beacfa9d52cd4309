"""Push targets as fields of heads: where due messages of a subject are POSTed to, as meta keeps it (docs/push.md).

Invariant: a target that was accepted can be served: its URL, its keys and its limits were checked before it was kept.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from delayd.address import HOST_BYTES_MAX
from delayd.batch.names import GROUP_NAME_BYTES_MAX, Pattern, check_subject, is_pattern, is_reserved
from delayd.errors import BadArgument, BadSubject
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import U64, Instant, need_bool, need_maps, need_u64, read_row

TARGETS_MAX = 1_000  # Targets of a cluster; each has a connection to its realtime server in each gateway.
PAGE_MAX = 50  # Targets in one answer: at most 16 KiB each, which a request must fit into.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
URL_BYTES_MAX = 2_048
HEADERS_BYTES_MAX = 4_096
NOTE_BYTES_MAX = 1_000
CONTENT_TYPE_BYTES_MAX = 200
BATCH_MAX = 1_000  # Messages in one POST.
TIMEOUT_MS_MIN, TIMEOUT_MS_MAX = 100, 30 * 60_000
BACKOFF_MS_MAX = 30 * 24 * 3_600_000
ATTEMPTS_MAX = 1_000
CONCURRENCY_MAX = 1_000  # POSTs under way at one time.
PER_UNIT_MAX = 1_000_000

SYMMETRIC, ASYMMETRIC = "whsec_", "whsk_"
KEY_BYTES_MIN, KEY_BYTES_MAX = 24, 64  # As Standard Webhooks has it.
SEED_BYTES = 32  # The private half of a key pair of ed25519.
KEYS_MAX = 2  # The one that signs, and the one that it takes the place of.

_UNITS_S = {"s": 1, "m": 60, "h": 3_600}
_RATE = re.compile(r"([1-9][0-9]{0,6})/([smh])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)")
# What a POST has anyway, or what would change how it is read.
_OWN_HEADERS = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "expect"})
_OWN_PREFIXES = ("webhook-", "delayd-")


class PushTarget(NamedTuple):
    """Where due messages of a subject are POSTed to, and how."""

    name: str
    subject: str  # Or a pattern of subjects.
    url: str
    group: str  # The group of consumers for which gateways pull.
    keys: str  # What signs, the newest first, with a blank between two.
    old_until_ms: Instant = 0  # Until when the second key signs, too.
    headers: str = ""  # Further ones of each POST, a line each, such as ``authorization: Bearer …``.
    content_type: str = "application/json"  # Of a message that names none.
    batch: int = 1  # Messages in one POST; from 2 on it is a JSON array.
    timeout_ms: int = 15_000
    attempts: int = 16
    first_ms: int = 5_000  # The wait after the first attempt; twice as long after each further one.
    most_ms: int = 12 * 3_600_000
    rate: str = ""  # POSTs in a time, such as ``10/s``, ``30/m``, ``5/h``; empty: no limit.
    concurrency: int = 0  # POSTs at one time; 0: no limit of the target's own.
    flow_rate: str = ""  # The same two for the messages of each flow key.
    flow_concurrency: int = 0
    paused: bool = False
    note: str = ""  # Why it is paused.
    version: int = 1  # It rises with each change.

    def to_head(self) -> dict[str, HeadValue]:
        """As a head, or as one item of `targets`."""
        return dict(self._asdict())


class PushTargets(NamedTuple):
    """The answer of PUSH_TARGETS."""

    revision: U64  # Another one when any target is.
    targets: list[PushTarget]
    more: bool


def read_push_targets(head: Head) -> PushTargets:
    """The answer of PUSH_TARGETS."""
    targets = [read_row(PushTarget, item) for item in need_maps(head, "targets")]
    return PushTargets(need_u64(head, "revision"), targets, need_bool(head, "more"))


def per_second(rate: str) -> float:
    """A rate in one second; 0 for no limit. Raises BadArgument when it is none."""
    if not rate:
        return 0.0
    found = _RATE.fullmatch(rate)
    if found is None or int(found[1]) > PER_UNIT_MAX:
        raise BadArgument(f"{rate[:40]!r} is no rate; write one such as 10/s, 30/m or 5/h")
    return int(found[1]) / _UNITS_S[found[2]]


def key_bytes(key: str) -> bytes:
    """What a key is made of. Raises BadArgument for one that is none; it does not say what it is."""
    prefix = next((each for each in (SYMMETRIC, ASYMMETRIC) if key.startswith(each)), None)
    if prefix is None:
        raise BadArgument(f"a key begins with {SYMMETRIC} or {ASYMMETRIC}")
    try:
        found = base64.b64decode(key[len(prefix) :], validate=True)
    except ValueError as error:
        raise BadArgument(f"what follows {prefix} in a key is no base64") from error
    if prefix == SYMMETRIC and not KEY_BYTES_MIN <= len(found) <= KEY_BYTES_MAX:
        raise BadArgument(f"a key that begins with {SYMMETRIC} has {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes")
    if prefix == ASYMMETRIC and len(found) != SEED_BYTES:
        raise BadArgument(f"a key that begins with {ASYMMETRIC} has {SEED_BYTES} bytes")
    return found


def header_pairs(headers: str) -> Iterator[tuple[str, str]]:
    """The further headers of a target. Raises BadArgument for a line that is none."""
    for line in headers.split("\n") if headers else ():
        found = _HEADER.fullmatch(line)
        if found is None:
            raise BadArgument(f"{line.partition(':')[0][:40]!r} begins no header; write one such as 'x-team: billing'")
        name = found[1].lower()
        if name in _OWN_HEADERS or name.startswith(_OWN_PREFIXES):
            raise BadArgument(f"the header {name} is delayd's own; choose another one")
        yield name, found[2]


def check_target(target: PushTarget) -> None:
    """Raise BadArgument or BadSubject for a target that can't be served; what is secret is not repeated."""
    check_name(target.name)
    _check_subject(target.subject)
    _check_url(target.url)
    if not 0 < len(target.group.encode()) <= GROUP_NAME_BYTES_MAX or not target.group.isprintable():
        raise BadArgument(f"group {target.group[:100]!r} is no name of 1 to {GROUP_NAME_BYTES_MAX} bytes")
    keys = target.keys.split(" ")
    if len(keys) > KEYS_MAX:
        raise BadArgument(f"a push target has 1 or {KEYS_MAX} keys")
    for key in keys:
        key_bytes(key)
    _within("headers", len(target.headers), 0, HEADERS_BYTES_MAX, "characters")
    for _ in header_pairs(target.headers):
        pass
    _within("content_type", len(target.content_type), 1, CONTENT_TYPE_BYTES_MAX, "characters")
    if not target.content_type.isascii() or not target.content_type.isprintable() or "/" not in target.content_type:
        raise BadArgument(f"{target.content_type[:40]!r} is no media type; write one such as text/plain")
    _within("note", len(target.note), 0, NOTE_BYTES_MAX, "characters")
    _within("batch", target.batch, 1, BATCH_MAX)
    _within("timeout_ms", target.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
    _within("attempts", target.attempts, 1, ATTEMPTS_MAX)
    _within("first_ms", target.first_ms, 1, BACKOFF_MS_MAX)
    _within("most_ms", target.most_ms, target.first_ms, BACKOFF_MS_MAX)
    _within("concurrency", target.concurrency, 0, CONCURRENCY_MAX)
    _within("flow_concurrency", target.flow_concurrency, 0, CONCURRENCY_MAX)
    per_second(target.rate)
    if (per_second(target.flow_rate) or target.flow_concurrency) and target.batch > 1:
        raise BadArgument(
            "messages of a flow key are POSTed one by one; give a limit for flow keys or a batch, not both"
        )


def check_name(name: str) -> None:
    """Raise BadArgument for a name that no target may have."""
    if not NAME.fullmatch(name):
        raise BadArgument(
            f"{name[:100]!r} is no name of a push target: 1 to 100 letters, digits, dots, dashes or underscores"
        )


def take_page(targets: Iterable[PushTarget], after: str) -> tuple[list[PushTarget], bool]:
    """The targets of one answer, in order of name, and whether there are more."""
    behind = sorted((each for each in targets if each.name > after), key=lambda each: each.name)
    return behind[:PAGE_MAX], len(behind) > PAGE_MAX


def _check_subject(subject: str) -> None:
    if is_pattern(subject):
        Pattern(subject)
        return
    check_subject(subject.encode())
    if is_reserved(subject):
        raise BadSubject(f"{subject} is a name that servers keep for themselves; push the subject that you send to")


def _check_url(url: str) -> None:
    _within("url", len(url), 1, URL_BYTES_MAX, "characters")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadArgument("the URL has characters that none may have; encode them, as %20 for a blank")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise BadArgument(f"{url[:200]!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or len(host) > HOST_BYTES_MAX:
        raise BadArgument(f"{url[:200]!r} is no URL of a web server; write one such as https://example.com/hook")
    if "@" in parts.netloc:
        raise BadArgument("the URL has a user or a password, which would be shown; give them as a header")
    if parts.fragment:
        raise BadArgument("the URL has a part behind #, which is never sent; leave it out")


def _within(name: str, value: int, least: int, most: int, unit: str = "") -> None:
    if not least <= value <= most:
        raise BadArgument(f"{name} is {value} and must lie within {least} and {most} {unit}".rstrip())
