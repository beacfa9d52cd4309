"""Figures of runs, and of several runs together: median, spread and quotients.

Invariant: nothing is made up; a figure that is missing in one run is not told of all of them.
"""

import statistics
from collections.abc import Mapping, Sequence

Figure = float | list[float]
Figures = dict[str, Figure]
Spread = dict[str, float]  # median, min, max.


def spreads(runs: Sequence[Mapping[str, object]]) -> dict[str, Spread]:
    """Median, least and most of every number that all runs have; lists are left out."""
    names = [name for name, value in runs[0].items() if _is_number(value)] if runs else []
    return {
        name: spread([run[name] for run in runs]) for name in names if all(_is_number(run.get(name)) for run in runs)
    }


def spread(values: Sequence[object]) -> Spread:
    """Median, least and most."""
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return {
        name: _short(value)
        for name, value in (("median", statistics.median(numbers)), ("min", min(numbers)), ("max", max(numbers)))
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The quotient of the medians, and between which values those of the single runs lie.

    Runs alternate, so the quotient of two that followed each other says what the machine's own noise hides.
    """
    each = [our / their for our, their in zip(ours, theirs, strict=False)]
    of_medians = statistics.median(ours) / statistics.median(theirs)
    return {"median": _short(of_medians), "min": _short(min(each)), "max": _short(max(each))}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> float:
    """Round to four digits; no figure here is more exact."""
    return float(f"{value:.4g}") if abs(value) < 1_000 else round(value)
