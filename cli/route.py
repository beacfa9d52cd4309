"""``delayd route``: an operator's word on which realtime server has a subject."""

import click

from delayd.secret import Secret
from delayd.wire.requests import RequestType, need_str

from . import ask
from .offers import offer_subjects
from .options import LogId, confirm, examples, meta_option, secret_data_option, secret_of, secret_option, yes_option


@click.group(
    epilog=examples(
        "delayd route move orders.cancel --to c3d6a1cd20e12b0e",
    )
)
def route() -> None:
    """Decide which realtime server has a subject."""


@route.command(
    epilog=examples(
        "delayd route move orders.cancel --to c3d6a1cd20e12b0e --data /var/lib/delayd",
    )
)
@click.argument("subject", shell_complete=offer_subjects)
@click.option("--to", "log_id", type=LogId(), required=True, metavar="LOG_ID", help="The realtime server that gets it.")
@meta_option
@secret_option
@secret_data_option
@yes_option
def move(subject: str, log_id: int, meta: str, secret_file: str | None, data: str, yes: bool) -> None:
    """Give a subject to another realtime server.

    Delay servers hear of the move within a heartbeat. They use the new server as soon as no message of the subject is
    in doubt at the old one. While the old server is away, the subject's messages wait until it comes back, or until
    you run `delayd target lost`.
    """
    secret = secret_of(secret_file, data)
    confirm(
        f"New messages of {subject} go to {log_id:016x}: those that the old server has stay there, where consumers "
        "that start from now on do not find them; let consumers empty it first, see `delayd groups`.",
        yes,
    )
    click.echo(ask.run(lambda: _move(meta, secret, subject, log_id)))


async def _move(address: str, secret: Secret, subject: str, log_id: int) -> str:
    async with ask.meta(address) as connection:
        await ask.prove(connection, secret)
        answer = await ask.ask(connection, RequestType.MOVE_ROUTE, {"subject": subject, "to": log_id})
        return need_str(answer, "message")
