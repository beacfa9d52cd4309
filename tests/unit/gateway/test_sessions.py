"""The cookie of a session: until when it holds, whose secrets it takes, and that it tells no token."""

from __future__ import annotations

import time
from base64 import urlsafe_b64encode

import pytest
from starlette.requests import Request

from delayd.gateway.sessions import LIFE_S, OPEN_NAME, TLS_NAME, Session, cookie_of, session_of
from delayd.secret import Secret

OLD, NEW = b"\x01" * 32, b"\x02" * 32
DIGEST = b"\x07" * 32


def asked(cookie: str = "", scheme: str = "http", origin: str = "") -> Request:
    headers = [(b"cookie", cookie.encode()), (b"origin", origin.encode())]
    return Request({"type": "http", "method": "GET", "scheme": scheme, "path": "/", "headers": headers})


def cookie(secret: Secret, ends_ms: int = 0, scheme: str = "http", origin: str = "") -> str:
    return cookie_of(asked("", scheme, origin), secret, DIGEST, ends_ms).partition(";")[0]


def signed(ends_s: int, secret: Secret, name: str = OPEN_NAME) -> str:
    session = ends_s.to_bytes(8, "little") + DIGEST
    return f"{name}={urlsafe_b64encode(session + secret.session_signature(name.encode() + session)).decode()}"


def test_a_session_ends_after_its_life_and_with_its_token() -> None:
    secret = Secret(NEW, "")
    now = int(time.time())
    found = session_of(asked(cookie(secret)), secret)
    assert found is not None and found.digest == DIGEST and now + LIFE_S <= found.ends_s <= now + LIFE_S + 60
    short = session_of(asked(cookie(secret, ends_ms=(now + 600) * 1_000)), secret)
    assert short is not None and short.ends_s <= now + 601 + 60
    assert session_of(asked(signed(now + 60, secret)), secret) == Session(now + 60, DIGEST)
    assert session_of(asked(signed(now, secret)), secret) is None


def test_a_session_goes_on_while_the_secret_is_changed_and_no_longer() -> None:
    before = cookie(Secret(OLD, ""))
    assert session_of(asked(before), Secret(NEW, "", OLD)) is not None
    assert session_of(asked(before), Secret(NEW, "")) is None


@pytest.mark.parametrize(("scheme", "origin"), [("https", ""), ("http", "https://delayd.example")])
def test_over_tls_also_that_of_a_proxy_the_name_is_one_that_needs_it(scheme: str, origin: str) -> None:
    secret = Secret(NEW, "")
    made = cookie(secret, 0, scheme, origin)
    assert made.startswith(f"{TLS_NAME}=")
    assert session_of(asked(made, scheme="https"), secret) and session_of(asked(made), secret)
    renamed = made.replace(TLS_NAME, OPEN_NAME)
    assert session_of(asked(renamed), secret) is None, "the name is signed, too"
