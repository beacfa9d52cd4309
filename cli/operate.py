"""Operate: what all commands of operators share: whom they ask, what a decision costs, and what was answered.

Invariant: what a decision costs is told before it is taken, only the server that is meant hears it, and a server that
can't be asked is named: no list looks complete without it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import click

from delayd.client.asking import ask
from delayd.client.asking.looking import silence
from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_str
from delayd.wire.requests import RequestType

from .shared_options import bundle, confirm, meta_option, operator_secret, secret_data_option, secret_option, yes_option

R = TypeVar("R")
T = TypeVar("T")


def run(main: Callable[[], Coroutine[object, object, R]]) -> R:
    """Run a coroutine that asks, and return what it found."""
    return asyncio.run(main())


class Operator(NamedTuple):
    """Somebody who decides: the address of the meta server, the cluster's secret, and whether they said yes before.

    Without the secret they have a token that allows to administer.
    """

    meta: str
    secret: Secret | None
    yes: bool = False

    @classmethod
    def of(cls, meta: str, secret_file: str | None, data: str, yes: bool = False) -> "Operator":
        """Take the options of a command. Raises BadSetting when the secret can't be had."""
        secret = operator_secret(secret_file, data)
        return cls(ask.as_operator(meta, secret), secret, yes)

    def confirm(self, costs: str) -> None:
        """Say in one sentence what a decision costs, and ask for it unless ``--yes`` was given."""
        confirm(costs, self.yes)

    @asynccontextmanager
    async def at_meta(self) -> AsyncIterator[Connection]:
        """Connect to meta, which knows then that an operator asks."""
        async with ask.meta(self.meta) as connection:
            await ask.prove(connection, self.secret)
            yield connection

    def tell_meta(self, request: RequestType, head: Mapping[str, HeadValue]) -> None:
        """Have meta decide something, and show what it says."""

        async def told() -> str:
            async with self.at_meta() as connection:
                return need_str(await ask.patiently(connection, request, head), "message")

        click.echo(run(told))

    def tell(self, server: ask.Known, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
        """Have a server decide something; what it answers."""
        return run(lambda: ask.decide(server, request, head, self.secret))


operator_options = bundle("operator", Operator.of, meta_option, secret_option, secret_data_option)
decision_options = bundle("operator", Operator.of, meta_option, secret_option, secret_data_option, yes_option)
"""The same for a command that asks before it does anything."""


async def of_each(
    servers: Sequence[ask.Known], what: str, read: Callable[[Connection], Awaitable[T]]
) -> list[tuple[ask.Known, T]]:
    """Ask all servers at once; stderr says ``what`` is missing of those that can't be asked."""

    async def asked(server: ask.Known) -> list[tuple[ask.Known, T]]:
        try:
            async with ask.reached(server) as connection:
                return [(server, await read(connection))]
        except DelaydError as error:
            why = error.message if server.alive else silence(server)
            click.echo(f"delayd: {what} of the {server.role} server at {server.address} are missing: {why}", err=True)
            return []

    return [found for each in await asyncio.gather(*map(asked, servers)) for found in each]


async def all_pages(
    connection: Connection,
    request: RequestType,
    read: Callable[[Head], tuple[Sequence[T], bool]],
    name_of: Callable[[T], HeadValue],
    head: Mapping[str, HeadValue],
) -> AsyncIterator[Sequence[T]]:
    """The pages of a listing. The first is asked for with ``head``, each other behind the last name of the one before.

    ``name_of`` says what a request calls a row; ``read`` takes the rows of an answer, and whether there are more.
    """
    page, more = read(await ask.ask(connection, request, head))
    yield page
    while more and page:
        page, more = read(await ask.ask(connection, request, {**head, "after": name_of(page[-1])}))
        yield page
