"""Tokens at a server: which of them it knows, and what each connection may ask for (docs/security.md, Tokens).

     meta: the records ──with each registration their revision──▶ TokenBook of each server, kept in its state
                                                                     │ TOKEN
     client ──token──▶ Guard (delayd.net.trust) ─────────────────────▶ Pass of the connection ──▶ may it?

Invariant: once a token is known, or the server was told to ask for one, nothing is served to a connection that has
neither a pass nor the cluster's secret. A pass ends at most a second after its token was revoked here, or is over, and
its connection with it.

A request is looked at once, by its type and by the subjects that it names, and what was found is remembered for the
connection. Nothing is asked of anybody else.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgpack

from delayd.errors import BadRequest, BadToken, DamagedData, NotAllowed, SlowDown, TooManyConnections
from delayd.machine.operating import LogLimit
from delayd.machine.state import State
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import as_head, read_row
from delayd.wire.requests import RequestType, request_type
from delayd.wire.tokens import Grant, Right, TokenPage, TokenRecord, digest_of, read_rights

STATE_KEY = b"tokens"  # The revision and the records, as a server other than meta has heard them last.
KNOWN_MAX = 4_096  # Subjects that one connection has asked for and that are remembered: their names are some 100 KB.
TOLD_MAX = 50  # Tokens named in one registration, whose head is short; others are named by the next ones.
BURST_S = 1.0  # A token that has a rate may use so much of it at once.

log = logging.getLogger(__name__)
limited = LogLimit(log)

WallMs = Callable[[], int]


class Entered(Protocol):
    """What a connection has of a token: `delayd.net.connection.Connection`."""

    entry: Pass | None
    peer: str

    def refuse(self, error: BadToken) -> None:
        """Tell the peer why the connection ends, and end it."""


class Meter:
    """What the connections of one token use together, at this server."""

    __slots__ = ("_at_s", "_bytes", "_requests", "connections", "record", "used")

    def __init__(self, record: TokenRecord) -> None:
        self.record = record
        self.connections = 0
        self.used = False  # Since meta was told last.
        self._at_s = time.monotonic()
        self._requests = self._bytes = 0.0  # How much is used of a second's worth; it runs off by itself.

    def take(self, size: int) -> None:
        """Count a request. Raises SlowDown when the token has used its second."""
        self.used = True
        record = self.record
        if not (record.requests_per_s or record.bytes_per_s):
            return
        now = time.monotonic()
        passed, self._at_s = now - self._at_s, now
        self._requests = max(0.0, self._requests - passed * record.requests_per_s)
        self._bytes = max(0.0, self._bytes - passed * record.bytes_per_s)
        # A request may be larger than a second's worth: it is taken when all before it has run off.
        for used, per_s, what in (
            (self._requests, record.requests_per_s, "requests"),
            (self._bytes, record.bytes_per_s, "bytes"),
        ):
            if per_s and used >= BURST_S * per_s:
                wait_ms = max(1, int((used - BURST_S * per_s) / per_s * 1000) + 1)
                raise SlowDown(
                    f"the token {record.name} has {per_s} {what} a second at this server, and has used them",
                    retry_after_ms=wait_ms,
                )
        self._requests += 1
        self._bytes += size


class Pass:
    """What one connection may ask for."""

    __slots__ = ("_allowed", "_grants", "_tables", "digest", "meter")

    def __init__(self, meter: Meter, digest: bytes) -> None:
        self.meter = meter
        self.digest = digest  # Which of a token's two texts it has shown.
        self._grants = read_rights(meter.record.rights)
        self._allowed: set[tuple[int, str]] = set()
        self._tables: set[tuple[int, bytes]] = set()  # Tables of subjects of bodies, which it may ask for.

    @property
    def name(self) -> str:
        """The token's."""
        return self.meter.record.name

    def allows(self, right: Right, subject: str) -> bool:
        """Whether it has a right for a subject; "" stands for any one, and ``>`` for all there are."""
        return any(_gives(grant, subject) for grant in self._grants if grant.right is right)

    def check(self, frame: Frame) -> None:
        """Look at a request.

        Raises:
            NotAllowed: the token does not allow it for a subject that its head names.
            SlowDown: the token has used its second.
        """
        kind = request_type(frame.type)
        if kind is not RequestType.PING:
            self.meter.take(len(frame.body))
        for subject in _named(kind, frame.head):
            self._need(kind, subject)

    def check_table(self, kind: RequestType, table: bytes, subjects: Callable[[], Iterable[bytes]]) -> None:
        """The same for the table of subjects in a request's body. Raises NotAllowed."""
        if (kind, table) in self._tables:
            return
        for subject in subjects():
            self._need(kind, subject.decode("utf-8", "replace"))
        if len(self._tables) < KNOWN_MAX:
            self._tables.add((kind, table))

    def check_whole(self, kind: RequestType) -> None:
        """The same for a request that may concern any subject. Raises NotAllowed."""
        self._need(kind, ">")

    def _need(self, kind: RequestType, subject: str) -> None:
        if (kind, subject) in self._allowed:
            return
        if not self._is_given(kind, subject):
            raise _not_allowed(self.name, kind, subject)
        if len(self._allowed) >= KNOWN_MAX:
            self._allowed.clear()
        self._allowed.add((kind, subject))

    def _is_given(self, kind: RequestType, subject: str) -> bool:
        needs = kind.terms.needs
        if Right.ANY in needs:
            return not subject or subject == ">" or any(grant.covers(subject) for grant in self._grants)
        return any(_gives(grant, subject) for grant in self._grants if grant.right in needs)


