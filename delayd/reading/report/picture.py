"""Picture: the verdict, totals and charts of an audit as a PNG, for a chat, a slide or a ticket.

Invariants. The shapes are those of the page's charts, and the colours are those that its style sheet has for the light.
Nothing of matplotlib's global state is changed, and no text is read as markup.
"""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

from delayd.hours import instant_text
from delayd.reading.books import AuditReport
from delayd.reading.findings import JudgedAcceptance
from delayd.reading.report.charts import (
    Chart,
    ChartFrame,
    ChartGroup,
    ChartLine,
    ChartText,
    course,
    distribution,
    heat_map,
    periods_of,
)
from delayd.reading.report.summary import (
    UNSEEN,
    Tile,
    Verdict,
    scope_of,
    tiles_of,
    verdict_of,
    verdict_on_damage,
    visible,
)

PX, DPI = (1600, 1000), 100
SCALE = 1.3  # Pixels for one of the page's, whose text of 12 is too small for a slide.
WIDTH, HEIGHT = PX[0] / SCALE, PX[1] / SCALE
MARGIN, LINE = 22, 18
LINE_CHARACTERS, LINES_MAX = 155, 12  # Of small text: what fits the width, and how many lines of sentences there are.
FONT = "DejaVu Sans"  # It comes with matplotlib, so pictures look alike everywhere.
ANCHORS: Mapping[str, Literal["left", "center", "right"]] = {"start": "left", "middle": "center", "end": "right"}
Colour = tuple[float, float, float, float]


def audit_picture(report: AuditReport, judged: Sequence[JudgedAcceptance] = (), *, chosen: str = "every hour") -> bytes:
    """Draw what `audit_page` says first, and its charts, as a PNG of 1600 × 1000 pixels; arguments as there."""
    picture = _Picture()
    # Places come last, for they may be more than a line has room for.
    scope = ", ".join(value for _, value in reversed([*scope_of(report, chosen)]))
    top = picture.head(verdict_of(report, judged), scope, [*tiles_of(report)])
    if report.hours:
        what, periods = periods_of(report.hours)
        hours = heat_map(periods, ChartFrame(WIDTH - 2 * MARGIN))
        top = picture.chart(hours, f"Messages of each {what} by what became of them (UTC)", MARGIN, top)
        if report.total.lateness.any():
            frame = ChartFrame((WIDTH - 3 * MARGIN) / 2, HEIGHT - top - 4 * LINE)
            late = distribution(report.total, report.late_ms_limit, frame)
            picture.chart(late, late.title, MARGIN, top)
            title = f"Lateness of each {what}: the line is p50, dark up to p99, light to the latest"
            picture.chart(course(periods, frame), title, 2 * MARGIN + frame.width, top)
    return picture.png()


def damage_picture(data: Sequence[str], read_at_ms: int, damage: Sequence[str]) -> bytes:
    """Draw that damaged files have ended an audit; arguments as of `damage_page`."""
    picture, verdict = _Picture(), verdict_on_damage(damage)
    said = verdict._replace(sentences=[*verdict.sentences, *damage])
    picture.head(said, f"{' '.join(data)}, {instant_text(read_at_ms)}")
    return picture.png()


