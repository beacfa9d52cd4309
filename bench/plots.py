"""Draws the results: how late messages are, how much faster than Redis, how a restart grows with what is pending."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from bench.arrivals import CURVE
from bench.cases import DELAYD, REDIS, REDIS_PY
from bench.results import Result

SIZE_INCHES = (7.0, 3.6)
DPI = 100
COLOURS = {DELAYD: "#1f6feb", REDIS_PY: "#d1242f", REDIS: "#8b949e"}
NAMES = {DELAYD: "delayd", REDIS_PY: "Redis, its own client", REDIS: "Redis"}
STYLES = ("-", "--", ":")
APART = ("fair-", "work", "streams-")  # Not about one producer or consumer at full speed: the table has their rates.


def draw_all(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write a picture for each plot that has figures."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in (("lateness", _lateness), ("throughput", _throughput), ("restart", _restart)):
        figure, axes = pyplot.subplots(figsize=SIZE_INCHES, dpi=DPI)
        if draw(results, axes):
            figure.tight_layout()
            drawn.append(folder / f"{name}.png")
            # Write neither time nor program name, so that the same figures give the same bytes.
            figure.savefig(drawn[-1], metadata={"Software": None})
        pyplot.close(figure)
    return drawn


def _lateness(results: Mapping[str, Result], axes: Axes) -> bool:
    cases = [result for result in results.values() if result.case.startswith("steady-") and result.curves]
    for result, style in zip(cases, STYLES, strict=False):
        for side, curves in result.curves.items():
            middle = np.median(np.array(curves), axis=0)
            label = f"{NAMES[side]}, {result.title.removeprefix('steady ')}"
            axes.plot(np.maximum(middle, 0.01), CURVE, style, color=COLOURS[side], label=label)
    axes.set_xscale("log")
    axes.set_xlabel("lateness at the consumer, ms")
    axes.set_ylabel("% of messages")
    axes.grid(True, alpha=0.3)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_title("Messages due 1 to 5 s ahead (delayd: fsynced twice and acknowledged; Redis: neither)", fontsize=9)
    if cases:
        axes.legend(fontsize=8, loc="lower right")
    return bool(cases)


def _throughput(results: Mapping[str, Result], axes: Axes) -> bool:
    cases = [
        result
        for result in results.values()
        if result.median(DELAYD, "messages_s") is not None and not result.case.startswith(APART)
    ]
    sides = [side for side in (DELAYD, REDIS_PY, REDIS) if any(side in result.sides for result in cases)]
    height = 0.8 / max(1, len(sides))
    for place, side in enumerate(sides):
        rates = [result.median(side, "messages_s") or 0 for result in cases]
        axes.barh(
            [row + place * height for row in range(len(cases))],
            [rate / 1e3 for rate in rates],
            height,
            color=COLOURS[side],
            label="Redis, raw" if side == REDIS else NAMES[side],
        )
    axes.set_yticks(
        [row + 0.4 - height / 2 for row in range(len(cases))], [result.title for result in cases], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlabel("thousand messages a second")
    axes.grid(True, axis="x", alpha=0.3)
    if cases:
        axes.legend(fontsize=8)
    return bool(cases)


def _restart(results: Mapping[str, Result], axes: Axes) -> bool:
    cases = [result for result in results.values() if result.case.startswith("restart-")]
    drawn = False
    for side in (DELAYD, REDIS):
        points = []
        for result in cases:
            pending, seconds = result.median(side, "pending"), result.median(side, "first_dispatch_s")
            if pending is not None and seconds is not None:
                points.append((pending / 1e6, seconds))
        if points:
            drawn = True
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=COLOURS[side], label=NAMES[side])
    axes.set_xlabel("million messages pending")
    axes.set_ylabel("s from SIGKILL to the next message")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    if drawn:
        axes.legend(fontsize=8)
    return drawn
