"""``delayd schedule`` and ``delayd dispatch``: what waits, what falls due in each period ahead, and what became of
messages, from the files of a server.

Invariant: a second that was not counted is bounded and never guessed, and a damaged hour is named and left out.
"""

import errno
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from delayd.batch.columns import Int64s
from delayd.client.asking import ask
from delayd.client.asking.ask import QUOTAS
from delayd.client.limits import check_subject
from delayd.errors import BadArgument, DamagedData, DelaydError, DiskFull, ServerUnavailable
from delayd.hours import hour_name, instant_text, period_name
from delayd.log.control import NO_LIMITS, QuotaLimits
from delayd.machine.operating import counted
from delayd.outcome import Outcome, Reason, reason_name
from delayd.reading.data import NONE, Hour, HourCount, Schedule, damaged
from delayd.reading.files.directory import Directory, server_runs
from delayd.reading.files.origins import outcome_word
from delayd.reading.verify import stored_quota

from .file_commands import find
from .hour_commands import HourListing, ListedWindow, ahead_options, in_chunks, listing_options
from .listing import Cell, Column, columns, printable, progress
from .operate import run
from .shared_options import CommandGroup, Shown, meta_option, shown_options
from .subject_commands import limits_sentence

HOUR_COLUMNS = columns(
    "hour messages:number pending:number dispatched:number,spare other_outcomes:number,spare "
    "stored_bytes:size,spare state delay_log_id:detail"
)
MESSAGE_COLUMNS = columns(
    "sequence:name subject deliver_at_ms:instant accepted_at_ms:instant,spare body_bytes:size state delay_log_id:detail"
)

LIGHT = "░"  # In a bar: messages that are done.


@click.group(no_args_is_help=True, cls=CommandGroup)
def schedule() -> None:
    """Look at what is scheduled, from files.

    $ delayd schedule hours --data /var/lib/delayd
    """


schedule.add_command(find)


@schedule.command()
@listing_options
@shown_options
def hours(listing: HourListing, shown: Shown) -> int:
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
def show_messages(listing: HourListing, everything: bool, with_body: bool, shown: Shown) -> int:
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
    listing: HourListing, by: str, quota: int | None, capacity: int | None, png: Path | None, meta: str, shown: Shown
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
    found, limits = Forecast(listing), RateLimits(quota, capacity)
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


def _hour_rows(listing: HourListing) -> Iterator[tuple[Cell, ...]]:
    with progress("hours", len(listing.wanted)) as done:
        for number, each in listing.wanted:
            done(1)
            if listing.window.subject is None and not listing.window.cuts(number):
                count = listing.count(number, each)
            else:
                count = _count(listing, number, each)
            if count.messages != 0:
                yield (hour_name(number), *count[1:-1], count.state.value, f"{each.directory.log_id:016x}")


def _count(listing: HourListing, number: int, each: Schedule) -> HourCount:
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


def _message_rows(listing: HourListing, everything: bool, with_body: bool) -> Iterator[tuple[Cell, ...]]:
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


def _body(listing: HourListing, each: Schedule, hour: Hour, row: int) -> str:
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


@click.group(no_args_is_help=True, cls=CommandGroup)
def dispatch() -> None:
    """Look at what became of messages, from files.

    $ delayd dispatch show --data /var/lib/delayd --from -10m
    """


@dispatch.command("show")
@listing_options
@click.option("--outcome", type=click.Choice([each.word for each in Outcome]), help="Messages with this outcome only.")
@shown_options
def show_outcomes(listing: HourListing, outcome: str | None, shown: Shown) -> int:
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


def _outcome_rows(listing: HourListing, kind: Outcome | None) -> Iterator[tuple[Cell, ...]]:
    for _, each, hour in listing.hours():
        if hour is not None:
            yield from _outcomes_of(hour, listing.window, kind, f"{each.directory.log_id:016x}")


def _outcomes_of(hour: Hour, window: ListedWindow, kind: Outcome | None, log_id: str) -> Iterator[tuple[Cell, ...]]:
    rows, outcomes = hour.rows, hour.outcomes
    row_of = hour.row_of()
    # An outcome without a row can't be told by its subject or its time: only a listing of all shows it.
    unbounded = window == ListedWindow()
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
                Outcome(int(part["outcome"])).word,
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


ROWS_READ_MAX = 4_000_000  # Some seconds of reading; hours beyond them are only bounded by their counts.
HOURS_READ_MAX = 1_000
BAR_CHARACTERS = 24
EIGHTHS = " ▏▎▍▌▋▊▉█"
SECOND_MS = 1_000
PNG_INCHES = (10.0, 4.0)
FORECAST_COLUMNS = columns(
    "period messages:number stored_bytes:size fullest_second_messages:number,spare "
    "fullest_second_ms:instant,spare above:spare"
)


