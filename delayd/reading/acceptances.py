"""Acceptances: hours whose findings an operator has looked into and accepts, a signed file for each word
(docs/formats/acceptance.md, version 1).

Invariant: a file is whole or not there, and is never changed. So it is read without a lock, and of two that are written
at once both are kept.
"""

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from crc32c import crc32c

from delayd.disk import FILE_MODE, Disk, RealDisk, create_whole, open_named
from delayd.errors import BadArgument, DamagedData, DataError, NewerFormat
from delayd.hours import INSTANT_MS_MAX, hour_from_name, hour_name
from delayd.reading.directory import Directory
from delayd.secret import Secret

FOLDER = "acceptances"  # In a delay server's folder.
FILE_NAME = re.compile(r"([0-9]{10})\.[0-9]+\.note")
VERSION = 1
FILE_BYTES_MAX = 64 << 10  # Longer words than BY_MAX and REASON_MAX allow, also when each character is escaped.
BY_MAX = 200
REASON_MAX = 2_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOG_ID = re.compile(r"[0-9a-f]{16}")

HourKey = tuple[int, int]
"""The log_id of a delay server and an hour of it."""


class Acceptance(NamedTuple):
    """The word of an operator on an hour of one delay server; ``findings_sha256`` is the digest of what was found."""

    log_id: int
    hour: int
    findings_sha256: str
    by: str
    reason: str
    at_ms: int

    def encode(self) -> bytes:
        """The line that is signed."""
        fields = {
            "version": VERSION,
            "log_id": f"{self.log_id:016x}",
            "hour": hour_name(self.hour),
            "findings_sha256": self.findings_sha256,
            "by": self.by,
            "reason": self.reason,
            "at_ms": self.at_ms,
        }
        return json.dumps(fields).encode()


class StoredAcceptance(NamedTuple):
    """One file; ``log_id`` and ``hour`` are of the place where it lies. It has an ``acceptance`` or an ``error``."""

    path: str
    log_id: int
    hour: int
    acceptance: Acceptance | None
    line: bytes
    signature: bytes
    error: DataError | None

    @property
    def size_bytes(self) -> int:
        """Bytes of a file that can be read."""
        return len(_file_of(self.line, self.signature)) if self.acceptance else 0


class AcceptanceState(StrEnum):
    """What an acceptance is worth; only ACCEPTED makes an audit quiet about its hour."""

    ACCEPTED = "accepted"
    DIFFERS = "differs"  # It is of other findings than those of now.
    NOT_SIGNED = "not_signed"  # Its signature is missing, or not made with this secret over these words.
    NOT_VERIFIED = "not_verified"  # Nobody gave a secret to verify it with.
    UNREADABLE = "unreadable"


class JudgedAcceptance(NamedTuple):
    """An acceptance, and what it is worth."""

    stored: StoredAcceptance
    state: AcceptanceState

    @property
    def key(self) -> HourKey:
        """Delay server and hour."""
        return self.stored.log_id, self.stored.hour


def check_words(by: str, reason: str) -> None:
    """Raise BadArgument when a name or a reason is empty, too long, or has characters that control a terminal."""
    for what, text, length_max in (("the name", by, BY_MAX), ("the reason", reason, REASON_MAX)):
        if not text.strip() or len(text) > length_max or not text.isprintable():
            raise BadArgument(f"{what} must be one line of 1 to {length_max:,} characters; it says who accepts, or why")


def write_acceptance(folder: str, acceptance: Acceptance, secret: Secret) -> str:
    """Sign an acceptance and keep it in a delay server's folder; durable on return, which is the path of its file.

    The server may run: it neither reads nor removes these files.

    Raises:
        DiskFull, NotWritable: nothing was written.
    """
    line = acceptance.encode()
    data = _file_of(line, secret.note_signature(line))
    RealDisk().make_folder(f"{folder}/{FOLDER}")
    for number in count(1):
        path = f"{folder}/{FOLDER}/{hour_name(acceptance.hour)}.{number}.note"
        try:
            create_whole(path, data, FILE_MODE)
        except FileExistsError:
            continue
        return path
    raise AssertionError("there is always a higher number")


def acceptance_files(disk: Disk, folder: str) -> list[str]:
    """The names of the acceptances in a delay server's folder; a file that a crash left unfinished is none."""
    return [name for name in disk.list_folder(f"{folder}/{FOLDER}") if FILE_NAME.fullmatch(name)]


