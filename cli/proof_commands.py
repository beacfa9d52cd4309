"""``delayd tree-head``, ``prove`` and ``check-proof``: proofs that outsiders check without delayd's files
(docs/formats/proof.md).

Invariant: only `tree-head` signs and writes. `check-proof` reads the files that it is given and nothing else, and ends
with exit code 0 only if all that it was asked for is shown.
"""

import os
from collections.abc import Callable, Iterator
from typing import TextIO

import click

from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument
from delayd.hours import hour_name, instant_text
from delayd.machine.disk import RealDisk
from delayd.outcome import reason_name
from delayd.reading.files.stored_groups import until_still
from delayd.reading.proofs import (
    KEY_FILE,
    NO_KEY,
    HourLog,
    ProvedRow,
    add_cosignatures,
    check_message,
    growth_since,
    open_signer,
    sign_head,
)
from delayd.reading.tlog import (
    PROOF_LINE,
    Checkpoint,
    Key,
    LogProof,
    NotProved,
    parse_checkpoint,
    parse_growth,
    parse_key,
)
from delayd.reading.tlog import parse_proof as parse_log_proof

from .hour_commands import HourSteps, all_damage_named
from .listing import progress
from .main import NOT_BALANCED, OK
from .shared_options import Command, data_option


class KeyParam(click.ParamType[Key]):
    """A public key that is one word."""

    name = "vkey"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Key:
        """Read the word."""
        return value if isinstance(value, Key) else parse_key(str(value))


witness_option = click.option(
    "--witness",
    "witnesses",
    multiple=True,
    type=KeyParam(),
    metavar="VKEY",
    help="Key of a witness, NAME+ID+KEY; may be repeated.",
)


@click.command("tree-head", cls=Command)
@data_option
@click.option("--key-file", metavar="FILE", help=f"File with the private key [default: {KEY_FILE} in DIR].")
@click.option("--origin", metavar="NAME", help="Name of the log, for its first checkpoint [default: delayd/LOG_ID].")
@click.option("--key", "show_key", is_flag=True, help="Print the public key alone; nothing is signed.")
@click.option(
    "--since", type=click.IntRange(min=0), metavar="SIZE", help="Print what a witness is sent that knows SIZE."
)
@click.option("--add", type=click.File(), metavar="FILE", help="Add the cosignatures that witnesses answered.")
@witness_option
def tree_head(
    data: str,
    key_file: str | None,
    origin: str | None,
    show_key: bool,
    since: int | None,
    add: TextIO | None,
    witnesses: tuple[Key, ...],
) -> int:
    """Sign the log of sealed hours, and print its checkpoint.

    Each sealed hour is one entry of the log. The command makes the trees of hours that have none, which takes 2 s for
    a million messages, signs the root over all, and keeps both beside the delay server's logs, which may run. The
    first run makes the private key. Run it each hour, and keep what it prints where you can't change it.

    --since prints the request `add-checkpoint` of a C2SP witness: the checkpoint, and a proof that it begins with the
    first SIZE entries. --add takes the witness's answer; each line must be by one of the keys of --witness.

    Exit codes: 3 what was signed before is not the beginning of the log any more, or a file is damaged.

    $ delayd tree-head --data /var/lib/delayd
    $ delayd tree-head --data /var/lib/delayd --key
    $ delayd tree-head --data /var/lib/delayd --since 41
    $ delayd tree-head --add answer.txt --witness w1+8f3fa973+BCmsuuFBvMrwsi4alNNNC8c2HlJtC/4SyJeUvJMilm3X
    """
    with all_damage_named([data]), progress("hours", None) as advance:

        def made() -> HourLog:
            log = HourLog(RealDisk(), data)
            log.make_trees(HourSteps(advance))
            return log

        log = HourLog(RealDisk(), data)
        signer = open_signer(key_file or os.path.join(data, KEY_FILE), origin or f"delayd/{log.log_id:016x}")
        if origin is not None and signer.name != origin:
            raise BadArgument(f"the key is of {signer.name}; a log keeps its name, so leave --origin out")
        if show_key:
            click.echo(signer.key.vkey)
            return OK
        if add is not None:
            return _show(lambda: add_cosignatures(log, add.read(), witnesses).text)

        def signed() -> str:
            log = until_still(data, made)
            checkpoint = sign_head(log, signer)
            return checkpoint.text if since is None else growth_since(log, checkpoint, since).text

        return _show(signed)