def _gives(grant: Grant, subject: str) -> bool:
    return not subject or grant.covers(subject)


def _named(kind: RequestType, head: Head) -> Sequence[str]:
    """The subjects, or the pattern, for which a request asks; "" stands for none, and ``>`` for all there are."""
    subject = head.get("subject")
    if isinstance(subject, str) and subject:
        return (subject,)
    subjects = head.get("subjects")
    if isinstance(subjects, list) and subjects:
        # The items of some lists are a subject and a count.
        return [str(item[0] if isinstance(item, list) and item else item) for item in subjects]
    pattern = head.get("pattern")
    if isinstance(pattern, str) and pattern:
        return (pattern,)
    # A subscription was looked at when it began, on this connection.
    if kind.terms.body_names or "subscription" in head or Right.ANY in kind.terms.needs:
        return ("",)
    return (">",)


def _not_allowed(name: str, kind: RequestType, subject: str) -> NotAllowed:
    rights = " or ".join(right.value for right in kind.terms.needs)
    needed = "a right" if Right.ANY in kind.terms.needs else f"the right to {rights}"
    if Right.SERVE in kind.terms.needs:
        return NotAllowed(f"{kind.name} is for servers of this cluster, and not for the token {name}")
    whose = "all subjects" if subject == ">" else subject[:300] or "a subject"
    return NotAllowed(
        f"the token {name} does not allow {kind.name}, which needs {needed} for {whose}; use another token, or have an"
        " operator give this one the right"
    )


def now_ms() -> int:
    """The wall clock of this machine."""
    return time.time_ns() // 1_000_000


