"""Charts: hours by outcome as a heat map, how late messages were, and the course of that, as SVG.

Invariant: a chart names colours by classes only, which the page's style sheet defines for light, dark and paper; and
each text in it is escaped. Nothing is left out: periods without any message have no column, and a mark shows where.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log10
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from delayd.hours import HOUR_MS, duration_text, hour_start_ms, instant_text
from delayd.reading.findings import LOWER_BOUNDS_MS, QUANTILES, HourSummary, sum_up
from delayd.reading.subject_figures import CLASSES, PARTS

WIDTH, LEFT, RIGHT = 960, 118, 12  # Of a chart, and beside its plot; in pixels of a wide screen.
ROW, TOP = 24, 6
PLOT = 180  # Height of the plots of lateness.
PERIODS_MAX = 370  # A year of days: a column is 2 pixels wide then.
PERIOD_HOURS = ((1, "hour"), (24, "day"), (7 * 24, "week"), (28 * 24, "four weeks"), (364 * 24, "52 weeks"))
COLUMN_MAX = 80
SHADES = 8
LABEL_GAP = 84  # Between the beginnings of two labels below a chart.
TICKS_MS = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 864_000_000, 86_400_000_000)
# Where bars begin, as places in the histogram: a millisecond each at first, then a quarter of an octave.
BARS = (*range(8), *range(8, len(LOWER_BOUNDS_MS), 4))
EDGE = WIDTH - RIGHT - 110  # A text that begins behind it ends at the edge of the chart in place of being cut there.
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


def heat_map(periods: Sequence[Period]) -> Markup:
    """Periods by what became of their messages: the darker, the more of the row's messages; by powers."""
    rows = [row for row in HEAT_ROWS if any(period.count(row) for period in periods)]
    width = _column(periods)
    parts: list[Markup] = []
    for number, row in enumerate(rows):
        top, counts = TOP + number * ROW, [period.count(row) for period in periods]
        label = Markup('<text class="label" x="{}" y="{}">{}</text>').format(LEFT - 8, top + 16, _words(row))
        tone = "bad" if row in _BAD else "odd" if row in _ODD else "good" if row == "dispatched" else "calm"
        parts += [label, Markup('<g class="{}">').format(tone)]
        most = max(counts)
        for place, (period, count) in enumerate(zip(periods, counts, strict=True)):
            if count:
                shade = 1 + round((SHADES - 1) * (log10(1 + count) / log10(1 + most)))
                parts.append(
                    Markup('<rect class="s{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}">').format(
                        shade, LEFT + place * width, top, max(width - 1, width * 0.8), ROW - 3
                    )
                )
                parts.append(Markup("<title>{}: {} {:,}</title></rect>").format(period.name, _words(row), count))
        parts.append(Markup("</g>"))
    bottom = TOP + len(rows) * ROW
    parts += _time_axis(periods, bottom)
    return _svg("Messages of each period by what became of them", bottom + 24, parts)


