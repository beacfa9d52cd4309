"""Charts: hours by outcome as a heat map, how late messages were, and the course of that, as shapes and as SVG.

Invariant: a chart names colours by classes only, which the page's style sheet defines for light, dark and paper; and
SVG escapes each text in it. Nothing is left out: periods without any message have no column, and a mark shows where.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log10
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from delayd.hours import HOUR_MS, duration_text, hour_start_ms, instant_text
from delayd.machine.histogram import LOWER_BOUNDS
from delayd.reading.findings import QUANTILES, HourSummary, sum_up
from delayd.reading.subject_figures import CLASSES, PARTS

LEFT, RIGHT = 118, 12  # Beside the plot of a chart; in pixels of a wide screen.
ROW, TOP = 24, 6
PERIODS_MAX = 370  # A year of days: a column is 2 pixels wide then.
PERIOD_HOURS = ((1, "hour"), (24, "day"), (7 * 24, "week"), (28 * 24, "four weeks"), (364 * 24, "52 weeks"))
COLUMN_MAX = 80
SHADES = 8
TICK_GAP, TICK_ROW = 28, 12  # Between the middles of two labels of lateness, beside and above each other.
LABEL_GAP = 84  # Between the beginnings of two labels below a chart.
TICKS_MS = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000, 864_000_000)
# Where bars begin, as places in the histogram: a millisecond each at first, then a quarter of an octave.
BARS = (*range(8), *range(8, len(LOWER_BOUNDS), 4))
HEAT_ROWS = (*CLASSES, *PARTS, "faults", "late")
_BAD = frozenset({"missing", "faults"})
_ODD = frozenset({"dead", "in_doubt", "waiting", "late"})


class Period(NamedTuple):
    """A column of a chart: some hours, and the figures of all servers in them."""

    first_hour: int
    until_hour: int
    figures: HourSummary

    @property
    def name(self) -> str:
        """The time that it covers, in UTC."""
        begin, end = _time(self.first_hour), _time(self.until_hour)
        if self.until_hour - self.first_hour == 1:
            return f"{begin} to {end[-5:]}"
        if self.until_hour - self.first_hour == 24:
            return begin[:10]
        return f"{begin[:10]} to {_time(self.until_hour - 24)[:10]}"

    def count(self, row: str) -> int:
        """How many of HEAT_ROWS it has."""
        if row == "faults":
            own = self.figures
            return own.lost + own.duplicate + own.early + own.orphan + own.mismatch + own.conservation
        found: int = getattr(self.figures, row)
        return found


def periods_of(hours: Sequence[HourSummary]) -> tuple[str, list[Period]]:
    """Join hours, so that a chart has room for all: what a period is, and those that have a message."""
    step, name = next(
        (each for each in PERIOD_HOURS if len({hour.hour // each[0] for hour in hours}) <= PERIODS_MAX),
        PERIOD_HOURS[-1],
    )
    own: dict[int, list[HourSummary]] = {}
    for hour in hours:
        own.setdefault(hour.hour // step, []).append(hour)
    return name, [Period(at * step, (at + 1) * step, sum_up(own[at])) for at in sorted(own)]


class ChartRect(NamedTuple):
    """A box; ``title`` is what a page says when one points at it."""

    style: str
    x: float
    y: float
    width: float
    height: float
    title: str = ""


class ChartLine(NamedTuple):
    """A line that is level or upright."""

    style: str
    x1: float
    x2: float
    y1: float
    y2: float


class ChartText(NamedTuple):
    """A text, whose style says which of its ends is at ``x``."""

    style: str
    x: float
    y: float
    text: str


class ChartGroup(NamedTuple):
    """Boxes that share a style and a title."""

    style: str
    boxes: Sequence[ChartRect]
    title: str = ""


Shape = ChartRect | ChartLine | ChartText | ChartGroup


class Chart(NamedTuple):
    """A drawing: y grows downwards, and styles are classes of page.css."""

    title: str
    width: float
    height: float
    shapes: Sequence[Shape]


class ChartFrame(NamedTuple):
    """The room of a chart, and the height that a plot of lateness has in it; in pixels of a wide screen."""

    width: float = 960
    plot: float = 180

    @property
    def right(self) -> float:
        """Where plots end."""
        return self.width - RIGHT

    @property
    def edge(self) -> float:
        """A text that begins behind it ends at the edge of the chart in place of being cut there."""
        return self.right - 110

    def column(self, periods: Sequence[Period]) -> float:
        """How wide the column of a period is."""
        return min(COLUMN_MAX, (self.right - LEFT) / len(periods))

    def late_x(self, ms: float, last_ms: float) -> float:
        """Where a lateness is on a level axis that ends with ``last_ms``."""
        return LEFT + (self.right - LEFT) * log10(1 + ms) / log10(1 + last_ms)

    def late_y(self, ms: float, top_ms: float) -> float:
        """Where a lateness is on an upright axis that ends with ``top_ms``."""
        return TOP + self.plot * (1 - log10(1 + ms) / log10(1 + top_ms))


PAGE_FRAME = ChartFrame()


def heat_map(periods: Sequence[Period], frame: ChartFrame = PAGE_FRAME) -> Chart:
    """Periods by what became of their messages: the darker, the more of the row's messages; by powers."""
    rows = [row for row in HEAT_ROWS if any(period.count(row) for period in periods)]
    width = frame.column(periods)
    shapes: list[Shape] = []
    for number, row in enumerate(rows):
        top, counts = TOP + number * ROW, [period.count(row) for period in periods]
        tone = "bad" if row in _BAD else "odd" if row in _ODD else "good" if row == "dispatched" else "calm"
        most = max(counts)
        boxes: list[ChartRect] = []
        for place, (period, count) in enumerate(zip(periods, counts, strict=True)):
            if count:
                shade = 1 + round((SHADES - 1) * (log10(1 + count) / log10(1 + most)))
                x, wide = LEFT + place * width, max(width - 1, width * 0.8)
                said = f"{period.name}: {_words(row)} {count:,}"
                boxes.append(ChartRect(f"s{shade}", x, top, wide, ROW - 3, said))
        shapes += [ChartText("label", LEFT - 8, top + 16, _words(row)), ChartGroup(tone, boxes)]
    bottom = TOP + len(rows) * ROW
    shapes += _time_axis(periods, bottom, frame)
    return Chart("Messages of each period by what became of them", frame.width, bottom + 24, shapes)


