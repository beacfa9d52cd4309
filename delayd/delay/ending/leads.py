"""Leads: where receipts of moved messages have led, so that the next request need not read the outcome of each row
between.

Invariant: a receipt that stands here was found to be true, and what it leads to is durable. Everything here may be
forgotten: the outcomes say it again.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from delayd.wire.ending import Asked

LEADS_MAX = 65_536  # Some 300 bytes each.
ROWS_MAX = 1_024  # Requests with more rows are looked up as they are: following each row would hold the loop.

Lead = tuple[int, int, int]  # Sequence, due instant and instant of acceptance: what a receipt says.


class Leads:
    """Receipts of earlier rows, each with that of a newer row; belongs to the loop."""

    def __init__(self) -> None:
        self._newer: OrderedDict[Lead, Lead] = OrderedDict()

    def note(self, earlier: Asked, newer: Asked, which: NDArray[np.bool_]) -> None:
        """Remember that some rows were moved."""
        if len(which) > ROWS_MAX:
            return
        rows = np.flatnonzero(which).tolist()
        for before, after in zip(_leads(earlier.take(rows)), _leads(newer.take(rows)), strict=True):
            self._newer[before] = after
        while len(self._newer) > LEADS_MAX:
            self._newer.popitem(last=False)

    def follow(self, asked: Asked) -> Asked:
        """The newest rows that are known here, in place of those of a request."""
        if not self._newer or not 0 < len(asked.sequences) <= ROWS_MAX:
            return asked
        columns = zip(*map(self._newest, _leads(asked)), strict=True)
        sequences, deliver_at_ms, accepted_at_ms = columns
        return Asked(
            np.array(sequences, np.uint64), np.array(deliver_at_ms, np.int64), np.array(accepted_at_ms, np.int64)
        )

    def _newest(self, lead: Lead) -> Lead:
        passed: list[Lead] = []
        while (newer := self._newer.get(lead)) is not None:
            passed.append(lead)
            lead = newer
        # The next time each of them leads there at once.
        for each in passed:
            self._newer[each] = lead
            self._newer.move_to_end(each)
        return lead


def _leads(asked: Asked) -> zip[Lead]:
    return zip(asked.sequences.tolist(), asked.deliver_at_ms.tolist(), asked.accepted_at_ms.tolist(), strict=True)
