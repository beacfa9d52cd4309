"""Pending messages of a subject: a list of them, one of them with its trace, and what may be done about it.

An *edit* is a new message in place of a pending one: with a key it takes the place of the old one there
(`on_conflict="replace"`), which is one decision of the key's owner. Without one it is sent first and the old one is
cancelled then; when that has left meanwhile, the new one is cancelled:

    new one kept ──▶ cancel the old one ──▶ CANCELLED: done
                                        └─▶ anything else: cancel the new one, and say so

Invariant: at no moment is neither of the two pending, and the page says which of them are.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.labels import Headers
from delayd.client.asking.messages import MessageInfo
from delayd.client.asking.walking import PendingMessage, Walked
from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument
from delayd.gateway.console.desk import INSTANT_HINT, PAGE, PageDesk, form_of, from_ms, queried
from delayd.gateway.console.drawing import (
    NONE,
    ChangeForm,
    DrawnTable,
    FactTable,
    FormField,
    LinkRow,
    SearchForm,
    Section,
    SentenceList,
    TextBlock,
    Verdict,
    exact,
    lines,
    link,
    path,
    short,
    size,
    when,
)
from delayd.gateway.messages import Named
from delayd.gateway.problems import Refusal
from delayd.gateway.sends import part
from delayd.gateway.traces import LifeStep, life_of
from delayd.hours import instant_text
from delayd.machine.operating import counted
from delayd.outcome import MessageState
from delayd.wire.asked import CancelAnswer, RescheduleAnswer

EDIT_OF = "delayd-edit-of"  # The header of an edited message: log_id and sequence of the one in whose place it is.
SHOWN_BYTES = 64 << 10  # Of a body.
EDIT_BYTES_MAX = 256 << 10  # A longer body is for programs.
HEX_BYTES = 1_024
SAID = {
    "UNKNOWN": "No such message is kept; the logs of its hour may be deleted.",
    "IN_FLIGHT": "The message is being handed over at this moment; ask again a moment later.",
    "ALREADY_DISPATCHED": "The message has left, or has ended in another way.",
    "CANCELLED": "The message was cancelled or replaced before.",
}
PENDING_COLUMNS = (("due", "w"), ("key", "t"), ("tags", "t"), ("body", "n"), ("sequence", "n"))


class PendingPages:
    """Pages about pending messages."""

    def __init__(self, desk: PageDesk) -> None:
        self._desk = desk

    async def listed(self, request: Request) -> Response:
        """Pending messages, a page at a time."""
        query = queried(request, "due_from", "due_before", "tag", "resume", "count")
        subject = part(request, "subject")
        window = {name: query.get(name, "") for name in ("due_from", "due_before", "tag")}
        pages = self._desk.producer.pending(
            subject,
            due_from=self._desk.bound_of(window["due_from"], "due_from"),
            due_before=self._desk.bound_of(window["due_before"], "due_before"),
            tag=window["tag"] or None,
            page_size=PAGE,
            resume=query.get("resume") or None,
        )
        page = await pages.next()
        messages = sorted(page or (), key=lambda message: message.receipt.deliver_at_ms)
        notes = []
        if pages.in_flight:
            notes.append(f"{counted(pages.in_flight, 'message is|messages are')} being handed over at this moment.")
        if pages.unread:
            notes.append("Something of this subject can't be read, so messages may be missing; see the overview.")
        more = path("subjects", subject, "pending", **window, resume=pages.resume) if pages.resume else ""
        rows = [self._row(subject, message) for message in messages]
        return self._desk.drawing.page(
            "Pending messages",
            self._search(subject, window),
            LinkRow([("Cancel all of these …", path("subjects", subject, "cancel", **window))]),
            *([SentenceList(notes)] if notes else []),
            DrawnTable("", PENDING_COLUMNS, rows, more=more, empty="No such message is pending."),
            lead=f"By the hour in which they are due, and within it as they were accepted; {PAGE} a page.",
            way=subject_way(subject),
        )

    async def find(self, request: Request) -> Response:
        """Leads to one message, by its key or the id of its receipt."""
        query = queried(request, "key", "id")
        subject, key, token = part(request, "subject"), query.get("key", ""), query.get("id", "").strip()
        if bool(key) == bool(token):
            raise BadArgument("give the key of a message, or the id of its receipt")
        if token:
            return await self._shown(subject, Receipt.of_token(token), None)
        return await self._shown(subject, None, key)

    async def message(self, request: Request) -> Response:
        """One message."""
        queried(request)
        subject, receipt = _named(request)
        return await self._shown(subject, receipt, None)

    # One message.

    async def _shown(self, subject: str, receipt: Receipt | None, key: str | None) -> Response:
        info = await self._desk.producer.get(subject, receipt=receipt, key=key)
        if info.state is MessageState.UNKNOWN:
            raise Refusal(404, "unknown", SAID["UNKNOWN"])
        sections: list[Section] = []
        if info.state is MessageState.PENDING:
            found = await self._read(subject, receipt, key)
            if found is not None:
                receipt = found.receipt
                sections = self._content(subject, found)
        title = f"Message {receipt.sequence}" if receipt else f"Message with the key {key}"
        trace = await self._trace(subject, receipt, key, info)
        return self._desk.drawing.page(
            title, Verdict(_state_sentence(info), tone=_tone(info)), *sections, *trace, way=subject_way(subject)
        )

    async def _read(self, subject: str, receipt: Receipt | None, key: str | None) -> PendingMessage | None:
        """A pending message with all that it has; None when it has left meanwhile."""
        page = await self._desk.producer.pending(subject, receipt=receipt, key=key, contents=True).next()
        return next(iter(page), None) if page is not None else None

    def _content(self, subject: str, message: PendingMessage) -> list[Section]:
        here = path("subjects", subject, "messages", message.receipt.token)
        links = [("Cancel …", f"{here}/cancel"), ("Move …", f"{here}/move"), ("Edit …", f"{here}/edit")]
        facts: list[tuple[str, object]] = [
            ("due", when(message.receipt.deliver_at_ms, self._desk.now_ms)),
            ("key", message.key if message.key is not None else NONE),
            ("tags", ", ".join(message.tags) or NONE),
            ("expires", when(message.expires_at_ms, self._desk.now_ms)),
            ("ordering key", "one, of which servers keep a digest" if message.ordered else NONE),
            ("id", message.receipt.token),
        ]
        edited = (message.headers or {}).get(EDIT_OF)
        if isinstance(edited, str):
            facts.append(("edited from", edited))
        return [
            LinkRow(links),
            FactTable(facts, "What it is"),
            *header_facts(message.headers or {}),
            body_block(message.body or b""),
        ]

    async def _trace(
        self, subject: str, receipt: Receipt | None, key: str | None, info: MessageInfo
    ) -> list[FactTable | DrawnTable | SentenceList]:
        """What became of it so far, as far as the servers that run can say."""
        now = self._desk.now_ms
        # A key and a receipt name two messages to a server when the key was taken again, so one of them is asked for.
        named = Named(subject, receipt, None if receipt else key)
        life = await life_of(self._desk.producer, self._desk.meta, named, info)
        facts = [(step.what.replace("_", " "), _step_text(step, now)) for step in life.steps]
        parts: list[FactTable | DrawnTable | SentenceList] = [FactTable(facts, "Trace")]
        if info.state is MessageState.DISPATCHED:
            rows = [
                (
                    link(each.group, path("subjects", subject, "groups", each.group)),
                    each.detail or _GROUP_SAID.get(each.state, each.state),
                    when(each.deliver_at_ms, now),
                )
                for each in life.groups
            ]
            columns = (("group", "t"), ("there", "t"), ("comes again", "t"))
            parts.append(DrawnTable("At its groups", columns, rows, empty="No group has consumed the subject yet."))
            more = [f"{life.groups_left:,} more groups are not shown."] if life.groups_left else []
            parts += [SentenceList(sentences)] if (sentences := [*life.missing, *more]) else []
        parts.append(
            SentenceList(
                [
                    Markup("All logs and lives of it: <code>delayd trace --data DIR --receipt {}</code>").format(
                        receipt.token if receipt else "ID"
                    )
                ]
            )
        )
        return parts

    # What may be done about it.

    async def ask_cancel(self, request: Request) -> Response:
        """Says what a cancel does."""
        return await self._ask(
            request,
            "Cancel",
            ["The message is never delivered. This can't be taken back; a new one can be sent."],
        )

    async def cancel(self, request: Request) -> Response:
        """Cancels a message."""
        await form_of(request)
        subject, receipt = _named(request)
        answer = await self._desk.producer.cancel(subject, receipt=receipt)
        if answer is CancelAnswer.CANCELLED:
            return self._done(subject, receipt, ["The message is cancelled: it is never delivered."])
        return self._done(subject, receipt, [SAID[answer.name], "Nothing was changed."], "odd")

    async def ask_move(self, request: Request) -> Response:
        """Asks for another instant."""
        return await self._ask(
            request,
            "Move",
            ["The message keeps its subject, key, tags, headers and body. Its earlier ids go on to stand for it."],
            _instant_field,
        )

    async def move(self, request: Request) -> Response:
        """Moves a message."""
        form = await form_of(request, "deliver_at")
        subject, receipt = _named(request)
        instant = self._desk.instant_of(form.get("deliver_at", ""), "the instant")
        moved = await self._desk.producer.reschedule(subject, receipt=receipt, deliver_at_ms=instant)
        if moved.answer is RescheduleAnswer.MOVED and moved.receipt is not None:
            due = when(moved.receipt.deliver_at_ms, self._desk.now_ms)
            return self._done(subject, moved.receipt, [f"The message is moved: it is due {due}."])
        return self._done(subject, receipt, [SAID[moved.answer.name], "Nothing was changed."], "odd")

    async def ask_edit(self, request: Request) -> Response:
        """Asks for the new form of a message."""
        way = (
            "It takes the place of this one at its key, at one moment."
            if (await self._one(request))[1].key is not None
            else "It is sent first, then this one is cancelled; when that fails, the new one is cancelled."
        )
        return await self._ask(
            request,
            "Edit",
            [f"A new message is sent in place of this one; its header {EDIT_OF} names this one.", way],
            _edit_fields,
        )

    async def edit(self, request: Request) -> Response:
        """Sends a message in place of another one."""
        form = await form_of(request, "body", "body_base64", "headers", "tags", "deliver_at")
        subject, old = await self._one(request)
        _check_editable(old)
        headers = {**_kept_headers(old), **_headers_of(form.get("headers", "")), EDIT_OF: _name(old.receipt)}
        key = old.key if old.key is not None else f"{EDIT_OF} {_name(old.receipt)}"
        sent = await self._desk.producer.send(
            subject,
            _body_of(form),
            deliver_at_ms=self._desk.instant_of(form.get("deliver_at", ""), "the instant"),
            headers=headers,
            key=key,
            # Without a key of its own, the form that is sent twice sends one message.
            on_conflict="keep" if old.key is None else "replace",
            tags=[tag for tag in form.get("tags", "").splitlines() if tag],
            expires_at=None if old.expires_at_ms is None else from_ms(old.expires_at_ms),
        )
        if old.key is not None and sent.replaced == old.receipt.sequence:
            return self._done(subject, sent, ["The new message is in place of the old one."])
        answer = await self._desk.producer.cancel(subject, receipt=old.receipt)
        if answer is CancelAnswer.CANCELLED:
            return self._done(subject, sent, ["The new message is kept, and the old one is cancelled."])
        back = await self._desk.producer.cancel(subject, receipt=sent)
        then = (
            "The new one is cancelled again, so nothing was changed."
            if back is CancelAnswer.CANCELLED
            else "The new one has left, too: both are delivered."
        )
        return self._done(subject, sent, [SAID[answer.name], then], "bad")

    # All of a window.

    async def ask_cancel_all(self, request: Request) -> Response:
        """Counts what a cancel of a window would end."""
        subject, window = self._window(request)
        found = await self._desk.producer.cancel_where(subject, **self._bounds(window), dry_run=True)
        here = path("subjects", subject, "pending", **window)
        sentences = [
            f"{counted(found.found, 'pending message|pending messages')} of {subject}{_window_text(window)}: "
            "they are never delivered. This can't be taken back.",
            "What is accepted meanwhile stays, and so does what leaves meanwhile.",
        ]
        return self._desk.drawing.page(
            f"Cancel {counted(found.found, 'message|messages')}?",
            SentenceList(sentences),
            ChangeForm(path("subjects", subject, "cancel"), "Cancel all of them", hidden=window, back=here),
            way=subject_way(subject),
        )

    async def cancel_all(self, request: Request) -> Response:
        """Cancels what is pending in a window."""
        form = await form_of(request, "due_from", "due_before", "tag")
        subject = part(request, "subject")
        walked = await self._desk.producer.cancel_where(subject, **self._bounds(form), dry_run=False)
        return self._desk.done(
            f"Pending messages of {subject}",
            [f"{counted(walked.done, 'message is|messages are')} cancelled.", *walked_sentences(walked)],
            [("Pending messages", path("subjects", subject, "pending")), (subject, path("subjects", subject))],
        )

    # Parts of a page.

    def _window(self, request: Request) -> tuple[str, dict[str, str]]:
        """The window of a query; its bounds as instants, so that what was counted is what is cancelled."""
        query = queried(request, "due_from", "due_before", "tag")
        window = {"tag": query.get("tag", "")}
        for name in ("due_from", "due_before"):
            text = query.get(name, "").strip()
            window[name] = instant_text(self._desk.instant_of(text, name)) if text else ""
        return part(request, "subject"), window

    def _bounds(self, window: Mapping[str, str]) -> WindowBounds:
        return {
            "due_from": self._desk.bound_of(window.get("due_from"), "due_from"),
            "due_before": self._desk.bound_of(window.get("due_before"), "due_before"),
            "tag": window.get("tag") or None,
        }

    def _search(self, subject: str, window: Mapping[str, str]) -> SearchForm:
        return SearchForm(
            path("subjects", subject, "pending"),
            [
                FormField("due_from", "Due from", window["due_from"], INSTANT_HINT),
                FormField("due_before", "Due before", window["due_before"]),
                FormField("tag", "Tag", window["tag"]),
            ],
        )

    def _row(self, subject: str, message: PendingMessage) -> tuple[object, ...]:
        receipt = message.receipt
        return (
            link(when(receipt.deliver_at_ms, self._desk.now_ms), path("subjects", subject, "messages", receipt.token)),
            short(message.key) if message.key is not None else NONE,
            short(", ".join(message.tags)) or NONE,
            size(message.size),
            receipt.sequence,
        )

    async def _one(self, request: Request) -> tuple[str, PendingMessage]:
        """The pending message that a path names; Refusal when it is pending no more."""
        subject, receipt = _named(request)
        found = await self._read(subject, receipt, None)
        if found is None:
            raise Refusal(409, "not_pending", "this message is not pending any more; its page says what became of it")
        return subject, found

    async def _ask(
        self,
        request: Request,
        word: str,
        costs: Sequence[str],
        fields_of: Callable[[PendingMessage], Sequence[FormField]] = lambda message: (),
    ) -> Response:
        """The page that asks before a pending message is changed."""
        queried(request)
        subject, message = await self._one(request)
        if word == "Edit":
            _check_editable(message)
        receipt = message.receipt
        here = path("subjects", subject, "messages", receipt.token)
        facts = [
            ("due", when(receipt.deliver_at_ms, self._desk.now_ms)),
            ("key", message.key if message.key is not None else NONE),
            ("sequence", f"{receipt.sequence} at {receipt.log_id:016x}"),
        ]
        return self._desk.drawing.page(
            f"{word} this message?",
            FactTable(facts),
            SentenceList(costs),
            ChangeForm(f"{here}/{word.lower()}", f"{word} it", fields_of(message), back=here),
            way=(*subject_way(subject), (f"Message {receipt.sequence}", here)),
        )

    def _done(self, subject: str, receipt: Receipt, sentences: Sequence[str], tone: str = "good") -> Response:
        links = [
            ("The message", path("subjects", subject, "messages", receipt.token)),
            ("Pending messages", path("subjects", subject, "pending")),
        ]
        return self._desk.done(f"Message {receipt.sequence} of {subject}", sentences, links, tone)


class WindowBounds(TypedDict):
    """Which pending messages are meant."""

    due_from: datetime | None
    due_before: datetime | None
    tag: str | None


_GROUP_SAID = {
    "dispatched": "handed over; nothing waits to come to it again",
    "pending": "waits to come again",
    "dead": "is a dead letter",
    "in_flight": "comes again at this moment",
}


def subject_way(subject: str) -> tuple[tuple[str, str], ...]:
    """The pages above one of a subject."""
    return ("Subjects", "/subjects"), (subject, path("subjects", subject))


def walked_sentences(walked: Walked) -> list[str]:
    """What is said of a walk beside what it did."""
    sentences = []
    if walked.in_flight:
        sentences.append(f"{counted(walked.in_flight, 'message was|messages were')} being handed over: not changed.")
    if walked.ended:
        sentences.append(f"{counted(walked.ended, 'message|messages')} left or ended meanwhile.")
    if walked.unread:
        sentences.append("Something can't be read, so messages may be missing; see the overview.")
    return sentences


def body_block(body: bytes) -> TextBlock:
    """The beginning of a body, as text where it is one."""
    shown = body[:SHOWN_BYTES]
    cut = f"; the first {size(SHOWN_BYTES)} are shown" if len(body) > SHOWN_BYTES else ""
    text = _text_of(body)
    if text is not None:
        return TextBlock("Body", lines(shown.decode(errors="ignore")), f"{size(len(body))} of text{cut}.")
    pairs = [shown[start : start + 16].hex(" ") for start in range(0, min(len(shown), HEX_BYTES), 16)]
    return TextBlock(
        "Body", lines("\n".join(pairs)), f"{size(len(body))} that are no text; the first {HEX_BYTES} are shown."
    )


def header_facts(headers: Headers) -> list[FactTable]:
    """The headers of a message, if there are any."""
    facts = [(name, _header_text(value)) for name, value in headers.items()]
    return [FactTable(facts, "Headers")] if facts else []


def _text_of(body: bytes) -> str | None:
    """A body as a text that a form can give back; None when it is none."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if all(each.isprintable() or each in "\n\t" for each in text) else None


