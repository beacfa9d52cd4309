"""Tokens, as operators ask meta for them and change them (docs/security.md, Tokens).

Invariant: the text of a token is made here and goes to whoever asked for it; meta is told its digest only.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from delayd.client.asking import ask
from delayd.errors import BadArgument
from delayd.net.connection import Connection
from delayd.wire.frame import Head
from delayd.wire.heads import need_bool
from delayd.wire.requests import RequestType
from delayd.wire.tokens import (
    RANDOM_BYTES,
    TokenPage,
    TokenRecord,
    check_record,
    digest_of,
    read_page,
    token_text,
)


async def list_tokens(connection: Connection) -> list[TokenRecord]:
    """All tokens, by name."""
    return (await token_page(connection))[0].tokens


async def token_page(connection: Connection, used: Mapping[str, int] | None = None) -> tuple[TokenPage, bool]:
    """All tokens with their revision, and whether servers ask for one also while there is none. ``used`` tells which
    tokens the asker has seen since it asked last, and when.
    """
    records: list[TokenRecord] = []
    while True:
        after = records[-1].name if records else ""
        told: Head = {"used": {**used}} if used and not records else {}
        answer = await ask.ask(connection, RequestType.TOKENS, {"after": after, **told})
        page = read_page(answer)
        records += page.tokens
        if not page.more or not page.tokens:
            return TokenPage(page.revision, records, more=False), need_bool(answer, "required")


async def create_token(connection: Connection, record: TokenRecord) -> str:
    """Have servers take a new token with the terms of ``record``; returns its text, which nobody else will ever know.

    Raises:
        BadArgument, BadSubject: its terms make no sense, or there is one of that name.
    """
    text = _new()
    made = record._replace(digest=digest_of(text))
    check_record(made)
    await ask.patiently(connection, RequestType.SET_TOKEN, {**made.to_head(), "is_new": True})
    return text


async def rotate_token(connection: Connection, name: str, old_until_ms: int) -> str:
    """Give a token another text; the one before is valid until then. BadArgument when there is none of that name."""
    known = next((each for each in await list_tokens(connection) if each.name == name), None)
    if known is None:
        raise BadArgument(f"there is no token {name[:100]}; see `delayd token list`")
    text = _new()
    changed = known._replace(digest=digest_of(text), old_digest=known.digest, old_until_ms=old_until_ms)
    await ask.patiently(connection, RequestType.SET_TOKEN, {**changed.to_head(), "is_new": False})
    return text


async def revoke_token(connection: Connection, name: str) -> None:
    """Have no server take a token any more. BadArgument when there is none of that name."""
    await ask.patiently(connection, RequestType.REVOKE_TOKEN, {"name": name})


def _new() -> str:
    return token_text(secrets.token_bytes(RANDOM_BYTES))
