"""Dead letters of a group: a list, one letter, and what may be done about one or about all of a window."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from delayd.client.admin import Letter
from delayd.client.asking.ask import find_group, one_place
from delayd.client.instants import instant_ms
from delayd.client.sending.receipts import Receipt
from delayd.gateway.admin import DeathWindow
from delayd.gateway.console.desk import INSTANT_HINT, PAGE, PageDesk, form_of, queried
from delayd.gateway.console.drawing import (
    NONE,
    ChangeForm,
    DrawnTable,
    FactTable,
    FormField,
    LinkRow,
    SearchForm,
    SentenceList,
    TextBlock,
    lines,
    link,
    path,
    short,
    size,
    when,
)
from delayd.gateway.console.pending import SAID, body_block, header_facts, walked_sentences
from delayd.gateway.console.subjects import group_way
from delayd.gateway.problems import Refusal
from delayd.gateway.sends import part
from delayd.hours import instant_text
from delayd.machine.operating import counted
from delayd.wire.asked import CancelAnswer, RescheduleAnswer

LETTER_COLUMNS = (
    ("dead since", "w"),
    ("reason", "t"),
    ("last error", "t"),
    ("attempts", "n"),
    ("key", "t"),
    ("body", "n"),
)
WORDS = {
    "redrive": ("Send again", "come to the group again now, as the first attempt"),
    "purge": ("Delete", "end for good; this can't be taken back"),
}
DONE = {"redrive": "sent to the group again", "purge": "deleted"}


class LetterPages:
    """Pages about dead letters."""

    def __init__(self, desk: PageDesk) -> None:
        self._desk = desk

    async def listed(self, request: Request) -> Response:
        """Dead letters of a group, a page at a time."""
        query = queried(request, "since", "before", "resume")
        subject, group = part(request, "subject"), part(request, "group")
        window = {name: query.get(name, "") for name in ("since", "before")}
        pages = await self._desk.admin.dead_letters(
            subject, group, **self._bounds(window), page_size=PAGE, resume=query.get("resume") or None
        )
        page = await pages.next()
        here = path("subjects", subject, "groups", group, "dead")
        more = path("subjects", subject, "groups", group, "dead", **window, resume=pages.resume)
        links = [
            (f"{WORDS[word][0]} all of these …", path("subjects", subject, "groups", group, "dead", word, **window))
            for word in WORDS
        ]
        return self._desk.drawing.page(
            "Dead letters",
            SearchForm(
                here,
                [
                    FormField("since", "Dead since", window["since"], INSTANT_HINT),
                    FormField("before", "Dead before", window["before"]),
                ],
            ),
            LinkRow(links),
            DrawnTable(
                "",
                LETTER_COLUMNS,
                [_row(here, letter, self._desk.now_ms) for letter in page or ()],
                more=more if pages.resume else "",
                empty="The group has no such dead letter.",
            ),
            way=_way(subject, group),
        )

    async def letter(self, request: Request) -> Response:
        """One dead letter."""
        queried(request)
        subject, group = part(request, "subject"), part(request, "group")
        letter = await self._one(request)
        here = path("subjects", subject, "groups", group, "dead", letter.receipt.token)
        now = self._desk.now_ms
        facts: list[tuple[str, object]] = [
            ("dead since", _dead_since(letter, now)),
            ("reason", letter.reason),
            ("attempts", letter.attempts),
            ("first due", when(None if letter.first_due is None else instant_ms(letter.first_due, "due"), now)),
            ("key", letter.key if letter.key is not None else NONE),
            ("tags", ", ".join(letter.tags) or NONE),
            ("sequence", letter.origin),
            ("kept until", when(letter.receipt.deliver_at_ms, now)),
            ("id", letter.receipt.token),
        ]
        return self._desk.drawing.page(
            f"Dead letter {letter.origin}",
            LinkRow([(f"{title} …", f"{here}/{word}") for word, (title, _) in WORDS.items()]),
            FactTable(facts),
            *([TextBlock("Last error", lines(letter.error))] if letter.error else []),
            *header_facts(letter.headers),
            body_block(letter.body),
            way=(*_way(subject, group), ("Dead letters", path("subjects", subject, "groups", group, "dead"))),
        )

    # One letter.

    async def ask_redrive_one(self, request: Request) -> Response:
        """Says what it does to send a letter again."""
        return await self._ask_one(request, "redrive")

    async def ask_purge_one(self, request: Request) -> Response:
        """Says what it does to delete a letter."""
        return await self._ask_one(request, "purge")

    async def redrive_one(self, request: Request) -> Response:
        """Sends a letter again."""
        kept_as, receipt = await self._kept(request)
        moved = await self._desk.producer.reschedule(kept_as, receipt=receipt, deliver_at_ms=self._desk.now_ms)
        return self._said_one(request, "redrive", moved.answer.name, moved.answer is RescheduleAnswer.MOVED)

    async def purge_one(self, request: Request) -> Response:
        """Deletes a letter."""
        kept_as, receipt = await self._kept(request)
        answer = await self._desk.producer.cancel(kept_as, receipt=receipt)
        return self._said_one(request, "purge", answer.name, answer is CancelAnswer.CANCELLED)

    async def _ask_one(self, request: Request, word: str) -> Response:
        queried(request)
        subject, group = part(request, "subject"), part(request, "group")
        letter = await self._one(request)
        here = path("subjects", subject, "groups", group, "dead", letter.receipt.token)
        title, what = WORDS[word]
        return self._desk.drawing.page(
            f"{title}: this dead letter?",
            FactTable([("sequence", letter.origin), ("reason", letter.reason), ("last error", short(letter.error))]),
            SentenceList([f"It will {what}."]),
            ChangeForm(f"{here}/{word}", title, back=here),
            way=_way(subject, group),
        )

    async def _kept(self, request: Request) -> tuple[str, Receipt]:
        """Under which subject a letter is kept, and as what."""
        await form_of(request)
        place = one_place(await find_group(self._desk.meta, part(request, "subject"), part(request, "group")))
        return place.kept_as, Receipt.of_token(part(request, "id"))

    async def _one(self, request: Request) -> Letter:
        subject, group = part(request, "subject"), part(request, "group")
        found = await self._desk.admin.dead_letter(subject, group, Receipt.of_token(part(request, "id")))
        if found is None:
            raise Refusal(404, "unknown", "the group has no such dead letter any more")
        return found

    def _said_one(self, request: Request, word: str, answer: str, done: bool) -> Response:
        if done:
            return self._said(request, [f"The dead letter is {DONE[word]}."], "good")
        return self._said(request, [SAID[answer], "Nothing was changed."], "odd")

    # All of a window.

    async def ask_redrive(self, request: Request) -> Response:
        """Counts what would be sent again."""
        return await self._ask_all(request, "redrive")

    async def ask_purge(self, request: Request) -> Response:
        """Counts what would be deleted."""
        return await self._ask_all(request, "purge")

    async def redrive(self, request: Request) -> Response:
        """Sends all letters of a window again."""
        return await self._do_all(request, "redrive")

    async def purge(self, request: Request) -> Response:
        """Deletes all letters of a window."""
        return await self._do_all(request, "purge")

    async def _ask_all(self, request: Request, word: str) -> Response:
        query = queried(request, "since", "before")
        subject, group = part(request, "subject"), part(request, "group")
        window = {}
        for name in ("since", "before"):
            text = query.get(name, "").strip()
            # As instants, so that what was counted is what is done.
            window[name] = instant_text(self._desk.instant_of(text, name)) if text else ""
        admin = self._desk.admin
        walk = admin.redrive if word == "redrive" else admin.purge
        found = await walk(subject, group, **self._bounds(window), dry_run=True)
        title, what = WORDS[word]
        here = path("subjects", subject, "groups", group, "dead", **window)
        return self._desk.drawing.page(
            f"{title}: {counted(found.found, 'dead letter|dead letters')}?",
            SentenceList([f"{counted(found.found, 'dead letter|dead letters')} of {group} of {subject} {what}."]),
            ChangeForm(
                path("subjects", subject, "groups", group, "dead", word), f"{title} all", hidden=window, back=here
            ),
            way=_way(subject, group),
        )

    async def _do_all(self, request: Request, word: str) -> Response:
        form = await form_of(request, "since", "before")
        admin = self._desk.admin
        walk = admin.redrive if word == "redrive" else admin.purge
        bounds = self._bounds(form)
        walked = await walk(part(request, "subject"), part(request, "group"), **bounds, dry_run=False)
        letters = counted(walked.done, "dead letter is|dead letters are")
        return self._said(request, [f"{letters} {DONE[word]}.", *walked_sentences(walked)], "good")

    # Parts.

    def _said(self, request: Request, sentences: list[str], tone: str) -> Response:
        subject, group = part(request, "subject"), part(request, "group")
        links = [
            ("Dead letters", path("subjects", subject, "groups", group, "dead")),
            (group, path("subjects", subject, "groups", group)),
        ]
        return self._desk.done(f"Dead letters of {group}", sentences, links, tone)

    def _bounds(self, window: Mapping[str, str]) -> DeathWindow:
        return {
            "since": self._desk.bound_of(window.get("since"), "since"),
            "before": self._desk.bound_of(window.get("before"), "before"),
        }


def _row(here: str, letter: Letter, now_ms: int) -> tuple[object, ...]:
    return (
        link(_dead_since(letter, now_ms), f"{here}/{letter.receipt.token}"),
        short(letter.reason),
        short(letter.error),
        letter.attempts,
        short(letter.key) if letter.key is not None else NONE,
        size(len(letter.body)),
    )


def _dead_since(letter: Letter, now_ms: int) -> str:
    return when(None if letter.dead_at is None else instant_ms(letter.dead_at, "dead_at"), now_ms)


def _way(subject: str, group: str) -> tuple[tuple[str, str], ...]:
    return (*group_way(subject), (group, path("subjects", subject, "groups", group)))