def read_acceptances(
    disk: Disk, directory: Directory, hours: Container[int] | None = None
) -> Iterator[StoredAcceptance]:
    """Read the acceptances of a delay server, of all hours or of some; those that can't be read have an error."""
    for name in acceptance_files(disk, directory.path):
        path = f"{directory.path}/{FOLDER}/{name}"
        try:
            hour = hour_from_name(name.partition(".")[0])
        except BadArgument as error:
            yield StoredAcceptance(path, directory.log_id, 0, None, b"", b"", DamagedData(path, 0, error.message))
            continue
        if hours is not None and hour not in hours:
            continue
        try:
            acceptance, line, signature = _read(disk, path)
            if (acceptance.log_id, acceptance.hour) != (directory.log_id, hour):
                raise DamagedData(path, 0, "it is of another hour or of another delay server than its place says")
        except FileNotFoundError:
            continue  # Somebody took it back just now.
        except DataError as error:
            yield StoredAcceptance(path, directory.log_id, hour, None, b"", b"", error)
        else:
            yield StoredAcceptance(path, directory.log_id, hour, acceptance, line, signature, None)


def judge(
    found: Iterable[StoredAcceptance], digests: Mapping[HourKey, str], secret: Secret | None
) -> list[JudgedAcceptance]:
    """What acceptances are worth, given the digests of today's findings; by server, hour and instant.

    Of those that fit an hour only the newest is returned, and then none that are of other findings; of these, too, the
    newest.
    """
    judged = [JudgedAcceptance(each, _state(each, digests.get((each.log_id, each.hour), ""), secret)) for each in found]
    judged.sort(key=lambda each: (*each.key, each.stored.acceptance.at_ms if each.stored.acceptance else 0))
    newest: dict[HourKey, JudgedAcceptance] = {}
    for each in judged:
        said = newest.get(each.key)
        if each.state is AcceptanceState.ACCEPTED or (
            each.state is AcceptanceState.DIFFERS and (said is None or said.state is AcceptanceState.DIFFERS)
        ):
            newest[each.key] = each
    superseded = AcceptanceState.ACCEPTED, AcceptanceState.DIFFERS
    return [each for each in judged if each.state not in superseded or newest[each.key] is each]


def _state(stored: StoredAcceptance, digest: str, secret: Secret | None) -> AcceptanceState:
    if stored.acceptance is None:
        return AcceptanceState.UNREADABLE
    if secret is None:
        return AcceptanceState.NOT_VERIFIED
    if not secret.is_note_signature(stored.signature, stored.line):
        return AcceptanceState.NOT_SIGNED
    return AcceptanceState.ACCEPTED if stored.acceptance.findings_sha256 == digest else AcceptanceState.DIFFERS


def _file_of(line: bytes, signature: bytes) -> bytes:
    text = line + b"\n" + signature.hex().encode() + b"\n"
    return text + f"{crc32c(text):08x}\n".encode()


def _read(disk: Disk, path: str) -> tuple[Acceptance, bytes, bytes]:
    file = open_named(disk, path)
    try:
        data = file.pread(FILE_BYTES_MAX, 0)
    finally:
        file.close()
    line, _, rest = data.partition(b"\n")
    digits = rest.partition(b"\n")[0]
    try:
        signature = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        signature = b""
    if _file_of(line, signature) != data:
        raise DamagedData(path, 0, "its checksum differs, or it does not have three lines")
    return _decode(path, line), line, signature


def _decode(path: str, line: bytes) -> Acceptance:
    try:
        fields: object = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    match fields:
        case {"version": int(version)} if version > VERSION:
            raise NewerFormat(path, version, VERSION)
        case {
            "version": 1,
            "log_id": str(log_id),
            "hour": str(hour),
            "findings_sha256": str(sha256),
            "by": str(by),
            "reason": str(reason),
            "at_ms": int(at_ms),
        } if _LOG_ID.fullmatch(log_id) and _SHA256.fullmatch(sha256) and 0 <= at_ms <= INSTANT_MS_MAX:
            try:
                check_words(by, reason)
                return Acceptance(int(log_id, 16), hour_from_name(hour), sha256, by, reason, at_ms)
            except BadArgument as error:
                raise DamagedData(path, 0, error.message) from error
    raise DamagedData(path, 0, "it is no acceptance of findings")
