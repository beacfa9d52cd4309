"""Conditions: what a request requires of what it changes (RFC 9110): `If-Match`, and `If-None-Match: *` for what must
not be there yet.

Invariant: a request whose condition does not hold changes nothing, and is a 412.
"""

from __future__ import annotations

import re

from starlette.requests import Request

from delayd.errors import BadArgument
from delayd.gateway.problems import Refusal

_TAG = re.compile(r'"([\x21\x23-\x7e]*)"')


def entity_tag(word: object) -> dict[str, str]:
    """The header of an answer that says which state it shows."""
    return {"ETag": f'"{word}"'}


def if_match(request: Request) -> str | None:
    """The state that a request requires, without its quotes; None when it requires none."""
    given = request.headers.get("if-match")
    if given is None or given.strip() == "*":
        return None
    met = _TAG.fullmatch(given.strip())
    if met is None:
        raise BadArgument(f"If-Match: {given[:60]} is no ETag; give the one that you have seen, with its quotes")
    return met[1]


def if_new(request: Request) -> bool:
    """Whether a request requires that what it makes is not there yet."""
    given = request.headers.get("if-none-match")
    if given is not None and given.strip() != "*":
        raise BadArgument(f"If-None-Match: {given[:60]} is not known here; * requires that there is none yet")
    return given is not None


def changed_since(what: str, now: object) -> Refusal:
    """The refusal of a request whose condition does not hold, with the state that there is now."""
    return Refusal(412, "precondition_failed", f"{what}; look at it, and ask again", entity_tag(now))
