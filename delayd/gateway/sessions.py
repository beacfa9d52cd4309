"""Sessions: what the cookie of somebody who has signed in to the console holds (docs/security.md, Sign-in).

    when it ends, s (8) | SHA-256 of the token (32) | HMAC of both and of the cookie's name (32)      in base64url

Invariant: a cookie is worth nothing without a gateway that has the cluster's secret, which made it, and without its
token, which is looked up for each request. Gateways keep nothing of it, so each of them takes the cookies of all.

Under TLS the cookie has a name that browsers take from no page without TLS, and send to none. Without TLS a page of
another port of this host could set one beside it; two of them are none.
"""

from __future__ import annotations

import base64
import binascii
import math
import time
from typing import NamedTuple

from starlette.requests import Request

from delayd.secret import Secret

LIFE_S = 8 * 3_600  # After that one signs in again.
OPEN_NAME, TLS_NAME = "delayd", "__Host-delayd"
_END_BYTES, _DIGEST_BYTES, _SIGNATURE_BYTES = 8, 32, 32


class Session(NamedTuple):
    """Until when somebody is signed in, and by which token."""

    ends_s: int
    digest: bytes


def cookie_of(request: Request, secret: Secret, digest: bytes, token_ends_ms: int) -> str:
    """The header that begins a session; it ends with its token at the latest."""
    name = TLS_NAME if _is_over_tls(request) else OPEN_NAME
    life_s = LIFE_S if not token_ends_ms else min(LIFE_S, max(1, math.ceil(token_ends_ms / 1_000 - time.time())))
    session = (int(time.time()) + life_s).to_bytes(_END_BYTES, "little") + digest
    signed = session + secret.session_signature(name.encode() + session)
    return _header(name, base64.urlsafe_b64encode(signed).decode("ascii"), life_s)


def endings() -> list[str]:
    """The headers that end a session in its browser."""
    return [_header(name, "", 0) for name in (OPEN_NAME, TLS_NAME)]


def session_of(request: Request, secret: Secret) -> Session | None:
    """The session of a request; None when it has none that holds."""
    pairs = [each.strip().partition("=") for each in request.headers.get("cookie", "").split(";")]
    for name in (TLS_NAME, OPEN_NAME) if request.scope["scheme"] == "http" else (TLS_NAME,):
        texts = [text for found, _, text in pairs if found == name]
        if len(texts) == 1:
            return _read(secret, name, texts[0])
    return None


def _read(secret: Secret, name: str, text: str) -> Session | None:
    try:
        signed = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(signed) != _END_BYTES + _DIGEST_BYTES + _SIGNATURE_BYTES:
        return None
    session, signature = signed[:-_SIGNATURE_BYTES], signed[-_SIGNATURE_BYTES:]
    if not secret.is_session_signature(signature, name.encode() + session):
        return None
    ends_s = int.from_bytes(session[:_END_BYTES], "little")
    return Session(ends_s, session[_END_BYTES:]) if time.time() < ends_s else None


def _is_over_tls(request: Request) -> bool:
    """Whether the browser speaks TLS, to this gateway or to a proxy in front of it."""
    return request.scope["scheme"] == "https" or request.headers.get("origin", "").startswith("https://")


def _header(name: str, text: str, life_s: int) -> str:
    secure = "; Secure" if name == TLS_NAME else ""
    return f"{name}={text}; Path=/; Max-Age={life_s}; HttpOnly; SameSite=Strict{secure}"
