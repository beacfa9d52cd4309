"""Checks a proof of `delayd prove` without delayd: `python examples/check_proof.py FILE VKEY [WITNESS_VKEY…]`.

It was written from docs/formats/proof.md and the texts of C2SP alone, and needs `pip install cryptography`.
"""

import base64
import hashlib
import struct
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

ROW, SEAL_BYTES, HASH_BYTES = struct.Struct("<QqqQBBHI32s"), 200, 32
OUTCOMES = {1: "dispatched", 2: "cancelled", 3: "dead", 4: "expired", 5: "in doubt"}


def unbase64(text: str) -> bytes:
    """Bytes of standard base64, in its one spelling."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("another spelling of base64")
    return data


def root_of(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """Follow a path to the root, by the recursive definition of RFC 6962, section 2.1.1."""
    if size == 1:
        if index or path:
            raise ValueError("the path does not fit the tree")
        return hashlib.sha256(b"\x00" + leaf).digest()
    left = 1 << (size - 1).bit_length() - 1  # The largest power of two below the size.
    if not path:
        raise ValueError("the path is too short")
    if index < left:
        return hashlib.sha256(b"\x01" + root_of(leaf, index, left, path[:-1]) + path[-1]).digest()
    return hashlib.sha256(b"\x01" + path[-1] + root_of(leaf, index - left, size - left, path[:-1])).digest()


def check_signature(checkpoint: str, vkey: str, kind: int) -> int:
    """Check the signature of a key, a log's (kind 1) or a witness's (kind 4); returns the witness's instant, or 0."""
    name, key_id, key = vkey.split("+", 2)
    packed = unbase64(key)
    if packed[0] != kind or hashlib.sha256(name.encode() + b"\n" + packed).hexdigest()[:8] != key_id:
        raise ValueError(f"{vkey} is no key of this kind")
    body, _, lines = checkpoint.rpartition("\n\n")
    at_s, found = 0, False
    for line in lines.removesuffix("\n").split("\n"):
        dash, signer, blob = line.split(" ")
        signature, text = unbase64(blob), f"{body}\n"
        if dash != "\N{EM DASH}" or (signer, signature[:4].hex()) != (name, key_id):
            continue
        if kind == 4:
            (at_s,) = struct.unpack(">Q", signature[4:12])
            text = f"cosignature/v1\ntime {at_s}\n{text}"
        Ed25519PublicKey.from_public_bytes(packed[1:]).verify(signature[12 if kind == 4 else 4 :], text.encode())
        found = True
    if not found or (kind == 1 and body.split("\n")[0] != name):
        raise ValueError(f"{name} has not signed this")
    return at_s


def check(text: str, vkey: str, witnesses: Sequence[str] = ()) -> tuple[int, tuple[Any, ...], datetime, list[int]]:
    """Check a proof; returns the fields of the message, the hour as a datetime, and the instants of witnesses."""
    head, _, checkpoint = text.partition("\n\n")
    first, extra_line, index_line, *path = head.split("\n")
    if first != "c2sp.org/tlog-proof@v1" or extra_line[:6] != "extra " or index_line[:6] != "index ":
        raise ValueError("this is no proof of delayd")
    check_signature(checkpoint, vkey, 1)
    cosigned = [check_signature(checkpoint, each, 4) for each in witnesses]
    extra, index = unbase64(extra_line[6:]), int(index_line[6:])
    version, place = struct.unpack_from("<QQ", extra)
    row, seal = extra[16 : 16 + ROW.size], extra[16 + ROW.size : 16 + ROW.size + SEAL_BYTES]
    rest = extra[16 + ROW.size + SEAL_BYTES :]
    log_id, hour, number, rows = struct.unpack_from("<QIIQ", seal)
    size, root = checkpoint.split("\n")[1:3]
    if version != 1 or number != index or len(rest) % HASH_BYTES or str(index) != index_line[6:] or place >= rows:
        raise ValueError("its fields do not fit together")
    inner = [rest[start : start + HASH_BYTES] for start in range(0, len(rest), HASH_BYTES)]
    entry = seal + root_of(row, place, rows, inner)
    if root_of(entry, index, int(size), [unbase64(line) for line in path]) != unbase64(root):
        raise ValueError("it does not lead to the root that is signed")
    return log_id, ROW.unpack(row), datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour), cosigned


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        try:
            log_id, row, hour, cosigned = check(file.read(), sys.argv[2], sys.argv[3:])
        except InvalidSignature:
            sys.exit("NOT proved: a signature is false")
        except (ValueError, struct.error) as error:
            sys.exit(f"NOT proved: {error}")
    sequence, due_ms, dispatched_ms, content, outcome, _, _, _, key = row
    print(f"message {sequence} of {log_id:016x}, hour {hour:%Y%m%d%H}: {OUTCOMES.get(outcome, outcome)}")
    print(f"due {due_ms} ms, dispatched {dispatched_ms} ms, content {content:016x}, key {key.hex()}")
    print(*(f"cosigned at {at_s} s\n" for at_s in cosigned), sep="", end="")