class BusySecond(NamedTuple):
    """A second, and how many messages fall due in it."""

    messages: int
    begin_ms: int


NO_SECOND = BusySecond(0, 0)
NO_INSTANTS: Int64s = np.empty(0, np.int64)


@dataclass(slots=True)
class Ahead:
    """What one hour holds that is still to come."""

    messages: int = 0
    stored_bytes: int = 0
    fullest: BusySecond = NO_SECOND
    read: bool = False  # Whether ``fullest`` is known.


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Messages a second that somebody allows or can serve; None: not given."""

    quota: int | None = None
    capacity: int | None = None

    def above(self, messages: int) -> str:
        """Which of the limits so many messages a second exceed."""
        names = (("quota", self.quota), ("capacity", self.capacity))
        return ", ".join(name for name, limit in names if limit is not None and messages > limit)


class Forecast:
    """The hours ahead of one data directory."""

    def __init__(self, listing: HourListing) -> None:
        self.hours: dict[int, Ahead] = {}
        self.unread_messages_max = 0  # No second of an hour that was not read has more messages than this.
        self._listing = listing
        self._window = listing.window

    def look(self) -> None:
        """Count all hours, and read those that may hold the fullest second."""
        found: dict[int, list[Schedule]] = defaultdict(list)
        for number, each in self._listing.wanted:
            found[number].append(each)
        unread: dict[int, list[Schedule]] = {}
        with progress("hours", len(found)) as done:
            for number, schedules in found.items():
                if self._must_be_read(number, schedules):
                    self._read(number, schedules)
                else:
                    counted = [each.counted(number) for each in schedules]
                    messages, stored_bytes = (sum(column) for column in zip(*counted, strict=True))
                    self.hours[number] = Ahead(messages, stored_bytes)
                    unread[number] = schedules
                done(1)
        self._find_fullest(unread)

    def _find_fullest(self, unread: dict[int, list[Schedule]]) -> None:
        fullest = max((ahead.fullest.messages for ahead in self.hours.values()), default=0)
        rows = 0
        by_messages = sorted(unread, key=lambda number: self.hours[number].messages, reverse=True)
        with progress("fullest second", None) as done:
            for index, number in enumerate(by_messages):
                ahead = self.hours[number]
                if ahead.messages <= fullest:
                    return
                rows += ahead.messages
                if index == HOURS_READ_MAX or rows > ROWS_READ_MAX:
                    self.unread_messages_max = ahead.messages
                    return
                self._read(number, unread[number])
                fullest = max(fullest, self.hours[number].fullest.messages)
                done(1)

    def _must_be_read(self, number: int, found: Sequence[Schedule]) -> bool:
        """Whether the messages that are wanted are not simply all messages of an hour."""
        if self._window.subject is not None or self._window.cuts(number):
            return True
        return any(each.has_outcomes(number) for each in found)

    def _read(self, number: int, found: Sequence[Schedule]) -> None:
        ahead, due = Ahead(read=True), [NO_INSTANTS]
        for each in found:
            hour = self._listing.read(number, each)
            if hour is not None:
                wanted = self._window.holds(hour.rows) & (hour.outcome_of == NONE)
                due.append(hour.rows.due_from_ms()[wanted])
                share = len(due[-1]) / max(1, len(hour.rows))
                ahead.messages += len(due[-1])
                ahead.stored_bytes += round(each.counted(number).stored_bytes * share)
        ahead.fullest = fullest_second(np.concatenate(due))
        self.hours[number] = ahead


def fullest_second(due_ms: Int64s) -> BusySecond:
    """The second in which most messages fall due; the first of them."""
    if not len(due_ms):
        return NO_SECOND
    seconds = due_ms // SECOND_MS
    first = int(seconds.min())
    counts = np.bincount(seconds - first)
    most = int(counts.argmax())
    return BusySecond(int(counts[most]), (first + most) * SECOND_MS)


def rows_of(forecast: Forecast, by: str, limits: RateLimits, *, with_chart: bool) -> Iterator[tuple[Cell, ...]]:
    """The periods that have messages, rising."""
    periods: dict[str, list[Ahead]] = defaultdict(list)
    for number in sorted(forecast.hours):
        if forecast.hours[number].messages:
            periods[period_name(number, by)].append(forecast.hours[number])
    most = max((sum(hour.messages for hour in hours) for hours in periods.values()), default=0)
    for name, hours in periods.items():
        messages, size = sum(hour.messages for hour in hours), sum(hour.stored_bytes for hour in hours)
        fullest = max((hour.fullest for hour in hours if hour.read), default=None)
        peak: tuple[Cell, ...] = (None, None, "") if fullest is None else (*fullest, limits.above(fullest.messages))
        row: tuple[Cell, ...] = (name, messages, size, *peak)
        yield (*row, bar(messages / most)) if with_chart else row


def bar(share: float) -> str:
    """A bar of at most BAR_CHARACTERS characters; anything above 0 shows."""
    eighths = max(1, round(share * BAR_CHARACTERS * 8)) if share > 0 else 0
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def told(forecast: Forecast, limits: RateLimits) -> str:
    """The fullest second in one sentence."""
    fullest = max((ahead.fullest for ahead in forecast.hours.values()), default=NO_SECOND)
    if not fullest.messages:
        return "nothing is due"
    above = limits.above(fullest.messages)
    sentence = f"fullest second: {instant_text(fullest.begin_ms)} with {counted(fullest.messages, 'message|messages')}"
    if above:
        sentence += f", above the {above.replace(', ', ' and the ')}"
    if forecast.unread_messages_max > fullest.messages:
        sentence += f"; hours that were not read have at most {forecast.unread_messages_max:,} messages each"
    return sentence


def draw(forecast: Forecast, by: str, path: Path) -> None:
    """Write the chart as a picture; raises BadArgument when this can't be done."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise BadArgument("--png needs matplotlib: pip install matplotlib") from None
    rows = list(rows_of(forecast, by, RateLimits(), with_chart=False))
    figure, axes = pyplot.subplots(figsize=PNG_INCHES)
    axes.bar(range(len(rows)), [int(row[1] or 0) for row in rows], width=1.0)
    ticks = np.unique(np.linspace(0, max(0, len(rows) - 1), 8).astype(int)).tolist() if rows else []
    axes.set_xticks(ticks, [str(rows[tick][0]) for tick in ticks], rotation=20, ha="right")
    axes.set_ylabel(f"messages due in each {by}")
    figure.tight_layout()
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(str(path)) from error
        raise BadArgument(f"{path} can't be written ({error.strerror}); give --png a file that can") from error
    finally:
        pyplot.close(figure)


