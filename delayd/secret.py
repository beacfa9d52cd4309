"""The cluster secret: a file that every server and operator of one cluster has, and the proofs and signatures made with
it.

Invariant: the secret itself never leaves this process. Only an HMAC goes over a connection, over both sides' nonces,
the side that speaks and the server that is dialled, so a proof fits one connection and one direction only
(docs/protocol.md, Trust).

While the secret is changed, the file has two lines, and each line is a secret: this side proves with the first one, and
takes a proof that the other side made with either. An example, with the machines A and B and the secrets old and new:

1. Both files become "old, new", one after the other: both machines prove with old, which both take.
2. Both become "new, old": A proves with new, which B takes, whether B's file has the lines in this order yet or not.
3. Both become "new": a machine that still has both lines proves with new as well.

A file that changes is read again for the next proof, so no server needs a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from delayd.errors import BadSetting, NotWritable
from delayd.machine.disk import create_whole

SECRET_FILE = "cluster.secret"  # In the data directory.
SECRET_BYTES = 32
KEYS_MAX = 2  # The one that is valid, and the one that it takes the place of.
NONCE_BYTES = 32
FILE_MODE = 0o600
FILE_BYTES_MAX = 1024  # A secret is one short line or two; a larger file is something else.

# Each side proves under a label of its own, so that nobody can send a side its own proof back.
_SERVER = b"delayd 1, the server proves: "
_DIALLER = b"delayd 1, the dialler proves: "
_OPERATOR = b"delayd 1, an operator notes: "
_SESSION = b"delayd 1, a gateway lets in: "


log = logging.getLogger(__name__)

Seen = tuple[int, int, int, int]
"""Device, inode, length and time of change of a file."""
NO_FILE: Seen = (0, 0, 0, 0)


class Exchange(NamedTuple):
    """The values that both sides of a connection have exchanged: a proof covers all of them."""

    dialler_nonce: bytes
    server_nonce: bytes
    role: str  # The server's role, so that a proof of one kind of server is not valid for another.
    log_id: int
    cluster_id: int
    channel: bytes = b""  # Over TLS, by which certificate: so that nobody between the two passes a proof on.


class Secret:
    """The cluster's secret, as read from `path`; with `seen` the file is read again when it has changed since."""

    def __init__(self, key: bytes, path: str, *others: bytes, seen: Seen | None = None) -> None:
        self.path = path
        self._keys = (key, *others)
        self._seen = seen

    def server_proof(self, exchange: Exchange) -> bytes:
        """The proof of the side that was dialled."""
        self._look()
        return _proof(self._keys[0], _SERVER, exchange)

    def dialler_proof(self, exchange: Exchange) -> bytes:
        """The proof of the side that dialled."""
        self._look()
        return _proof(self._keys[0], _DIALLER, exchange)

    def is_server_proof(self, shown: bytes, exchange: Exchange) -> bool:
        """Whether the side that was dialled has one of these secrets."""
        self._look()
        return any(same_proof(shown, _proof(key, _SERVER, exchange)) for key in self._keys)

    def is_dialler_proof(self, shown: bytes, exchange: Exchange) -> bool:
        """Whether the side that dialled has one of these secrets."""
        self._look()
        return any(same_proof(shown, _proof(key, _DIALLER, exchange)) for key in self._keys)

    def note_signature(self, note: bytes) -> bytes:
        """The signature of an operator's note: 32 bytes."""
        self._look()
        return _signature(self._keys[0], _OPERATOR, note)

    def is_note_signature(self, shown: bytes, note: bytes) -> bool:
        """Whether somebody who had one of these secrets has signed a note."""
        self._look()
        return any(same_proof(shown, _signature(key, _OPERATOR, note)) for key in self._keys)

    def session_signature(self, session: bytes) -> bytes:
        """The signature of a session at gateways: 32 bytes."""
        self._look()
        return _signature(self._keys[0], _SESSION, session)

    def is_session_signature(self, shown: bytes, session: bytes) -> bool:
        """Whether a gateway that had one of these secrets has signed a session."""
        self._look()
        return any(same_proof(shown, _signature(key, _SESSION, session)) for key in self._keys)

    def _look(self) -> None:
        """Read the file again if it has changed; one that can't be used leaves what is known."""
        if self._seen is None:
            return
        try:
            seen = _seen(os.stat(self.path))
        except OSError:
            seen = NO_FILE
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = read_secret(self.path)._keys
        except BadSetting as error:
            log.warning("secret_unreadable path=%s reason=%r", self.path, str(error))
        else:
            log.info("secret_changed path=%s valid=%d", self.path, len(self._keys))


