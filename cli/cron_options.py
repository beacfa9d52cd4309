"""The options of ``delayd cron`` that say when a schedule fires, what becomes of missed occurrences, and what it sends.

Invariant: they are named and read as the arguments of `Producer.recurring`, and one that was not given says nothing, so
an edit changes what was given and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, TextIO, get_args

import click

from delayd.client.instants import utc
from delayd.errors import BadArgument
from delayd.recurrence.deciding import Misfire, Overlap
from delayd.recurrence.recurrence import Fold, Gap

from .send import read_headers
from .shared_options import bundle
from .times import duration, instant

Given = dict[str, Any]  # Arguments of `Producer.recurring`, as far as options named them.


def moment(text: str) -> datetime:
    """Read a moment of an option."""
    return utc(instant(text))


def day(text: str) -> date:
    """Read a date of an option."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no date; write one such as 2027-12-25") from error


def _when(
    skip_dates: Sequence[date],
    skip_file: TextIO | None,
    only_dates: Sequence[date],
    only_file: TextIO | None,
    **given: object,
) -> Given:
    found = _given(**given)
    for name, dates, file in (("skip_dates", skip_dates, skip_file), ("only_dates", only_dates, only_file)):
        if dates or file is not None:
            found[name] = [*dates, *_dates_of(file)]
    return found


def _content(headers: Sequence[str], tags: Sequence[str], **given: object) -> Given:
    return _given(**given, headers=read_headers(headers) or None, tags=tuple(tags) or None)


def _given(**options: object) -> Given:
    return {name: value for name, value in options.items() if value is not None}


def _dates_of(file: TextIO | None) -> list[date]:
    """One date a line; what follows a # is a comment, such as the name of the holiday."""
    found = []
    for number, line in enumerate(file or (), 1):
        text = line.partition("#")[0].strip()
        try:
            found += [date.fromisoformat(text)] if text else []
        except ValueError as error:
            raise BadArgument(
                f"line {number} of {getattr(file, 'name', 'the file')} is no date, {text[:40]!r};"
                " write one such as 2027-12-25"
            ) from error
    return found


when_options = bundle(
    "when",
    _when,
    click.option("--cron", metavar="LINE", help='Five fields, such as "0 9 * * MON-FRI", or a word such as @daily.'),
    click.option("--every", type=duration, metavar="DURATION", help="Or so often, by elapsed time: 10s, 15m, 1d."),
    click.option("--anchor", type=moment, metavar="INSTANT", help="With --every: count from here, in both directions."),
    click.option(
        "--timezone", metavar="ZONE", help="Zone of LINE and of dates, such as Europe/Berlin.  [default: UTC]"
    ),
    click.option(
        "--fold",
        type=click.Choice(get_args(Fold)),
        help="When clocks are set back: which of two equal local times.  [default: as cron does]",
    ),
    click.option(
        "--gap",
        type=click.Choice(get_args(Gap)),
        help="When clocks skip a local time: fire behind the gap, or not.  [default: as cron does]",
    ),
    click.option(
        "--skip-date", "skip_dates", multiple=True, type=day, metavar="DATE", help="A holiday; may be given again."
    ),
    click.option(
        "--skip-dates", "skip_file", type=click.File(), metavar="FILE", help="One holiday a line; - is stdin."
    ),
    click.option(
        "--only-date", "only_dates", multiple=True, type=day, metavar="DATE", help="Only then; may be given again."
    ),
    click.option(
        "--only-dates", "only_file", type=click.File(), metavar="FILE", help="One such date a line; - is stdin."
    ),
    click.option("--jitter", type=duration, metavar="DURATION", help="Each is due up to so much later."),
    click.option("--starts-at", type=moment, metavar="INSTANT", help="Not before this."),
    click.option("--until", type=moment, metavar="INSTANT", help="Not after this."),
    click.option("--max-occurrences", type=click.IntRange(1), metavar="N", help="Ends after so many."),
)
policy_options = bundle(
    "policy",
    _given,
    click.option(
        "--misfire",
        type=click.Choice(get_args(Misfire)),
        help="Of missed occurrences send the last one, all, or none.  [default: last]",
    ),
    click.option("--catchup", type=duration, metavar="DURATION", help="None that was missed longer ago."),
    click.option(
        "--catchup-max", type=click.IntRange(1), metavar="N", help="With all: so many at most.  [default: 100]"
    ),
    click.option(
        "--overlap",
        type=click.Choice(get_args(Overlap)),
        help="Send all, or skip one while an earlier one is not acknowledged.  [default: all]",
    ),
)
content_options = bundle(
    "content",
    _content,
    click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Sent along; may be given again."),
    click.option("--tag", "tags", multiple=True, metavar="TAG", help="By which messages can be found."),
    click.option(
        "--ttl", type=duration, metavar="DURATION", help="So long after it is due it is not delivered any more."
    ),
    click.option("--ordering-key", metavar="KEY", help="Groups that keep an order get its messages one by one."),
)