def quota_of(subject: str, listing: HourListing, meta: str) -> tuple[QuotaLimits, str]:
    """The limits that all servers of the directory have together, and a sentence that tells them.

    They are those of no quota when they are not known. A state that is damaged is left out of the listing by name.
    """
    found: list[QuotaLimits] = []
    running: list[int] = []
    try:
        name = check_subject(subject)
        for directory in listing.servers:
            if server_runs(directory.path):
                running.append(directory.log_id)
            else:
                found.append(_stored(directory, name))
        if running:
            found += run(lambda: _asked(subject, running, meta))
    except DamagedData as error:
        listing.leave_out(error)
        return NO_LIMITS, f"the quota of {subject} is not known: a state is damaged"
    except DelaydError as error:
        return NO_LIMITS, f"the quota of {subject} is not known: {error.message}"
    limits = together(found)
    servers = f", at {len(found)} delay servers together" if len(found) > 1 else ""
    return limits, limits_sentence(subject, limits) + servers


def _stored(directory: Directory, subject: bytes) -> QuotaLimits:
    try:
        return stored_quota(directory, subject)
    except FileNotFoundError as error:
        raise ServerUnavailable(f"{error.filename} is missing, as in a copy of the logs alone") from error


async def _asked(subject: str, log_ids: Sequence[int], meta: str) -> list[QuotaLimits]:
    async with ask.meta(meta) as connection:
        known = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
    found: list[QuotaLimits] = []
    for log_id in log_ids:
        if log_id not in known:
            raise ServerUnavailable(
                f"delay server {log_id:016x} runs, and the meta server at {ask.endpoint_of(meta)} does not know it"
            )
        limits = NO_LIMITS
        for info in await QUOTAS.of(known[log_id], {"prefix": subject}):
            if info.subject == subject:
                limits = QuotaLimits(info.per_second, info.pending, info.pending_bytes)
        found.append(limits)
    return found


def together(found: Sequence[QuotaLimits]) -> QuotaLimits:
    """Each server counts for itself, so a subject may have the sum; where one server has no limit, there is none."""
    sums = [None if None in limits else sum(limit or 0 for limit in limits) for limits in zip(*found, strict=True)]
    return QuotaLimits._make(sums)
