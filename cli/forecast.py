"""``delayd schedule forecast``: how many messages fall due in each hour, day or month ahead, and in which second most.

Invariant: counts are exact for hours that are read, and for the others those of the checkpoint's table, of which none
has an outcome yet. Hours are read as long as one of them may hold a fuller second than the fullest one that is known. A
quota that is not known is said to be unknown, and never taken for none.
"""

import errno
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import Int64s
from delayd.client.asking.ask import QUOTAS
from delayd.client.limits import check_subject
from delayd.errors import BadArgument, DamagedData, DelaydError, DiskFull, ServerUnavailable
from delayd.hours import hour_start_ms
from delayd.log.control import NO_LIMITS
from delayd.log.control import Limits as Quota
from delayd.reading.data import NONE, Schedule
from delayd.reading.files.directory import Directory, server_runs
from delayd.reading.verify import stored_quota

from . import ask
from .hours import Listing
from .listing import Cell, columns, progress
from .subjects import limits_sentence
from .times import instant_text

ROWS_READ_MAX = 4_000_000  # Some seconds of reading; hours beyond them are only bounded by their counts.
HOURS_READ_MAX = 1_000
BAR_CHARACTERS = 24
EIGHTHS = " ▏▎▍▌▋▊▉█"
SECOND_MS = 1_000
PNG_INCHES = (10.0, 4.0)
COLUMNS = columns(
    "period messages:number stored_bytes:size fullest_second_messages:number,spare "
    "fullest_second_ms:instant,spare above:spare"
)


class Second(NamedTuple):
    """A second, and how many messages fall due in it."""

    messages: int
    begin_ms: int


NO_SECOND = Second(0, 0)
NO_INSTANTS: Int64s = np.empty(0, np.int64)


@dataclass(slots=True)
class Ahead:
    """What one hour holds that is still to come."""

    messages: int = 0
    stored_bytes: int = 0
    fullest: Second = NO_SECOND
    read: bool = False  # Whether ``fullest`` is known.


@dataclass(frozen=True, slots=True)
class Limits:
    """Messages a second that somebody allows or can serve; None: not given."""

    quota: int | None = None
    capacity: int | None = None

    def above(self, messages: int) -> str:
        """Which of the limits so many messages a second exceed."""
        names = (("quota", self.quota), ("capacity", self.capacity))
        return ", ".join(name for name, limit in names if limit is not None and messages > limit)


class Forecast:
    """The hours ahead of one data directory."""

    def __init__(self, listing: Listing) -> None:
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


def fullest_second(due_ms: Int64s) -> Second:
    """The second in which most messages fall due; the first of them."""
    if not len(due_ms):
        return NO_SECOND
    seconds = due_ms // SECOND_MS
    first = int(seconds.min())
    counts = np.bincount(seconds - first)
    most = int(counts.argmax())
    return Second(int(counts[most]), (first + most) * SECOND_MS)


def rows_of(forecast: Forecast, by: str, limits: Limits, *, with_chart: bool) -> Iterator[tuple[Cell, ...]]:
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


def period_name(hour: int, by: str) -> str:
    """The name of the hour, day or month that an hour belongs to, in UTC."""
    begin = datetime.fromtimestamp(hour_start_ms(hour) / 1_000, UTC)
    return begin.strftime({"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}[by])


def bar(share: float) -> str:
    """A bar of at most BAR_CHARACTERS characters; anything above 0 shows."""
    eighths = max(1, round(share * BAR_CHARACTERS * 8)) if share > 0 else 0
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def told(forecast: Forecast, limits: Limits) -> str:
    """The fullest second in one sentence."""
    fullest = max((ahead.fullest for ahead in forecast.hours.values()), default=NO_SECOND)
    if not fullest.messages:
        return "nothing is due"
    above = limits.above(fullest.messages)
    sentence = f"fullest second: {instant_text(fullest.begin_ms)} with {fullest.messages:,} messages"
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
    rows = list(rows_of(forecast, by, Limits(), with_chart=False))
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


def quota_of(subject: str, listing: Listing, meta: str) -> tuple[Quota, str]:
    """The limits that all servers of the directory have together, and a sentence that tells them.

    They are those of no quota when they are not known. A state that is damaged is left out of the listing by name.
    """
    found: list[Quota] = []
    running: list[int] = []
    try:
        name = check_subject(subject)
        for directory in listing.servers:
            if server_runs(directory.path):
                running.append(directory.log_id)
            else:
                found.append(_stored(directory, name))
        if running:
            found += ask.run(lambda: _asked(subject, running, meta))
    except DamagedData as error:
        listing.leave_out(error)
        return NO_LIMITS, f"the quota of {subject} is not known: a state is damaged"
    except DelaydError as error:
        return NO_LIMITS, f"the quota of {subject} is not known: {error.message}"
    limits = together(found)
    servers = f", at {len(found)} delay servers together" if len(found) > 1 else ""
    return limits, limits_sentence(subject, limits) + servers


def _stored(directory: Directory, subject: bytes) -> Quota:
    try:
        return stored_quota(directory, subject)
    except FileNotFoundError as error:
        raise ServerUnavailable(f"{error.filename} is missing, as in a copy of the logs alone") from error


async def _asked(subject: str, log_ids: Sequence[int], meta: str) -> list[Quota]:
    async with ask.meta(meta) as connection:
        known = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
    found: list[Quota] = []
    for log_id in log_ids:
        if log_id not in known:
            raise ServerUnavailable(f"delay server {log_id:016x} runs, and the meta server at {meta} does not know it")
        limits = NO_LIMITS
        for info in await QUOTAS.of(known[log_id], {"prefix": subject}):
            if info.subject == subject:
                limits = Quota(info.per_second, info.pending, info.pending_bytes)
        found.append(limits)
    return found


def together(found: Sequence[Quota]) -> Quota:
    """Each server counts for itself, so a subject may have the sum; where one server has no limit, there is none."""
    sums = [None if None in limits else sum(limit or 0 for limit in limits) for limits in zip(*found, strict=True)]
    return Quota._make(sums)
