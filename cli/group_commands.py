"""``delayd groups`` and ``delayd dead``: how far the consumers of each group are, its dead letters, and an operator's
words about both.

A dead letter is a message of its group's retry subject that its delay server keeps for 725 days (docs/consuming.md,
Dead letters). So it is found, ended and moved as every pending message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import click

from delayd.client.admin import Admin, Letter
from delayd.client.asking.ask import (
    GroupAt,
    Listing,
    delete_group,
    find_group,
    list_groups,
    move_group,
    one_place,
    pause_group,
)
from delayd.client.instants import instant_ms
from delayd.client.producer import Producer
from delayd.errors import DelaydError
from delayd.machine.operating import counted
from delayd.wire.consuming import AtInstant, AtSequence, End, GroupInfo, Position

from .file_commands import shown_body
from .listing import Cell, Column, columns
from .listing import show as show_rows
from .main import NOT_BALANCED, OK
from .message_commands import Due, Walk, Wording, in_bulk, told_unread, walk_all
from .operate import Operator, decision_options, operator_options, run
from .shared_options import (
    CommandGroup,
    Shown,
    bundle,
    format_option,
    meta_option,
    offer_groups,
    offer_subjects,
    shown_options,
    subject_option,
    yes_option,
)
from .times import instant

PENDING = "dead letters, and what was to come to it again"
COSTS = (
    "what it has not acknowledged is never delivered to it, and retention may remove it; consumers that still run make "
    "a new group of this name at once, which begins at the earliest message that is kept"
)
AGAIN = "messages that it had acknowledged come to it again"
NEVER = "it never gets the messages in between"
PROGRESS = columns("waiting:number outstanding:number redelivering:number quarantined:number")
COLUMNS = (
    *columns("subject group"),
    *PROGRESS,
    *columns("leaving:number,spare oldest_ago_ms:duration next:number,spare end:number,spare state:spare"),
)
SERVER = Column("realtime_log_id")
OF_ONE = (
    *columns("realtime_address"),
    *PROGRESS,
    *columns("leaving:number oldest_unacked:number oldest_ago_ms:duration next:number end:number state"),
    SERVER,
)

RETRIES = columns(
    "sequence:name comes_at_ms:instant attempts:number error origin_sequence:name,spare delay_log_id:detail "
    "receipt:detail body"
)

T = TypeVar("T")

subject_argument = click.argument("subject", shell_complete=offer_subjects)
group_argument = click.argument("group", shell_complete=offer_groups)


class Where(click.ParamType[Position]):
    """An end of what is kept, a sequence, or an instant."""

    name = "where"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Position:
        """Read the word of an option."""
        if isinstance(value, End | AtInstant | AtSequence):
            return value
        text = str(value)
        for end in End:
            if text == end.value:
                return end
        return AtSequence(int(text)) if text.isdecimal() else AtInstant(instant(text))


class _Pending(NamedTuple):
    """What a group has at the delay servers, and how it is ended."""

    name: str  # The retry subject, under which they keep it.
    walk: Walk
    found: int
    leaving: int  # So many messages they had not taken yet.


@click.group(invoke_without_command=True, cls=CommandGroup)
@meta_option
@click.option("--subject", metavar="NAME", shell_complete=offer_subjects, help="Groups of this subject only.")
@format_option
@click.pass_context
def groups(context: click.Context, meta: str, subject: str | None, form: str) -> None:
    """List consumer groups and their progress; pause, rewind or delete one.

    `waiting` messages are due and were not pulled yet. `outstanding` messages were pulled and not acknowledged.
    `redelivering` messages came back and are offered again. `quarantined` messages can't be read because their file is
    damaged; the server's log names them. `leaving` messages are to come again later, or are dead letters, and their
    delay server has not taken them yet. `oldest ago` says how long ago the oldest message was handed over that the
    group has not acknowledged.

    A group of a subject that was moved may be at several realtime servers. Then the list names the server of each row;
    `delayd status` says where messages lie that consumers do not find, and which command helps.

    When a server can't be asked, its groups are missing, and stderr says so.

    $ delayd groups
    $ delayd groups --subject orders.cancel
    $ delayd groups rewind orders.cancel billing --to -2h
    """
    if context.invoked_subcommand is None:
        listed = run(lambda: list_groups(meta, subject))
        tell_missing(listed)
        is_one_each = len({(place.subject, place.group) for place in listed}) == len(listed)
        show_rows((*COLUMNS, SERVER._replace(detail=is_one_each)), [_row(place) for place in listed], form)


@groups.command()
@subject_argument
@group_argument
@meta_option
@format_option
def show(subject: str, group: str, meta: str, form: str) -> None:
    """Show all about one group, at each realtime server that has it.

    `next` is the sequence of the message that the group is given next, `end` that behind the subject's last message,
    `oldest unacked` the group's first message that is not acknowledged.

    $ delayd groups show orders.cancel billing
    """
    show_rows(OF_ONE, [_of_one(place) for place in _places(meta, subject, group)], form)


@groups.command()
@subject_argument
@group_argument
@meta_option
@shown_options
def retries(subject: str, group: str, meta: str, shown: Shown) -> int:
    """Show the messages that a group gave back and that wait to come to it again, the next one first.

    They are asked of the running delay servers, hour by hour of the instant at which they come. `delayd cancel` and
    `delayd reschedule` take `receipt` with the subject under which the group's messages are kept, `--format json` has
    both.

    Exit codes: 3 files of a delay server can't be read, so messages may be missing; everything else is shown.

    $ delayd groups retries orders.cancel billing
    """
    with Admin(meta) as admin:
        pages = admin.retries(subject, group)
        shown.show(RETRIES, (_retry(letter, shown.form) for page in pages for letter in page))
        return told_unread(pages.unread)


@groups.command()
@subject_argument
@group_argument
@click.option(
    "--keep-pending",
    is_flag=True,
    help="Leave its dead letters, and what is to come to it again, at the delay servers; they need not be reached.",
)
@decision_options
def delete(subject: str, group: str, keep_pending: bool, operator: Operator) -> int:
    """Delete a consumer group.

    The group never gets the messages that it has not acknowledged. Delete a group that nobody uses any more, because
    the server keeps messages for it beyond their retention. A consumer that names the group later makes a new one,
    which begins at the earliest message that is kept. A consumer that runs does so at once: stop the group's consumers
    before. The command needs the cluster's secret.

    The group's dead letters, and the messages that were to come to it again, end at the delay servers. The command
    counts them before it asks, and says how many have ended. When a delay server does not answer the count, nothing is
    deleted. When one fails later, stderr says how to end the rest.

    Exit codes: 3 the group is deleted, but files of a delay server can't be read, so messages may be pending there.

    $ delayd groups delete orders.cancel billing
    $ delayd groups delete orders.cancel billing --keep-pending
    """
    places = _places(operator.meta, subject, group)
    with Producer(operator.meta) as producer:
        walks = [] if keep_pending else [_of_pending(producer, place) for place in places]
        pending = sum(each.found for each in walks)
        more = f"; {counted(pending, 'message ends|messages end')}: {PENDING}" if pending else ""
        operator.confirm(f"{group} of {subject}: {COSTS}{more}")
        # The group goes first: from then on it gives nothing back any more.
        run(lambda: _at_each(places, partial(delete_group, secret=operator.secret)))
        click.echo(f"group {group} of {subject} is deleted")
        return _end_pending(walks)


@groups.command()
@subject_argument
@group_argument
@click.option(
    "--to",
    "to",
    type=Where(),
    required=True,
    metavar="WHERE",
    help="earliest, latest, an instant such as -2h or ISO 8601, or a sequence (see `delayd groups show`).",
)
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@decision_options
def rewind(subject: str, group: str, to: Position, dry_run: bool, operator: Operator) -> None:
    """Let a consumer group go on at another message, an earlier or a later one.

    An instant is that of the hand-over: the group goes on at the first message that a delay server handed over then or
    later. Nobody holds a message of the group any more, and messages that were to be offered again come only from there
    on. Retries and dead letters stay as they are. The command needs the cluster's secret.

    $ delayd groups rewind orders.cancel billing --to earliest --dry-run
    $ delayd groups rewind orders.cancel billing --to -2h
    $ delayd groups rewind orders.cancel billing --to latest --yes
    """
    place = one_place(_places(operator.meta, subject, group))
    found = run(lambda: move_group(place, operator.secret, to, dry_run=True))
    before, then, dropped = found
    click.echo(f"group {group} of {subject} goes from message {before} to {then}, and lets {dropped} go that it holds")
    if dry_run:
        return
    operator.confirm(f"{group} of {subject}: {AGAIN if then < before else NEVER}")
    # The place that was shown, not where the words lead by now.
    run(lambda: move_group(place, operator.secret, AtSequence(then), dry_run=False))
    click.echo(f"group {group} of {subject} goes on at message {then}")


@groups.command()
@subject_argument
@group_argument
@operator_options
def pause(subject: str, group: str, operator: Operator) -> None:
    """Give the consumers of a group no more messages, until `delayd groups resume`.

    Consumers may finish and acknowledge what they have. Restarts change nothing. The command needs the cluster's
    secret.

    $ delayd groups pause orders.cancel billing
    """
    _pause(subject, group, operator, paused=True)
    click.echo(f"group {group} of {subject} is paused")


@groups.command()
@subject_argument
@group_argument
@operator_options
def resume(subject: str, group: str, operator: Operator) -> None:
    """Give the consumers of a paused group messages again. The command needs the cluster's secret.

    $ delayd groups resume orders.cancel billing
    """
    _pause(subject, group, operator, paused=False)
    click.echo(f"group {group} of {subject} gets messages again")


def _of_pending(producer: Producer, place: GroupAt) -> _Pending:
    walk = partial(producer.cancel_where, place.kept_as)
    return _Pending(place.kept_as, walk, walk().found, place.info.leaving)


def _end_pending(walks: list[_Pending]) -> int:
    """End what a deleted group has at the delay servers; the exit code."""
    done = unread = 0
    left = list(walks)
    try:
        while left:
            walked = walk_all(left[0].walk, Wording("ended", ""), left[0].found)
            done, unread = done + walked.done, unread + walked.unread
            left.pop(0)
    except (KeyboardInterrupt, DelaydError):
        for each in left:
            click.echo(f"delayd: to end the rest: delayd cancel '{each.name}' --where", err=True)
        raise
    if done:
        click.echo(f"ended {counted(done, 'message|messages')}: {PENDING}")
    for each in walks:
        if each.leaving:
            told = f"{counted(each.leaving, 'message was|messages were')} on the way to a delay server"
            click.echo(f"delayd: {told}; to end what got there later: delayd cancel '{each.name}' --where", err=True)
    if unread:
        told = "files of hours could not be read, so messages of the group may be pending there; see `delayd status`"
        click.echo(f"delayd: {told}", err=True)
        return NOT_BALANCED
    return OK


def _places(meta: str, subject: str, group: str) -> Listing[GroupAt]:
    """Where a group is; stderr names the servers that can't be asked."""
    places = run(lambda: find_group(meta, subject, group))
    tell_missing(places)
    return places


