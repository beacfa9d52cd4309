"""Front: what each request passes on its way to its route, and each answer on its way back.

    a request ──▶ is it of a foreign page? ──▶ which route? ──▶ may this caller? ──▶ the route's endpoint
                                                                                         │
    one write ◀── the head and the body of an answer ◀── a problem for whatever it raised ┘

Invariant: a page of a browser can do nothing here that its user did not ask for: a request that comes from another
site, or for a host that is not this one, is refused. Each answer has a status that says how the request ended, and is
counted; only an answer that is a stream is written piece by piece.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router, compile_path
from starlette.types import Message, Receive, Scope, Send

from delayd.errors import BadArgument, DelaydError
from delayd.gateway.callers import READS, Callers
from delayd.gateway.connection import VISIT, cycle_of, write_answer
from delayd.gateway.problems import Refusal, answer_problem
from delayd.gateway.sends import Lines

log = logging.getLogger(__name__)

Serve = Callable[[Request], Awaitable[Response]]
Refused = Callable[[Request, str, DelaydError | Refusal], Response | None]

OWN_SITE = frozenset({"same-origin", "none"})
PATHS_MAX, PATH_CHARS_MAX = 4_096, 300  # Paths whose route is remembered, and how long such a path is at most.
HOSTS_MAX = 64  # Names of this gateway that are remembered.

# Most clients and proxies take such a part of a path, in either form, as a step and send another path. One that comes
# through is refused, so that the same request is never about one name from here and another from there.
STEPS = re.compile(r"/(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)
NO_NAME = (
    "a part of this path is . or .., also as %2E, which clients and proxies read as a step to another path; write a /"
    " beside it as %2F, and ask for a subject or group of this name with a client of delayd"
)

# On each answer: a browser runs no script and frames nothing of what it gets here, whatever a message has in it.
HARMLESS = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": (
            "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
            "frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        # Not no-referrer: browsers send forms without their Origin then.
        "referrer-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }.items()
)


_ENCLOSED = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; frame-ancestors "
    "'none'"
)
# A page of which nobody knows who has written it: it has no origin of its own, so it is of no site of this gateway,
# and may have a style in it, which fetches nothing.
ENCLOSED = tuple(
    (name, _ENCLOSED.encode() if name == b"content-security-policy" else value) for name, value in HARMLESS
)


class EnclosedPage(Response):
    """A page of HTML as somebody else has written it."""

    media_type = "text/html"


class ReadRequest(Request):
    """A request whose headers are read once: by their names in lower case, the first of each name."""

    @property
    def headers(self) -> Mapping[str, str]:  # type: ignore[override]
        """See Starlette."""
        if not hasattr(self, "_read"):
            self._read = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.scope["headers"])
            }
        return self._read


class _Path(NamedTuple):
    """All that one path may be asked, by method."""

    template: str
    by_method: Mapping[str, Serve]


class Paths:
    """Which path a request names. Of several that fit the first one with its method is taken."""

    def __init__(self, routes: Iterable[tuple[str, Mapping[str, Serve]]]) -> None:
        self._all = [(compile_path(template)[0], _Path(template, by_method)) for template, by_method in routes]
        self._known: dict[str, list[tuple[_Path, dict[str, str]]]] = {}

    def find(self, method: str, path: str) -> tuple[str, Serve, dict[str, str]]:
        """The template, the endpoint and the parts of a path; BadArgument or Refusal when there is none."""
        fitting = self._known.get(path)
        if fitting is None:
            if STEPS.search(path):
                raise BadArgument(NO_NAME)
            fitting = [(each, met.groupdict()) for regex, each in self._all if (met := regex.match(path))]
            if fitting and len(path) <= PATH_CHARS_MAX:
                if len(self._known) >= PATHS_MAX:
                    self._known.clear()
                self._known[path] = fitting
        method = "GET" if method == "HEAD" else method
        for each, parts in fitting:
            serve = each.by_method.get(method)
            if serve is not None:
                return each.template, serve, parts
        if not fitting:
            raise Refusal(404, "no_such_path", "Not Found")
        allowed = fitting[0][0].by_method
        allow = ", ".join([*allowed, *(["HEAD"] if "GET" in allowed else [])])
        raise Refusal(405, "no_such_method", "Method Not Allowed", {"Allow": allow})


class Front:
    """The whole app, as ASGI. ``answered`` counts answers by method and status; ``refused`` answers a caller who may
    not ask a path, where that is a page.
    """

    def __init__(
        self,
        paths: Paths,
        callers: Callers,
        refused: Refused,
        hosts: Iterable[str],
        lifespan: Router,
        answered: Counter[tuple[str, int]],
    ) -> None:
        self._paths = paths
        self._callers = callers
        self._refused = refused
        self._hosts = frozenset(hosts)
        self._known_hosts: set[str] = set()
        self._lifespan = lifespan
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        scope["path"] = scope["raw_path"].decode("ascii")  # So that a / in a name is none between two.
        request = ReadRequest(scope, receive)
        try:
            answer = await self._served(request)
        except (DelaydError, Refusal) as error:
            answer = answer_problem(error)
        except ClientDisconnect:
            answer = Response(status_code=400)  # Nobody hears it; the metrics count it.
        except asyncio.CancelledError:
            if VISIT not in scope:
                raise
            answer = answer_problem(scope[VISIT].cut())
        except Exception as error:  # A bug ends one request, and is logged.
            log.error("request_failed method=%s path=%r", request.method, scope["path"], exc_info=error)
            answer = answer_problem(error)
        self._answered[scope["method"], answer.status_code] += 1
        if isinstance(answer, Lines):
            await answer(scope, receive, _with_harmless(send))
        else:
            if VISIT in scope:
                scope[VISIT].work = None  # It is done.
            harmless = ENCLOSED if isinstance(answer, EnclosedPage) else HARMLESS
            await write_answer(cycle_of(send), answer.status_code, (*answer.raw_headers, *harmless), bytes(answer.body))

    async def _served(self, request: Request) -> Response:
        why = self._foreign(request)
        if why is not None:
            raise Refusal(403, "foreign_request", why)
        scope = request.scope
        template, serve, parts = self._paths.find(scope["method"], scope["path"])
        scope["path_params"] = parts
        if self._callers.asks:
            try:
                await self._callers.check(request, template)
            except (DelaydError, Refusal) as error:
                page = self._refused(request, template, error)
                if page is None:
                    raise
                return page
        return await serve(request)

    def _foreign(self, request: Request) -> str | None:
        headers = request.headers
        host = headers.get("host", "")
        if host not in self._known_hosts:
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if host and not _is_address(name.strip("[]")) and name.lower() not in self._hosts:
                return f"this gateway is not asked as {name[:100]!r}; start it with --name {name[:100]} if it should be"
            if len(self._known_hosts) < HOSTS_MAX and len(host) <= PATH_CHARS_MAX:
                self._known_hosts.add(host)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return "this request comes from a page of another site"
        # A browser says so itself of what is sent without an Origin.
        if request.method not in READS and headers.get("sec-fetch-site", "none") not in OWN_SITE:
            return "this request comes from a page of another site"
        return None


def by_path(routes: Iterable[BaseRoute]) -> list[tuple[str, Mapping[str, Serve]]]:
    """Routes of Starlette as `Paths` takes them."""
    return [
        (each.path, dict.fromkeys(sorted((each.methods or set()) - {"HEAD"}), each.endpoint))
        for each in routes
        if isinstance(each, Route)
    ]


def _with_harmless(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *HARMLESS]
        await send(message)

    return sent


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
