"""The tallies of a directory as lines of text, which two machines compare without their rows (docs/formats/tally.md).

Invariant: a delay server and its realtime servers print the same line for an hour that they agree on, whichever of them
still keeps its messages. If the lines do not decide a question, that is not called a difference.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delayd.content import Tally
from delayd.disk import Disk
from delayd.errors import BadArgument
from delayd.hours import hour_from_name, hour_name
from delayd.reading.directory import Directory, Role, find_directories
from delayd.reading.dispatch import read_outcomes
from delayd.reading.groups import LogMoved
from delayd.reading.plan import until_still
from delayd.reading.seals import SealBook
from delayd.reading.sides import HourOf, held_now, tallies_by_target
from delayd.reading.word import take_snapshot

Progress = Callable[[int, int], None]
ALL = 0  # Stands for all realtime servers together, as in a seal.
_ID = "[0-9a-f]{16}"
_DELAY = re.compile(rf"delay ({_ID})")
_REALTIME = re.compile(rf"realtime ({_ID}) (whole|partly)")
_TALLY = re.compile(rf"([0-9]{{10}}) ({_ID}) ({_ID}|all) ([0-9]{{1,20}}) ({_ID})({_ID})")


@dataclass(frozen=True, slots=True)
class Sides:
    """The rows that delay servers say they handed over, and that realtime servers held; ``sealed`` and ``sent`` only
    have sealed hours.
    """

    sealed: dict[HourOf, Tally] = field(default_factory=dict)
    sent: dict[tuple[HourOf, int], Tally] = field(default_factory=dict)  # Only hours whose files are still there.
    held: dict[tuple[HourOf, int], Tally] = field(default_factory=dict)
    delays: set[int] = field(default_factory=set)
    realtimes: dict[int, bool] = field(default_factory=dict)  # Whether the tally covers every row that it held.

    def lines(self, hours: Container[int] | None = None) -> Iterator[str]:
        """One line for each server, and for each hour and target below it."""
        for log_id in sorted(self.delays):
            yield f"delay {log_id:016x}"
            found = {**self.sent, **{(key, ALL): total for key, total in self.sealed.items()}}
            yield from _lines({key: each for key, each in found.items() if key[0][0] == log_id}, hours)
        for log_id, whole in sorted(self.realtimes.items()):
            yield f"realtime {log_id:016x} {'whole' if whole else 'partly'}"
            yield from _lines({key: each for key, each in self.held.items() if key[1] == log_id}, hours)

    def join(self, other: "Sides") -> "Sides":
        """Put both together; for a server that both have, the first one counts."""
        return Sides(
            other.sealed | self.sealed,
            other.sent | self.sent,
            {key: each for key, each in other.held.items() if key[1] not in self.realtimes} | self.held,
            self.delays | other.delays,
            other.realtimes | self.realtimes,
        )


class Compared(NamedTuple):
    """A sealed hour on both sides, at one realtime server or at all; ``differs`` is "" where they agree.

    ``agrees`` is None where the lines do not decide it; ``differs`` then says why.
    """

    log_id: int
    hour: int
    target: int
    agrees: bool | None
    differs: str


def read_sides(disk: Disk, data: str, hours: Container[int] | None = None, progress: Progress | None = None) -> Sides:
    """Read both sides from a directory; for realtime servers from the bytes that they keep.

    Raises:
        BadArgument: it holds no server's directory.
        DamagedData: a file can't be read.
    """
    directories = find_directories(disk, data)

    def read() -> Sides:
        sides = Sides()
        for directory in directories:
            if directory.role is Role.DELAY:
                _read_delay(disk, directory, sides, hours, progress)
            else:
                held, tallies = held_now(disk, directory, [])
                sides.realtimes[directory.log_id] = held.whole
                sides.held.update(((key, directory.log_id), each) for key, each in tallies.items())
        return sides

    return until_still(data, read)


def parse_lines(lines: Iterable[str], name: str) -> Sides:
    """Read lines that `Sides.lines` has printed; BadArgument names the first line of another form."""
    sides, section = Sides(), None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if found := _DELAY.fullmatch(text):
            section = int(found[1], 16)
            sides.delays.add(section)
        elif found := _REALTIME.fullmatch(text):
            section = int(found[1], 16)
            sides.realtimes[section] = found[2] == "whole"
        elif (found := _TALLY.fullmatch(text)) and section is not None:
            key = int(found[2], 16), _hour(found[1], name, number)
            target = ALL if found[3] == "all" else int(found[3], 16)
            total = Tally(int(found[4]), int(found[5], 16), int(found[6], 16))
            if section in sides.realtimes:
                sides.held[key, target] = total
            elif target == ALL:
                sides.sealed[key] = total
            else:
                sides.sent[key, target] = total
        elif text:
            raise _no_line(name, number)
    return sides


def compare_sides(sides: Sides) -> list[Compared]:
    """Compare each sealed hour at each realtime server that the lines name."""
    found: list[Compared] = []
    sent: dict[HourOf, dict[int, Tally]] = {}
    for (key, target), total in sides.sent.items():
        sent.setdefault(key, {})[target] = total
    for key, total in sorted(sides.sealed.items()):
        by_target = sent.get(key, {})
        if sum(each.rows for each in by_target.values()) == total.rows:
            for target in sorted(sides.realtimes.keys()):
                own, theirs = by_target.get(target, Tally()), sides.held.get((key, target), Tally())
                found += _compare(sides, key, target, own, theirs)
            for target in sorted(by_target.keys() - sides.realtimes.keys()):
                found.append(Compared(*key, target, None, "no line of this realtime server is here"))
            continue
        # The hour is deleted: its seal only has the sum over all realtime servers.
        theirs = Tally()
        for target in sides.realtimes:
            theirs += sides.held.get((key, target), Tally())
        if theirs.rows < total.rows:
            what = f"{total.rows - theirs.rows} of its messages are at realtime servers whose lines are not here"
            found.append(Compared(*key, ALL, None, what))
        else:
            found += _compare(sides, key, ALL, total, theirs)
    return found


def _hour(text: str, name: str, number: int) -> int:
    try:
        return hour_from_name(text)
    except BadArgument:
        raise _no_line(name, number) from None


def _no_line(name: str, number: int) -> BadArgument:
    return BadArgument(f"{name}, line {number}: this is no line that `delayd seals --tallies` prints")


def _compare(sides: Sides, key: HourOf, target: int, own: Tally, theirs: Tally) -> Iterator[Compared]:
    if own == theirs:
        if own.rows:
            yield Compared(*key, target, True, "")
    elif theirs.rows < own.rows and not all(sides.realtimes.values() if target == ALL else [sides.realtimes[target]]):
        yield Compared(*key, target, None, "the realtime server's tallies leave messages out")
    else:
        what = f"handed over {own.rows} with {own.digest}, held {theirs.rows} with {theirs.digest}"
        yield Compared(*key, target, False, what)


def _read_delay(
    disk: Disk, directory: Directory, sides: Sides, hours: Container[int] | None, progress: Progress | None
) -> None:
    snapshot = take_snapshot(disk, directory)
    book = SealBook(disk, snapshot)
    sides.delays.add(directory.log_id)
    wanted = [seal.facts for seal in book.seals if hours is None or seal.facts.hour in hours]
    for done, facts in enumerate(wanted, 1):
        key = directory.log_id, facts.hour
        sides.sealed[key] = Tally(facts.dispatched, facts.tally_first, facts.tally_second)
        if book.has_standing(facts.hour):
            for target, total in _sent(disk, directory, facts.hour):
                sides.sent[key, target] = total
        if progress is not None:
            progress(done, len(wanted))


def _sent(disk: Disk, directory: Directory, hour: int) -> Sequence[tuple[int, Tally]]:
    try:
        return list(tallies_by_target(read_outcomes(disk, directory, hour)).items())
    except LogMoved:
        return ()  # Retention removed it just now: only the seal is left.


def _lines(found: dict[tuple[HourOf, int], Tally], hours: Container[int] | None) -> Iterator[str]:
    for ((origin, hour), target), total in sorted(found.items()):
        if hours is None or hour in hours:
            name = "all" if target == ALL else f"{target:016x}"
            yield f"{hour_name(hour)} {origin:016x} {name} {total.rows} {total.digest}"
