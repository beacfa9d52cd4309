"""Audits: those of the folder that the gateway was given, one with its findings, and the page that was written of it.

Invariant: the page of an audit comes as it lies in the folder, and may be anybody's: it is only ever sent enclosed
(`delayd.gateway.front.EnclosedPage`). A command that is shown is made here, of values that were read as what they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from delayd.errors import BadArgument
from delayd.gateway.console.audit_folder import AuditFigures, AuditFolder, AuditUnreadable, FoundRow, KeptAudit
from delayd.gateway.console.desk import PAGE, PageDesk, queried
from delayd.gateway.console.drawing import (
    NO_STORE,
    NONE,
    DrawnTable,
    FactTable,
    FigureTile,
    FigureTiles,
    LinkRow,
    Section,
    SentenceList,
    Verdict,
    code,
    link,
    path,
    short,
    when,
)
from delayd.gateway.front import EnclosedPage
from delayd.gateway.problems import Refusal
from delayd.gateway.sends import part
from delayd.hours import duration_text, hour_from_name, instant_text
from delayd.machine.operating import counted
from delayd.reading.report.summary import command_of
from delayd.reading.subject_figures import CLASSES, PARTS

LISTED = 50  # Audits on one page: each is a file that is read.
SENTENCES_MAX = 50
SECONDS = len("2027-01-31T09:00:00")
NO_FOLDER = (
    "This gateway was given no folder of audits: write audits to one with delayd audit --report FOLDER, and start the "
    "gateway with --audits FOLDER."
)
VERDICTS = {
    "balanced": ("The books balance", "good"),
    "accepted": ("The books do not balance; all findings are accepted", "odd"),
    "not_balanced": ("The books do NOT balance", "bad"),
    "damaged": ("The books could NOT be audited", "bad"),
}
FAULTS = ("lost", "duplicate", "early")
CONTRADICTIONS = ("orphan", "mismatch", "conservation")
AUDIT_COLUMNS = (
    ("books read at", "w"),
    ("verdict", "t"),
    ("places", "t"),
    ("hours", "t"),
    ("scheduled", "n"),
    ("findings", "n"),
    ("name", "w"),
)
FOUND_COLUMNS = (
    ("finding", "w"),
    ("hour", "w"),
    ("subject", "t"),
    ("message", "n"),
    ("what was found", "t"),
    ("command that shows it", "t"),
)

R = TypeVar("R")


class AuditPages:
    """Pages about audits."""

    def __init__(self, desk: PageDesk, folder: AuditFolder | None) -> None:
        self._desk = desk
        self._folder = folder
        self._turn = asyncio.Semaphore(1)  # One thread and 64 MiB are enough for all who look.

    async def listed(self, request: Request) -> Response:
        """Audits, the last first."""
        before = queried(request, "before").get("before") or None
        folder = self._folder
        if folder is None:
            return self._desk.drawing.page("Audits", Verdict("No audits are shown", (NO_FOLDER,)))
        found = await self._asked(lambda: folder.listed(before, LISTED))
        more = path("audits", before=found.audits[-1].name) if found.more else ""
        cut = "The folder has more files than are looked at here; move older audits to another one."
        return self._desk.drawing.page(
            "Audits",
            *([SentenceList([cut])] if found.is_cut else []),
            DrawnTable(
                "",
                AUDIT_COLUMNS,
                [self._row(each) for each in found.audits],
                more=more,
                empty="There is none yet; delayd audit --report writes them to this folder.",
            ),
            lead=f"Audits in {folder.path}, by name, the last first.",
        )

    async def audit(self, request: Request) -> Response:
        """One audit."""
        queried(request)
        name, folder = part(request, "name"), self._needed()
        audit = await self._asked(lambda: folder.audit(name))
        links = [LinkRow([("Page of this audit, to be printed", path("audits", name, "page"))])]
        shown = [] if audit.figures is None else list(_sections(audit.figures))
        return self._desk.drawing.page(
            name,
            *([] if shown else [Verdict("There are no figures", (audit.unread,), "odd")]),
            *shown[:1],
            *(links if audit.has_page else []),
            *shown[1:],
            lead="" if audit.figures is None else when(audit.figures.read_at_ms, self._desk.now_ms),
            way=(("Audits", "/audits"),),
        )

    async def page(self, request: Request) -> Response:
        """The page that was written of one audit."""
        queried(request)
        name, folder = part(request, "name"), self._needed()
        return EnclosedPage(await self._asked(lambda: folder.page(name)), headers=NO_STORE)

    def _needed(self) -> AuditFolder:
        if self._folder is None:
            raise Refusal(404, "unknown", NO_FOLDER)
        return self._folder

    async def _asked(self, ask: Callable[[], R]) -> R:
        """Ask the folder, beside the loop."""
        try:
            async with self._turn:
                return await asyncio.to_thread(ask)
        except AuditUnreadable as error:
            status, word = (404, "unknown") if error.is_missing else (500, "unreadable")
            raise Refusal(status, word, error.why) from error

    def _row(self, audit: KeptAudit) -> tuple[object, ...]:
        name = link(short(audit.name), path("audits", audit.name))
        figures = audit.figures
        if figures is None:
            return (NONE, short(audit.unread, 300), NONE, NONE, NONE, NONE, name)
        return (
            f"{instant_text(figures.read_at_ms)[:SECONDS]}Z",
            _verdict(figures)[0],
            short(" ".join(figures.places)),
            short(figures.chosen) or NONE,
            _count(figures, "scheduled"),
            figures.findings_count + len(figures.broken_seals),
            name,
        )


def _verdict(figures: AuditFigures) -> tuple[str, str]:
    return VERDICTS.get(figures.verdict) or VERDICTS["balanced" if figures.balanced else "not_balanced"]


def _count(figures: AuditFigures, name: str) -> int:
    return figures.total.get(name) or 0


def _sections(figures: AuditFigures) -> Iterator[Section]:
    word, tone = _verdict(figures)
    yield Verdict(word, _said(figures), tone)
    if not figures.damage:
        yield FigureTiles(list(_tiles(figures)))
    yield FactTable(
        [
            ("places", short(" ".join(figures.places), 1_000)),
            ("hours", short(figures.chosen) or NONE),
            *((name.replace("_", " "), count) for name in (*CLASSES, *PARTS) if (count := _count(figures, name))),
        ],
        "Scope and totals",
    )
    for title, sentences in (
        ("Files that can't be read", figures.damage),
        ("Totals that do not add up", figures.conservation),
        ("Broken seals", [f"{each.hour}: {each.differs}" for each in figures.broken_seals]),
        ("Remarks", figures.remarks),
    ):
        if sentences:
            left = len(sentences) - SENTENCES_MAX
            rest = [f"… and {left:,} more; the page of the audit, or its JSON, has them"] if left > 0 else []
            yield SentenceList([short(each, 1_000) for each in sentences[:SENTENCES_MAX]] + rest, title)
    shown = figures.findings[:PAGE]
    all_of = f"{counted(figures.findings_count, 'finding|findings')}."
    if figures.findings_count > len(shown):
        all_of += f" These are {len(shown):,} of them; delayd audit --findings N keeps more, and the page has causes."
    homes = {each.log_id: each.place for each in figures.servers}
    rows = [_found(each, figures.places, homes.get(each.delay_log_id)) for each in shown]
    if figures.findings_count:
        yield DrawnTable("Findings", FOUND_COLUMNS, rows, lead=all_of)
    if figures.servers:
        servers = [
            (each.role, each.log_id, short(each.state), short(each.place or NONE)) for each in figures.servers[:PAGE]
        ]
        columns = (("server", "w"), ("log_id", "w"), ("state then", "w"), ("directory", "t"))
        yield DrawnTable("Servers", columns, servers)


def _said(figures: AuditFigures) -> list[str]:
    if figures.damage:
        what = counted(len(figures.damage), "file|files")
        return [f"{what} can't be read, so nobody can say what became of the messages."]
    faults = {name: _count(figures, name) for name in (*FAULTS, *CONTRADICTIONS)}
    faults["conservation"] += len(figures.conservation)
    return [", ".join(f"{name} {count:,}" for name, count in faults.items()).capitalize() + "."]


def _tiles(figures: AuditFigures) -> Iterator[FigureTile]:
    for name in ("scheduled", "dispatched"):
        yield FigureTile(name, f"{_count(figures, name):,}")
    for name in FAULTS:
        count = _count(figures, name)
        yield FigureTile(name, f"{count:,}", tone="bad" if count else "good")
    rest = sum(_count(figures, name) for name in CONTRADICTIONS) + len(figures.conservation)
    yield FigureTile("contradictions", f"{rest:,}", ", ".join(CONTRADICTIONS), "bad" if rest else "good")
    late, most = _count(figures, "late"), figures.total.get("late_max_ms")
    note = "" if most is None else f"at most {duration_text(most)}"
    yield FigureTile("late", f"{late:,}", note, "odd" if late else "good")


def _found(row: FoundRow, places: list[str], home: str | None) -> tuple[object, ...]:
    subject = link(short(row.subject), path("subjects", row.subject)) if row.subject else NONE
    try:
        hour = hour_from_name(row.hour)
        shown: object = code(command_of(places, home, int(row.delay_log_id, 16), hour, row.sequence, row.subject))
    except BadArgument:
        shown = NONE  # A finding of all hours, which no audit of some hours shows.
    return (row.finding, row.hour, subject, row.sequence or NONE, short(row.detail, 1_000), shown)
