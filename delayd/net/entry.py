"""Entry: how a side that dials is let in.

Invariant: a connection is handed out only when its server has let this side in, so whoever gets it may ask at once; and
nobody else on the network reads a token, unless whoever gave it has allowed that in so many words.
"""

from __future__ import annotations

from delayd.address import Access, Endpoint
from delayd.errors import BadSetting, UnknownRequest
from delayd.net.connection import CONNECT_MS_DEFAULT, Connection, Handler
from delayd.net.endpoint import dial
from delayd.net.trust import prove
from delayd.secret import read_secret
from delayd.wire.requests import RequestType
from delayd.wire.tokens import need_token


async def connect(
    endpoint: Endpoint, handler: Handler | None = None, timeout_ms: float = CONNECT_MS_DEFAULT
) -> Connection:
    """Connect to a server, and show it the token, and prove the secret, that the endpoint's access names.

    Raises:
        ServerUnavailable: it can't be reached in time; nothing was sent to it.
        BadToken, NotTrusted, WrongCluster: it does not let this side in.
        BadArgument, BadSetting: the token is none, or would be sent in the clear; the secret can't be read.
    """
    access = endpoint.shown
    if access.token:
        need_token(access.token)
        _check_hidden(endpoint)
    secret = read_secret(access.secret) if access.secret else None
    connection = await dial(endpoint, lambda: Connection(handler), timeout_ms)
    connection.access = endpoint.access
    try:
        if access.token:
            await _show(connection, access, timeout_ms)
        if secret is not None:
            await prove(connection, secret, 0, timeout_ms)
    except BaseException:
        connection.abort()
        raise
    return connection


async def _show(connection: Connection, access: Access, timeout_ms: float) -> None:
    try:
        await connection.request(RequestType.TOKEN, {"token": access.token}, (), timeout_ms)
    except UnknownRequest as error:
        raise UnknownRequest(f"{connection.peer} is a server of an earlier version, which takes no tokens") from error


def _check_hidden(endpoint: Endpoint) -> None:
    """Raise BadSetting when others could read a token on its way."""
    access = endpoint.access
    if access.tls is None and not access.in_clear and not endpoint.is_here:
        raise BadSetting(
            f"everybody on the network could read the token on its way to {endpoint}; write delayds:// in front of the"
            " address, for TLS, or put ?in_clear=yes behind a delayd:// address when nobody else is there",
            setting="token",
        )
