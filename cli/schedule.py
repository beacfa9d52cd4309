"""``delayd schedule`` and ``delayd dispatch``: what waits, and what became of messages, from the files of a server."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np

from delayd.errors import DamagedData
from delayd.hours import hour_name
from delayd.log.hour import Outcome, Reason, reason_name
from delayd.reading.data import NONE, Hour, HourCount, Schedule, damaged
from delayd.reading.files.origins import outcome_word

from .find import find
from .forecast import BAR_CHARACTERS, Forecast, Limits, bar, draw, quota_of, rows_of, told
from .forecast import COLUMNS as FORECAST_COLUMNS
from .hours import Listing, Window, ahead_options, in_chunks, listing_options
from .listing import Cell, Column, columns, printable, progress
from .options import Group, Shown, meta_option, shown_options

HOUR_COLUMNS = columns(
    "hour messages:number pending:number dispatched:number,spare other_outcomes:number,spare "
    "stored_bytes:size,spare state delay_log_id:detail"
)
MESSAGE_COLUMNS = columns(
    "sequence:name subject deliver_at_ms:instant accepted_at_ms:instant,spare body_bytes:size state delay_log_id:detail"
)

LIGHT = "░"  # In a bar: messages that are done.


@click.group(no_args_is_help=True, cls=Group)
def schedule() -> None:
    """Look at what is scheduled, from files.

    $ delayd schedule hours --data /var/lib/delayd
    """


schedule.add_command(find)


@schedule.command()
@listing_options
@shown_options
def hours(listing: Listing, shown: Shown) -> int:
    """Count the messages of each hour, in UTC, and how many of them still wait.

    A table has a bar for each hour: full for messages that wait, light for the others.

    Exit codes: 3 an hour is damaged; its state says so, and stderr names the file.

    $ delayd schedule hours --from now --to +2d
    """
    rows = _hour_rows(listing)
    if shown.form == "table":
        shown.show((*HOUR_COLUMNS, Column("chart")), _with_bars(list(rows)))
    else:
        shown.show(HOUR_COLUMNS, rows)
    return listing.end()


@schedule.command("show")
@listing_options
@click.option("--all", "everything", is_flag=True, help="Messages that are done, too.")
@click.option("--body", "with_body", is_flag=True, help="Show the beginning of each body.")
@shown_options
def show_messages(listing: Listing, everything: bool, with_body: bool, shown: Shown) -> int:
    """List pending messages, the next due first.

    Exit codes: 3 an hour or a body is damaged; stderr names it, and the list leaves it out.

    $ delayd schedule show --subject orders.cancel --to +30m --body
    $ delayd schedule show --data /var/lib/delayd --limit 0 --format csv > pending.csv
    """
    columns = (*MESSAGE_COLUMNS, Column("body")) if with_body else MESSAGE_COLUMNS
    shown.show(columns, _message_rows(listing, everything, with_body))
    return listing.end()


@schedule.command()
@ahead_options
@click.option(
    "--by", type=click.Choice(["hour", "day", "month"]), default="day", show_default=True, help="Length of a period."
)
@click.option(
    "--quota",
    type=click.IntRange(min=1),
    metavar="N",
    help="Name periods with a second above N messages; without it, above the quota of --subject.",
)
@click.option(
    "--capacity", type=click.IntRange(min=1), metavar="N", help="The same, with what was measured to be possible."
)
@click.option(
    "--png", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw the chart into a file, too."
)
@meta_option
@shown_options
def forecast(
    listing: Listing, by: str, quota: int | None, capacity: int | None, png: Path | None, meta: str, shown: Shown
) -> int:
    """Foresee how many messages fall due in each period, in UTC, and in which second most of them do.

    Without --from the forecast begins now. stderr names the fullest second. With --subject the forecast is held against
    the subject's quota, from the directory; --meta is for the quota of a server that runs.

    Exit codes: 3 a file is damaged; stderr names it, and the forecast leaves it out.

    $ delayd schedule forecast --by hour --to +2d
    $ delayd schedule forecast --subject mails
    $ delayd schedule forecast --by month --quota 5000 --capacity 20000 --png forecast.png
    """
    sentence = ""
    if listing.window.subject is not None and quota is None:
        stored, sentence = quota_of(listing.window.subject, listing, meta)
        quota = stored.per_second
    found, limits = Forecast(listing), Limits(quota, capacity)
    found.look()
    is_table = shown.form == "table"
    columns = (*FORECAST_COLUMNS, Column("chart")) if is_table else FORECAST_COLUMNS
    shown.show(columns, rows_of(found, by, limits, with_chart=is_table))
    sys.stdout.flush()
    for line in filter(None, (sentence, told(found, limits))):
        click.echo(f"delayd: {line}", err=True)
    if png is not None:
        draw(found, by, png)
    return listing.end()


def _hour_rows(listing: Listing) -> Iterator[tuple[Cell, ...]]:
    with progress("hours", len(listing.wanted)) as done:
        for number, each in listing.wanted:
            done(1)
            if listing.window.subject is None and not listing.window.cuts(number):
                count = listing.count(number, each)
            else:
                count = _count(listing, number, each)
            if count.messages != 0:
                yield (hour_name(number), *count[1:-1], count.state.value, f"{each.directory.log_id:016x}")


def _count(listing: Listing, number: int, each: Schedule) -> HourCount:
    """Count the wanted messages of an hour; its bytes are shared out by their number."""
    hour = listing.read(number, each)
    if hour is None:
        return damaged(number)
    messages, pending, dispatched = hour.counts(listing.window.holds(hour.rows))
    stored_bytes = round(each.counted(number).stored_bytes * messages / max(1, len(hour.rows)))
    others = messages - pending - dispatched
    return HourCount(number, messages, pending, dispatched, others, stored_bytes, hour.state)


def _with_bars(rows: Sequence[tuple[Cell, ...]]) -> Iterator[tuple[Cell, ...]]:
    """Each row with a bar that is as long as it has messages, compared with the fullest hour."""
    counts = [(row[1], row[2]) for row in rows]
    most = max((messages for messages, _ in counts if isinstance(messages, int)), default=0)
    for row, (messages, pending) in zip(rows, counts, strict=True):
        chart = ""
        if isinstance(messages, int) and isinstance(pending, int):
            chart = bar(pending / most)
            chart += LIGHT * max(0, round(messages / most * BAR_CHARACTERS) - len(chart))
        yield (*row, chart)


def _message_rows(listing: Listing, everything: bool, with_body: bool) -> Iterator[tuple[Cell, ...]]:
    for _, each, hour in listing.hours():
        if hour is None:
            continue
        rows, log_id = hour.rows, f"{each.directory.log_id:016x}"
        mask = listing.window.holds(rows) if everything else listing.window.holds(rows) & (hour.outcome_of == NONE)
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
    return outcome_word(hour.outcomes.parts[hour.outcomes.part_of[index]])


OUTCOME_COLUMNS = columns(
    "sequence:name subject deliver_at_ms:instant outcome reason:spare late_ms:duration "
    "claimed_at_ms:instant,detail appended_at_ms:instant,spare attempt:number,spare epoch:name,detail "
    "batch_id:name,detail target_log_id:spare target_offset:name,detail delay_log_id:detail"
)


@click.group(no_args_is_help=True, cls=Group)
def dispatch() -> None:
    """Look at what became of messages, from files.

    $ delayd dispatch show --data /var/lib/delayd --from -10m
    """


@dispatch.command("show")
@listing_options
@click.option(
    "--outcome", type=click.Choice([each.name.lower() for each in Outcome]), help="Messages with this outcome only."
)
@shown_options
def show_outcomes(listing: Listing, outcome: str | None, shown: Shown) -> int:
    """List outcomes hour by hour, in the order in which the delay server learned them.

    `late` is the time from when a message was due (or accepted, if that was later) to when the realtime server
    appended it.

    Exit codes: 3 an hour is damaged; stderr names it, and the list leaves it out.

    $ delayd dispatch show --subject orders.cancel --from -10m --format csv
    $ delayd dispatch show --data /var/lib/delayd --outcome dead --limit 0
    """
    kind = None if outcome is None else Outcome[outcome.upper()]
    shown.show(OUTCOME_COLUMNS, _outcome_rows(listing, kind))
    return listing.end()


def _outcome_rows(listing: Listing, kind: Outcome | None) -> Iterator[tuple[Cell, ...]]:
    for _, each, hour in listing.hours():
        if hour is not None:
            yield from _outcomes_of(hour, listing.window, kind, f"{each.directory.log_id:016x}")


def _outcomes_of(hour: Hour, window: Window, kind: Outcome | None, log_id: str) -> Iterator[tuple[Cell, ...]]:
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