def _named(request: Request) -> tuple[str, Receipt]:
    return part(request, "subject"), Receipt.of_token(part(request, "id"))


def _name(receipt: Receipt) -> str:
    return f"{receipt.log_id:016x}-{receipt.sequence}"


def _step_text(step: LifeStep, now_ms: int) -> str:
    """When it was, by how much that was late, and where."""
    said = [] if step.at_ms is None else [when(step.at_ms, now_ms)]
    said += [] if step.late_ms is None else [f"{step.late_ms:,} ms after it was due"]
    places = (("at {}", step.log_id), ("sequence {}", step.sequence), ("offset {}", step.offset))
    return ", ".join([*said, *(text.format(place) for text, place in places if place is not None)])


def _state_sentence(info: MessageInfo) -> str:
    return f"The message is {info.state.name.lower().replace('_', ' ')}."


def _tone(info: MessageInfo) -> str:
    if info.state in (MessageState.PENDING, MessageState.DISPATCHED, MessageState.IN_FLIGHT):
        return "calm"
    return "odd"


def _header_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else f"{value[:HEX_BYTES].hex(' ')} ({len(value)} bytes)"


def _window_text(window: Mapping[str, str]) -> str:
    words = {"due_from": " due from {}", "due_before": " due before {}", "tag": " with the tag {}"}
    return "".join(words[name].format(window[name]) for name in words if window.get(name))