def distribution(total: HourSummary, limit_ms: int, frame: ChartFrame = PAGE_FRAME) -> Chart:
    """How many messages were how late, on a logarithmic scale; those above the limit have a colour of their own."""
    bars = list(_bars(total))
    last_ms = max(2 * total.late_ms_max, 2 * limit_ms, 20)
    most = max(count for _, _, count in bars)
    shapes: list[Shape] = [*_late_axis(last_ms, frame)]
    for lower, upper, count in bars:
        begin, end = frame.late_x(lower, last_ms), frame.late_x(upper, last_ms)
        height = max(2.0, (frame.plot - 10) * count / most)
        said = f"{duration_text(lower)} to {duration_text(upper)}: {count:,} messages"
        style = "bar over" if lower >= limit_ms else "bar"
        shapes.append(ChartRect(style, begin, frame.plot - height, max(end - begin - 1, 1.5), height, said))
    marks = [(f"p{100 * each:g}", total.late_ms(each) or 0) for each in QUANTILES] + [("max", total.late_ms_max)]
    for row, (name, ms) in enumerate(marks):
        x = frame.late_x(ms, last_ms)
        style, at = ("note end", x - 4) if x > frame.edge else ("note", x + 4)
        shapes.append(ChartLine("mark", x, x, TOP, frame.plot))
        shapes.append(ChartText(style, at, TOP + 12 + 15 * row, f"{name} {duration_text(ms)}"))
    x = frame.late_x(limit_ms, last_ms)
    shapes.append(ChartLine("limit", x, x, TOP, frame.plot))
    shapes.append(ChartText("note", x + 4, frame.plot - 8, f"LATE above {limit_text(limit_ms)}"))
    shapes.append(ChartText("label", LEFT - 8, 20, f"{most:,}"))
    shapes.append(ChartText("label", LEFT - 8, 36, "messages"))
    return Chart("How late messages were", frame.width, frame.plot + 26, shapes)


def course(periods: Sequence[Period], frame: ChartFrame = PAGE_FRAME) -> Chart:
    """The quantiles of lateness and the latest message of each period."""
    width = frame.column(periods)
    top_ms = max(10 * max(period.figures.late_ms_max for period in periods), 100)
    shapes: list[Shape] = []
    free = frame.plot + TOP
    for tick in (each for each in TICKS_MS if each < top_ms):
        y = frame.late_y(tick, top_ms)
        shapes.append(ChartLine("grid", LEFT, frame.right, y, y))
        if y <= free:
            shapes.append(ChartText("label", LEFT - 8, y + 4, _short(tick)))
            free = y - TICK_ROW
    for place, period in enumerate(periods):
        own = period.figures
        found = [own.late_ms(each) for each in (*QUANTILES[:2],)]
        if found[0] is None or found[1] is None:
            continue
        values = found[0], found[1], own.late_ms_max
        x, wide = LEFT + place * width, max(width - 1, width * 0.8)
        ys = [frame.late_y(ms, top_ms) for ms in values]
        boxes = [
            ChartRect(style, x, upper, wide, max(lower - upper, 1.0))
            for style, upper, lower in (("band2", ys[2], ys[1]), ("band1", ys[1], ys[0]))
        ]
        boxes.append(ChartRect("middle", x, ys[0] - 1, wide, 2.5))
        said = ", ".join(f"{name} {duration_text(ms)}" for name, ms in zip(("p50", "p99", "max"), values, strict=True))
        shapes.append(ChartGroup("", boxes, f"{period.name}: {said}"))
    shapes += _time_axis(periods, frame.plot + TOP, frame)
    return Chart("The course of lateness", frame.width, frame.plot + TOP + 24, shapes)


