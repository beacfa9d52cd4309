"""``delayd seals``: what each sealed hour is held against, and whether it still says the same.

Invariant: the exit code is 0 when no seal is broken and 3 when one is, whatever the format.
"""

from collections import Counter
from collections.abc import Iterator

import click

from delayd.hours import hour_name
from delayd.reading.seals import SealReport, SealsReport, SealState, verify_seals

from .damage import all_damage_named
from .exits import NOT_BALANCED, OK
from .hour_range import HourRange, Hours
from .listing import show
from .options import data_option, examples, format_option, limit_option
from .progress import progress
from .table import Cell, Column, Kind
from .times import instant

COLUMNS = (
    Column("hour"),
    Column("number", Kind.NAME),
    Column("state"),
    Column("rows", Kind.NUMBER),
    Column("dispatched", Kind.NUMBER),
    Column("cancelled", Kind.NUMBER, detail=True),
    Column("dead", Kind.NUMBER),
    Column("expired", Kind.NUMBER, detail=True),
    Column("in_doubt", Kind.NUMBER, detail=True),
    Column("body_bytes", Kind.SIZE),
    Column("due_min_ms", Kind.INSTANT, detail=True),
    Column("due_max_ms", Kind.INSTANT, detail=True),
    Column("schedule_sha256", detail=True),
    Column("outcomes_sha256", detail=True),
    Column("previous_sha256", detail=True),
    Column("sha256", detail=True),
    Column("differs"),
    Column("delay_log_id", detail=True),
)


@click.command(epilog=examples("delayd seals --data /var/lib/delayd --from -24h"))
@data_option
@click.option("--from", "from_ms", type=instant, metavar="INSTANT", help="From the hour that holds this, in UTC.")
@click.option("--to", "to_ms", type=instant, metavar="INSTANT", help="Up to the hour before this, or that holds it.")
@limit_option
@format_option
def seals(data: str, from_ms: int | None, to_ms: int | None, limit: int, form: str) -> int:
    """Verify the seals of hours, from files.

    Reads the rows of each sealed hour that still stands, recomputes what its seal says, and follows the chain of all
    seals, those of deleted hours too. Names what differs.

    Exit codes: 0 no seal is broken, 3 one is or a file is damaged.
    """
    hours = HourRange.of(from_ms, to_ms)
    with all_damage_named(data), progress("hours", None) as advance:
        report = verify_seals(data, hours=hours, progress=Hours(advance))
    listed = [each for each in report.seals if each.hour in hours or each.state is SealState.BROKEN]
    if listed or form != "table":
        show(COLUMNS, (_row(each) for each in listed), form, limit)
    if form == "table":
        for line in _verdict(report, bool(listed)):
            click.echo(line)
    return NOT_BALANCED if report.broken else OK


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
