"""Sessions: sign-in with a token, who is signed in and what the token allows, and sign-out.

Invariant: the text of a token comes in by the body of a form, and goes nowhere: neither into a page, nor a path, nor a
log. Where a page leads after the sign-in is a path of this gateway.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.names import check_subject, is_pattern
from delayd.errors import BadToken
from delayd.gateway.callers import Callers, need_own_page
from delayd.gateway.console.desk import PageDesk, form_of, queried
from delayd.gateway.console.drawing import (
    NO_STORE,
    ChangeForm,
    DrawnTable,
    FactTable,
    FormField,
    LinkRow,
    SearchForm,
    Section,
    SentenceList,
    Verdict,
    link,
    path,
    when,
)
from delayd.gateway.problems import Refusal
from delayd.gateway.sessions import LIFE_S, endings
from delayd.wire.tokens import read_rights

# A path of this gateway, as browsers send it: with // or /\ in front it would be another site's.
OWN_PATH = re.compile(r"/(?![/\\])[!-~]{0,2000}")
IN_CLEAR = (
    "This page came without TLS, unless a proxy has it: whoever reads the network between you and the gateway reads the"
    " token. Start the gateway with --tls-cert and --tls-key."
)
SIGN_IN_BYTES_MAX = 8_192  # Anybody may send this form.
LOCAL = ("localhost", "127.0.0.1", "[::1]")
HINT = "dlyd_ and 58 characters, as delayd token create has printed it"


class SessionPages:
    """Pages about who is signed in."""

    def __init__(self, desk: PageDesk, callers: Callers) -> None:
        self._desk = desk
        self._callers = callers

    async def shown(self, request: Request) -> Response:
        """Show the session of this browser, or the form to sign in."""
        queried(request)
        await self._callers.until_heard()
        if not self._callers.asks:
            return self._desk.drawing.page(
                "Session", Verdict("Nobody has to sign in.", ("There is no token, so everybody may see all pages.",))
            )
        entry = self._callers.visitor(request)
        if entry is None:
            return self._form(request, "/", 200)
        expires_ms = entry.meter.record.expires_ms
        return self._desk.drawing.page(
            "Session",
            Verdict(f"You are signed in with the token {entry.name}.", tone="good"),
            FactTable([("the token ends", when(expires_ms, self._desk.now_ms) if expires_ms else "never")]),
            *self.may(request),
            ChangeForm("/session/end", "Sign out", tone=""),
        )

    async def sign_in(self, request: Request) -> Response:
        """Lets a browser in."""
        form = await form_of(request, "token", "to", most=SIGN_IN_BYTES_MAX)
        to = form.get("to", "/")
        to = to if OWN_PATH.fullmatch(to) else "/"
        await self._callers.until_heard()
        if not self._callers.asks:
            return _elsewhere(to)
        try:
            cookie = await self._callers.sign_in(request, form.get("token", "").strip())
        except BadToken as error:
            return self._form(request, to, 401, Verdict("You are not signed in.", (error.message,), "bad"))
        return _elsewhere(to, cookie)

    async def sign_out(self, request: Request) -> Response:
        """Ends the session in this browser."""
        await form_of(request)
        need_own_page(request)
        return _elsewhere("/session", *endings())

    async def open(self, request: Request) -> Response:
        """Leads to a subject that was typed in."""
        subject = queried(request, "subject").get("subject", "").strip()
        check_subject(subject.encode())
        return _elsewhere(path("subjects", subject))

    def asked(self, request: Request, error: Refusal) -> Response:
        """The form, in place of a page that needs a token."""
        scope = request.scope
        query = scope["query_string"].decode("ascii", "replace") if request.method == "GET" else ""
        to = f"{scope['path']}?{query}" if query else scope["path"]
        again = LinkRow([("I am signed in, and came by a link from elsewhere", to)]) if OWN_PATH.fullmatch(to) else None
        answer = self._form(request, to, 401, *([] if again is None else [again]))
        answer.headers.update(error.headers)
        return answer

    def may(self, request: Request) -> list[Section]:
        """What the token of whoever is signed in allows; nothing for a program."""
        entry = self._callers.visitor(request)
        if entry is None:
            return []
        grants = read_rights(entry.meter.record.rights)
        rows = [
            (
                grant.right.value,
                "all" if grant.names == ">" else grant.names if is_pattern(grant.names) else _subject(grant.names),
            )
            for grant in grants
        ]
        return [
            DrawnTable("What the token allows", (("right", "t"), ("subjects", "t")), rows),
            SearchForm("/open", [FormField("subject", "Subject")], "Open"),
        ]

    def _form(self, request: Request, to: str, status: int, *sections: Section) -> Response:
        fields = [FormField("token", "Token", hint=HINT, secret=True)]
        local = request.headers.get("host", "").rpartition(":")[0] in LOCAL
        in_clear = request.scope["scheme"] == "http" and not local
        return self._desk.drawing.page(
            "Sign in",
            *sections,
            *([Verdict(IN_CLEAR, tone="odd")] if in_clear else []),
            ChangeForm("/session", "Sign in", fields, {"to": to}, tone=""),
            SentenceList(
                [
                    f"You are signed in for {LIFE_S // 3_600} hours, in this browser, by a cookie without the token.",
                    "Each page shows what the token allows; who has none asks an operator for one.",
                ]
            ),
            status=status,
        )


def _subject(name: str) -> object:
    return link(name, path("subjects", name))


def _elsewhere(to: str, *cookies: str) -> Response:
    answer = Response(status_code=303, headers={**NO_STORE, "Location": to})
    for cookie in cookies:
        answer.headers.append("Set-Cookie", cookie)
    return answer