def _proof(key: bytes, label: bytes, exchange: Exchange) -> bytes:
    spoken = b"".join(
        (
            label,
            exchange.dialler_nonce,
            exchange.server_nonce,
            exchange.log_id.to_bytes(8, "little"),
            exchange.cluster_id.to_bytes(8, "little"),
            exchange.role.encode(),
            exchange.channel,
        )
    )
    return hmac.digest(key, spoken, hashlib.sha256)


def _signature(key: bytes, label: bytes, signed: bytes) -> bytes:
    return hmac.digest(key, label + signed, hashlib.sha256)


def same_proof(shown: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one, in a time that reveals nothing about it."""
    return hmac.compare_digest(shown, expected)


def open_secret(data: str, secret_file: str) -> Secret:
    """The secret of a server: `secret_file`, which must be there, or the one in `data`, which is made if it is missing.

    Raises:
        BadSetting: the file is missing, readable by others, or holds no secret.
        NotWritable, DiskFull: it is missing in `data` and can't be made there.
    """
    if secret_file:
        return read_secret(secret_file)
    path = os.path.join(data, SECRET_FILE)
    if not os.path.exists(path):
        _make(data, path)
    return read_secret(path)


def read_secret(path: str) -> Secret:
    """Read a secret file. Raises BadSetting when it is missing, readable by others, or holds no secret."""
    try:
        # Without O_NONBLOCK the open of a pipe that has this name would never return.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _bad(
            f"{path} is missing; name it with --secret-file, or copy {SECRET_FILE} from the machine of the meta server"
        ) from None
    except OSError as error:
        raise _bad(f"{path} can't be read ({error.strerror}); be the user that the servers run as") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _bad(f"{path} is no file, but a folder, a pipe or a device; put the secret there")
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise _bad(f"{path} has mode {mode:03o}, so others may read it; run `chmod 600 {path}`")
        text = os.read(descriptor, FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _bad(f"{path} can't be read ({error.strerror})") from error
    finally:
        os.close(descriptor)
    try:
        keys = [bytes.fromhex(line) for line in text.decode("ascii").split()]
    except ValueError:
        keys = []
    if not 1 <= len(keys) <= KEYS_MAX or any(len(key) != SECRET_BYTES for key in keys):
        raise _bad(
            f"{path} holds no secret, which is {2 * SECRET_BYTES} hexadecimal digits, or two of them on two lines while"
            " it is changed; copy it again"
        )
    return Secret(keys[0], path, *keys[1:], seen=_seen(found))


def _seen(found: os.stat_result) -> Seen:
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def _make(data: str, path: str) -> None:
    """Make the file with a random secret, whole and durable, unless another server of the directory is faster."""
    try:
        os.makedirs(data, exist_ok=True)
        with suppress(FileExistsError):  # Another server was faster, and its secret is the cluster's.
            create_whole(path, os.urandom(SECRET_BYTES).hex().encode() + b"\n", FILE_MODE)
    except OSError as error:
        raise NotWritable(path, error.strerror or str(error)) from error


def _bad(what: str) -> BadSetting:
    return BadSetting(f"the cluster's secret: {what}", setting="secret_file")
