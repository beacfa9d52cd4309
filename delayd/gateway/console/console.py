"""The console: which page a path is. What fails is a page, too, with the status that the HTTP of programs has.

Invariant: a GET changes nothing. Each change is a POST of a form that says what will happen, and its answer says what
happened; the guard of the gateway (`delayd.gateway.app`) lets no page of another site send one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from delayd.client.admin import AsyncAdmin
from delayd.client.producer import AsyncProducer
from delayd.errors import DelaydError
from delayd.gateway.callers import PAGES, Callers
from delayd.gateway.clock import MovableClock
from delayd.gateway.console.audit_folder import AuditFolder
from delayd.gateway.console.audits import AuditPages
from delayd.gateway.console.desk import PageDesk
from delayd.gateway.console.drawing import KEEP, LinkRow, Section, Verdict
from delayd.gateway.console.letters import LetterPages
from delayd.gateway.console.overview import ClusterPages
from delayd.gateway.console.pending import PendingPages
from delayd.gateway.console.schedules import SchedulePages
from delayd.gateway.console.sessions import SessionPages
from delayd.gateway.console.subjects import SubjectPages
from delayd.gateway.console.targets import TargetPages
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.push import Push

PageMaker = Callable[[Request], Awaitable[Response]]


class Console:
    """Pages for people; belongs to the loop of its gateway."""

    def __init__(
        self,
        meta: str,
        push: Push,
        clock: MovableClock | None,
        callers: Callers,
        audits: AuditFolder | None,
    ) -> None:
        self._desk = PageDesk(meta, push, clock)
        self._cluster = ClusterPages(self._desk)
        self._subjects = SubjectPages(self._desk)
        self._pending = PendingPages(self._desk)
        self._letters = LetterPages(self._desk)
        self._schedules = SchedulePages(self._desk)
        self._targets = TargetPages(self._desk)
        self._audits = AuditPages(self._desk, audits)
        self._sessions = SessionPages(self._desk, callers)

    def start(self, producer: AsyncProducer, admin: AsyncAdmin) -> None:
        """Ask by way of these from now on."""
        self._desk.start(producer, admin)

    def routes(self) -> list[BaseRoute]:
        """All pages. A / within a name is no / of the path, as for programs."""
        one, group = "/subjects/{subject}/messages/{id}", "/subjects/{subject}/groups/{group}"
        letters, letter = f"{group}/dead", f"{group}/dead/{{id}}"
        cluster, subjects, pending, dead = self._cluster, self._subjects, self._pending, self._letters
        schedules, audits, targets, sessions = self._schedules, self._audits, self._targets, self._sessions
        return [
            self._page("/", cluster.overview),
            self._page("/servers", cluster.servers),
            self._page("/groups", cluster.groups),
            self._page("/quotas", cluster.quotas),
            self._page("/quotas/{subject}", cluster.ask_quota, cluster.set_quota),
            self._page("/subjects", subjects.listed),
            self._page("/subjects/{subject}", subjects.subject),
            self._page("/subjects/{subject}/find", pending.find),
            self._page("/subjects/{subject}/pending", pending.listed),
            self._page("/subjects/{subject}/cancel", pending.ask_cancel_all, pending.cancel_all),
            self._page(one, pending.message),
            self._page(f"{one}/cancel", pending.ask_cancel, pending.cancel),
            self._page(f"{one}/move", pending.ask_move, pending.move),
            self._page(f"{one}/edit", pending.ask_edit, pending.edit),
            self._page(group, subjects.group),
            self._page(f"{group}/pause", subjects.ask_pause, subjects.pause),
            self._page(f"{group}/resume", subjects.ask_resume, subjects.resume),
            self._page(letters, dead.listed),
            self._page(f"{letters}/redrive", dead.ask_redrive, dead.redrive),
            self._page(f"{letters}/purge", dead.ask_purge, dead.purge),
            self._page(letter, dead.letter),
            self._page(f"{letter}/redrive", dead.ask_redrive_one, dead.redrive_one),
            self._page(f"{letter}/purge", dead.ask_purge_one, dead.purge_one),
            self._page("/schedules", schedules.listed),
            self._page("/schedules/{name}", schedules.schedule),
            self._page("/schedules/{name}/run", schedules.ask_run, schedules.run),
            self._page("/schedules/{name}/pause", schedules.ask_pause, schedules.pause),
            self._page("/schedules/{name}/resume", schedules.ask_resume, schedules.resume),
            self._page("/schedules/{name}/delete", schedules.ask_delete, schedules.delete),
            self._page("/audits", audits.listed),
            self._page("/audits/{name}", audits.audit),
            self._page("/audits/{name}/page", audits.page),
            self._page("/push", targets.listed),
            self._page("/push/{name}", targets.target),
            self._page("/push/{name}/pause", targets.ask_pause, targets.pause),
            self._page("/push/{name}/resume", targets.ask_resume, targets.resume),
            self._page("/push/{name}/test", targets.ask_test, targets.test),
            self._page("/push/{name}/delete", targets.ask_delete, targets.delete),
            self._page("/session", sessions.shown, sessions.sign_in),
            self._page("/session/end", sessions.shown, sessions.sign_out),
            self._page("/open", sessions.open),
            Route("/static/{name}", self._static, methods=["GET"]),
        ]

    def refused(self, request: Request, template: str, error: DelaydError | Refusal) -> Response | None:
        """The page for a caller who may not see one, or has to sign in first; None where programs ask."""
        if template not in PAGES:
            return None
        if isinstance(error, Refusal) and error.status == 401:
            return self._sessions.asked(request, error)
        return self._fault(error, *self._sessions.may(request))

    def _page(self, path: str, show: PageMaker, change: PageMaker | None = None) -> Route:
        """A page, and what a form on it does."""

        async def asked(request: Request) -> Response:
            try:
                return await (change if change is not None and request.method == "POST" else show)(request)
            except (DelaydError, Refusal) as error:
                return self._fault(error)

        return Route(path, asked, methods=["GET"] if change is None else ["GET", "POST"])

    def _fault(self, error: DelaydError | Refusal, *more: Section) -> Response:
        told = problem(error)
        status, retry_ms = told["status"], told.get("retry_after_ms")
        assert isinstance(status, int)
        headers = dict(error.headers) if isinstance(error, Refusal) else {}
        if isinstance(retry_ms, int):
            headers["Retry-After"] = str(math.ceil(retry_ms / 1_000))
        return self._desk.drawing.page(
            "That did not work",
            Verdict(str(told["detail"]), (f"{status} {told['code']}",), "bad"),
            *more,
            LinkRow([("Overview", "/")]),
            status=status,
            headers=headers,
        )

    async def _static(self, request: Request) -> Response:
        content, kind = self._desk.drawing.static.get(request.path_params["name"], (None, ""))
        if content is None:
            raise Refusal(404, "no_such_path", "there is no such file")
        return Response(content, headers=KEEP, media_type=kind)
