"""Tokens: what lets a client in, as text, as a record of meta, and as fields of heads (docs/security.md, Tokens).

     dlyd_ | 58 characters of base32 in small letters: 32 random bytes, and the first 4 of their SHA-256

Invariant: a record has no token, but the SHA-256 of its text: whoever reads records can't make a token of one. The
checksum in the text shows a slip of the pen before anybody is asked.

A record's rights are words, each ``RIGHT:NAMES``; names are a subject, a pattern (`delayd.batch.names`), or ``>``: all.

     send:orders.> cancel:orders.> consume:orders.eu        producers of orders, who also take those of orders.eu
     inspect:>                                              looks at everything, and changes nothing
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from delayd.batch.names import Pattern, check_subject, is_pattern
from delayd.errors import BadArgument
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import Instant, need_bool, need_maps, need_u64, read_row

PREFIX = "dlyd_"
RANDOM_BYTES = 32
CHECK_BYTES = 4
TOKEN = re.compile(r"dlyd_([a-z2-7]{58})")
DIGEST_BYTES = 32

TOKENS_MAX = 1_000  # Of a cluster: each server has all of them in memory.
PAGE_MAX = 100  # Tokens in one answer: at most 8 KiB each.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RIGHTS_BYTES_MAX = 8_000
PER_SECOND_MAX = 1 << 40
CONNECTIONS_MAX = 1 << 20


class Right(Enum):
    """What a token has to allow for a request (docs/security.md, Tokens); where there are none, all but the last two
    are everybody's.
    """

    ENTER = "-"  # It lets a connection in, so nobody needs a token before.
    ANY = "any"  # Any token will do, whatever it allows.
    SEND = "send"
    INSPECT = "inspect"
    CANCEL = "cancel"
    CONSUME = "consume"
    ADMINISTER = "administer"  # Also for whoever has proved the cluster's secret.
    SERVE = "serve"  # For whoever has proved the cluster's secret, and no token.

    @property
    def is_granted(self) -> bool:
        """Whether tokens have it for subjects."""
        return self not in (Right.ENTER, Right.ANY, Right.SERVE)


GRANTED = tuple(right for right in Right if right.is_granted)
"""The rights that a token may have."""


class TokenRecord(NamedTuple):
    """A token as servers know it."""

    name: str
    digest: bytes  # The SHA-256 of its text.
    rights: str
    expires_ms: Instant = 0  # 0: never.
    old_digest: bytes = b""  # The text that was valid before a rotation, until the instant below.
    old_until_ms: Instant = 0
    requests_per_s: int = 0  # At each server; 0: no limit of its own.
    bytes_per_s: int = 0
    connections: int = 0
    created_ms: Instant = 0
    used_ms: Instant = 0  # When a server has seen it last in this life of meta; 0: not yet.

    def to_head(self) -> dict[str, HeadValue]:
        """As a head, or as one item of `tokens`."""
        return dict(self._asdict())


class TokenPage(NamedTuple):
    """One answer of TOKENS."""

    revision: int  # Another one when any token is.
    tokens: list[TokenRecord]
    more: bool


def read_page(head: Head) -> TokenPage:
    """Read the answer of TOKENS."""
    tokens = [read_row(TokenRecord, item) for item in need_maps(head, "tokens")]
    return TokenPage(need_u64(head, "revision"), tokens, need_bool(head, "more"))


def take_page(records: Iterable[TokenRecord], after: str) -> tuple[list[TokenRecord], bool]:
    """The records of one answer, behind a name, and whether there are more."""
    behind = sorted((record for record in records if record.name > after), key=lambda record: record.name)
    return behind[:PAGE_MAX], len(behind) > PAGE_MAX


def token_text(random: bytes) -> str:
    """The token of 32 random bytes."""
    assert len(random) == RANDOM_BYTES, "a token has 256 random bits"
    return PREFIX + base64.b32encode(random + _check(random)).decode("ascii").rstrip("=").lower()


def need_token(text: str) -> str:
    """Check a token that a caller gave. Raises BadArgument for a text that can be none."""
    found = TOKEN.fullmatch(text)
    raw = base64.b32decode(found[1].upper() + "======") if found else b""
    # The last character has two bits to spare, so a text is one that would be written so.
    if not raw or token_text(raw[:RANDOM_BYTES]) != text:
        raise BadArgument(
            f"the token that was given (of {len(text)} characters) is none, for a character of it is missing or wrong;"
            f" copy it again: {PREFIX} and 58 letters and digits"
        )
    return text


def digest_of(token: str) -> bytes:
    """What servers know of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _check(random: bytes) -> bytes:
    return hashlib.sha256(random).digest()[:CHECK_BYTES]


class Grant(NamedTuple):
    """One right, and the subjects for which it is given."""

    right: Right
    names: str

    def covers(self, asked: str) -> bool:
        """Whether it is given for a subject, or for all subjects of a pattern."""
        return _covers(self.names, asked)


def _covers(names: str, asked: str) -> bool:
    if names == ">":
        return True
    if not is_pattern(names):
        return names == asked
    if not is_pattern(asked):
        return Pattern(names).matches(asked)
    # Word by word: ``*`` covers any one word but ``>``, and ``>`` covers all that follow.
    mine, theirs = names.split("."), asked.split(".")
    for at, word in enumerate(theirs):
        if at >= len(mine):
            return False
        if mine[at] == ">":
            return True
        if word == ">" or mine[at] not in ("*", word):
            return False
    return len(mine) == len(theirs)


def read_rights(text: str) -> tuple[Grant, ...]:
    """The rights of a record. Raises BadArgument, BadSubject for words that are none."""
    if len(text.encode("utf-8", "replace")) > RIGHTS_BYTES_MAX:
        raise BadArgument(f"the rights of a token have at most {RIGHTS_BYTES_MAX} bytes; use patterns")
    return tuple(_grants(text))


def _grants(text: str) -> Iterator[Grant]:
    known = {right.value: right for right in GRANTED}
    for word in text.split():
        right, colon, names = word.partition(":")
        if right not in known or not colon or not names:
            raise BadArgument(f"{word[:100]!r} is no right; write one of {', '.join(known)}, a colon and subjects")
        if is_pattern(names) and names != ">":
            Pattern(names)
        elif names != ">":
            check_subject(names.encode())
        yield Grant(known[right], names)


def check_record(record: TokenRecord) -> None:
    """Raise BadArgument, BadSubject when a record can't be kept."""
    if NAME.fullmatch(record.name) is None:
        raise BadArgument(
            f"a token's name is {record.name[:120]!r}; it has 1 to 100 letters, digits and . _ -, the first no sign"
        )
    if len(record.digest) != DIGEST_BYTES or len(record.old_digest) not in (0, DIGEST_BYTES):
        raise BadArgument(f"a token's digest has {DIGEST_BYTES} bytes")
    if not read_rights(record.rights):
        raise BadArgument(f"the token {record.name} has no right; give it one, such as send:orders.>")
    for name, most in (
        ("requests_per_s", PER_SECOND_MAX),
        ("bytes_per_s", PER_SECOND_MAX),
        ("connections", CONNECTIONS_MAX),
    ):
        if getattr(record, name) > most:
            raise BadArgument(f"{name} of a token is at most {most}")
