"""Subjects and groups: the list of subjects, one subject with its groups, one group, which may be paused."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from delayd.client.asking.ask import find_group, list_groups
from delayd.client.asking.subjects import list_subjects
from delayd.gateway.console.desk import PAGE, PageDesk, form_of, queried
from delayd.gateway.console.drawing import (
    NONE,
    ChangeForm,
    DrawnTable,
    FactTable,
    FormField,
    LinkRow,
    SearchForm,
    SentenceList,
    length,
    link,
    number,
    path,
)
from delayd.gateway.console.overview import GROUP_COLUMNS, group_row, operator_note
from delayd.gateway.sends import part

SUBJECT_COLUMNS = (
    ("subject", "t"),
    ("realtime server", "t"),
    ("kept messages", "n"),
    ("groups", "n"),
    ("unreadable", "n"),
    ("oldest kept", "t"),
    ("still to come", "t"),
)


class SubjectPages:
    """Pages about subjects."""

    def __init__(self, desk: PageDesk) -> None:
        self._desk = desk

    async def listed(self, request: Request) -> Response:
        """Subjects, a page at a time."""
        query = queried(request, "prefix", "after")
        prefix = query.get("prefix", "")
        found = await list_subjects(self._desk.meta, prefix, after=query.get("after", ""), limit=PAGE)
        rows = [
            (
                link(each.subject, path("subjects", each.subject)),
                each.server.address if each.server else f"{each.log_id:016x}, which meta does not know",
                number(each.info.messages if each.info else None),
                number(each.info.groups if each.info else None),
                number(each.info.quarantined if each.info else None),
                length(each.info.oldest_ms_ago if each.info else None),
                link("pending", path("subjects", each.subject, "pending")),
            )
            for each in found.subjects[:PAGE]
        ]
        more = len(found.subjects) > PAGE
        behind = path("subjects", prefix=prefix, after=found.subjects[PAGE - 1].subject) if more else ""
        return self._desk.drawing.page(
            "Subjects",
            SearchForm(path("subjects"), [FormField("prefix", "Begin with", prefix)]),
            *([SentenceList(found.missing)] if found.missing else []),
            DrawnTable("", SUBJECT_COLUMNS, rows, more=behind, empty="Nobody has sent to such a subject yet."),
            lead="Each subject from its first send on, and what its realtime server keeps of it.",
        )

    async def subject(self, request: Request) -> Response:
        """One subject, and its groups."""
        queried(request)
        subject = part(request, "subject")
        groups = await list_groups(self._desk.meta, subject, ages=False)
        rows = [group_row(each.info)[1:] for each in groups[:PAGE]]
        quotas = [each for each in await self._desk.admin.quotas(subject) if each.subject == subject]
        links = [
            ("Pending messages", path("subjects", subject, "pending")),
            ("Quota", path("quotas", subject)),
        ]
        more = [f"{len(groups) - PAGE:,} more groups are not shown"] if len(groups) > PAGE else []
        missing = [*groups.missing, *more]
        return self._desk.drawing.page(
            subject,
            LinkRow(links),
            SearchForm(
                path("subjects", subject, "find"),
                [
                    FormField("key", "Key", hint="of the message that is pending with it, or was the last"),
                    FormField("id", "Id", hint="of a receipt"),
                ],
                "Find one message",
            ),
            DrawnTable("Groups of consumers", GROUP_COLUMNS[1:], rows, empty="No group has consumed it yet."),
            *([SentenceList(missing)] if missing else []),
            *(
                [
                    FactTable(
                        [
                            (f"at {each.server.log_id:016x}", f"{number(each.info.pending_now)} pending")
                            for each in quotas
                        ],
                        "Quota",
                    )
                ]
                if quotas
                else []
            ),
            way=(("Subjects", "/subjects"),),
        )

    async def group(self, request: Request) -> Response:
        """One group."""
        queried(request)
        subject, group = part(request, "subject"), part(request, "group")
        places = await find_group(self._desk.meta, subject, group)
        word = "resume" if any(place.info.paused for place in places) else "pause"
        links = [
            ("Dead letters", path("subjects", subject, "groups", group, "dead")),
            (f"{word.capitalize()} the group", path("subjects", subject, "groups", group, word)),
        ]
        tables = [
            FactTable(
                [
                    ("realtime server", place.server.address),
                    ("waiting", place.waiting + place.info.redelivering),
                    ("with consumers", place.info.outstanding),
                    ("to come again, or dead", place.info.leaving),
                    ("oldest message", length(place.info.oldest_ms_ago)),
                    ("next consume sequence", place.info.next),
                    ("end of the subject", place.info.end),
                    ("unreadable", place.info.quarantined),
                    ("paused", place.info.paused),
                    ("order", "ordered" if place.info.ordered else NONE),
                    ("exclusive", place.info.exclusive),
                    ("wants tags", place.info.filter or NONE),
                ]
            )
            for place in places
        ]
        return self._desk.drawing.page(group, LinkRow(links), *tables, way=group_way(subject))

    async def ask_pause(self, request: Request) -> Response:
        """Says what a pause does."""
        return self._ask(
            request,
            "Pause",
            "Its consumers get no more messages, also after restarts, until the group is resumed.",
            "They may finish and acknowledge what they have. Messages wait, and none is lost.",
        )

    async def ask_resume(self, request: Request) -> Response:
        """Says what the end of a pause does."""
        return self._ask(request, "Resume", "Its consumers get messages again, what waited first.")

    def _ask(self, request: Request, word: str, *costs: str) -> Response:
        queried(request)
        subject, group = part(request, "subject"), part(request, "group")
        here = path("subjects", subject, "groups", group)
        return self._desk.drawing.page(
            f"{word} {group}?",
            *operator_note(self._desk),
            SentenceList(costs),
            ChangeForm(f"{here}/{word.lower()}", f"{word} the group", back=here),
            way=(*group_way(subject), (group, here)),
        )

    async def pause(self, request: Request) -> Response:
        """Pauses a group."""
        return await self._set(request, "paused")

    async def resume(self, request: Request) -> Response:
        """Resumes it."""
        return await self._set(request, "resumed")

    async def _set(self, request: Request, word: str) -> Response:
        await form_of(request)
        subject, group = part(request, "subject"), part(request, "group")
        admin = self._desk.admin
        await (admin.pause if word == "paused" else admin.resume)(subject, group)
        links = [(group, path("subjects", subject, "groups", group)), (subject, path("subjects", subject))]
        return self._desk.done(f"{group} of {subject}", [f"{group} of {subject} is {word}."], links)


def group_way(subject: str) -> tuple[tuple[str, str], ...]:
    """The pages above one of a group."""
    return ("Subjects", "/subjects"), (subject, path("subjects", subject))
