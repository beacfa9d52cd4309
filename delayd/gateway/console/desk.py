"""The desk: what all pages of the console share; and what forms bring.

Invariant: a page says what the servers say at this moment. Nothing is kept here between two requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.client.admin import AsyncAdmin
from delayd.client.instants import instant_ms
from delayd.client.producer import AsyncProducer
from delayd.errors import BadArgument
from delayd.gateway.clock import MovableClock
from delayd.gateway.console.drawing import Drawing, LinkRow, SentenceList, Verdict
from delayd.gateway.problems import Refusal
from delayd.gateway.push import Push
from delayd.gateway.sends import read_body
from delayd.gateway.values import Instant, duration, utc

FORM = "application/x-www-form-urlencoded"
FORM_BYTES_MAX = 4 << 20
FIELDS_MAX = 40
PAGE = 100  # Rows of a list on one page.
NO_SECRET = (
    "This gateway has no secret of the cluster, so it shows groups, quotas and push targets, and changes none: "
    "start it with --secret-file or --data."
)
INSTANT_HINT = "UTC, such as 2027-01-31T09:00:00Z; or from now, such as 30m, 1h30m or 2d"


class PageDesk:
    """What pages ask; belongs to one loop."""

    def __init__(self, meta: str, push: Push, clock: MovableClock | None) -> None:
        self.meta = meta
        self.push = push
        self.operates = (
            push.secret is not None
        )  # Without the secret nobody decides anything here about groups or targets.
        self.drawing = Drawing()
        self._clock = clock
        self._clients: tuple[AsyncProducer, AsyncAdmin] | None = None

    def start(self, producer: AsyncProducer, admin: AsyncAdmin) -> None:
        """Ask by way of these from now on."""
        self._clients = producer, admin

    @property
    def producer(self) -> AsyncProducer:
        """Asks about messages."""
        assert self._clients is not None, "requests come after the start"
        return self._clients[0]

    @property
    def admin(self) -> AsyncAdmin:
        """Asks about groups, dead letters and quotas."""
        assert self._clients is not None, "requests come after the start"
        return self._clients[1]

    @property
    def now_ms(self) -> int:
        """What the clock of the servers shows, as far as this machine knows."""
        return round(time.time() * 1_000) if self._clock is None else instant_ms(self._clock.now, "now")

    def instant_of(self, text: str, name: str) -> int:
        """An instant as people write it: in UTC, or as a time from now."""
        text = text.strip()
        if text[:1].isdigit() and not ("-" in text or ":" in text):
            return self.now_ms + round(duration(text) / timedelta(milliseconds=1))
        try:
            moment = utc(msgspec.convert(text, Instant, strict=False), name)
        except msgspec.ValidationError as error:
            why = "is no instant with its offset from UTC; write one such as 2027-01-31T09:00:00Z, or 30m from now"
            raise BadArgument(f"{name}: {text[:40]!r} {why}") from error
        assert moment is not None, "an instant was given"
        return instant_ms(moment, name)

    def bound_of(self, text: str | None, name: str) -> datetime | None:
        """The same as a bound of a window; None for none."""
        return None if text is None or not text.strip() else from_ms(self.instant_of(text, name))

    def done(
        self, title: str, sentences: Sequence[object], links: Sequence[tuple[str, str]], tone: str = "good"
    ) -> Response:
        """The page that says what became of a change, in the servers' words."""
        word, *more = sentences
        return self.drawing.page(
            title, Verdict(str(word), tone=tone), *([SentenceList(more)] if more else []), LinkRow(links)
        )


def from_ms(instant: int) -> datetime:
    """An instant in ms since the epoch as a datetime."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=instant)


async def form_of(request: Request, *names: str, most: int = FORM_BYTES_MAX) -> Mapping[str, str]:
    """The fields of a form that was sent, each of ``names`` at most once; BadArgument for anything else in it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request, most)
    if body and kind != FORM:
        raise Refusal(415, "bad_media_type", f"a form is sent as {FORM}")
    return _read(body, names, "form")


def queried(request: Request, *names: str) -> dict[str, str]:
    """The query of a page, each of ``names`` at most once; BadArgument for anything else in it."""
    return _read(request.scope["query_string"], names, "query")


def _read(encoded: bytes, names: Sequence[str], what: str) -> dict[str, str]:
    try:
        text = encoded.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise BadArgument(f"this {what}: {error}") from error
    found = dict(pairs)
    if len(found) < len(pairs) or not found.keys() <= set(names):
        may = f"may have {', '.join(names)}, each once" if names else "has no fields"
        raise BadArgument(f"this {what} {may}")
    return found
