"""Signing: what lets a receiver of a POST know who sent it and when, as Standard Webhooks 1.0.0 has it (docs/push.md).

Invariant: a POST is signed with each key of its target that is valid, so a receiver that knows the old or the new one
accepts it while they change.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence

from delayd.wire.push import ASYMMETRIC, SEED_BYTES, SYMMETRIC, PushTarget, key_bytes

PUBLIC = "whpk_"
NEW_KEY_BYTES = 32

_Sign = Callable[[bytes], bytes]


def new_key(*, asymmetric: bool = False) -> str:
    """A key that nobody can guess: ``whsec_…``, which both sides have, or ``whsk_…``, which only delayd has."""
    if asymmetric:
        return ASYMMETRIC + _text(secrets.token_bytes(SEED_BYTES))
    return SYMMETRIC + _text(secrets.token_bytes(NEW_KEY_BYTES))


def shown_key(key: str) -> str:
    """What a receiver needs to check signatures: the key itself, or of ``whsk_…`` its public half, ``whpk_…``."""
    if not key.startswith(ASYMMETRIC):
        return key
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # Slow to import, seldom used.

    return PUBLIC + _text(Ed25519PrivateKey.from_private_bytes(key_bytes(key)).public_key().public_bytes_raw())


def valid_keys(target: PushTarget, now_ms: int) -> list[str]:
    """The keys that sign at an instant."""
    first, *old = target.keys.split(" ")
    return [first, *old] if now_ms < target.old_until_ms else [first]


def rotated(target: PushTarget, key: str, until_ms: int) -> PushTarget:
    """A target whose POSTs are signed with a new key, and until an instant with the one before, too."""
    old = target.keys.split(" ")[0]
    return target._replace(keys=f"{key} {old}", old_until_ms=until_ms)


class Signer:
    """Signs with some keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [_signing(key) for key in keys]

    def sign(self, message_id: str, timestamp_s: int, body: bytes) -> str:
        """The header `webhook-signature` of a POST."""
        content = b"%b.%d.%b" % (message_id.encode(), timestamp_s, body)
        return " ".join(f"{version},{_text(sign(content))}" for version, sign in self._keys)


def _signing(key: str) -> tuple[str, _Sign]:
    secret = key_bytes(key)
    if key.startswith(SYMMETRIC):
        return "v1", lambda content: hmac.digest(secret, content, hashlib.sha256)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    sign: _Sign = Ed25519PrivateKey.from_private_bytes(secret).sign
    return "v1a", sign


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
