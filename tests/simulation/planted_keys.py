"""Bugs to plant in what callers change of pending messages: keys, cancels and moves (docs/keys.md)."""

from __future__ import annotations

from delayd.delay import parts as delay_parts
from delayd.delay import recovery as delay_recovery
from delayd.delay.ending import keyed_sends
from delayd.delay.keys.index import TakenNames, Watch
from delayd.delay.keys.run import AskedNames, KeyedRows, Newest
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.recovery import Recovered
from delayd.log.hour import NO_ENDED, EndedRows
from tests.worlds.bugs import PLANTED_IN_CANCELS
from tests.worlds.patches import Bugs, Patch, changed


def _index_nothing(*arguments: object) -> Recovered:
    found = _recover(*arguments)  # type: ignore[arg-type]
    found.replayed.keyed.clear()
    return found


def _compare_with_nothing(self: TakenNames, watch: Watch, asked: AskedNames, found: Newest) -> None:
    """What came since the look-up began is not seen."""


def _take_no_names(self: TakenNames, rows: KeyedRows) -> None:
    """The key is free for whoever sends next."""


def _tell_nothing(ended: EndedRows, base_sequence: int, count: int) -> EndedRows:
    return NO_ENDED


_recover = delay_recovery.recover

IN_KEYS: Bugs = {
    **{
        name: PLANTED_IN_CANCELS[name]
        for name in (
            "C1: rows that are replaced by key are not claimed",
            "C2: a checkpoint passes a decision and does not name its rows",
            "P1: a start does not read the decisions",
        )
    },
    "C3: a start does not index rows above the checkpoint": [Patch(delay_parts, "recover", _index_nothing)],
    "C3: a look-up is not compared with what came since": [Patch(TakenNames, "compare", _compare_with_nothing)],
    "C3: a message that moves leaves its key": [Patch(TakenNames, "add", _take_no_names)],
    "C3: a row that is kept is answered with itself": [
        Patch(
            keyed_sends,
            "_ended",
            changed(keyed_sends._ended, 'others["sequence"], others', 'rows["sequence"], others'),
        )
    ],
    "I1: a start forgets the verdicts of a batch": [Patch(delay_recovery, "decided_about", _tell_nothing)],
    "S2: rows of sealed hours are not looked up": [
        Patch(
            Ledger,
            "_hour_places",
            changed(Ledger._hour_places, "file.sealed", "False"),
        )
    ],
}
