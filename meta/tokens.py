"""Tokens: what lets clients in, as meta keeps them for all servers (docs/security.md, Tokens).

Invariant: a token is told only when it is durable. No text of one is ever here, only its digest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

import msgpack

from delayd.errors import BadArgument, BadRequest, DamagedData
from delayd.machine.state import State
from delayd.wire.heads import read_row
from delayd.wire.tokens import TOKENS_MAX, TokenPage, TokenRecord, check_record, take_page

PREFIX = b"token/"  # `<name>` The record, as in its request.

log = logging.getLogger(__name__)


class TokenTable:
    """Belongs to the loop; it follows the state."""

    def __init__(self, state: State, path: str) -> None:
        """Raises DamagedData: to go on without a token that was revoked, or for which others are refused, is no way."""
        self._known: dict[str, TokenRecord] = {}
        self._used: dict[str, int] = {}
        for key, value in state.scan(PREFIX):
            try:
                record = read_row(TokenRecord, msgpack.unpackb(value))
            except (ValueError, TypeError, BadRequest) as error:
                raise DamagedData(path, 0, f"the value of {key!r} is no token ({error})") from error
            self._known[record.name] = record
        self.revision = self._revision()

    def whole(self) -> TokenPage:
        """All of them, for meta itself."""
        return TokenPage(self.revision, list(self._known.values()), more=False)

    def page(self, after: str) -> TokenPage:
        """Those of one answer."""
        records = (record._replace(used_ms=self._used.get(name, 0)) for name, record in self._known.items())
        return TokenPage(self.revision, *take_page(records, after))

    def heard(self, used: Mapping[str, int]) -> None:
        """Hear from a server which tokens were used, and when."""
        for name, at_ms in used.items():
            if name in self._known:
                self._used[name] = max(at_ms, self._used.get(name, 0))

    def check_change(self, record: TokenRecord, *, is_new: bool) -> None:
        """Raise BadArgument, BadSubject when a record can't be kept."""
        check_record(record)
        known = self._known.get(record.name)
        if is_new and known is not None:
            raise BadArgument(f"there is a token {record.name} already; give another name, or rotate that one")
        if not is_new and known is None:
            raise BadArgument(f"there is no token {record.name}; see `delayd token list`")
        if is_new and len(self._known) >= TOKENS_MAX:
            raise BadArgument(f"there are {TOKENS_MAX} tokens; revoke one first")
        for other in self._known.values():
            if other.name != record.name and record.digest in (other.digest, other.old_digest):
                raise BadArgument(f"{other.name} is the same token; have another one made")

    def check_known(self, name: str) -> None:
        """Raise BadArgument when there is no token of that name."""
        if name not in self._known:
            raise BadArgument(f"there is no token {name[:100]}; see `delayd token list`")

    def set(self, record: TokenRecord) -> None:
        """Note what the state says now."""
        self._known[record.name] = record
        self.revision = self._revision()

    def remove(self, name: str) -> None:
        """Note that the state has this token no more."""
        self._known.pop(name, None)
        self._used.pop(name, None)
        self.revision = self._revision()

    def _revision(self) -> int:
        # A digest, so that it differs after a restart exactly when a token does; 0 is that of none.
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._known):
            digest.update(token_value(self._known[name]))
        return int.from_bytes(digest.digest(), "big") if self._known else 0


def token_key(name: str) -> bytes:
    """Where the state has a token."""
    return PREFIX + name.encode()


def token_value(record: TokenRecord) -> bytes:
    """A token as the state has it."""
    value: bytes = msgpack.packb(record._replace(used_ms=0).to_head())
    return value
