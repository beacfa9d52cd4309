"""``delayd schedule``: what waits, read from the files of a running server, a stopped one, or a copy."""

from collections.abc import Iterator

import click
import numpy as np

from delayd.disk import RealDisk
from delayd.errors import DamagedData
from delayd.hours import hour_name
from delayd.log.dispatch import Outcome

from .hour_schedule import NONE, Hour, Listing, Schedule, Window, in_chunks, schedules
from .listing import printable, show
from .options import data_option, examples, format_option, from_option, limit_option, subject_option, to_option
from .progress import progress
from .table import Cell, Column, Kind

HOUR_COLUMNS = (
    Column("hour"),
    Column("messages", Kind.NUMBER),
    Column("pending", Kind.NUMBER),
    Column("dispatched", Kind.NUMBER),
    Column("other_outcomes", Kind.NUMBER),
    Column("body_bytes", Kind.SIZE),
    Column("state"),
    Column("delay_log_id", detail=True),
)
MESSAGE_COLUMNS = (
    Column("sequence", Kind.NAME),
    Column("subject"),
    Column("deliver_at_ms", Kind.INSTANT),
    Column("accepted_at_ms", Kind.INSTANT, spare=True),
    Column("body_bytes", Kind.SIZE),
    Column("state"),
    Column("delay_log_id", detail=True),
)


# In place of counts.
_DAMAGED: tuple[Cell, ...] = (None, None, None, None, None, "damaged")


@click.group(no_args_is_help=True, epilog=examples("delayd schedule hours --data /var/lib/delayd"))
def schedule() -> None:
    """Look at what is scheduled, from files."""


@schedule.command(epilog=examples("delayd schedule hours --from now --to +2d"))
@data_option
@subject_option
@from_option
@to_option
@limit_option
@format_option
def hours(data: str, subject: str | None, from_ms: int | None, to_ms: int | None, limit: int, form: str) -> int:
    """Count the messages of each hour, in UTC, and how many of them still wait.

    Exit codes: 3 an hour is damaged; its state says so, and stderr names the file.
    """
    window = Window(from_ms, to_ms, subject)
    listing = Listing(schedules(RealDisk(), data), window)
    show(HOUR_COLUMNS, _hour_rows(listing, window), form, limit)
    return listing.end()


@schedule.command(
    "show",
    epilog=examples(
        "delayd schedule show --subject orders.cancel --to +30m --body",
        "delayd schedule show --data /var/lib/delayd --limit 0 --format csv > pending.csv",
    ),
)
@data_option
@subject_option
@from_option
@to_option
@click.option("--all", "everything", is_flag=True, help="Messages that are done, too.")
@click.option("--body", "with_body", is_flag=True, help="Show the beginning of each body.")
@limit_option
@format_option
def show_messages(
    data: str,
    subject: str | None,
    from_ms: int | None,
    to_ms: int | None,
    everything: bool,
    with_body: bool,
    limit: int,
    form: str,
) -> int:
    """List pending messages, the next due first.

    Exit codes: 3 an hour or a body is damaged; stderr names it, and the list leaves it out.
    """
    window = Window(from_ms, to_ms, subject)
    columns = (*MESSAGE_COLUMNS, Column("body")) if with_body else MESSAGE_COLUMNS
    listing = Listing(schedules(RealDisk(), data), window)
    show(columns, _message_rows(listing, window, everything, with_body), form, limit)
    return listing.end()


def _hour_rows(listing: Listing, window: Window) -> Iterator[tuple[Cell, ...]]:
    with progress("hours", len(listing.wanted)) as done:
        for number, each, hour in listing.hours():
            done(1)
            counts = _DAMAGED if hour is None else _count(hour, window)
            if counts[0] != 0:
                yield (hour_name(number), *counts, f"{each.directory.log_id:016x}")


def _count(hour: Hour, window: Window) -> tuple[int, int, int, int, int, str]:
    wanted = window.holds(hour.rows)
    found = hour.outcome_of[wanted]
    done = found[found != NONE]
    kinds = hour.outcomes.parts["outcome"][hour.outcomes.part_of[done]]
    dispatched = int((kinds == Outcome.DISPATCHED).sum())
    size = int(hour.rows.body_bytes[wanted].sum(dtype=np.int64))
    return len(found), len(found) - len(done), dispatched, len(done) - dispatched, size, hour.state.value


def _message_rows(listing: Listing, window: Window, everything: bool, with_body: bool) -> Iterator[tuple[Cell, ...]]:
    for _, each, hour in listing.hours():
        if hour is None:
            continue
        rows, log_id = hour.rows, f"{each.directory.log_id:016x}"
        mask = window.holds(rows) if everything else window.holds(rows) & (hour.outcome_of == NONE)
        chosen = np.flatnonzero(mask)
        chosen = chosen[np.argsort(rows.due_from_ms()[chosen], kind="stable")]
        for chunk in in_chunks(chosen):
            for row in chunk:
                accepted_ms = int(rows.appended_at_ms[row])
                line: tuple[Cell, ...] = (
                    int(rows.sequence[row]),
                    rows.subjects[rows.subject[row]],
                    int(rows.deliver_at_ms[row]),
                    accepted_ms or None,
                    int(rows.body_bytes[row]),
                    _state(hour, row),
                    log_id,
                )
                yield (*line, _body(listing, each, hour, row)) if with_body else line


def _body(listing: Listing, each: Schedule, hour: Hour, row: int) -> str:
    try:
        return printable(each.body(hour, row))
    except DamagedData as error:
        listing.leave_out(error)
        return "(damaged)"


def _state(hour: Hour, row: int) -> str:
    index = int(hour.outcome_of[row])
    if index == NONE:
        return "pending"
    return Outcome(int(hour.outcomes.parts["outcome"][hour.outcomes.part_of[index]])).name.lower()
