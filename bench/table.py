"""Makes the Markdown table of results, with the machine, the minute and the disk beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.cases import DELAYD, REDIS, REDIS_PY
from bench.figures import Spread
from bench.results import Facts, Result

NOTHING = "–"

HEADLINES = ("batches", "singles", "herd-", "steady-", "far", "restart-")

Render = Callable[[Mapping[str, Spread]], str]


def full_table(results: Mapping[str, Result]) -> str:
    """All cases."""
    header = [
        "what",
        "delayd",
        "Redis, its own client",
        "Redis, raw",
        "delayd / Redis: client; raw",
        "steal s; fsync ms",
    ]
    rows = [row for result in results.values() for row in _rows(result)]
    return "\n".join([_machine(results), "", *_markdown(header, rows)])


def headline_table(results: Mapping[str, Result]) -> str:
    """Those that a first look is about."""
    header = ["what", "delayd", "Redis", "delayd / Redis"]
    rows = []
    for result in results.values():
        if result.case.startswith(HEADLINES):
            what, ours, client, raw, ratio, _ = _rows(result)[0]
            rows.append([what, ours, client if client != NOTHING else raw, ratio.partition(";")[0]])
    return "\n".join([_machine(results), "", *_markdown(header, rows)])


def _rows(result: Result) -> list[list[str]]:
    rows = []
    for title, render in _renders(result.case):
        cells = [_cell(result, side, render) for side in (DELAYD, REDIS_PY, REDIS)]
        rows.append([result.title + title, *cells, _ratio(result), _beside(result)])
    return rows


def _renders(case: str) -> list[tuple[str, Render]]:
    if case.startswith(("steady-", "subjects-", "again-")):
        return [("", lambda figures: _lateness("late_ms", figures))]
    if case == "near":
        return [
            (": flooding", lambda figures: _lateness("flood_late_ms", figures)),
            (": filing", lambda figures: _lateness("checkpoint_late_ms", figures)),
        ]
    if case == "edge":
        return [
            (": all of it", lambda figures: _lateness("late_ms", figures)),
            (": at the edge", lambda figures: _lateness("edge_late_ms", figures)),
        ]
    if case == "inspected":
        return [
            (": nobody looks", lambda figures: _lateness("alone_late_ms", figures)),
            (": somebody looks", lambda figures: _lateness("inspected_late_ms", figures)),
        ]
    if case.startswith("restart-"):
        return [("", lambda figures: f"{_spread(figures['first_dispatch_s'])} s")]
    if case.startswith("years"):
        return [("", lambda figures: f"{_spread(figures['seconds'])} s")]
    if case.startswith("fair-"):
        return [("", _fair)]
    if case == "crowded":
        return [("", _crowded)]
    if case == "memory":
        return [("", _memory)]
    if case == "written":
        return [("", _written)]
    return [("", lambda figures: f"{_spread(figures['messages_s'])}/s")]


def _cell(result: Result, side: str, render: Render) -> str:
    if side in result.problems:
        return result.problems[side]
    return render(result.sides[side]) if side in result.sides else NOTHING


def _lateness(name: str, figures: Mapping[str, Spread]) -> str:
    if f"{name}_p99" not in figures:
        return NOTHING
    names = [f"{name}_{each}" for each in ("p50", "p99", "p99_9", "max")]
    values = [figures[name] for name in names if name in figures]
    medians = " / ".join(number(value["median"]) for value in values)
    wrong = [f"{name} {figures[name]['max']:.0f}" for name in ("early", "lost") if figures[name]["max"]]
    return f"{medians} ms{_range(values[1], 'p99 ')}; {', '.join(wrong) or 'early 0'}"


def _fair(figures: Mapping[str, Spread]) -> str:
    took, ideal, least, most = (
        number(figures[name]["median"]) for name in ("took_s", "ideal_s", "share_least", "share_most")
    )
    return f"{took} s of {ideal} s; {least} to {most} each; came again {number(figures['came_again']['median'])}"


def _crowded(figures: Mapping[str, Spread]) -> str:
    return ", ".join(
        f"{what} {number(figures[f'{what}_crowded_ms']['median'])} ms ({number(figures[f'{what}_times']['median'])} x)"
        for what in ("get", "cancel")
    )


def _memory(figures: Mapping[str, Spread]) -> str:
    if "pending_b" in figures:
        return f"{number(figures['pending_b']['median'])} B"
    parts = (("before_b", "before its checkpoint"), ("loaded_b", "in a loaded hour"), ("later_b", "later"))
    return "; ".join(f"{what} {number(figures[name]['median'])} B" for name, what in parts)


def _written(figures: Mapping[str, Spread]) -> str:
    disk, files = (number(figures[name]["median"]) for name in ("disk_times", "files_times"))
    return f"{disk} x by the disk, {files} x by files"


def _ratio(result: Result) -> str:
    return (
        "; ".join(f"{_spread(result.ratio[side])} x" for side in (REDIS_PY, REDIS) if side in result.ratio) or NOTHING
    )


def _beside(result: Result) -> str:
    figures = result.sides.get(DELAYD)
    if figures is None:
        return NOTHING
    steal = number(figures["steal_s"]["median"])
    return f"{steal}; {number(figures['fsync_ms_p50']['median'])} / {number(figures['fsync_ms_p99']['median'])}"


def _spread(spread: Spread) -> str:
    return number(spread["median"]) + _range(spread)


def _range(spread: Spread, what: str = "") -> str:
    if spread["min"] == spread["max"]:
        return ""
    return f" ({what}{number(spread['min'])} to {number(spread['max'])})"


def number(value: float) -> str:
    """Three digits, and thousands as people write them."""
    if abs(value) >= 1_000:
        digits = len(str(round(abs(value)))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{float(f'{value:.3g}'):g}"


def _machine(results: Mapping[str, Result]) -> str:
    facts = [result.facts for result in results.values()]
    counts = sorted({count for result in results.values() for count in result.runs.values()})
    runs = f"{' or '.join(map(str, counts))} run{'s' * (counts[-1] > 1)}"
    return (
        f"{_all(facts, 'cpu')}, {_all(facts, 'cores')} cores, Linux {_all(facts, 'kernel')}, "
        f"Python {_all(facts, 'python')}; {_dates(facts)}, commit {_all(facts, 'commit')}; "
        f"`{_all(facts, 'size')}` sizes; medians of {runs} (least to most)."
    )


def _all(facts: list[Facts], name: str) -> str:
    return ", ".join(dict.fromkeys(str(fact[name]) for fact in facts))


def _dates(facts: list[Facts]) -> str:
    return ", ".join(sorted({str(fact["date"])[:10] for fact in facts}))


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