def svg(chart: Chart) -> Markup:
    """A chart as SVG, for the page."""
    opened = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">')
    parts = [opened.format(chart.width, chart.height, chart.title), *map(_svg_shape, chart.shapes), Markup("</svg>")]
    return Markup("").join(parts)


def _svg_shape(shape: Shape) -> Markup:
    style = Markup(' class="{}"').format(shape.style) if shape.style else Markup("")
    if isinstance(shape, ChartText):
        return Markup('<text{} x="{:.1f}" y="{:.1f}">{}</text>').format(style, shape.x, shape.y, shape.text)
    if isinstance(shape, ChartLine):
        line = Markup('<line{} x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
        return line.format(style, shape.x1, shape.x2, shape.y1, shape.y2)
    title = Markup("<title>{}</title>").format(shape.title) if shape.title else Markup("")
    if isinstance(shape, ChartGroup):
        return Markup("<g{}>{}{}</g>").format(style, Markup("").join(map(_svg_shape, shape.boxes)), title)
    rect = Markup('<rect{} x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"{}')
    end = Markup(">{}</rect>").format(title) if title else Markup("/>")
    return rect.format(style, shape.x, shape.y, shape.width, shape.height, end)


def _bars(total: HourSummary) -> Iterator[tuple[int, int, int]]:
    """Lower bound, upper bound and count of each bar that has a message."""
    bounds = [*LOWER_BOUNDS[list(BARS)].tolist(), 2 * int(LOWER_BOUNDS[-1])]
    counts = np.add.reduceat(total.lateness, BARS).tolist()
    for (lower, upper), count in zip(pairwise(bounds), counts, strict=True):
        if count:
            yield lower, upper, count


def _late_axis(last_ms: int, frame: ChartFrame) -> Iterator[Shape]:
    free = 0.0
    for tick in (0, *TICKS_MS):
        if tick <= last_ms:
            x = frame.late_x(tick, last_ms)
            yield ChartLine("grid", x, x, TOP, frame.plot)
            if x >= free:
                yield ChartText("tick", x, frame.plot + 18, _short(tick))
                free = x + TICK_GAP


def _time_axis(periods: Sequence[Period], y: float, frame: ChartFrame) -> Iterator[Shape]:
    """Labels below the columns as far as there is room, and a mark where periods without any message lie between."""
    width, free = frame.column(periods), float("-inf")
    before: Period | None = None
    day = ""
    for place, period in enumerate(periods):
        x = LEFT + place * width
        if before is not None and before.until_hour != period.first_hour:
            yield ChartLine("gap", x - 0.5, x - 0.5, TOP, y)
        before, name = period, _time(period.first_hour)
        # A label at the edge ends with its column, and needs the room before it.
        is_last = x > frame.edge
        if x < free + LABEL_GAP * is_last:
            continue
        is_hour = period.until_hour - period.first_hour == 1
        label = name[:10]
        if is_hour and day[:4] == name[:4]:
            label = name[11:] if day == name[:10] else f"{name[5:10]} {name[11:]}"
        day, free = name[:10], x + LABEL_GAP
        yield ChartText("label" if is_last else "time", x + width * is_last, y + 15, label)


def limit_text(ms: int) -> str:
    """A limit as people say it: ``1 s``, and not ``1.000 s``."""
    return duration_text(ms).replace(".000 s", " s")


def _time(hour: int) -> str:
    return instant_text(hour_start_ms(hour))[:16].replace("T", " ")


def _short(ms: int) -> str:
    """A tick of an axis: ``10 s``, and not ``10.000 s``."""
    for unit, size in (("d", 86_400_000), ("h", HOUR_MS), ("min", 60_000), ("s", 1_000)):
        if ms >= size:
            return f"{ms // size:,} {unit}"
    return f"{ms} ms"


def _words(row: str) -> str:
    return "findings" if row == "faults" else row.replace("_", " ")