class _Picture:
    """A figure whose coordinates are those of charts: y grows downwards."""

    def __init__(self) -> None:
        css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
        # What the style sheet says first is for the light.
        self._colours = dict(reversed(re.findall(r"--(\w+): (#\w+)", css)))
        self._rules: dict[str, dict[str, str]] = {}
        for name, body in re.findall(r"(?<=\s)\.(\w+) \{([^}]*)\}", css):
            self._rules.setdefault(name, dict(re.findall(r"([\w-]+): ([^;]+);", body)))
        self._glyphs = get_font(findfont(FontProperties(family=FONT))).get_charmap()
        self._figure = Figure(figsize=(PX[0] / DPI, PX[1] / DPI), dpi=DPI, facecolor=self._colours["paper"])
        self._axes = self._figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self._axes.set_axis_off()

    def head(self, verdict: Verdict, scope: str, tiles: Sequence[Tile] = ()) -> float:
        """Draw what stands above the charts; returns where they may begin."""
        self._text(MARGIN, 40, verdict.word, self._colours[verdict.tone], size=25).set_fontweight("bold")
        sentences = [line for each in verdict.sentences for line in textwrap.wrap(each, LINE_CHARACTERS)]
        rest = [f"… and {len(sentences) - LINES_MAX:,} more lines"] if len(sentences) > LINES_MAX else []
        top = 44.0
        for number, line in enumerate((_shortened(scope), *sentences[:LINES_MAX], *rest)):
            top += LINE
            self._text(MARGIN, top, line, self._colours["ink" if number else "soft"])
        for number, tile in enumerate(tiles):
            room = (WIDTH - 2 * MARGIN) / len(tiles)
            x, size = MARGIN + number * room, min(19, 1.3 * room / len(tile.value))
            self._text(x, top + 28, tile.name, self._colours["soft"])
            self._text(x, top + 52, tile.value, self._colours[tile.tone or "ink"], size=size).set_fontweight("bold")
        return top + 66

    def chart(self, chart: Chart, title: str, x: float, y: float) -> float:
        """Draw a chart with a title above; returns where it ends."""
        self._text(x, y + LINE, title, self._colours["ink"]).set_fontweight("bold")
        y += LINE + 8
        boxes, fills = [], []
        for shape in chart.shapes:
            rule = self._rule(shape.style)
            if isinstance(shape, ChartText):
                text = self._text(x + shape.x, y + shape.y, shape.text, self._colour(rule, "fill"))
                text.set_horizontalalignment(ANCHORS[rule.get("text-anchor", "start")])
            elif isinstance(shape, ChartLine):
                ends = [(x + shape.x1, y + shape.y1), (x + shape.x2, y + shape.y2)]
                dashes = tuple(map(float, rule.get("stroke-dasharray", "").split()))
                style, order = ((0, dashes) if dashes else "solid"), 1 if shape.style == "grid" else 3
                colour = self._colour(rule, "stroke")
                self._axes.add_collection(LineCollection([ends], colors=[colour], linestyles=[style], zorder=order))
            else:
                for box in shape.boxes if isinstance(shape, ChartGroup) else [shape]:
                    left, right, upper, lower = x + box.x, x + box.x + box.width, y + box.y, y + box.y + box.height
                    boxes.append([(left, upper), (right, upper), (right, lower), (left, lower)])
                    fills.append(self._colour(self._rule(f"{shape.style} {box.style}"), "fill"))
        self._axes.add_collection(PolyCollection(boxes, facecolors=fills, linewidths=0, zorder=2))
        return y + chart.height

    def png(self) -> bytes:
        """The whole picture; the same bytes for the same shapes."""
        made = io.BytesIO()
        FigureCanvasAgg(self._figure).print_png(made, metadata={"Software": None})  # type: ignore[no-untyped-call]
        return made.getvalue()

    def _rule(self, style: str) -> Mapping[str, str]:
        """What the style sheet says of some classes, of which the last one counts."""
        return {key: value for name in style.split() for key, value in self._rules.get(name, {}).items()}

    def _colour(self, rule: Mapping[str, str], what: str) -> Colour:
        name = rule.get(what, "var(--soft)").removeprefix("var(--").removesuffix(")")
        return to_rgba(self._colours[name], float(rule.get(f"{what}-opacity", 1)))

    def _text(self, x: float, y: float, text: str, colour: Colour | str, *, size: float = 12) -> Text:
        # A font that lacks a character would warn on stderr; the data may have any.
        shown = "".join(each if ord(each) in self._glyphs else UNSEEN for each in str(visible(text)))
        points = size * SCALE * 72 / DPI
        return self._axes.text(x, y, shown, color=colour, size=points, family=FONT, parse_math=False, usetex=False)


def _shortened(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS else f"{text[: LINE_CHARACTERS - 2]} …"
