"""Callers: who may ask a gateway for what, by the cluster's tokens (docs/security.md, Tokens).

Invariant: while tokens are asked for, a route is served to no caller without one, and a route that is in neither
`RIGHTS` nor `PAGES` to those alone who may administer everything. The cookie of a session counts for pages alone. A
gateway with the cluster's secret proves it for all that it does, so nothing else stands between its callers and the
servers; until it has heard which tokens there are, it serves nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import Request

from delayd.batch.names import RECURRING_SUBJECT
from delayd.client.asking import ask
from delayd.client.asking.tokens import token_page
from delayd.errors import BadToken, DelaydError, NotAllowed, NotReady
from delayd.gateway.connection import VISIT, HttpConnection, Visit, connection_of, cycle_of
from delayd.gateway.once import TOKEN
from delayd.gateway.problems import Refusal
from delayd.gateway.sends import part
from delayd.gateway.sessions import cookie_of, session_of
from delayd.machine.operating import LogLimit
from delayd.net.tokens import Pass, TokenBook
from delayd.secret import Secret
from delayd.wire.tokens import Right

log = logging.getLogger(__name__)
limited = LogLimit(log)

ASK_S = 1.0  # So soon a token that was revoked is refused.
HEARD_S = 5.0  # So long a request waits after the start.
PASSES_MAX = 10_000
WRONG_S = 1.0  # So long whoever signs in with a token that is none waits for the answer.

_MESSAGES, _MESSAGE = "/v1/subjects/{subject:path}/messages", "/v1/subjects/{subject:path}/messages/{id}"
# The right that a route needs for the subject in its path.
RIGHTS = {
    ("POST", _MESSAGES): Right.SEND,
    ("GET", _MESSAGES): Right.INSPECT,
    ("DELETE", _MESSAGES): Right.CANCEL,
    ("PATCH", _MESSAGES): Right.CANCEL,
    ("GET", _MESSAGE): Right.INSPECT,
    ("DELETE", _MESSAGE): Right.CANCEL,
    ("PATCH", _MESSAGE): Right.CANCEL,
    ("GET", f"{_MESSAGE}/trace"): Right.INSPECT,
    ("GET", "/v1/subjects/{subject:path}/trace"): Right.INSPECT,
    ("GET", "/v1/subjects/{subject:path}/forecast"): Right.INSPECT,
    ("POST", "/v1/subjects/{subject:path}/groups/{group}/pull"): Right.CONSUME,
    ("GET", "/v1/subjects/{subject:path}/groups/{group}/events"): Right.CONSUME,
    ("GET", "/v1/subjects/{subject:path}/groups"): Right.INSPECT,
    ("GET", "/v1/subjects/{subject:path}/groups/{group}"): Right.INSPECT,
    ("GET", "/v1/subjects/{subject:path}/groups/{group}/dead"): Right.INSPECT,
    ("GET", "/v1/subjects"): Right.INSPECT,
    ("GET", "/v1/groups"): Right.INSPECT,
    ("GET", "/v1/quotas"): Right.INSPECT,
    ("GET", "/v1/forecast"): Right.INSPECT,
    ("GET", "/metrics"): Right.INSPECT,
    ("GET", "/v1/cron"): Right.INSPECT,
    ("GET", "/v1/cron/{name}"): Right.INSPECT,
    ("GET", "/v1/cron/{name}/next"): Right.INSPECT,
    ("PUT", "/v1/cron/{name}"): Right.SEND,
    ("DELETE", "/v1/cron/{name}"): Right.CANCEL,
    ("POST", "/v1/cron/{name}/pause"): Right.SEND,
    ("POST", "/v1/cron/{name}/resume"): Right.SEND,
    ("POST", "/v1/cron/{name}/run"): Right.SEND,
    ("POST", "/v1/recurrence/next"): Right.ANY,
}
# A lease is 256 random bits that only who has pulled was told.
LEASES = ("/v1/leases/ack", "/v1/leases/nack", "/v1/leases/reject", "/v1/leases/extend")
OPEN = ("/healthz", "/readyz", "/v1/openapi.json", "/session", "/session/end", "/static/{name}")  # Nothing of messages.

_LOOK, _CANCEL, _DECIDE = (Right.INSPECT,), (Right.INSPECT, Right.CANCEL), (Right.ADMINISTER,)
_SCHEDULES = (Right.INSPECT, Right.SEND)
_PAGE, _GROUP = "/subjects/{subject}/messages/{id}", "/subjects/{subject}/groups/{group}"
# All the rights that a page of the console needs, for the subject in its path, or for everything: those of its calls.
# A form is shown only to those who may do what it is for.
PAGES = {
    "/": _LOOK,
    "/open": (Right.ANY,),
    "/servers": (Right.ANY,),
    "/groups": _LOOK,
    "/quotas": _LOOK,
    "/quotas/{subject}": _DECIDE,
    "/subjects": _LOOK,
    "/subjects/{subject}": _LOOK,
    "/subjects/{subject}/find": _LOOK,
    "/subjects/{subject}/pending": _LOOK,
    "/subjects/{subject}/cancel": (Right.CANCEL,),
    _PAGE: _LOOK,
    f"{_PAGE}/cancel": _CANCEL,
    f"{_PAGE}/move": _CANCEL,
    f"{_PAGE}/edit": (*_CANCEL, Right.SEND),
    _GROUP: _LOOK,
    f"{_GROUP}/pause": _DECIDE,
    f"{_GROUP}/resume": _DECIDE,
    f"{_GROUP}/dead": _LOOK,
    f"{_GROUP}/dead/redrive": _DECIDE,
    f"{_GROUP}/dead/purge": _DECIDE,
    f"{_GROUP}/dead/{{id}}": _LOOK,
    f"{_GROUP}/dead/{{id}}/redrive": _DECIDE,
    f"{_GROUP}/dead/{{id}}/purge": _DECIDE,
    "/schedules": _LOOK,
    "/schedules/{name}": _LOOK,
    "/schedules/{name}/run": _SCHEDULES,
    "/schedules/{name}/pause": _SCHEDULES,
    "/schedules/{name}/resume": _SCHEDULES,
    "/schedules/{name}/delete": _CANCEL,
    "/audits": _LOOK,
    "/audits/{name}": _LOOK,
    "/audits/{name}/page": _LOOK,
    "/push": _DECIDE,
    "/push/{name}": _DECIDE,
    "/push/{name}/pause": _DECIDE,
    "/push/{name}/resume": _DECIDE,
    "/push/{name}/test": _DECIDE,
    "/push/{name}/delete": _DECIDE,
}
# What only looks, and these walks through many messages, may be cut anywhere when the caller's token ends.
READS = frozenset({"GET", "HEAD"})
WALKS = (
    "/v1/subjects/{subject:path}/groups/{group}/dead/redrive",
    "/v1/subjects/{subject:path}/groups/{group}/dead/purge",
    "/subjects/{subject}/cancel",
    f"{_GROUP}/dead/redrive",
    f"{_GROUP}/dead/purge",
)


class Callers:
    """Which tokens there are, as meta tells a gateway with the secret; belongs to one loop."""

    def __init__(self, meta: str, secret: Secret | None, *, required: bool) -> None:
        """Without the secret nobody is asked for a token, unless ``required``: then nobody is served."""
        self._meta = meta
        self._secret = secret
        self._required = required
        self._book = TokenBook(required=required)
        self._passes: dict[str, Pass] = {}
        self._asking: asyncio.Task[None] | None = None
        self._away = False
        self._heard = asyncio.Event()
        if secret is None:
            self._heard.set()

    def start(self) -> None:
        """Begin to ask."""
        if self._secret is not None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    @property
    def asks(self) -> bool:
        """Whether `check` has to be asked of each request."""
        return self._book.is_closed or not self._heard.is_set()

    async def check(self, request: Request, path: str) -> None:
        """Refuse a request that its caller may not make; ``path`` is that of its route, with names in braces."""
        if path in OPEN:
            return
        await self.until_heard()
        if self._book.is_closed:
            method = "GET" if request.method == "HEAD" else request.method
            self._check(request, path, PAGES.get(path) or (RIGHTS.get((method, path), Right.ADMINISTER),))

    def look(self, connections: Sequence[HttpConnection]) -> None:
        """End the requests under way that their callers may not make any more: the token was revoked, is over, has
        another text or fewer rights. So ends also what was begun before anybody was asked for one.
        """
        for connection in connections:
            visit = connection.visit
            if visit is None:
                if connection.listener is not None and self._book.is_closed:
                    connection.listener.leave(_no_token())
            elif not self._book.is_valid(visit.entry.meter, visit.entry.digest):
                try:
                    entry = self._book.pass_by(visit.entry.digest)
                    _need(entry, visit.rights, visit.subject)
                except BadToken:
                    why = f"the token {visit.entry.name} was revoked, has another text, or is over"
                    connection.end(visit, _bad_token(BadToken(why)))
                except NotAllowed as error:
                    connection.end(visit, Refusal(403, error.code, error.message))
                else:
                    visit.entry = entry

    async def sign_in(self, request: Request, text: str) -> str:
        """The header that lets a browser in until it ends.

        Raises:
            Refusal: the form comes from another page.
            BadToken: the token is none of this cluster, was revoked or is over; it takes `WRONG_S` to say so.
        """
        need_own_page(request)
        await self.until_heard()
        assert self._secret is not None, "nobody is asked for a token by a gateway without the secret"
        try:
            entry = self._book.pass_of(text)
        except BadToken:
            limited.warning("sign_in_refused", "sign_in_refused peer=%s", request.client.host if request.client else "")
            await asyncio.sleep(WRONG_S)
            raise
        log.info("signed_in by=%r", entry.name)
        record = entry.meter.record
        ends_ms = record.old_until_ms if entry.digest == record.old_digest else record.expires_ms
        return cookie_of(request, self._secret, entry.digest, ends_ms)

    def visitor(self, request: Request) -> Pass | None:
        """The caller signed in in this browser; None for nobody, or when the token is not valid any more."""
        session = None if self._secret is None else session_of(request, self._secret)
        if session is None:
            return None
        try:
            return self._book.pass_by(session.digest)
        except BadToken:
            return None

    async def until_heard(self) -> None:
        """Wait until it is known which tokens there are. Raises NotReady."""
        if self._heard.is_set():
            return
        try:
            async with asyncio.timeout(HEARD_S):
                await self._heard.wait()
        except TimeoutError:
            raise NotReady("meta has not told this gateway yet which tokens there are", retry_after_ms=1_000) from None

    def _check(self, request: Request, path: str, rights: tuple[Right, ...]) -> None:
        entry = self._visiting(request) if path in PAGES and "authorization" not in request.headers else None
        entry = entry or self._entry(request)
        size = request.headers.get("content-length", "0")
        entry.meter.take(int(size) if size.isdigit() else 0)
        if path in LEASES:
            rights, subject = (Right.CONSUME,), ""
        elif path.startswith("/v1/cron") and Right.SEND not in rights:
            subject = RECURRING_SUBJECT
        else:
            # A schedule has its name in the whole cluster, so who changes one may change that of any subject.
            subject = part(request, "subject") if "subject" in request.path_params else ">"
        request.scope[TOKEN] = entry.name
        _need(entry, rights, subject)
        work = asyncio.current_task() if request.method in READS or path in WALKS else None
        visit = Visit(entry, rights, subject, work)
        connection_of(cycle_of(request.receive)).visit = request.scope[VISIT] = visit
        if Right.ADMINISTER in rights:
            log.info("administered request=%s by=%r path=%r", request.method, entry.name, request.url.path)

    def _visiting(self, request: Request) -> Pass | None:
        entry = self.visitor(request)
        if entry is not None and request.method == "POST":
            need_own_page(request)
        return entry

    def _entry(self, request: Request) -> Pass:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise _no_token()
        text = text.strip()
        known = self._passes.get(text)
        if known is not None and self._book.is_valid(known.meter, known.digest):
            return known
        self._passes.pop(text, None)
        try:
            entry = self._book.pass_of(text)
        except BadToken as error:
            raise _bad_token(error) from error
        if len(self._passes) >= PASSES_MAX:
            self._passes.clear()
        self._passes[text] = entry
        return entry

    async def _ask(self) -> None:
        while True:
            try:
                async with ask.meta(self._meta) as connection:
                    while True:
                        page, required = await token_page(connection, self._book.used())
                        self._book.required = required or self._required
                        if page.revision != self._book.revision:
                            self._book.take(page)
                        self._away = False
                        self._heard.set()
                        await asyncio.sleep(ASK_S)
            except DelaydError as error:
                if not self._away:
                    log.warning("tokens_not_heard code=%s reason=%r", error.code, error.message)
                self._away = True
                await asyncio.sleep(ASK_S)


def _no_token() -> Refusal:
    return Refusal(
        401,
        "not_allowed",
        "this gateway asks for a token: send it as `Authorization: Bearer dlyd_…`",
        {"WWW-Authenticate": "Bearer"},
    )


def _bad_token(error: BadToken) -> Refusal:
    return Refusal(401, error.code, error.message, {"WWW-Authenticate": 'Bearer error="invalid_token"'})


def _need(entry: Pass, rights: tuple[Right, ...], subject: str) -> None:
    for right in rights:
        if right is not Right.ANY and not entry.allows(right, subject):
            whose = "everything" if subject == ">" else subject or "a subject"
            raise NotAllowed(f"the token {entry.name} does not allow this: it needs the right to {right.value} {whose}")


def need_own_page(request: Request) -> None:
    """Refuse a form unless its browser says that a page of this gateway has sent it, beside the guard of all requests.

    Raises:
        Refusal: it says nothing.
    """
    if "origin" not in request.headers and request.headers.get("sec-fetch-site") != "same-origin":
        raise Refusal(403, "foreign_request", "this form names no page that has sent it; use a browser of our days")