def distribution(total: HourSummary, limit_ms: int) -> Markup:
    """How many messages were how late, on a logarithmic scale; those above the limit have a colour of their own."""
    bars = list(_bars(total))
    last_ms = max(2 * total.late_ms_max, 2 * limit_ms, 20)
    most = max(count for _, _, count in bars)
    parts = list(_late_axis(last_ms))
    for lower, upper, count in bars:
        begin, end = _late_x(lower, last_ms), _late_x(upper, last_ms)
        height = max(2.0, (PLOT - 10) * count / most)
        parts.append(
            Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">').format(
                "bar over" if lower >= limit_ms else "bar", begin, PLOT - height, max(end - begin - 1, 1.5), height
            )
        )
        what = Markup("<title>{} to {}: {:,} messages</title></rect>")
        parts.append(what.format(duration_text(lower), duration_text(upper), count))
    marks = [(f"p{100 * each:g}", total.late_ms(each) or 0) for each in QUANTILES] + [("max", total.late_ms_max)]
    for row, (name, ms) in enumerate(marks):
        x = _late_x(ms, last_ms)
        parts.append(Markup('<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(x, TOP, PLOT))
        tone, x = ("note end", x - 4) if x > EDGE else ("note", x + 4)
        text = Markup('<text class="{}" x="{:.1f}" y="{}">{} {}</text>')
        parts.append(text.format(tone, x, TOP + 12 + 15 * row, name, duration_text(ms)))
    x = _late_x(limit_ms, last_ms)
    parts.append(Markup('<line class="limit" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(x, TOP, PLOT))
    note = Markup('<text class="note" x="{:.1f}" y="{}">LATE above {}</text>')
    parts.append(note.format(x + 4, PLOT - 8, limit_text(limit_ms)))
    parts.append(Markup('<text class="label" x="{}" y="{}">{:,}</text>').format(LEFT - 8, 20, most))
    parts.append(Markup('<text class="label" x="{}" y="{}">messages</text>').format(LEFT - 8, 36))
    return _svg("How late messages were", PLOT + 26, parts)


def course(periods: Sequence[Period]) -> Markup:
    """The quantiles of lateness and the latest message of each period."""
    width = _column(periods)
    top_ms = max(10 * max(period.figures.late_ms_max for period in periods), 100)
    parts: list[Markup] = []
    for tick in (each for each in TICKS_MS if each < top_ms):
        y = _late_y(tick, top_ms)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>').format(LEFT, WIDTH - RIGHT, y=y)
        )
        label = Markup('<text class="label" x="{}" y="{:.1f}">{}</text>')
        parts.append(label.format(LEFT - 8, y + 4, _short(tick)))
    for place, period in enumerate(periods):
        own = period.figures
        found = [own.late_ms(each) for each in (*QUANTILES[:2],)]
        if found[0] is None or found[1] is None:
            continue
        values = found[0], found[1], own.late_ms_max
        x, wide = LEFT + place * width, max(width - 1, width * 0.8)
        ys = [_late_y(ms, top_ms) for ms in values]
        parts.append(Markup("<g>"))
        for tone, upper, lower in (("band2", ys[2], ys[1]), ("band1", ys[1], ys[0])):
            rect = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')
            parts.append(rect.format(tone, x, upper, wide, max(lower - upper, 1.0)))
        line = Markup('<rect class="middle" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="2.5"/>')
        parts.append(line.format(x, ys[0] - 1, wide))
        said = ", ".join(f"{name} {duration_text(ms)}" for name, ms in zip(("p50", "p99", "max"), values, strict=True))
        parts.append(Markup("<title>{}: {}</title></g>").format(period.name, said))
    parts += _time_axis(periods, PLOT + TOP)
    return _svg("The course of lateness", PLOT + TOP + 24, parts)


def _bars(total: HourSummary) -> Iterator[tuple[int, int, int]]:
    """Lower bound, upper bound and count of each bar that has a message."""
    bounds = [*LOWER_BOUNDS_MS[list(BARS)].tolist(), 2 * int(LOWER_BOUNDS_MS[-1])]
    counts = np.add.reduceat(total.lateness, BARS).tolist()
    for (lower, upper), count in zip(pairwise(bounds), counts, strict=True):
        if count:
            yield lower, upper, count


def _late_x(ms: float, last_ms: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * log10(1 + ms) / log10(1 + last_ms)


def _late_y(ms: float, top_ms: float) -> float:
    return TOP + PLOT * (1 - log10(1 + ms) / log10(1 + top_ms))


def _late_axis(last_ms: int) -> Iterator[Markup]:
    line = Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>')
    text = Markup('<text class="tick" x="{:.1f}" y="{}">{}</text>')
    for tick in (0, *TICKS_MS):
        if tick <= last_ms:
            x = _late_x(tick, last_ms)
            yield line.format(x, TOP, PLOT)
            yield text.format(x, PLOT + 18, _short(tick))


def _time_axis(periods: Sequence[Period], y: float) -> Iterator[Markup]:
    """Labels below the columns as far as there is room, and a mark where periods without any message lie between."""
    width, free = _column(periods), float("-inf")
    text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>')
    gap = Markup('<line class="gap" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2:.1f}"/>')
    before: Period | None = None
    day = ""
    for place, period in enumerate(periods):
        x = LEFT + place * width
        if before is not None and before.until_hour != period.first_hour:
            yield gap.format(x - 0.5, TOP, y)
        before, name = period, _time(period.first_hour)
        # A label at the edge ends with its column, and needs the room before it.
        is_last = x > EDGE
        if x < free + LABEL_GAP * is_last:
            continue
        is_hour = period.until_hour - period.first_hour == 1
        label = name[:10]
        if is_hour and day[:4] == name[:4]:
            label = name[11:] if day == name[:10] else f"{name[5:10]} {name[11:]}"
        day, free = name[:10], x + LABEL_GAP
        yield text.format("label" if is_last else "time", x + width * is_last, y + 15, label)


def limit_text(ms: int) -> str:
    """A limit as people say it: ``1 s``, and not ``1.000 s``."""
    return duration_text(ms).replace(".000 s", " s")


def _column(periods: Sequence[Period]) -> float:
    return min(COLUMN_MAX, (WIDTH - LEFT - RIGHT) / len(periods))


def _svg(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    opened = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">').format(WIDTH, height, title)
    return Markup("").join((opened, *parts, Markup("</svg>")))


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