# The form of an edit.


def _instant_field(message: PendingMessage) -> list[FormField]:
    return [FormField("deliver_at", "Due", instant_text(message.receipt.deliver_at_ms), INSTANT_HINT)]


def _edit_fields(message: PendingMessage) -> list[FormField]:
    body = message.body or b""
    text = _text_of(body)
    field = (
        FormField("body_base64", "Body, in base64", base64.b64encode(body).decode(), rows=10)
        if text is None
        else FormField("body", "Body", exact(text), rows=10)
    )
    headers = "\n".join(f"{name}: {value}" for name, value in _form_headers(message).items())
    kept = _kept_headers(message)
    hint = "one a line, as name: value"
    if kept:
        hint += f"; {counted(len(kept), 'other one stays|other ones stay')} as it is"
    return [
        field,
        *_instant_field(message),
        FormField("headers", "Headers", exact(headers), hint, rows=4),
        FormField("tags", "Tags", exact("\n".join(message.tags)), "one a line", rows=2),
    ]


def _check_editable(message: PendingMessage) -> None:
    if message.ordered:
        why = "it has an ordering key, of which servers keep a digest only, so a new message would lose it"
        raise Refusal(409, "not_editable", f"this message can't be edited here: {why}")
    if message.size > EDIT_BYTES_MAX:
        raise Refusal(409, "not_editable", f"its body has {message.size} bytes; {EDIT_BYTES_MAX} can be edited here")


