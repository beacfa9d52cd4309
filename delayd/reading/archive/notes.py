"""Notes: the names of an archive's files, and the note that stands beside each of them (docs/archive.md).

Invariant: a note is written after its file, and says which bytes the file has. So an hour is archived when its note is
there; a file without a note is one whose archiver died, and the next archiver takes it if it is the same.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from delayd.errors import BadArgument, DamagedData, NewerFormat
from delayd.hours import hour_from_name, hour_name
from delayd.log.hour import SHA256_BYTES, Seal, SealFacts

VERSION = 2  # That of files with items; the others are as version 1 had them, and say so.
VERSION_FACT = "delayd.version"
SCHEDULE, MESSAGE, CONSUMPTION = TABLES = ("schedule", "message", "consumption")
NOTES = "notes"
NOTE_BYTES_MAX = 16 << 10
READ_BYTES = 1 << 20
_ID = "[0-9a-f]{16}"
_NAME = re.compile(
    rf"notes/({'|'.join(TABLES)})/day=([0-9-]{{10}})/hour=([0-9]{{10}})/server=({_ID})/({_ID})\.json",
    re.ASCII,
)


class ArchivedKey(NamedTuple):
    """Which file it is: of the table ``schedule`` what the delay server ``origin`` knows of an hour, of ``message``
    what the realtime server ``log_id`` holds of it, of ``consumption`` what groups there have done with it. In
    ``schedule`` both are the delay server.
    """

    table: str
    hour: int
    log_id: int
    origin: int

    @property
    def path(self) -> str:
        """The name of the file, without its ending."""
        name = hour_name(self.hour)
        day = f"{name[:4]}-{name[4:6]}-{name[6:8]}"
        return f"{self.table}/day={day}/hour={name}/server={self.log_id:016x}/{self.origin:016x}"

    @property
    def file(self) -> str:
        return f"{self.path}.parquet"

    @property
    def note(self) -> str:
        return f"{NOTES}/{self.path}.json"

    def facts(self, items: Sequence[str] = ()) -> dict[str, str]:
        """What the file itself says of this, if it has these items."""
        return {
            VERSION_FACT: str(VERSION if items else 1),
            "delayd.table": self.table,
            "delayd.hour": hour_name(self.hour),
            "delayd.log_id": f"{self.log_id:016x}",
            "delayd.origin": f"{self.origin:016x}",
        }


def key_of_note(name: str) -> ArchivedKey | None:
    """The key of a note by its name; None for any other file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        hour = hour_from_name(found[3])
    except BadArgument:
        return None
    key = ArchivedKey(found[1], hour, int(found[4], 16), int(found[5], 16))
    return key if key.note == name else None


@dataclass(frozen=True, slots=True)
class Note:
    """What is said of one file; ``size`` 0 and no digest: there is none, because its server held no row.

    A schedule's note has the hour's seal, and without a file it says that retention was faster. ``start_offset`` is
    where a realtime server's log began when it was read: messages before it are not in the file. ``items`` says which
    of keys, tags, headers and bodies a schedule has, too.
    """

    key: ArchivedKey
    rows: int = 0
    size: int = 0
    sha256: str = ""
    start_offset: int = 0
    seal: Seal | None = None
    items: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Make the bytes of the note: the same for the same values."""
        key = self.key
        version = VERSION if self.items else 1
        said: dict[str, object] = {"version": version, "table": key.table, "hour": hour_name(key.hour)}
        said |= {"log_id": f"{key.log_id:016x}", "origin": f"{key.origin:016x}"}
        said |= {"rows": self.rows, "bytes": self.size, "sha256": self.sha256, "start_offset": self.start_offset}
        if self.items:
            said["with"] = self.items
        if self.seal is not None:
            said["seal"] = _seal_as_json(self.seal)
        return json.dumps(said, indent=1).encode() + b"\n"


def decode_note(path: str, key: ArchivedKey, data: bytes) -> Note:
    """Read a note.

    Raises:
        DamagedData: it is none, or another file's.
        NewerFormat: a newer delayd wrote it.
    """
    try:
        said = json.loads(data)
        version = said["version"]
        if isinstance(version, int) and version > VERSION:
            raise NewerFormat(path, version, VERSION)
        seal = _seal_of_json(said["seal"]) if "seal" in said else None
        numbers = [said[name] for name in ("rows", "bytes", "start_offset")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a number is none")
        items = tuple(str(each) for each in said.get("with", ()))
        note = Note(key, numbers[0], numbers[1], str(said["sha256"]), numbers[2], seal, items)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(path, 0, f"it is no note of an archive: {error!r}") from error
    if note.encode() != data or (note.seal is None) != (key.table != SCHEDULE):
        raise DamagedData(path, 0, "it is not as an archiver writes the note of this file")
    if seal is not None and (seal.log_id, seal.facts.hour) != (key.log_id, key.hour):
        raise DamagedData(path, 0, "its seal is of another server or hour")
    return note


def file_sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    digest = sha256()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _seal_as_json(seal: Seal) -> dict[str, object]:
    said: dict[str, object] = {"number": seal.number, **seal.facts._asdict(), "previous_sha256": seal.previous_sha256}
    del said["hour"]
    said |= {"log_id": f"{seal.log_id:016x}", "hour": hour_name(seal.facts.hour), "sha256": seal.sha256}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in said.items()}


def _seal_of_json(said: dict[str, object]) -> Seal:
    values: dict[str, object] = {}
    for name in SealFacts._fields:
        value = said[name]
        values[name] = hour_from_name(str(value)) if name == "hour" else value
        if name.endswith("_sha256"):
            values[name] = _digest(value)
        elif type(values[name]) is not int:
            raise ValueError(f"{name} is no number")
    facts = SealFacts(**values)  # type: ignore[arg-type]
    number = said["number"]
    if type(number) is not int:
        raise ValueError("number is no number")
    return Seal(int(str(said["log_id"]), 16), number, facts, _digest(said["previous_sha256"]))


def _digest(text: object) -> bytes:
    digest = bytes.fromhex(str(text))
    if len(digest) != SHA256_BYTES:
        raise ValueError("a digest has 32 bytes")
    return digest