def tell_missing(listed: Listing[T]) -> None:
    """Name the servers whose groups are missing, on stderr."""
    for sentence in listed.missing:
        click.echo(f"delayd: {sentence}", err=True)


def _pause(subject: str, group: str, operator: Operator, *, paused: bool) -> None:
    places = _places(operator.meta, subject, group)
    run(lambda: _at_each(places, partial(pause_group, secret=operator.secret, paused=paused)))


async def _at_each(places: Sequence[GroupAt], decide: Callable[[GroupAt], Awaitable[object]]) -> None:
    for place in places:
        await decide(place)


def _row(group: GroupAt) -> tuple[Cell, ...]:
    info = group.info
    place = (info.oldest_ms_ago, info.next, info.end, _state(info), f"{group.server.log_id:016x}")
    return (info.subject, info.group, *_progress(info), info.leaving, *place)


def _retry(letter: Letter, form: str) -> tuple[Cell, ...]:
    receipt = letter.receipt
    told = (letter.attempts, letter.error or None, letter.origin, f"{receipt.log_id:016x}", receipt.token)
    return (receipt.sequence, receipt.deliver_at_ms, *told, shown_body(letter.body, "text", form))


def _of_one(place: GroupAt) -> tuple[Cell, ...]:
    info = place.info
    where = (info.oldest_unacked, info.oldest_ms_ago, info.next, info.end, _state(info))
    return (place.server.address, *_progress(info), info.leaving, *where, f"{place.server.log_id:016x}")


