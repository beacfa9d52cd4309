"""``delayd dispatch``: what became of messages, read from the dispatch logs."""

from collections.abc import Iterator

import click
import numpy as np

from delayd.log.dispatch import Outcome, Reason, reason_name
from delayd.reading.scheduled import NONE, Hour

from .hour_schedule import Listing, Window, in_chunks
from .listing import show
from .options import Group, data_option, format_option, from_option, limit_option, subject_option, to_option
from .table import Cell, Column, Kind

COLUMNS = (
    Column("sequence", Kind.NAME),
    Column("subject"),
    Column("deliver_at_ms", Kind.INSTANT),
    Column("outcome"),
    Column("reason", spare=True),
    Column("late_ms", Kind.DURATION),
    Column("claimed_at_ms", Kind.INSTANT, detail=True),
    Column("appended_at_ms", Kind.INSTANT, spare=True),
    Column("attempt", Kind.NUMBER, spare=True),
    Column("epoch", Kind.NAME, detail=True),
    Column("batch_id", Kind.NAME, detail=True),
    Column("target_log_id", spare=True),
    Column("target_offset", Kind.NAME, detail=True),
    Column("delay_log_id", detail=True),
)


@click.group(no_args_is_help=True, cls=Group)
def dispatch() -> None:
    """Look at what became of messages, from files.

    $ delayd dispatch show --data /var/lib/delayd --from -10m
    """


@dispatch.command("show")
@data_option
@subject_option
@from_option
@to_option
@click.option(
    "--outcome",
    type=click.Choice([each.name.lower() for each in Outcome]),
    help="Messages with this outcome only.",
)
@limit_option
@format_option
def show_outcomes(
    data: str, subject: str | None, from_ms: int | None, to_ms: int | None, outcome: str | None, limit: int, form: str
) -> int:
    """List outcomes hour by hour, in the order in which the delay server learned them.

    `late` is the time from when a message was due (or accepted, if that was later) to when the realtime server
    appended it.

    Exit codes: 3 an hour is damaged; stderr names it, and the list leaves it out.

    $ delayd dispatch show --subject orders.cancel --from -10m --format csv
    $ delayd dispatch show --data /var/lib/delayd --outcome dead --limit 0
    """
    kind = None if outcome is None else Outcome[outcome.upper()]
    window = Window(from_ms, to_ms, subject)
    listing = Listing(data, window)
    show(COLUMNS, _rows(listing, window, kind), form, limit)
    return listing.end()


def _rows(listing: Listing, window: Window, kind: Outcome | None) -> Iterator[tuple[Cell, ...]]:
    for _, each, hour in listing.hours():
        if hour is not None:
            yield from _hour_rows(hour, window, kind, f"{each.directory.log_id:016x}")


def _hour_rows(hour: Hour, window: Window, kind: Outcome | None, log_id: str) -> Iterator[tuple[Cell, ...]]:
    rows, outcomes = hour.rows, hour.outcomes
    row_of = hour.row_of()
    # An outcome without a row can't be told by its subject or its time: only a listing of all shows it.
    unbounded = window == Window()
    held = window.holds(rows)
    chosen = np.full(len(row_of), unbounded)
    if len(held):
        chosen |= (row_of != NONE) & held[np.maximum(row_of, 0)]
    if kind is not None:
        chosen &= outcomes.parts["outcome"][outcomes.part_of] == kind
    due_ms = rows.due_from_ms()
    for chunk in in_chunks(np.flatnonzero(chosen)):
        for index in chunk:
            part = outcomes.parts[outcomes.part_of[index]]
            row = int(row_of[index])
            deliver_ms = int(outcomes.deliver_at_ms[index])
            handed_over = part["outcome"] == Outcome.DISPATCHED
            due = deliver_ms if row == NONE else int(due_ms[row])
            yield (
                int(outcomes.sequences[index]),
                None if row == NONE else rows.subjects[rows.subject[row]],
                deliver_ms,
                Outcome(int(part["outcome"])).name.lower(),
                reason_name(int(part["reason"])) if part["reason"] else None,
                int(part["target_appended_at_ms"]) - due if handed_over else None,
                int(part["claimed_at_ms"]) or None,
                int(part["target_appended_at_ms"]) or None if handed_over else None,
                int(part["attempt"]),
                int(part["epoch"]),
                int(part["batch_id"]) if handed_over else None,
                f"{int(part['target_log_id']):016x}" if handed_over or part["reason"] == Reason.DRAINED else None,
                int(part["target_offset"]) if handed_over else None,
                log_id,
            )
