"""Push targets: what meta has, what this gateway counts of them, and what may be done about one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from delayd.client.asking.push import delete_target
from delayd.errors import BadArgument
from delayd.gateway.console.desk import NO_SECRET, PageDesk, form_of, queried
from delayd.gateway.console.drawing import (
    NONE,
    ChangeForm,
    DrawnTable,
    FactTable,
    LinkRow,
    SentenceList,
    TextBlock,
    Verdict,
    length,
    lines,
    link,
    path,
)
from delayd.gateway.problems import Refusal
from delayd.gateway.push_routes import Terms, changed, target_view
from delayd.gateway.sends import part
from delayd.wire.push import PushTarget

TARGETS_MAX = 500
TARGET_COLUMNS = (
    ("target", "t"),
    ("subject", "t"),
    ("URL", "t"),
    ("state", "t"),
    ("delivered here", "n"),
    ("failed here", "n"),
    ("last failure", "t"),
)
CREATE = "delayd push create SUBJECT URL --data DIR"


class TargetPages:
    """Pages about push targets."""

    def __init__(self, desk: PageDesk) -> None:
        self._desk = desk

    async def listed(self, request: Request) -> Response:
        """All targets."""
        queried(request)
        if not self._desk.operates:
            return self._desk.drawing.page(
                "Push targets", Verdict("No push target is served here.", (NO_SECRET,), "odd")
            )
        targets = await self._desk.push.targets()
        rest = len(targets) - TARGETS_MAX
        return self._desk.drawing.page(
            "Push targets",
            DrawnTable("", TARGET_COLUMNS, [self._row(target) for target in targets[:TARGETS_MAX]], empty=CREATE),
            *([SentenceList([f"{rest:,} more are not shown; see delayd push list"])] if rest > 0 else []),
            lead="URLs to which due messages are POSTed; “here” is what this gateway counts since its start.",
        )

    async def target(self, request: Request) -> Response:
        """One target."""
        queried(request)
        target = await self._found(request)
        here = path("push", target.name)
        words = ["Resume" if target.paused else "Pause", "Test", "Delete"]
        facts = [(name.replace("_", " "), _fact(value)) for name, value in target_view(target).items()]
        pusher = self._desk.push.pushers.get(target.name)
        own: list[tuple[str, object]] = []
        if pusher is not None:
            counts = pusher.counts
            own = [
                ("POSTs", counts.posts),
                ("delivered", counts.delivered),
                ("failed", counts.failed),
                ("put off", counts.put_off),
                ("under way", pusher.under_way),
                ("left alone for", length(round(pusher.rests_s * 1_000))),
                ("last failure", pusher.last_failure or NONE),
            ]
        links = [
            *((f"{word} …", f"{here}/{word.lower()}") for word in words),
            ("Its group", path("subjects", target.subject, "groups", target.group)),
        ]
        return self._desk.drawing.page(
            target.name,
            LinkRow(links),
            FactTable(facts),
            *([FactTable(own, "At this gateway")] if own else []),
            way=_WAY,
        )

    async def ask_pause(self, request: Request) -> Response:
        """Says what a pause does."""
        return await self._ask(request, "Pause", "Nothing is POSTed to it. Its messages wait in its group.")

    async def ask_resume(self, request: Request) -> Response:
        """Says what the end of a pause does."""
        return await self._ask(request, "Resume", "What waited is POSTed first, within seconds.")

    async def ask_test(self, request: Request) -> Response:
        """Says what a test does."""
        return await self._ask(request, "Test", "One POST goes to its URL now, about no message; its answer is shown.")

    async def ask_delete(self, request: Request) -> Response:
        """Says what it does to delete a target."""
        return await self._ask(
            request, "Delete", "Nothing is POSTed any more, and its key is forgotten.", "Its group and messages stay."
        )

    async def pause(self, request: Request) -> Response:
        """Pauses a target."""
        return await self._set_paused(request, paused=True)

    async def resume(self, request: Request) -> Response:
        """Resumes it."""
        return await self._set_paused(request, paused=False)

    async def test(self, request: Request) -> Response:
        """One POST now."""
        await form_of(request)
        target = await self._found(request)
        outcome = await self._desk.push.try_once(target)
        answer = outcome.answer.decode(errors="replace")
        word = "The receiver has taken it" if outcome.is_done else "The receiver has not taken it"
        return self._desk.drawing.page(
            f"Test of {target.name}",
            Verdict(word, (f"{outcome.what}",), "good" if outcome.is_done else "bad"),
            *([TextBlock("Its answer", lines(answer))] if answer else []),
            LinkRow(_links(target.name)),
            way=_WAY,
        )

    async def delete(self, request: Request) -> Response:
        """Deletes a target."""
        await form_of(request)
        target = await self._found(request)
        async with self._desk.push.at_meta() as connection:
            said = await delete_target(connection, target.name)
        return self._desk.done(f"Push target {target.name}", [said], [("Push targets", "/push")])

    async def _set_paused(self, request: Request, *, paused: bool) -> Response:
        await form_of(request)
        name = (await self._found(request)).name
        note = "by the console" if paused else ""
        await self._desk.push.change(name, lambda known: changed(known, Terms(paused=paused, note=note)))
        said = f"The push target {name} is {'paused' if paused else 'resumed'}; gateways obey within seconds."
        return self._desk.done(f"Push target {name}", [said], _links(name))

    async def _ask(self, request: Request, word: str, *costs: str) -> Response:
        queried(request)
        target = await self._found(request)
        here = path("push", target.name)
        return self._desk.drawing.page(
            f"{word} {target.name}?",
            FactTable([("subject", target.subject), ("URL", target.url)]),
            SentenceList(costs),
            ChangeForm(f"{here}/{word.lower()}", f"{word} it", back=here),
            way=(*_WAY, (target.name, here)),
        )

    async def _found(self, request: Request) -> PushTarget:
        try:
            return await self._desk.push.target(part(request, "name"))
        except BadArgument as error:
            raise Refusal(404, "unknown", error.message) from error

    def _row(self, target: PushTarget) -> tuple[object, ...]:
        pusher = self._desk.push.pushers.get(target.name)
        return (
            link(target.name, path("push", target.name)),
            link(target.subject, path("subjects", target.subject)),
            target.url,
            f"paused: {target.note}" if target.paused and target.note else "paused" if target.paused else "served",
            pusher.counts.delivered if pusher is not None else NONE,
            pusher.counts.failed if pusher is not None else NONE,
            (pusher.last_failure or NONE) if pusher is not None else NONE,
        )


_WAY = (("Push targets", "/push"),)


def _links(name: str) -> list[tuple[str, str]]:
    return [(name, path("push", name)), ("Push targets", "/push")]


def _fact(value: object) -> object:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return NONE if value in ("", None) else value
