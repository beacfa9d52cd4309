"""The overview: what is due when, how late it is, what waits for an operator and which command helps; and the lists of
groups, servers and quotas.

Invariant: a figure that a server does not tell is not shown, and a server that does not answer is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from starlette.requests import Request
from starlette.responses import Response

from delayd.client.asking import ask
from delayd.client.asking.ask import GROUPS, groups_head
from delayd.client.asking.looking import AskedServer, Named, left_of, look, look_at
from delayd.errors import BadArgument
from delayd.gateway.console.desk import NO_SECRET, PAGE, PageDesk, form_of, queried
from delayd.gateway.console.drawing import (
    NONE,
    ChangeForm,
    DrawnTable,
    FigureTile,
    FigureTiles,
    FormField,
    SearchForm,
    Section,
    SentenceList,
    Verdict,
    WaitCard,
    WaitCards,
    length,
    link,
    number,
    path,
    size,
)
from delayd.gateway.sends import part
from delayd.hours import duration_text
from delayd.machine.operating import counted
from delayd.wire.consuming import GroupInfo
from delayd.wire.scheduling import LIMITS

GROUPS_MAX = 20  # Those with the largest lag.
CARDS_MAX = 50
HORIZONS = (
    ("pending_overdue", "overdue", "due, and not handed over yet"),
    ("pending_minute", "within a minute", ""),
    ("pending_hour", "this hour and the next", "without those of the minute"),
    ("pending_day", "within a day", "behind these hours"),
    ("pending_further", "later", ""),
)
GROUP_COLUMNS = (
    ("subject", "t"),
    ("group", "t"),
    ("waiting", "n"),
    ("with consumers", "n"),
    ("to come again", "n"),
    ("state", "t"),
)


class ClusterPages:
    """Pages about the whole cluster."""

    def __init__(self, desk: PageDesk) -> None:
        self._desk = desk

    async def overview(self, request: Request) -> Response:
        """What somebody should see first."""
        queried(request)
        found = await look(self._desk.meta, ages=False)
        waits, refuses = found.waits, found.refuses
        groups = [group for seen in found.servers for group in seen.groups]
        sections: list[Section] = [
            _verdict(waits, refuses),
            *_cards("Waits for an operator", waits, "bad"),
            *_cards("Is refused for now", refuses, "odd"),
            self._due(found.servers),
            _lateness(found.servers),
            DrawnTable(
                "Groups with the largest lag",
                GROUP_COLUMNS,
                [group_row(group) for group in nlargest(GROUPS_MAX, groups, key=left_of) if left_of(group)],
                lead=f"{counted(len(groups), 'group|groups')} of consumers",
                empty="No group has anything left to do.",
            ),
            self._servers(found.servers),
        ]
        return self._desk.drawing.page("Overview", *sections, lead="What the servers say now; times are UTC.")

    async def servers(self, request: Request) -> Response:
        """Servers and their clocks."""
        queried(request)
        async with ask.meta(self._desk.meta) as connection:
            known = await ask.known_servers(connection)
        seen = await look_at(known)
        return self._desk.drawing.page(
            "Servers",
            self._servers(seen, title=""),
            SentenceList(
                (
                    "“as here”: the clock of that server differs by less than a second from that of this gateway.",
                    "A server that is away or silent, and what to do about it, stands on the overview.",
                )
            ),
        )

    async def groups(self, request: Request) -> Response:
        """All groups, a page at a time."""
        query = queried(request, "after", "subject")
        after = query.get("after", "").partition("\n")
        async with ask.meta(self._desk.meta) as connection:
            servers = [each for each in await ask.known_servers(connection, GROUPS.role) if each.alive]
        place = [after[0], after[2]]
        head = {**groups_head(query.get("subject") or None, ages=False), "limit": PAGE}

        async def first_page(server: ask.Known) -> list[GroupInfo]:
            async with ask.reached(server) as connection:
                return [*await anext(GROUPS.pages(connection, head, place))]

        listed = await ask.at_each(servers, first_page, lambda server: f"groups of {server.address} are missing")
        found = sorted(listed, key=lambda group: (group.subject, group.group))
        last = found[PAGE - 1] if len(found) >= PAGE else None
        behind = f"{last.subject}\n{last.group}" if last else None
        more = path("groups", after=behind, subject=query.get("subject")) if behind else ""
        rows = [group_row(group) for group in found[:PAGE]]
        return self._desk.drawing.page(
            "Groups",
            SearchForm(path("groups"), [FormField("subject", "Groups of this subject only", query.get("subject", ""))]),
            *_missing(listed.missing),
            DrawnTable("", GROUP_COLUMNS, rows, more=more, empty="There is no group of consumers here."),
        )

    # Quotas.

    async def quotas(self, request: Request) -> Response:
        """Quotas, and how much of them is used."""
        query = queried(request, "prefix")
        prefix = query.get("prefix", "")
        listed = await self._desk.admin.quotas(prefix)
        rows = [
            (
                link(each.subject, path("subjects", each.subject)),
                f"{each.server.log_id:016x}",
                *(number(getattr(each.info, name)) for name in LIMITS),
                number(each.info.pending_now if each.info.counted else None),
                number(each.info.highest if each.info.counted else None),
                size(each.info.bytes_now if each.info.counted else None),
                link("change", path("quotas", each.subject)),
            )
            for each in listed[:PAGE]
        ]
        names = ("due in a second", "pending", "bytes")
        columns = (
            ("subject", "t"),
            ("delay server", "t"),
            *((f"{name}, at most", "n") for name in names),
            ("pending now", "n"),
            ("fullest second", "n"),
            ("bytes now", "n"),
            ("its limits", "t"),
        )
        more = [f"{len(listed) - PAGE:,} more are not shown: say how their names begin."] if len(listed) > PAGE else []
        return self._desk.drawing.page(
            "Quotas",
            SearchForm(path("quotas"), [FormField("prefix", "Subjects that begin with", prefix)]),
            *_missing([*listed.missing, *more]),
            DrawnTable("", columns, rows, empty="No subject has a quota here."),
            lead="What may be pending of a subject, at each delay server.",
        )

    async def ask_quota(self, request: Request) -> Response:
        """Asks for the limits of a subject."""
        subject = _subject(request)
        listed = await self._desk.admin.quotas(subject)
        now = next((each.info for each in listed if each.subject == subject), None)
        labels = ("Messages that may be due in one second", "Messages that may be pending", "Bytes of them")
        fields = [
            FormField(name, label, str(value) if (value := getattr(now, name, None)) is not None else "", "empty: any")
            for name, label in zip(LIMITS, labels, strict=True)
        ]
        return self._desk.drawing.page(
            f"Quota of {subject}",
            *operator_note(self._desk),
            SentenceList(
                (
                    "Each delay server counts for itself, and refuses sends that are over the quota.",
                    "The new quota replaces the earlier one as a whole. Messages that are pending already stay.",
                    "With 0 nothing more may be sent.",
                )
            ),
            ChangeForm(path("quotas", subject), "Set the quota", fields, back=path("quotas")),
            way=(("Quotas", "/quotas"),),
        )

    async def set_quota(self, request: Request) -> Response:
        """Sets them."""
        subject = _subject(request)
        form = await form_of(request, *LIMITS)
        limits = {name: whole(name, text) for name, text in form.items() if text.strip()}
        await self._desk.admin.set_quota(subject, **limits)
        text = ", ".join(f"{name} {limit:,}" for name, limit in limits.items())
        return self._desk.done(
            f"Quota of {subject}",
            [f"{subject} may have {text}" if text else f"{subject} has no quota any more"],
            [("Quotas", "/quotas"), (subject, path("subjects", subject))],
        )

    # Parts of a page.

    def _due(self, servers: Sequence[AskedServer]) -> FigureTiles:
        """What is due when, over all delay servers."""
        tiles = [FigureTile("pending", f"{_sum(servers, 'pending') or 0:,}", "all of two years")]
        for name, title, note in HORIZONS:
            count = _sum(servers, name)
            if count is not None:
                tiles.append(
                    FigureTile(title, f"{count:,}", note, "odd" if name == "pending_overdue" and count else "")
                )
        furthest = max((seen.counter("furthest_due_ms") for seen in servers), default=0)
        if furthest:
            tiles[-1] = tiles[-1]._replace(note=f"the last in {duration_text(max(0, furthest - self._desk.now_ms))}")
        return FigureTiles(tiles, "What is due when")

    def _servers(self, servers: Sequence[AskedServer], title: str = "Servers") -> DrawnTable:
        columns = (
            ("server", "t"),
            ("address", "t"),
            ("state", "t"),
            ("up for", "t"),
            ("clock", "t"),
            ("pending", "n"),
            ("free disk", "n"),
        )
        return DrawnTable(title, columns, [_server_row(seen) for seen in servers], empty="Meta knows no server.")


def group_row(group: GroupInfo) -> tuple[object, ...]:
    """A group as a row of a table."""
    to = path("subjects", group.subject, "groups", group.group)
    return (
        link(group.subject, path("subjects", group.subject)),
        link(group.group, to),
        group.end - group.next + group.redelivering,
        group.outstanding,
        group.leaving,
        "paused" if group.paused else "exclusive" if group.exclusive else "",
    )


def operator_note(desk: PageDesk) -> list[Verdict]:
    """A word to whoever wants to change what this gateway may not."""
    return [] if desk.operates else [Verdict("Only an operator may change this.", (NO_SECRET,), "odd")]


def whole(name: str, text: str) -> int:
    """A whole number of a form; Refusal when it is none."""
    if not text.strip().isascii() or not text.strip().isdigit() or len(text) > 18:
        raise BadArgument(f"{name} is {text[:40]!r}, and must be a whole number")
    return int(text)


def _subject(request: Request) -> str:
    queried(request)
    return part(request, "subject")


def _sum(servers: Sequence[AskedServer], name: str) -> int | None:
    told = [value for seen in servers if seen.role == "delay" and (value := seen.told(name)) is not None]
    return sum(told) if told else None


def _verdict(waits: Sequence[Named], refuses: Sequence[Named]) -> Verdict:
    if waits:
        return Verdict(f"{counted(len(waits), 'thing waits|things wait')} for an operator.", tone="bad")
    if refuses:
        return Verdict("Nothing waits for an operator; something is refused for now.", tone="odd")
    return Verdict("All is well.", tone="good")


def _cards(title: str, listed: Sequence[Named], tone: str) -> list[WaitCards]:
    cards = [WaitCard(f"{name}: {wait.what}", wait.why, wait.command, tone) for name, wait in listed[:CARDS_MAX]]
    if len(listed) > CARDS_MAX:
        cards.append(WaitCard(f"{len(listed) - CARDS_MAX:,} more", "see all of them", "delayd status", tone))
    return [WaitCards(title, cards)] if cards else []


def _lateness(servers: Sequence[AskedServer]) -> FigureTiles:
    """How late messages are now; a delay server that handed over nothing in ten seconds tells nothing."""

    def most(name: str) -> str:
        told = [value for seen in servers if (value := seen.told(name)) is not None]
        return duration_text(max(told)) if told else NONE

    letters = _sum(servers, "dead_letters")
    tone = "odd" if letters else ""
    return FigureTiles(
        [
            FigureTile("half within", most("late_ms_p50")),
            FigureTile("99 of 100 within", most("late_ms_p99")),
            FigureTile("the latest", most("late_ms_max")),
            FigureTile("due for longest", most("oldest_overdue_ms"), "and not handed over"),
            *([] if letters is None else [FigureTile("dead letters", f"{letters:,}", "at the groups", tone)]),
        ],
        "Lateness and failures now",
        "From the due instant to the disk of the realtime server, in the last ten seconds, at the latest server.",
    )


def _server_row(seen: AskedServer) -> tuple[object, ...]:
    answered = not seen.fault and not ask.is_held(seen.status)
    return (
        seen.name,
        seen.address,
        seen.state or "serves",
        length(seen.up_ms) if not seen.fault else NONE,
        seen.clock_text if answered else NONE,
        number(seen.told("pending")),
        size(seen.told("free_bytes")),
    )


def _missing(sentences: Sequence[str]) -> list[SentenceList]:
    return [SentenceList(sentences)] if sentences else []