class TokenBook:
    """The tokens that one server knows; belongs to its loop."""

    def __init__(self, *, required: bool = False, wall_ms: WallMs = now_ms) -> None:
        """``required``: nothing is served without a token, also while there is none."""
        self.revision = 0
        self.required = required
        self._wall_ms = wall_ms
        self._meters: dict[str, Meter] = {}
        self._by_digest: dict[bytes, Meter] = {}

    @property
    def is_closed(self) -> bool:
        """Whether nothing is served without a token."""
        return self.required or bool(self._meters)

    def enter(self, connection: Entered, token: str) -> Pass | None:
        """Give a connection the pass of a token; None while tokens are not asked for.

        Raises:
            BadToken: it is not known, was revoked, or is over.
            TooManyConnections: its connections are as many as it may have here.
        """
        if not self.is_closed:
            return None
        entry = self.pass_at(connection.peer, token)
        meter = entry.meter
        record = meter.record
        self.leave(connection)
        if record.connections and meter.connections >= record.connections:
            raise TooManyConnections(
                f"the token {record.name} has {record.connections} connections at this server; close some of them",
                retry_after_ms=1_000,
            )
        meter.connections += 1
        meter.used = True
        connection.entry = entry
        return entry

    def pass_at(self, peer: str, token: str) -> Pass:
        """The same as `pass_of`, and a token that is not valid is noted in the log with who has sent it."""
        try:
            return self.pass_of(token)
        except BadToken:
            limited.warning("token_refused", "token_refused peer=%s", peer)
            raise

    def pass_of(self, token: str) -> Pass:
        """What a token lets its holder do. Raises BadToken when it is not known, was revoked, or is over."""
        return self.pass_by(digest_of(token))

    def pass_by(self, digest: bytes) -> Pass:
        """The same for whoever has shown the token before. Raises BadToken."""
        meter = self._by_digest.get(digest)
        if meter is None or not self.is_valid(meter, digest):
            raise BadToken(
                "this token is not valid here: it is another cluster's, was revoked, is over, or was made this second"
            )
        meter.used = True
        return Pass(meter, digest)

    def leave(self, connection: Entered) -> None:
        """The connection has ended, or gets another pass."""
        if connection.entry is not None:
            connection.entry.meter.connections -= 1
            connection.entry = None

    def look(self, connections: Iterable[Entered]) -> None:
        """End the connections whose token was revoked, changed, or is over."""
        for connection in list(connections):
            entry = connection.entry
            if entry is not None and not self.is_valid(entry.meter, entry.digest):
                connection.refuse(BadToken(f"the token {entry.name} was revoked or changed, or is over"))

    def take(self, page: TokenPage) -> None:
        """Know these tokens and no others."""
        meters = {record.name: self._meter(record) for record in page.tokens}
        self._meters = meters
        self._by_digest = {
            digest: meter
            for meter in meters.values()
            for digest in (meter.record.digest, meter.record.old_digest)
            if digest
        }
        self.revision = page.revision

    def used(self) -> dict[str, int]:
        """Which tokens were used since this was asked last, and when about."""
        found: dict[str, int] = {}
        for name, meter in self._meters.items():
            if meter.used and len(found) < TOLD_MAX:
                meter.used = False
                found[name] = self._wall_ms()
        return found

    def _meter(self, record: TokenRecord) -> Meter:
        known = self._meters.get(record.name)
        if known is not None and known.record._replace(used_ms=0) == record._replace(used_ms=0):
            return known
        return Meter(record)

    def is_valid(self, meter: Meter, digest: bytes) -> bool:
        """Whether a text of this token still lets in."""
        record, now = meter.record, self._wall_ms()
        if self._meters.get(record.name) is not meter or (record.expires_ms and record.expires_ms <= now):
            return False
        if hmac.compare_digest(digest, record.digest):
            return True
        return now < record.old_until_ms and hmac.compare_digest(digest, record.old_digest)


def read_kept(state: State, path: str, book: TokenBook) -> None:
    """Take what a server's state has of tokens. Raises DamagedData."""
    value = state.get(STATE_KEY)
    if value is None:
        return
    try:
        head = as_head(msgpack.unpackb(value), "tokens")
        records = [read_row(TokenRecord, as_head(each, "tokens")) for each in head["records"]]  # type: ignore[union-attr]
        book.take(TokenPage(int(str(head["revision"])), records, more=False))
    except (ValueError, TypeError, KeyError, BadRequest) as error:
        raise DamagedData(path, 0, f"the value of {STATE_KEY.decode()} has no tokens ({error})") from error


def keep_tokens(state: State, page: TokenPage) -> None:
    """Remember the tokens, so that the next start asks for them before meta has answered; durable on return."""
    value = {"revision": page.revision, "records": [record.to_head() for record in page.tokens]}
    state.commit([(STATE_KEY, msgpack.packb(value))])