def _form_headers(message: PendingMessage) -> dict[str, str]:
    """Headers that a line of a form can have."""
    return {
        name: value
        for name, value in (message.headers or {}).items()
        if isinstance(value, str)
        and (name, value) == _pair(f"{name}: {value}")
        and f"{name}{value}".isprintable()
        and name != EDIT_OF
    }


def _kept_headers(message: PendingMessage) -> Headers:
    """Headers that an edit leaves as they are."""
    shown = _form_headers(message)
    return {name: value for name, value in (message.headers or {}).items() if name not in shown and name != EDIT_OF}


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _headers_of(text: str) -> dict[str, str]:
    pairs = [_pair(line) for line in text.splitlines() if line.strip()]
    if len(dict(pairs)) < len(pairs) or not all(name for name, _ in pairs):
        raise BadArgument("headers: write one a line, as name: value, each name once")
    return dict(pairs)


def _body_of(form: Mapping[str, str]) -> bytes:
    """The body of a form; browsers end the lines of a text with CR LF, whatever it had."""
    if "body_base64" in form:
        try:
            return base64.b64decode("".join(form["body_base64"].split()), validate=True)
        except ValueError as error:
            raise BadArgument(f"the body is not base64: {error}") from error
    if "body" not in form:
        raise BadArgument("the form has no body")
    return form["body"].replace("\r\n", "\n").encode()
