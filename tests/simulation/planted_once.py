"""Bugs to plant in sends that are to happen once: records, and the messages behind them (docs/once.md)."""

from __future__ import annotations

from delayd.delay.ending.keyed_sends import KeyedSends, _Behind
from delayd.delay.ending.own_rows import OwnRows
from tests.worlds.patches import Bugs, Patch, changed

IN_ONCE: Bugs = {
    "P1: a message is sent though there is a record of it": [
        Patch(
            KeyedSends,
            "_decide",
            changed(
                KeyedSends._decide,
                "np.flatnonzero(~took.take(place_of.take(behind.records)))",
                "NO_INDICES",
            ),
        )
    ],
    "P1: a record stays of a message that was refused": [
        Patch(
            _Behind,
            "settle",
            changed(_Behind.settle, "places.took[records] = False", "places.took[records] = True"),
        )
    ],
    "P1: a record decides about the next sender's message": [
        Patch(_Behind, "of", classmethod(changed(_Behind.of.__func__, "has_row & has_key", "has_key")))  # type: ignore[attr-defined]
    ],
    "L8: own rows that a full disk kept back are decided about without a pause": [
        Patch(OwnRows, "come", changed(OwnRows.come, " and self._again.at_ms is None", "")),
    ],
}
