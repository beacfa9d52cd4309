"""Recurring schedules: by when they are next due, one with its next occurrences, and what may be done about it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.names import RECURRING_SUBJECT
from delayd.client.asking.recurring import RecurringInfo, info_of_record
from delayd.client.instants import instant_ms
from delayd.gateway.console.desk import PAGE, PageDesk, form_of, queried
from delayd.gateway.console.drawing import (
    NONE,
    ChangeForm,
    DrawnTable,
    FactTable,
    FormField,
    LinkRow,
    SentenceList,
    length,
    link,
    path,
    short,
    when,
)
from delayd.gateway.console.pending import body_block, header_facts
from delayd.gateway.problems import Refusal
from delayd.gateway.sends import part
from delayd.recurrence.zones import shown_at
from delayd.wire.recurring import RecurringRecord

NEXT = 10  # Occurrences ahead.
SCHEDULE_COLUMNS = (
    ("next", "w"),
    ("name", "t"),
    ("subject", "t"),
    ("recurs", "t"),
    ("state", "t"),
    ("sent", "n"),
    ("skipped", "n"),
)
COSTS = {
    "run": "One message is sent now, beside its occurrences, which stay as they are.",
    "pause": "Nothing is sent until it is resumed. What is due meanwhile is skipped, and counted so.",
    "resume": "Its occurrences are sent again, from now on.",
    "delete": "It sends nothing any more. What was sent stays. This can't be taken back.",
}
TITLES = {"run": "Run now", "pause": "Pause", "resume": "Resume", "delete": "Delete"}


class SchedulePages:
    """Pages about recurring schedules."""

    def __init__(self, desk: PageDesk) -> None:
        self._desk = desk

    async def listed(self, request: Request) -> Response:
        """Schedules, a page at a time."""
        query = queried(request, "resume")
        # Each is a pending message of the servers' own, so a page of them costs what a page of messages costs.
        pages = self._desk.producer.pending(
            RECURRING_SUBJECT, contents=True, page_size=PAGE, resume=query.get("resume") or None
        )
        page = await pages.next()
        found = [
            info_of_record(message.key or "", RecurringRecord.decode(message.body or b"")) for message in page or ()
        ]
        more = path("schedules", resume=pages.resume) if pages.resume else ""
        empty = "There is none; make one with delayd cron add, or with recurring of a producer."
        return self._desk.drawing.page(
            "Schedules",
            DrawnTable("", SCHEDULE_COLUMNS, [self._row(info) for info in found], more=more, empty=empty),
            lead="Messages that are sent again and again, by the hour in which the next one is decided.",
        )

    async def schedule(self, request: Request) -> Response:
        """One schedule."""
        queried(request)
        info = await self._found(request)
        here = path("schedules", info.name)
        words = ["run", "resume" if info.paused else "pause", "delete"]
        now_ms = self._desk.now_ms
        facts: list[tuple[str, object]] = [
            ("subject", link(info.subject, path("subjects", info.subject))),
            ("recurs", _recurs(info)),
            ("state", _state(info)),
            ("sent", info.sent),
            ("last", NONE if info.last is None else when(instant_ms(info.last, "last"), now_ms)),
            *([("one at a time", "yes")] if info.policy.overlap == "skip" else []),
            *((f"skipped: {reason}", count) for reason, count in info.skipped.items()),
            ("tags", ", ".join(info.tags) or NONE),
            ("version", info.version),
            ("changed", when(instant_ms(info.changed_at, "changed"), now_ms)),
        ]
        zone = info.recurrence.timezone
        ahead = [instant_ms(moment, "next") for moment in info.preview(NEXT)]
        rows = [(when(ms, now_ms), f"{shown_at(zone, ms):%a %Y-%m-%d %H:%M:%S %z}") for ms in ahead]
        lead = "None of them is sent as long as it is paused." if info.paused else ""
        return self._desk.drawing.page(
            info.name,
            LinkRow([(f"{TITLES[word]} …", f"{here}/{word}") for word in words]),
            FactTable(facts),
            DrawnTable("Next occurrences", (("UTC", "w"), (zone, "w")), rows, lead=lead, empty="It has ended."),
            *header_facts(dict(info.headers)),
            body_block(info.body),
            way=_WAY,
        )

    async def ask_run(self, request: Request) -> Response:
        """Says what a run does."""
        return await self._ask(request, "run")

    async def ask_pause(self, request: Request) -> Response:
        """Says what a pause does, and asks for its reason."""
        return await self._ask(request, "pause", FormField("note", "Why", hint="shown to others"))

    async def ask_resume(self, request: Request) -> Response:
        """Says what the end of a pause does."""
        return await self._ask(request, "resume")

    async def ask_delete(self, request: Request) -> Response:
        """Says what it does to delete a schedule."""
        return await self._ask(request, "delete")

    async def run(self, request: Request) -> Response:
        """Sends one message now."""
        await form_of(request)
        info = await self._desk.producer.run_recurring(part(request, "name"))
        return self._done(info.name, f"A message of {info.name} is sent to {info.subject}.")

    async def pause(self, request: Request) -> Response:
        """Pauses a schedule."""
        form = await form_of(request, "note")
        name = part(request, "name")
        await self._desk.producer.pause_recurring(name, form.get("note", ""))
        return self._done(name, f"{name} is paused: nothing is sent until it is resumed.")

    async def resume(self, request: Request) -> Response:
        """Resumes it."""
        await form_of(request)
        name = part(request, "name")
        await self._desk.producer.resume_recurring(name)
        return self._done(name, f"{name} is resumed.")

    async def delete(self, request: Request) -> Response:
        """Deletes it."""
        await form_of(request)
        name = part(request, "name")
        if not await self._desk.producer.delete_recurring(name):
            raise _unknown()
        return self._desk.done(f"Schedule {name}", [f"{name} is deleted."], [("Schedules", "/schedules")])

    async def _ask(self, request: Request, word: str, *fields: FormField) -> Response:
        queried(request)
        info = await self._found(request)
        here = path("schedules", info.name)
        return self._desk.drawing.page(
            f"{TITLES[word]}: {info.name}?",
            FactTable([("subject", info.subject), ("recurs", _recurs(info)), ("state", _state(info))]),
            SentenceList([COSTS[word]]),
            ChangeForm(f"{here}/{word}", TITLES[word], fields, back=here),
            way=(*_WAY, (info.name, here)),
        )

    async def _found(self, request: Request) -> RecurringInfo:
        info = await self._desk.producer.get_recurring(part(request, "name"))
        if info is None:
            raise _unknown()
        return info

    def _done(self, name: str, sentence: str) -> Response:
        links = [(name, path("schedules", name)), ("Schedules", "/schedules")]
        return self._desk.done(f"Schedule {name}", [sentence], links)

    def _row(self, info: RecurringInfo) -> tuple[object, ...]:
        coming = NONE if info.next is None else when(instant_ms(info.next, "next"), self._desk.now_ms)
        return (
            coming,
            link(short(info.name), path("schedules", info.name)),
            link(info.subject, path("subjects", info.subject)),
            _recurs(info),
            short(_state(info)),
            info.sent,
            sum(info.skipped.values()),
        )


_WAY = (("Schedules", "/schedules"),)


def _unknown() -> Refusal:
    return Refusal(404, "unknown", "there is no schedule of this name")


def _recurs(info: RecurringInfo) -> str:
    recurrence = info.recurrence
    if recurrence.every is not None:
        return f"every {length(round(recurrence.every.total_seconds() * 1_000))}"
    return f"{recurrence.cron} {recurrence.timezone}"


def _state(info: RecurringInfo) -> str:
    if info.paused:
        return f"paused: {info.note}" if info.note else "paused"
    return "ended" if info.next is None else "active"
