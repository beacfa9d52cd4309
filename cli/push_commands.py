"""``delayd push``: where gateways POST due messages to (docs/push.md).

Invariant: a key is shown once, when it is made; no listing has it.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import click

from delayd.client.asking.push import change_target, create_target, delete_target, find_target, list_targets
from delayd.gateway.signing import new_key, rotated, shown_key, valid_keys
from delayd.reading.tables import need
from delayd.wire.push import ASYMMETRIC, PushTarget, header_pairs

from .listing import Cell, columns, show
from .main import OK, TRY_LATER, USAGE
from .operate import Operator, operator_options, run
from .shared_options import CommandGroup, bundle, format_option, offer_subjects
from .times import duration

COLUMNS = columns("name subject url state group:spare version:number,spare note")
DETAILS = columns(
    "name subject url state group version:number note headers content_type batch:number timeout_ms:duration "
    "attempts:number backoff_first_ms:duration backoff_most_ms:duration rate concurrency:number flow_rate "
    "flow_concurrency:number keys:number"
)
MS = timedelta(milliseconds=1)

Change = Callable[[PushTarget], PushTarget]


def _change_of(
    headers: tuple[str, ...],
    content_type: str | None,
    batch: int | None,
    timeout: timedelta | None,
    attempts: int | None,
    backoff_first: timedelta | None,
    backoff_most: timedelta | None,
    rate: str | None,
    concurrency: int | None,
    flow_rate: str | None,
    flow_concurrency: int | None,
) -> Change:
    """What the options say of a target; what they leave out stays."""
    given: dict[str, object] = {"headers": "\n".join(headers) or None, "content_type": content_type}
    given |= {"batch": batch, "timeout_ms": _ms(timeout), "attempts": attempts, "first_ms": _ms(backoff_first)}
    given |= {"most_ms": _ms(backoff_most), "rate": rate, "concurrency": concurrency, "flow_rate": flow_rate}
    given |= {"flow_concurrency": flow_concurrency}
    said = {name: value for name, value in given.items() if value is not None}
    return lambda target: target._replace(**said)  # type: ignore[arg-type]


def _ms(length: timedelta | None) -> int | None:
    return None if length is None else round(length / MS)


terms_options = bundle(
    "change",
    _change_of,
    click.option(
        "--header", "headers", multiple=True, metavar="TEXT", help="'name: value' for each POST; may be repeated."
    ),
    click.option("--content-type", metavar="TYPE", help="Of messages that name none.  [default: application/json]"),
    click.option("--batch", type=int, metavar="N", help="Messages in one POST, as a JSON array.  [default: 1]"),
    click.option("--timeout", type=duration, metavar="DURATION", help="For one POST.  [default: 15s]"),
    click.option("--attempts", type=int, metavar="N", help="Then it is a dead letter.  [default: 16]"),
    click.option("--backoff-first", type=duration, metavar="DURATION", help="Wait after attempt 1.  [default: 5s]"),
    click.option("--backoff-most", type=duration, metavar="DURATION", help="Longest wait.  [default: 12h]"),
    click.option("--rate", metavar="N/UNIT", help="POSTs in a time, such as 10/s, 30/m, 5/h; '' lifts it."),
    click.option("--concurrency", type=int, metavar="N", help="POSTs at one time; 0 lifts it."),
    click.option("--flow-rate", metavar="N/UNIT", help="The same for the messages of each flow key."),
    click.option("--flow-concurrency", type=int, metavar="N", help="The same for the messages of each flow key."),
)


@click.group(cls=CommandGroup)
def push() -> None:
    """Have gateways POST due messages to URLs, signed as Standard Webhooks has it.

    A target is a group of consumers: each due message of its subject is POSTed, and acknowledged when the answer is
    2xx. Else it comes again, later and later, and at last is a dead letter of the group. Every gateway that has the
    cluster's secret serves all targets; see docs/push.md.

    $ delayd push create orders.paid https://example.com/hook
    $ delayd push list
    """


@push.command()
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("url")
@click.option("--name", metavar="NAME", help="The name of the target; the default is the subject.")
@click.option("--group", metavar="NAME", help="The group of consumers; the default is push/ and the name.")
@click.option("--key", metavar="KEY", help="A key that the receiver has already: whsec_…")
@click.option("--asymmetric", is_flag=True, help="Sign with a key that the receiver need not keep secret (ed25519).")
@terms_options
@operator_options
def create(
    subject: str,
    url: str,
    name: str | None,
    group: str | None,
    key: str | None,
    asymmetric: bool,
    change: Change,
    operator: Operator,
) -> None:
    """Have due messages of a subject, or of a pattern of subjects, POSTed to a URL.

    It prints the key with which receivers check signatures; nothing shows it again.

    $ delayd push create orders.paid https://example.com/hook --data /var/lib/delayd
    $ delayd push create 'orders.>' https://example.com/all --name audit --batch 100 --rate 10/s
    """
    name = name or subject
    made = change(PushTarget(name, subject, url, group or f"push/{name}", key or new_key(asymmetric=asymmetric)))

    async def created() -> str:
        async with operator.at_meta() as connection:
            return await create_target(connection, made)

    click.echo(run(created))
    click.echo(f"the receiver checks signatures with {shown_key(made.keys)}")


@push.command("list")
@format_option
@operator_options
def list_all(form: str, operator: Operator) -> None:
    """List the push targets.

    $ delayd push list --data /var/lib/delayd
    """

    async def listed() -> list[PushTarget]:
        async with operator.at_meta() as connection:
            return await list_targets(connection)

    show(COLUMNS, [_row(target) for target in run(listed)], form)


@push.command("show")
@click.argument("name")
@format_option
@operator_options
def show_one(name: str, form: str, operator: Operator) -> None:
    """Show all terms of a push target, but no key and no value of a header.

    $ delayd push show orders.paid --format json
    """

    async def found() -> PushTarget:
        async with operator.at_meta() as connection:
            return await find_target(connection, name)

    target = run(found)
    headers = ", ".join(each for each, _ in header_pairs(target.headers))
    rates: tuple[Cell, ...] = (
        *(target.rate or None, target.concurrency or None, target.flow_rate or None, target.flow_concurrency or None),
        len(valid_keys(target, _now_ms())),
    )
    waits = (target.timeout_ms, target.attempts, target.first_ms, target.most_ms)
    own = (target.group, target.version, target.note, headers, target.content_type, target.batch)
    show(DETAILS, [(target.name, target.subject, target.url, _state(target), *own, *waits, *rates)], form)


@push.command()
@click.argument("name")
@click.option("--url", metavar="URL", help="Where messages are POSTed to from now on.")
@terms_options
@operator_options
def edit(name: str, url: str | None, change: Change, operator: Operator) -> None:
    """Change terms of a push target; what is not named stays. Gateways follow within seconds.

    $ delayd push edit orders.paid --rate 10/s --timeout 30s
    """
    _changed(operator, name, lambda known: change(known._replace(url=url or known.url)))
    click.echo(f"changed {name}")


@push.command()
@click.argument("name")
@click.option("--note", default="", metavar="TEXT", help="Why; `delayd push list` shows it.")
@operator_options
def pause(name: str, note: str, operator: Operator) -> None:
    """POST nothing more to a target; its messages wait.

    $ delayd push pause orders.paid --note "they move house"
    """
    _changed(operator, name, lambda known: known._replace(paused=True, note=note))
    click.echo(f"paused {name}; its messages wait")


@push.command()
@click.argument("name")
@operator_options
def resume(name: str, operator: Operator) -> None:
    """POST to a paused target again, also to one that was paused because it answered 410.

    $ delayd push resume orders.paid
    """
    _changed(operator, name, lambda known: known._replace(paused=False, note=""))
    click.echo(f"{name} goes on")


@push.command()
@click.argument("name")
@operator_options
def delete(name: str, operator: Operator) -> None:
    """Delete a push target. Its group stays, with what it has not acknowledged.

    $ delayd push delete orders.paid
    """

    async def deleted() -> PushTarget:
        async with operator.at_meta() as connection:
            known = await find_target(connection, name)
            await delete_target(connection, name)
            return known

    known = run(deleted)
    click.echo(
        f"deleted {name}; its group keeps messages: `delayd groups delete {known.subject} {known.group}` ends it"
    )


@push.command("rotate-secret")
@click.argument("name")
@click.option("--keep", type=duration, default="24h", show_default=True, help="So long the old key signs, too.")
@click.option("--key", metavar="KEY", help="The new key; without it one is made.")
@click.option("--asymmetric/--symmetric", default=None, help="Of which kind the new key is; the default: as before.")
@operator_options
def rotate_secret(name: str, keep: timedelta, key: str | None, asymmetric: bool | None, operator: Operator) -> None:
    """Sign the POSTs of a target with a new key, and for a while with the old one, too.

    It prints the new key; nothing shows it again.

    $ delayd push rotate-secret orders.paid --keep 3d
    """

    def change(known: PushTarget) -> PushTarget:
        kind = known.keys.startswith(ASYMMETRIC) if asymmetric is None else asymmetric
        return rotated(known, key or new_key(asymmetric=kind), _now_ms() + round(keep / MS))

    target = _changed(operator, name, change)
    click.echo(f"the receiver checks signatures with {shown_key(target.keys.split(' ')[0])}")


@push.command()
@click.argument("name")
@click.option("--allow-private", is_flag=True, help="Also when the URL is on this machine or in a private network.")
@operator_options
def test(name: str, allow_private: bool, operator: Operator) -> int:
    """POST once to a target now, from this machine; the POST is about no message.

    It needs `pip install 'delayd[gateway]'`.

    $ delayd push test orders.paid
    """
    need("aiohttp", "`delayd push test`", "gateway")
    # Only this command needs them.
    from delayd.gateway.caller import Caller, Outcome
    from delayd.gateway.pusher import post_test

    async def tried() -> Outcome:
        async with operator.at_meta() as connection:
            known = await find_target(connection, name)
        caller = Caller(allow_private=allow_private)
        try:
            return await post_test(caller, known)
        finally:
            await caller.close()

    outcome = run(tried)
    click.echo(f"{name}: {outcome.what}")
    if outcome.answer:
        click.echo(outcome.answer.decode(errors="replace"))
    if outcome.is_refused:
        return USAGE
    return OK if outcome.is_done else TRY_LATER


def _changed(operator: Operator, name: str, change: Change) -> PushTarget:
    async def changed() -> PushTarget:
        async with operator.at_meta() as connection:
            return await change_target(connection, name, change)

    return run(changed)


def _state(target: PushTarget) -> str:
    return "paused" if target.paused else "served"


def _row(target: PushTarget) -> tuple[Cell, ...]:
    state = _state(target)
    return (target.name, target.subject, target.url, state, target.group, target.version, target.note)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
