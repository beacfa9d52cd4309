"""Sums: the sums that realtime servers have, as tables: their tallies by hour and segment, and their groups of
consumers.

Invariant: a row is a sum over messages, so a table is as small as the hours, segments and groups are few.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from delayd.hours import hour_name
from delayd.reading.consumption import GroupBooks
from delayd.reading.plan import AuditPlan
from delayd.reading.tables import Cells, text

Value = str | int | None
Types = Mapping[str, str]
Columns = Mapping[str, Cells]

GROUP_FIGURES = ("pulled", "redelivered", "acknowledged", "given_back", "sent_back", "lapsed", "outstanding", "gaps")
CONSUMPTION: Types = {
    "log_id": "id",
    "subject": "string",
    "consumers": "string",
    "group_id": "id",
    **dict.fromkeys(GROUP_FIGURES, "long"),
}
TALLY: Types = {
    "hour": "string",
    "log_id": "id",
    "origin": "id",
    "begin_offset": "long",
    "end_offset": "long",
    **dict.fromkeys(("messages", "batches", "differing", "tally_first", "tally_second"), "long"),
}


def group_row(books: GroupBooks) -> tuple[Value, ...]:
    """A group as a row of CONSUMPTION; names that its log does not keep any more are null."""
    names = f"{books.log_id:016x}", books.subject or None, books.group or None, f"{books.group_id:08x}"
    return (*names, *(int(getattr(books, name)) for name in GROUP_FIGURES))


def columns_of(types: Types, rows: Sequence[tuple[Value, ...]]) -> Columns:
    """Rows as columns of their types."""
    columns: dict[str, Cells] = {}
    for index, (name, kind) in enumerate(types.items()):
        values = [row[index] for row in rows]
        if kind in ("string", "id"):
            columns[name] = text([None if value is None else str(value) for value in values])
        else:
            columns[name] = Cells(np.array(values, np.int64))
    return columns


def consumption(plan: AuditPlan, subject: str | None = None) -> Columns:
    """The groups of all realtime servers of a plan, or those of one subject."""
    groups = (books for each in plan.consumption for books in each.groups)
    return columns_of(CONSUMPTION, [group_row(books) for books in groups if subject in (None, books.subject)])


def tallies(plan: AuditPlan, subject: str | None = None) -> Columns:
    """The tallies of all realtime servers of a plan in all hours, deleted ones too; none if one subject is asked
    for.
    """
    return columns_of(TALLY, [] if subject is not None else list(_tally_rows(plan)))


def _tally_rows(plan: AuditPlan) -> Iterator[tuple[Value, ...]]:
    for held in plan.helds:
        entries = held.entries[held.entries["rows"] > 0]
        signed = {name: entries[name].view(np.int64).tolist() for name in ("first", "second")}
        for entry, first, second in zip(entries, signed["first"], signed["second"], strict=True):
            names = hour_name(int(entry["hour"])), f"{held.log_id:016x}", f"{int(entry['origin_log_id']):016x}"
            counts = (int(entry[name]) for name in ("begin", "end", "rows", "batches", "differing"))
            yield (*names, *counts, first, second)


SUMS: Mapping[str, tuple[Types, Callable[[AuditPlan, str | None], Columns]]] = {
    "consumption": (CONSUMPTION, consumption),
    "tally": (TALLY, tallies),
}
