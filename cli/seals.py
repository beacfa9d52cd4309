"""``delayd seals``: what each sealed hour is held against, and whether it still says the same.

Invariant: the exit code is 0 when no seal is broken and 3 when one is, whatever the format.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TextIO

import click

from delayd.hours import hour_name
from delayd.machine.disk import RealDisk
from delayd.reading.seals import (
    Compared,
    SealReport,
    SealsReport,
    SealState,
    compare_sides,
    parse_lines,
    read_sides,
    verify_seals,
)

from .exits import NOT_BALANCED, OK
from .hours import HourRange, Hours, all_damage_named, hours_options
from .listing import Cell, columns, progress
from .options import Command, Shown, data_option, shown_options

COLUMNS = columns(
    "hour number:name state rows:number dispatched:number cancelled:number,detail dead:number "
    "expired:number,detail in_doubt:number,detail body_bytes:size due_min_ms:instant,detail "
    "due_max_ms:instant,detail schedule_sha256:detail outcomes_sha256:detail previous_sha256:detail sha256:detail "
    "differs delay_log_id:detail"
)

SIDES_COLUMNS = columns("hour state target differs delay_log_id:detail")
NOTHING = "nothing to compare: it takes the lines of a delay server and of a realtime server, and a sealed hour"
_STATES = {True: "agree", False: "DIFFER", None: "left open"}


@click.command(cls=Command)
@data_option
@hours_options
@click.option(
    "--tallies",
    is_flag=True,
    help="Print lines that are the same for delay and realtime servers when they agree; verify nothing.",
)
@click.option(
    "--against",
    multiple=True,
    type=click.File(),
    metavar="FILE",
    help="Compare with the lines that --tallies printed on another machine; may be repeated.",
)
@shown_options
def seals(data: str, hours: HourRange, tallies: bool, against: tuple[TextIO, ...], shown: Shown) -> int:
    """Verify the seals of hours, from files.

    The command reads the rows of each sealed hour that was not deleted, and computes anew what its seal says. It
    follows the chain of all seals, also of deleted hours, and names what differs.

    With --tallies it prints for each hour one line with what delay servers say that they handed over, and one with
    what realtime servers held. Both lines are the same when the servers agree, also after the messages are removed.
    --against compares such lines from another machine with this directory.

    Exit codes: 0 no seal is broken; 3 a seal is broken, both sides differ, or a file is damaged.

    $ delayd seals --data /var/lib/delayd --from -24h
    $ delayd seals --data /var/lib/delayd --tallies > here.tallies
    $ delayd seals --data /var/lib/delayd --against there.tallies
    """
    if tallies or against:
        return _sides(data, hours, against, shown)
    with all_damage_named(data), progress("hours", None) as advance:
        report = verify_seals(data, hours=hours, progress=Hours(advance))
    listed = [each for each in report.seals if each.hour in hours or each.state is SealState.BROKEN]
    if listed or shown.form != "table":
        shown.show(COLUMNS, (_row(each) for each in listed))
    if shown.form == "table":
        for line in _verdict(report, bool(listed)):
            click.echo(line)
    return NOT_BALANCED if report.broken else OK


def _sides(data: str, hours: HourRange, against: Sequence[TextIO], shown: Shown) -> int:
    with all_damage_named(data), progress("hours", None) as advance:
        sides = read_sides(RealDisk(), data, hours, Hours(advance))
    if not against:
        for line in sides.lines(hours):
            click.echo(line)
        return OK
    for file in against:
        sides = sides.join(parse_lines(file, file.name))
    found = [each for each in compare_sides(sides) if each.hour in hours]
    if shown.form != "table" or any(not each.agrees for each in found):
        shown.show(SIDES_COLUMNS, (_side_row(each) for each in found if shown.form != "table" or not each.agrees))
    states = Counter(_STATES[each.agrees] for each in found)
    if shown.form == "table":
        click.echo(f"both sides: {', '.join(f'{count:,} {state}' for state, count in states.items()) or NOTHING}")
    return NOT_BALANCED if states[_STATES[False]] else OK


def _side_row(found: Compared) -> tuple[Cell, ...]:
    target = f"{found.target:016x}" if found.target else "all"
    return hour_name(found.hour), _STATES[found.agrees], target, found.differs, f"{found.log_id:016x}"


def _row(report: SealReport) -> tuple[Cell, ...]:
    name, log_id = hour_name(report.hour), f"{report.log_id:016x}"
    seal = report.seal
    if seal is None:
        return (name, None, report.state.value, *[None] * (len(COLUMNS) - 5), report.differs, log_id)
    facts = seal.facts
    return (
        *(name, seal.number, report.state.value, facts.rows, facts.dispatched, facts.cancelled, facts.dead),
        *(facts.expired, facts.in_doubt, facts.body_bytes, facts.due_min_ms, facts.due_max_ms),
        *(facts.schedule_sha256.hex(), facts.outcomes_sha256.hex(), seal.previous_sha256.hex(), seal.sha256.hex()),
        *(report.differs, log_id),
    )


def _verdict(report: SealsReport, listed: bool) -> Iterator[str]:
    if listed:
        yield ""
    for torn in report.torn:
        yield torn.sentence
    last = {each.log_id: each.seal for each in report.seals if each.seal is not None}
    for log_id, seal in last.items():
        yield f"the last seal of {log_id:016x} is number {seal.number}, {seal.sha256.hex()}"
    states = Counter(each.state for each in report.seals)
    if states:
        yield f"seals: {', '.join(f'{count:,} {state}' for state, count in states.items())}"
    else:
        yield "no hour is sealed yet; one is when it is over and each of its messages has an outcome"
