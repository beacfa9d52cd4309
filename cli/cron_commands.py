"""``delayd cron``: recurring schedules, which a delay server keeps and decides (docs/recurring.md).

Invariant: nothing is overwritten silently. A new schedule needs a name that is free, and an edit holds only for the
version that it was made from.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import click

from delayd.client.asking.recurring import RecurringInfo
from delayd.client.producer import Producer
from delayd.errors import BadArgument, NoRecurring, RecurringConflict
from delayd.hours import EPOCH, duration_text, duration_word, instant_text
from delayd.recurrence.cron_line import CronLine
from delayd.recurrence.recurrence import PREVIEW_MAX, Recurrence
from delayd.recurrence.zones import shown_at, tzdata_version

from .cron_options import Given, content_options, policy_options, when_options
from .listing import Cell, columns, printable
from .listing import show as show_rows
from .send import one_body, told_whom
from .shared_options import (
    CommandGroup,
    Shown,
    confirm,
    format_option,
    meta_option,
    shown_options,
    text_format_option,
    timeout_option,
    yes_option,
)
from .times import instant

MS = timedelta(milliseconds=1)
COUNT = 5  # Occurrences that `next` shows unless told otherwise.
# What may be taken back to its default, by the arguments of `Producer.recurring`.
UNSET = (
    *("anchor", "timezone", "fold", "gap", "skip-dates", "only-dates", "jitter", "starts-at", "until"),
    *("max-occurrences", "misfire", "catchup", "catchup-max", "overlap", "headers", "tags", "ttl"),
    "ordering-key",
)
# A line takes the place of an interval, with what belongs to it, and the reverse.
_INSTEAD = {"cron": ("every", "anchor"), "every": ("cron", "fold", "gap")}
_WHEN = tuple(Recurrence.__dataclass_fields__)
_POLICY = ("misfire", "catchup", "catchup_max", "overlap")

LISTED = columns(
    "name subject when state next_ms:instant last_ms:instant,spare sent:number skipped:number version:number,spare"
    " note:spare"
)
NEXT = columns("occurrence_ms:instant local due_ms:instant,spare")

name_argument = click.argument("name")
version_option = click.option(
    "--if-version", type=click.IntRange(0), metavar="N", help="Only when it has this version, as `show` tells it."
)
file_option = click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="The body is in this file; - is stdin.",
)


@click.group(cls=CommandGroup)
def cron() -> None:
    """Send messages again and again: by cron lines in time zones, or at intervals.

    A delay server keeps each schedule and decides each of its occurrences once, whatever is killed.

    $ delayd cron next --cron "0 9 * * MON-FRI" --timezone Europe/Berlin
    $ delayd cron add report reports.daily '{}' --cron "0 9 * * MON-FRI" --timezone Europe/Berlin
    $ delayd cron list
    """


@cron.command("list")
@click.option("--prefix", default="", metavar="TEXT", help="Schedules whose names begin with this only.")
@timeout_option
@meta_option
@shown_options
def list_schedules(prefix: str, timeout: timedelta, meta: str, shown: Shown) -> None:
    """List the schedules of all delay servers, by name.

    States: `active`, `paused` (the note says why), and `ended` (nothing recurs any more). `sent` and `skipped` count
    occurrences; `delayd cron show` has the reasons.

    $ delayd cron list --prefix report
    $ delayd cron list --format json --limit 0
    """
    with _asking(meta, timeout) as producer:
        shown.show(LISTED, map(_row, producer.list_recurring(prefix)))


@cron.command("show")
@name_argument
@timeout_option
@meta_option
@text_format_option
def show_schedule(name: str, timeout: timedelta, meta: str, form: str) -> None:
    """Show all about one schedule: when it fires, what it sends, and what it did.

    $ delayd cron show report
    $ delayd cron show report --format json
    """
    with _asking(meta, timeout) as producer:
        _tell(_found(producer, name), form)


@cron.command("add")
@name_argument
@click.argument("subject")
@click.argument("body", required=False)
@file_option
@when_options
@policy_options
@content_options
@timeout_option
@meta_option
@text_format_option
def add(
    name: str,
    subject: str,
    body: str | None,
    file: str | None,
    when: Given,
    policy: Given,
    content: Given,
    timeout: timedelta,
    meta: str,
    form: str,
) -> None:
    """Make a schedule: messages to SUBJECT, each with the same body.

    NAME names it in the whole cluster. To add the same schedule twice does no harm; another one with this name is
    refused, see `delayd cron edit`.

    $ delayd cron add report reports.daily '{}' --cron "0 9 * * MON-FRI" --timezone Europe/Berlin
    $ delayd cron add poll feeds.poll --file feed.json --every 10s --jitter 2s
    $ delayd cron add bill bills '{}' --cron "0 6 L * *" --skip-dates holidays.txt --misfire all --catchup 3d
    """
    if (body is None) == (file is None):
        raise click.UsageError("give the body once: as BODY, or with --file FILE")
    # What is wrong with the line is told before any server is asked.
    Recurrence(**when)
    with _asking(meta, timeout) as producer:
        try:
            added = producer.recurring(name, subject, one_body(body, file), if_version=0, **when, **policy, **content)
        except RecurringConflict as error:
            raise RecurringConflict(
                f"there is a schedule {name!r} with another specification, in version {error.version}:"
                " `delayd cron edit` changes it, or choose another name",
                version=error.version,
            ) from error
    _tell_changed("is kept", added, form)


@cron.command("edit")
@name_argument
@click.option("--subject", metavar="SUBJECT", help="Send to this subject.")
@click.option("--body", metavar="BODY", help="Send this.")
@file_option
@when_options
@policy_options
@content_options
@click.option(
    "--unset", multiple=True, type=click.Choice(UNSET), help="Take it back to its default; may be given again."
)
@version_option
@timeout_option
@meta_option
@text_format_option
def edit(
    name: str,
    subject: str | None,
    body: str | None,
    file: str | None,
    when: Given,
    policy: Given,
    content: Given,
    unset: Sequence[str],
    if_version: int | None,
    timeout: timedelta,
    meta: str,
    form: str,
) -> None:
    """Change a schedule: what you give, and nothing else.

    When somebody else changes it at the same moment, one of both is refused. What was decided before stays; a change
    holds for what recurs from then on.

    $ delayd cron edit report --cron "30 8 * * MON-FRI"
    $ delayd cron edit report --body '{"full": true}' --unset jitter
    $ delayd cron edit report --until 2028-01-01T00:00:00Z --if-version 3
    """
    if body is not None and file is not None:
        raise click.UsageError("give the body once: with --body or with --file")
    given = {**when, **policy, **content}
    both = sorted(given.keys() & {_argument(word) for word in unset})
    if both:
        raise click.UsageError(f"--unset {both[0].replace('_', '-')} contradicts the option that sets it")
    if not given and not unset and (subject, body, file) == (None, None, None):
        raise click.UsageError("nothing is to be changed: give an option that says what")
    with _asking(meta, timeout) as producer:
        info = _found(producer, name)
        if info.ordered and not {"ordering_key"} & (given.keys() | {_argument(word) for word in unset}):
            raise BadArgument(
                f"the messages of {name} have an ordering key, of which a hash alone is kept; give --ordering-key KEY"
                " again, or --unset ordering-key"
            )
        options = {**_options_of(info), **given}
        for new, others in _INSTEAD.items():
            if new in given:
                options = {each: value for each, value in options.items() if each not in others or each in given}
        for word in unset:
            options.pop(_argument(word), None)
        new_body = info.body if body is None and file is None else one_body(body, file)
        changed = producer.recurring(
            name, subject or info.subject, new_body, if_version=if_version or info.version, **options
        )
    _tell_changed("is kept", changed, form)


@cron.command("pause")
@name_argument
@click.option("--note", default="", metavar="TEXT", help="Why, for those who look at it.")
@version_option
@timeout_option
@meta_option
@text_format_option
def pause(name: str, note: str, if_version: int | None, timeout: timedelta, meta: str, form: str) -> None:
    """Let a schedule send nothing, until `delayd cron resume`; what recurs meanwhile is skipped.

    $ delayd cron pause report --note "the report is wrong, see ticket 42"
    """
    with _asking(meta, timeout) as producer:
        _tell_changed("is paused", producer.pause_recurring(name, note, if_version=if_version), form)


@cron.command("resume")
@name_argument
@version_option
@timeout_option
@meta_option
@text_format_option
def resume(name: str, if_version: int | None, timeout: timedelta, meta: str, form: str) -> None:
    """Let a paused schedule send again, from now on.

    $ delayd cron resume report
    """
    with _asking(meta, timeout) as producer:
        _tell_changed("goes on", producer.resume_recurring(name, if_version=if_version), form)


@cron.command("run")
@name_argument
@timeout_option
@meta_option
@text_format_option
def run_now(name: str, timeout: timedelta, meta: str, form: str) -> None:
    """Send one message of a schedule now, besides its occurrences; also while it is paused.

    $ delayd cron run report
    """
    with _asking(meta, timeout) as producer:
        _tell_changed("has sent one message now", producer.run_recurring(name), form)


@cron.command("delete")
@name_argument
@version_option
@timeout_option
@meta_option
@yes_option
def delete(name: str, if_version: int | None, timeout: timedelta, meta: str, yes: bool) -> None:
    """End a schedule for good. Messages that it has sent stay.

    When somebody changes the schedule while you are asked, it stays.

    $ delayd cron delete report
    $ delayd cron delete report --yes
    """
    with _asking(meta, timeout) as producer:
        info = _found(producer, name)
        confirm(f"{name} ({_when_text(info.recurrence)}, to {info.subject}) sends nothing any more.", yes)
        if not producer.delete_recurring(name, if_version=if_version or info.version):
            raise _none_of(name)
    click.echo(f"{name} is deleted")


@cron.command("next")
@click.argument("name", required=False)
@when_options
@click.option(
    *("--count", "-n"),
    type=click.IntRange(1, PREVIEW_MAX),
    default=COUNT,
    show_default=True,
    metavar="N",
    help="So many.",
)
@click.option("--after", type=instant, metavar="INSTANT", help="Behind this; now unless given.")
@timeout_option
@meta_option
@format_option
def next_occurrences(
    name: str | None, when: Given, count: int, after: int | None, timeout: timedelta, meta: str, form: str
) -> None:
    """Show when a schedule fires next: one that is kept, or one that you only think of.

    With --cron or --every no server is asked. `local` is what clocks show in the zone; `due` differs from the
    occurrence by the jitter.

    $ delayd cron next report
    $ delayd cron next --cron "30 2 * * *" --timezone Europe/Berlin --after 2027-03-26T00:00:00Z -n 3
    $ delayd cron next --every 90m --anchor 2027-01-01T00:00:00Z --format json
    """
    if (name is None) == (not when):
        raise click.UsageError("name a schedule, or say --cron LINE or --every DURATION, and not both")
    after_ms = instant("now") if after is None else after
    if name is None:
        recurrence, ran = Recurrence(**when), 0
        click.echo(
            f"delayd: {_when_text(recurrence)}: {_explained(recurrence)} (zones of {tzdata_version()})", err=True
        )
    else:
        with _asking(meta, timeout) as producer:
            info = _found(producer, name)
        recurrence, ran = info.recurrence, info.sent
        if info.paused:
            click.echo(f"delayd: {name} is paused, so none of these is sent until it is resumed", err=True)
    rows = (
        (ms, _local(recurrence, ms), recurrence.due_ms(name, ms) if name is not None else None)
        for ms in recurrence.preview(count, after_ms, ran)
    )
    show_rows(NEXT, rows, form)


@contextmanager
def _asking(meta: str, timeout: timedelta) -> Iterator[Producer]:
    with (
        Producer(meta, timeout_ms=timeout / MS) as producer,
        told_whom(meta, duration_text(timeout / MS)),
    ):
        yield producer


def _found(producer: Producer, name: str) -> RecurringInfo:
    info = producer.get_recurring(name)
    if info is None:
        raise _none_of(name)
    return info


def _none_of(name: str) -> NoRecurring:
    return NoRecurring(f"there is no schedule {name!r}; see `delayd cron list`")


def _argument(word: str) -> str:
    return word.replace("-", "_")


def _options_of(info: RecurringInfo) -> dict[str, Any]:
    """What a schedule was made with, as arguments of `Producer.recurring`."""
    when = {name: getattr(info.recurrence, name) for name in _WHEN if not name.startswith("_")}
    policy = {name: getattr(info.policy, name) for name in _POLICY}
    labels = {"headers": info.headers, "tags": info.tags or None, "ttl": info.ttl}
    return {**when, **policy, **labels}


def _when_text(recurrence: Recurrence) -> str:
    if recurrence.every is not None:
        return f"every {duration_word(recurrence.every)}"
    return f"{recurrence.cron} {recurrence.timezone}"


def _explained(recurrence: Recurrence) -> str:
    """A recurrence as a sentence, without a full stop."""
    if recurrence.cron is None:
        return "by elapsed time, whatever clocks do"
    return CronLine(recurrence.cron).explained()


def _local(recurrence: Recurrence, ms: int) -> str:
    return f"{shown_at(recurrence.timezone, ms):%a %Y-%m-%d %H:%M:%S %z}"


def _state(info: RecurringInfo) -> str:
    if info.paused:
        return "paused"
    return "ended" if info.next is None else "active"


def _row(info: RecurringInfo) -> Sequence[Cell]:
    return (
        *(info.name, info.subject, _when_text(info.recurrence), _state(info)),
        *(_ms(info.next), _ms(info.last), info.sent, sum(info.skipped.values()), info.version, info.note or None),
    )


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - EPOCH) // MS


def _tell_changed(what: str, info: RecurringInfo, form: str) -> None:
    if form == "json":
        _tell(info, form)
        return
    coming = "nothing recurs any more" if info.next is None else f"next {_with_local(info, info.next)}"
    if info.paused:
        coming = "it is paused"
    click.echo(f"{info.name} {what} in version {info.version}: {_when_text(info.recurrence)}; {coming}")


def _tell(info: RecurringInfo, form: str) -> None:
    if form == "json":
        click.echo(json.dumps(_as_json(info), ensure_ascii=False))
        return
    for label, text in _lines(info):
        click.echo(f"{label:9}{text}")


def _lines(info: RecurringInfo) -> Iterator[tuple[str, str]]:
    """What `show` tells people: a label, and a text that is not empty."""
    yield "name", f"{info.name}, {_state(info)}, version {info.version} of {_second(info.changed_at)}"
    if info.note:
        yield "note", printable(info.note.encode())
    yield "when", f"{_when_text(info.recurrence)}: {_explained(info.recurrence)}"
    yield from (("", text) for text in _conditions(info.recurrence))
    policy = info.policy
    limits = [f"at most {policy.catchup_max} of them"] if policy.misfire == "all" else []
    limits += [f"none older than {duration_word(policy.catchup)}"] if policy.catchup is not None else []
    yield "missed", ", ".join((policy.misfire, *limits))
    if policy.overlap == "skip":
        yield "overlap", "skipped while an earlier one is not acknowledged"
    yield "sends", f"{printable(info.body)} to {info.subject}"
    labels = [f"{name}={printable(_bytes(value))}" for name, value in info.headers.items()]
    labels += [f"tag {tag}" for tag in info.tags]
    labels += [f"not later than {duration_word(info.ttl)} after it is due"] if info.ttl is not None else []
    labels += ["in the order of its ordering key"] if info.ordered else []
    if labels:
        yield "", ", ".join(labels)
    yield "sent", f"{info.sent:,}" + ("" if info.last is None else f", the last one for {_with_local(info, info.last)}")
    if info.skipped:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(info.skipped.items()))
        yield "skipped", f"{sum(info.skipped.values()):,}: {reasons}"
    for number, coming in enumerate([] if info.paused else info.preview(COUNT)):
        yield "" if number else "next", _with_local(info, coming)


def _conditions(recurrence: Recurrence) -> Iterator[str]:
    for word, dates in (("not on", recurrence.skip_dates), ("only on", recurrence.only_dates)):
        if dates:
            more = f" and {len(dates) - COUNT:,} more dates" if len(dates) > COUNT else ""
            yield f"{word} {', '.join(map(str, dates[:COUNT]))}{more}"
    for name in ("fold", "gap"):
        if getattr(recurrence, name) is not None:
            yield f"{name} {getattr(recurrence, name)}"
    if recurrence.jitter:
        yield f"each up to {duration_word(recurrence.jitter)} later"
    for word, at in (("counted from", recurrence.anchor), ("from", recurrence.starts_at), ("until", recurrence.until)):
        if at is not None:
            yield f"{word} {_second(at)}"
    if recurrence.max_occurrences is not None:
        yield f"at most {recurrence.max_occurrences:,} times"


def _as_json(info: RecurringInfo) -> dict[str, object]:
    when, policy = info.recurrence, info.policy
    return {
        "name": info.name,
        "state": _state(info),
        "version": info.version,
        "subject": info.subject,
        **_body_json(info.body),
        "headers": {name: _header_json(value) for name, value in info.headers.items()},
        "tags": list(info.tags),
        "ttl_ms": _length_ms(info.ttl),
        "ordered": info.ordered,
        "cron": when.cron,
        "every_ms": _length_ms(when.every),
        "anchor_ms": _ms(when.anchor),
        "timezone": when.timezone,
        "fold": when.fold,
        "gap": when.gap,
        "skip_dates": [each.isoformat() for each in when.skip_dates],
        "only_dates": [each.isoformat() for each in when.only_dates],
        "jitter_ms": _length_ms(when.jitter),
        "starts_at_ms": _ms(when.starts_at),
        "until_ms": _ms(when.until),
        "max_occurrences": when.max_occurrences,
        "misfire": policy.misfire,
        "catchup_ms": _length_ms(policy.catchup),
        "catchup_max": policy.catchup_max,
        "overlap": policy.overlap,
        "created_ms": _ms(info.created_at),
        "changed_ms": _ms(info.changed_at),
        "decided_ms": _ms(info.decided_until),
        "next_ms": _ms(info.next),
        "last_ms": _ms(info.last),
        "sent": info.sent,
        "skipped": dict(info.skipped),
        "paused": info.paused,
        "note": info.note,
    }


def _body_json(body: bytes) -> Mapping[str, str]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def _header_json(value: str | bytes) -> object:
    return value if isinstance(value, str) else {"base64": base64.b64encode(value).decode("ascii")}


def _length_ms(length: timedelta | None) -> int | None:
    return None if length is None else length // MS


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _second(moment: datetime) -> str:
    return instant_text((moment - EPOCH) // MS)


def _with_local(info: RecurringInfo, moment: datetime) -> str:
    return f"{_second(moment)} ({_local(info.recurrence, (moment - EPOCH) // MS)})"
