"""POSTs are signed as Standard Webhooks has it, with each key that is valid (docs/push.md, Keys)."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks import Webhook

from delayd.errors import BadArgument
from delayd.gateway.signing import Signer, new_key, rotated, shown_key, valid_keys
from delayd.wire.push import PushTarget, key_bytes

TARGET = PushTarget("a", "a", "https://example.com/", "push/a", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")


def test_the_signature_is_that_of_the_standards_own_example() -> None:
    signed = Signer([TARGET.keys]).sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    theirs = Webhook(TARGET.keys).sign(
        "msg_p5jXN8AQM9LWM0D4loKWxJek", datetime.fromtimestamp(1_614_265_330, UTC), '{"test": 2432232314}'
    )
    assert signed == theirs


def test_the_old_key_signs_until_its_time_is_over() -> None:
    first, second = rotated(TARGET, new_key(), 5_000), new_key(asymmetric=True)
    assert valid_keys(TARGET, 0) == [TARGET.keys]
    assert [key == TARGET.keys for key in valid_keys(first, 4_999)] == [False, True]
    assert [key == TARGET.keys for key in valid_keys(first, 5_000)] == [False]
    again = rotated(first, second, 9_000)
    assert valid_keys(again, 6_000) == [second, valid_keys(first, 6_000)[0]]
    signed = Signer(valid_keys(again, 6_000)).sign("a", 1, b"")
    assert [each.split(",")[0] for each in signed.split(" ")] == ["v1a", "v1"]


def test_the_public_half_is_shown_and_checks_what_the_private_one_signs() -> None:
    key = new_key(asymmetric=True)
    shown = shown_key(key)
    assert shown.startswith("whpk_") and shown_key(TARGET.keys) == TARGET.keys
    _, _, signature = Signer([key]).sign("msg_1", 7, b"\xff").partition(",")
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(shown.removeprefix("whpk_")))
    public.verify(base64.b64decode(signature), b"msg_1.7.\xff")


def test_keys_are_drawn_anew_and_are_long_enough() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(key_bytes(new_key())) == len(key_bytes(new_key(asymmetric=True))) == 32


@pytest.mark.parametrize(
    "key", ["", "whsec_", "whsec_!!!!", f"whsec_{'A' * 28}", f"whsec_{'A' * 88}", "whpk_AAAA", "A" * 40]
)
def test_what_is_no_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(BadArgument) as refused:
        key_bytes(key)
    assert len(key) < 10 or key not in refused.value.message