def _progress(info: GroupInfo) -> tuple[Cell, ...]:
    return (info.end - info.next, info.outstanding, info.redelivering, info.quarantined)


def _state(info: GroupInfo) -> str:
    states = [(info.paused, "paused"), (info.ephemeral, "ephemeral"), (info.ordered, "ordered")]
    states.append((info.exclusive, f"exclusive, {info.standbys} standing by"))
    states.append((info.in_flight_max > 0, f"at most {info.in_flight_max} in flight"))
    states.append((bool(info.filter), f"tags: {info.filter}"))
    return "; ".join(name for is_so, name in states if is_so)


DEAD_GROUPS = columns("subject group dead:number")
LETTERS = columns(
    "sequence:name dead_at_ms:instant attempts:number reason error origin_sequence:name,spare delay_log_id:detail "
    "receipt:detail body"
)

dead_options = bundle(
    "died",
    Due.of,
    click.option(
        "--from", "from_ms", type=instant, metavar="INSTANT", help="Dead since this or later, such as -2h or ISO 8601."
    ),
    click.option("--to", "to_ms", type=instant, metavar="INSTANT", help="Dead before this, such as -30d or ISO 8601."),
)


@click.group(cls=CommandGroup)
def dead() -> None:
    """List dead letters of consumer groups, send them to their group again, or end them.

    $ delayd dead list
    $ delayd dead show orders.cancel billing
    $ delayd dead redrive orders.cancel billing --dry-run
    """


