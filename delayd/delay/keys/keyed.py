"""Keyed rows: the rows of a batch that have a key, as the index takes them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.content import Bools, Names, UInt64s
from delayd.delay.rows import filing_hours
from delayd.delay.stored import Stored

Hours = NDArray[np.uint32]


class KeyedRows(NamedTuple):
    """Rows with keys, by rising sequence; their names are packed."""

    names: Names
    sequences: UInt64s
    deliver_at_ms: Int64s
    hours: Hours  # Filing hours.

    @property
    def n(self) -> int:
        """How many rows these are."""
        return len(self.sequences)

    def kept(self, kept: Bools) -> KeyedRows:
        """Some of the rows."""
        if kept.all():
            return self
        chosen = np.flatnonzero(kept)
        names = self.names.take(chosen).packed()
        return KeyedRows(names, self.sequences[chosen], self.deliver_at_ms[chosen], self.hours[chosen])


def sent_rows(stored: Stored, appended_at_ms: int) -> KeyedRows:
    """The keyed rows of a batch in the message log."""
    batch = stored.batch
    places = batch.keyed_rows()
    due = batch.int64s(ColumnId.DELIVER_AT_MS).take(places)
    sequences = places.astype(np.uint64) + np.uint64(stored.base_sequence)
    return KeyedRows(Names.of_batch(batch, places), sequences, due, filing_hours(due, appended_at_ms))


def filed_rows(batch: Batch, hour: int) -> KeyedRows:
    """The keyed rows of a batch in the schedule log of an hour."""
    places = batch.keyed_rows()
    sequences = batch.uint64s(ColumnId.SEQUENCE).take(places)
    order = np.argsort(sequences, kind="stable")
    places, sequences = places.take(order), sequences.take(order)
    due = batch.int64s(ColumnId.DELIVER_AT_MS).take(places)
    return KeyedRows(Names.of_batch(batch, places), sequences, due, np.full(len(places), hour, np.uint32))