@click.command(cls=Command)
@click.argument("receipt", metavar="RECEIPT")
@data_option
def prove(receipt: str, data: str) -> int:
    """Print the proof of what became of one message.

    RECEIPT is what `send` has printed. The hour of the message must be sealed, and in a checkpoint of `tree-head`. The
    proof is a C2SP tlog-proof: whoever has it and the public key can check it, with `delayd check-proof` or without
    delayd (examples/check_proof.py).

    $ delayd prove 3kj... --data /var/lib/delayd > order-42.tlog-proof
    """
    wanted = Receipt.of_token(receipt)
    with all_damage_named([data]):

        def made() -> LogProof:
            log = HourLog(RealDisk(), data)
            if log.log_id != wanted.log_id:
                ids = f"{wanted.log_id:016x}, and {data} of {log.log_id:016x}"
                raise BadArgument(f"the receipt is of delay server {ids}")
            return log.prove(wanted.sequence, max(wanted.deliver_at_ms, wanted.accepted_at_ms))

        proof = until_still(data, made)
    click.echo(proof.text, nl=False)
    return OK


@click.command("check-proof", cls=Command)
@click.argument("file", type=click.File(encoding="utf-8", errors="surrogateescape"))
@click.option("--key", required=True, type=KeyParam(), metavar="VKEY", help="Public key of the log.")
@witness_option
@click.option("--receipt", metavar="RECEIPT", help="The message must be that of this receipt.")
@click.option(
    "--old",
    type=click.File(encoding="utf-8", errors="surrogateescape"),
    metavar="FILE",
    help="An earlier checkpoint; FILE is what `tree-head --since` printed.",
)
def check_proof(file: TextIO, key: Key, witnesses: tuple[Key, ...], receipt: str | None, old: TextIO | None) -> int:
    """Check a proof, or that a log only grew, without files of servers.

    FILE is what `delayd prove` or `delayd tree-head` has printed. The checkpoint in it must be signed by the key of
    the log, and cosigned by each witness that is given.

    Exit codes: 0 all of it is shown; 3 it is not.

    $ delayd check-proof order.tlog-proof --key orders+926ade88+AQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4
    $ delayd check-proof grown --old before --key orders+926ade88+AQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4
    """
    wanted = None if receipt is None else Receipt.of_token(receipt)

    def checked() -> str:
        text = file.read()
        if old is not None:
            growth, earlier = parse_growth(text), parse_checkpoint(old.read())
            growth.check(earlier, key)
            lines = [f"the log only grew: its {growth.checkpoint.size} entries begin with the {earlier.size} of before"]
            checkpoint = growth.checkpoint
        elif text.startswith(PROOF_LINE):
            proof = parse_log_proof(text)
            row, checkpoint = check_message(proof, key), proof.checkpoint
            lines = list(_said(row, wanted, proof.place, checkpoint))
        else:
            checkpoint = parse_checkpoint(text)
            checkpoint.check_signed(key)
            lines = [f"signed by {key.name}: {checkpoint.size} entries"]
        if wanted is not None and not text.startswith(PROOF_LINE):
            raise NotProved("this is no proof of a message, so it does not show that of the receipt")
        cosigned = [
            f"cosigned by {each.name} at {instant_text(1000 * checkpoint.cosigned_at_s(each))}" for each in witnesses
        ]
        return "".join(f"{line}\n" for line in (*lines, *cosigned))

    return _show(checked)


def _said(row: ProvedRow, wanted: Receipt | None, index: int, checkpoint: Checkpoint) -> Iterator[str]:
    """What a proof shows, in lines. NotProved when it is of another message than the receipt."""
    found = row.log_id, row.sequence
    if wanted is not None and found != (wanted.log_id, wanted.sequence):
        raise NotProved(
            f"it is of message {row.sequence} of {row.log_id:016x}, and the receipt of {wanted.sequence} of "
            f"{wanted.log_id:016x}"
        )
    if wanted is not None and row.deliver_at_ms != wanted.deliver_at_ms:
        raise NotProved("the message was due at another instant than the receipt says")
    why = f", {reason_name(row.reason)}" if row.reason else ""
    yield f"message {row.sequence} of delay server {row.log_id:016x} ended: {row.outcome.word}{why}"
    yield f"due {instant_text(row.deliver_at_ms)}"
    if row.dispatched_at_ms:
        yield f"dispatched {instant_text(row.dispatched_at_ms)}"
    yield f"content hash {row.content_hash:016x}"
    yield f"SHA-256 of its key {row.key_sha256.hex()}" if row.key_sha256 != NO_KEY else "it had no key"
    yield f"by entry {index}, hour {hour_name(row.hour)}, of {checkpoint.size} entries that {checkpoint.origin} signed"


def _show(make: Callable[[], str]) -> int:
    """Print what was made, or why it is not proved; the exit code."""
    try:
        click.echo(make(), nl=False)
    except NotProved as error:
        click.echo(f"delayd: NOT proved: {error}", err=True)
        return NOT_BALANCED
    return OK
