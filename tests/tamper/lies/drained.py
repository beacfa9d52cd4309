"""Lies about drained rows, told to the directory in which one delay server was drained into another.

Invariant: each is told to `tests.tamper.drained` alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from delayd.log.hour import NewPart
from delayd.outcome import Outcome, Reason
from delayd.testing.clock import START_MS
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import HOUR_MS, Lie
from tests.tamper.lies.seals import seal_anew

SEALED = START_MS // HOUR_MS  # An hour with rows that were handed over, and drained ones.
TO_COME = SEALED + 26  # An hour with drained rows only.

Edit = Callable[[NewPart], NewPart | None]


def drained_lies() -> list[Lie]:
    """Every lie that must be found."""
    anyhow: dict[str, Edit] = {
        "another taker": lambda part: part._replace(target_log_id=0xBAD),
        "another row at the taker": lambda part: part._replace(batch_id=part.batch_id + 99),
        "another instant at the taker": lambda part: part._replace(target_appended_at_ms=1),
        "that a caller cancelled it": lambda part: part._replace(reason=Reason.CANCELLED),
        "nothing": lambda part: None,
    }
    by_itself: dict[str, tuple[Edit, str]] = {
        "that a caller cancelled it": (lambda part: part._replace(reason=Reason.CANCELLED), "MISMATCH"),
        "that nobody decided it": (lambda part: part._replace(reason=0), "MISMATCH"),
        "that it was handed over": (lambda part: part._replace(reason=0, outcome=Outcome.DISPATCHED), "EARLY"),
        "that it expired": (lambda part: part._replace(reason=0, outcome=Outcome.EXPIRED), "MISMATCH"),
        "another due instant": (lambda part: part._replace(deliver_at_ms=part.deliver_at_ms + 1), "MISMATCH"),
        "another hash": (lambda part: part._replace(hashes=np.ones(len(part.sequences), np.uint64)), "MISMATCH"),
        "another sequence": (
            lambda part: part._replace(sequences=part.sequences + np.uint64(1_000_000)),
            "ORPHAN",
        ),
    }
    lies = [_lie(f"a sealed drained outcome says {name}", SEALED, edit, "BROKEN") for name, edit in anyhow.items()]
    for name, (edit, names) in by_itself.items():
        lies.append(_lie(f"a drained outcome to come says {name}", TO_COME, edit, names))
        lies.append(_lie(f"a sealed drained outcome says {name}, thoroughly", SEALED, edit, names, thorough=True))
    return lies


def _lie(name: str, hour: int, edit: Edit, names: str, *, thorough: bool = False) -> Lie:
    return Lie(name, partial(_edit, hour=hour, edit=edit, thorough=thorough), frozenset(names.split()), "drained")


def _edit(liar: Liar, hour: int, edit: Edit, thorough: bool) -> None:
    liar.edit_outcomes(hour, lambda part: edit(part) if part.reason == Reason.DRAINED else part)
    if thorough:
        seal_anew(liar)
