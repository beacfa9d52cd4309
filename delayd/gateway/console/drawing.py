"""Drawing: a page is a title and sections, each of which is one of the values below; the template knows how each looks.

Invariant: whatever comes from a message, a request or a server is text. Only `link` makes marks, of texts that it
escapes; characters that nobody sees or that turn others around are shown by their numbers (`visible`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import resources
from typing import ClassVar, NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import Response

import delayd.reading.report
from delayd.hours import duration_text, instant_text
from delayd.reading.report.summary import visible

HTML = "text/html; charset=utf-8"
NO_STORE = {"Cache-Control": "no-store"}
KEEP = {"Cache-Control": "public, max-age=31536000, immutable"}  # A static file has its digest in its name.
NAV = (
    ("Overview", "/"),
    ("Subjects", "/subjects"),
    ("Groups", "/groups"),
    ("Schedules", "/schedules"),
    ("Audits", "/audits"),
    ("Push targets", "/push"),
    ("Quotas", "/quotas"),
    ("Servers", "/servers"),
    ("Session", "/session"),
)
NONE = "–"


class Verdict(NamedTuple):
    """What somebody who has one second should read."""

    word: str
    sentences: Sequence[str] = ()
    tone: str = "calm"  # good, odd, bad or calm.
    kind: str = "verdict"


class FigureTile(NamedTuple):
    """One figure in large."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


class FigureTiles(NamedTuple):
    """Some figures beside each other."""

    tiles: Sequence[FigureTile]
    title: str = ""
    lead: str = ""
    kind: str = "tiles"


class WaitCard(NamedTuple):
    """Something that waits, why, and the command that helps."""

    title: str
    why: str
    command: str = ""
    tone: str = "bad"


class WaitCards(NamedTuple):
    """What waits for an operator, or is refused."""

    title: str
    cards: Sequence[WaitCard]
    kind: str = "cards"


class DrawnTable(NamedTuple):
    """A table. ``columns`` are names and kinds: ``n`` number, ``t`` text, ``w`` text of one line; ``more`` leads on."""

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[object]]
    lead: str = ""
    empty: str = "There is none."
    more: str = ""
    kind: str = "table"


class FactTable(NamedTuple):
    """Names and values of one thing."""

    facts: Sequence[tuple[str, object]]
    title: str = ""
    kind: str = "facts"


class FormField(NamedTuple):
    """What a form asks for; ``rows``: of a text of several lines."""

    name: str
    label: str
    value: str = ""
    hint: str = ""
    rows: int = 0
    secret: bool = False


class SearchForm(NamedTuple):
    """A form that only asks, and leads to a page that can be kept as a bookmark."""

    action: str
    fields: Sequence[FormField]
    word: str = "Show"
    kind: str = "search"


class ChangeForm(NamedTuple):
    """A form that changes something."""

    action: str
    word: str
    fields: Sequence[FormField] = ()
    hidden: Mapping[str, str] = {}
    back: str = ""
    tone: str = "bad"
    kind: str = "change"


class TextBlock(NamedTuple):
    """A longer text as it is, such as a body."""

    title: str
    text: str
    note: str = ""
    kind: str = "text"


class SentenceList(NamedTuple):
    """Sentences."""

    sentences: Sequence[object]
    title: str = ""
    kind: str = "sentences"


class LinkRow(NamedTuple):
    """What may be done here: words and where they lead."""

    links: Sequence[tuple[str, str]]
    title: str = ""
    kind: str = "links"


Section = (
    Verdict
    | FigureTiles
    | WaitCards
    | DrawnTable
    | FactTable
    | SearchForm
    | ChangeForm
    | TextBlock
    | SentenceList
    | LinkRow
)


class Drawing:
    """Makes pages; it has all templates and static files in memory."""

    _STATIC: ClassVar = {"console.css": "text/css", "icon.svg": "image/svg+xml"}

    def __init__(self) -> None:
        report = resources.files(delayd.reading.report).joinpath("page.css").read_bytes()
        own = {name: resources.files(__package__).joinpath("static", name).read_bytes() for name in self._STATIC}
        # The colours, tables and tiles are those of the page of an audit.
        own["console.css"] = report + own["console.css"]
        self.static = {_named(name, content): (content, self._STATIC[name]) for name, content in own.items()}
        self._template = Environment(
            autoescape=True, undefined=StrictUndefined, finalize=visible, loader=FunctionLoader(_template)
        ).get_template("page.html")
        self._shared = {
            "nav": NAV,
            "css": "/static/" + _named("console.css", own["console.css"]),
            "icon": "/static/" + _named("icon.svg", own["icon.svg"]),
        }

    def page(
        self,
        title: str,
        *sections: Section,
        lead: object = "",
        way: Sequence[tuple[str, str]] = (),
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """A page; ``way``: the pages above it."""
        text = self._template.render(self._shared, title=title, lead=lead, sections=sections, way=way)
        # What UTF-8 does not have was made visible, so nothing is lost here.
        return Response(text.encode(), status, {**NO_STORE, **(headers or {})}, HTML)


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _named(name: str, content: bytes) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{sha256(content).hexdigest()[:12]}.{ending}"


def path(*parts: str, **query: str | None) -> str:
    """A path of the console of names of any kind, with a query of what is not None."""
    text = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value}
    return f"{text}?{urlencode(given)}" if given else text


def link(text: object, to: str) -> Markup:
    """A link within the console."""
    return Markup('<a href="{}">{}</a>').format(to, visible(str(text)))


def lines(text: str) -> Markup:
    """A text of several lines, each as it is but for characters that nobody sees."""
    return Markup("\n").join(str(visible(line.expandtabs())) for line in text.split("\n"))


def exact(text: str) -> Markup:
    """A text for a field of a form, which gives it back as it is."""
    return escape(text)


def code(text: str) -> Markup:
    """A text in the type of code, such as a command."""
    return Markup("<code>{}</code>").format(visible(text))


def when(instant_ms: int | None, now_ms: int) -> str:
    """An instant in UTC, and how far away it is."""
    if instant_ms is None:
        return NONE
    apart_ms = instant_ms - now_ms
    away = f"in {duration_text(apart_ms)}" if apart_ms >= 0 else f"{duration_text(-apart_ms)} ago"
    return f"{instant_text(instant_ms)} ({away})"


def length(ms: int | None) -> str:
    """A length of time."""
    return NONE if ms is None else duration_text(ms)


def size(byte_count: int | None) -> str:
    """A number of bytes, in the largest unit of which there are ten."""
    if byte_count is None:
        return NONE
    count, unit = float(byte_count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 10 * 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}"


def number(count: int | None) -> object:
    """A count; the template groups its digits."""
    return NONE if count is None else count


def short(text: str, most: int = 120) -> str:
    """The beginning of a text."""
    return text if len(text) <= most else text[:most] + "…"