@dead.command("list")
@meta_option
@subject_option
@format_option
def list_dead(meta: str, subject: str | None, form: str) -> None:
    """Count the dead letters of each group that has any.

    $ delayd dead list
    $ delayd dead list --subject orders.cancel --format json
    """
    with Admin(meta) as admin:
        listed = admin.dead_groups(subject)
    tell_missing(listed)
    show_rows(DEAD_GROUPS, list(listed), form)


@dead.command("show")
@subject_argument
@group_argument
@meta_option
@dead_options
@click.option("--reason", metavar="TEXT", help="Only those whose reason has this text.")
@shown_options
def show_letters(subject: str, group: str, meta: str, died: Due, reason: str | None, shown: Shown) -> int:
    """Show the dead letters of a group: since when, why, what went wrong last, and the body.

    The letters are asked of the running delay servers.

    Exit codes: 3 files of a delay server can't be read, so letters may be missing; everything else is shown.

    $ delayd dead show orders.cancel billing --from -24h
    """
    with Admin(meta) as admin:
        pages = admin.dead_letters(subject, group, since=died.since, before=died.before)
        letters = (letter for page in pages for letter in page if reason is None or reason in letter.reason)
        shown.show(LETTERS, (_letter_row(letter, shown.form) for letter in letters))
        return told_unread(pages.unread)


@dead.command()
@subject_argument
@group_argument
@meta_option
@dead_options
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@yes_option
def redrive(subject: str, group: str, meta: str, died: Due, dry_run: bool, yes: bool) -> int:
    """Send dead letters to their group again, as the first attempt.

    Letters that die while it runs are left.

    $ delayd dead redrive orders.cancel billing --dry-run
    $ delayd dead redrive mail g --yes
    """
    with Admin(meta) as admin:
        walk = partial(admin.redrive, subject, group, since=died.since, before=died.before)
        wording = Wording("sent again", f"come to the group {group} again.")
        return in_bulk(f"the dead letters of {subject}", walk, wording, dry_run=dry_run, yes=yes)


@dead.command()
@subject_argument
@group_argument
@meta_option
@dead_options
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@yes_option
def purge(subject: str, group: str, meta: str, died: Due, dry_run: bool, yes: bool) -> int:
    """End dead letters for good: nobody gets them any more.

    A group that has ended left none, so there is nothing to purge then, and stderr says so.

    $ delayd dead purge orders.cancel billing --to -30d --dry-run
    """
    with Admin(meta) as admin:
        listed = admin.groups(subject)
        if not listed.missing and group not in [each.group for each in listed]:
            click.echo(f"delayd: there is no group {group} of {subject}, so it has no dead letters", err=True)
            return OK
        walk = partial(admin.purge, subject, group, since=died.since, before=died.before)
        wording = Wording("purged", "are gone for good then.")
        return in_bulk(f"the dead letters of {subject}", walk, wording, dry_run=dry_run, yes=yes)


def _letter_row(letter: Letter, form: str) -> tuple[Cell, ...]:
    receipt = letter.receipt
    dead_at_ms = None if letter.dead_at is None else instant_ms(letter.dead_at)
    told = (dead_at_ms, letter.attempts, letter.reason, letter.error or None, letter.origin)
    return (receipt.sequence, *told, f"{receipt.log_id:016x}", receipt.token, shown_body(letter.body, "text", form))
