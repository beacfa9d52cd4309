"""An honest archive of two machines, and the forger who changes its files and makes every digest fit again.

Invariant: what the forger writes an archiver could have written: notes name their files' bytes, and a seal made anew
has the digests of its rows, computed here by docs/formats/seal.md and content.md alone.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delayd.hours import hour_from_name
from delayd.outcome import Outcome, Reason
from tests.books import HOUR, HOUR_MS, START_MS, Books
from tests.tamper.honest import honest
from tests.tamper.in_spark import write_tree
from tests.unit.cli.runner import run

Cells = dict[str, Any]
Change = Callable[[list[Cells]], list[Cells]]
BITS = (1 << 64) - 1
FACTOR = 0xD6E8FEB86659FD93
OUTCOMES = {"DISPATCHED": 1, "CANCELLED": 2, "DEAD": 3, "EXPIRED": 4, "IN_DOUBT": 5}
REASONS = {None: 0, "CANCELLED": 1, "MOVED": 3, "REPLACED": 4, "REJECTED": 5, "KEPT": 6, "IN_FLIGHT": 7, "DRAINED": 8}
COUNTED = ("dispatched", "cancelled", "dead", "expired", "in_doubt")
NUMBERS = ("rows", "body_bytes", *COUNTED, "due_min_ms", "due_max_ms", "tally_first", "tally_second")
DIGESTS = ("schedule_sha256", "outcomes_sha256", "previous_sha256")
MOVED_MS = 40 * HOUR_MS
NOBODY = "0000000000000007"  # A server that nobody knows.


@cache
def honest_archive() -> Path:
    """The archive: one of a delay server with two realtime servers, and one of all kinds of outcomes, in one folder."""
    folder = Path(mkdtemp(prefix="delayd-archive-"))
    disk, _ = honest()
    for name, data in (("a", write_tree(disk, folder / "a")), ("b", _all_kinds(folder / "b"))):
        ran = run("archive", "--data", data, "--to", str(folder / "archive"))
        assert ran.code == 0, (name, ran)
    return folder / "archive"


@cache
def archive_with_items() -> Path:
    """The archive of all kinds of outcomes, with keys, tags, headers and bodies."""
    folder = Path(mkdtemp(prefix="delayd-archive-"))
    words = "--with", "key,tags,headers,body"
    ran = run("archive", "--data", _all_kinds(folder / "b"), "--to", str(folder / "archive"), *words)
    assert ran.code == 0, ran
    return folder / "archive"


def _all_kinds(folder: Path) -> str:
    books = Books(str(folder))
    for hour in range(3):
        begin = START_MS + hour * HOUR_MS
        sent = books.send(
            [begin + 1_000 * row for row in range(8)], subjects=("orders", "bills"), expires=[0] * 6 + [begin, 0]
        )
        books.hand_over(sent[:4], delay_ms=5)
        books.decide(sent[4:5], Outcome.IN_DOUBT)
        books.decide(sent[5:6], Outcome.CANCELLED, Reason.CANCELLED, claimed_at_ms=begin)
        books.decide(sent[6:7], Outcome.EXPIRED, claimed_at_ms=begin + 6_000)
        moved = {"other": 3, "other_due_ms": begin + MOVED_MS}
        books.decide(sent[7:], Outcome.CANCELLED, Reason.MOVED, claimed_at_ms=begin, **moved)
        books.checkpoint()
        books.seal(HOUR + hour)
    books.see_realtime(START_MS + 4 * HOUR_MS)
    books.close()
    return str(folder)


class Forger:
    """A copy of the archive, and what may be done to it. Files are named without their endings."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(archive, folder)

    def files(self, table: str, server: str = "") -> list[str]:
        """The files of a table that are there, of one ``server`` or of all, by hour."""
        found = (str(path.relative_to(self.folder)) for path in self.folder.glob(f"{table}/**/*.parquet"))
        return sorted(name.removesuffix(".parquet") for name in found if f"server={server}" in name)

    def notes(self, origin: str) -> list[str]:
        """The schedules of a delay server that have notes, in the order of their seals."""
        paths = self.folder.glob(f"notes/schedule/**/{origin}.json")
        names = [str(path.relative_to(self.folder / "notes")).removesuffix(".json") for path in paths]
        return sorted(names, key=lambda name: int(self.note(name)["seal"]["number"]))

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self.folder / f"{name}.parquet"

    def note_path(self, name: str) -> Path:
        """Where a note is."""
        return self.folder / "notes" / f"{name}.json"

    def note(self, name: str) -> dict[str, Any]:
        """What a note says."""
        found: dict[str, Any] = json.loads(self.note_path(name).read_text())
        return found

    def write_note(self, name: str, said: Mapping[str, object]) -> None:
        """Write a note as an archiver does."""
        self.note_path(name).parent.mkdir(parents=True, exist_ok=True)
        self.note_path(name).write_bytes(json.dumps(said, indent=1).encode() + b"\n")

    def say(self, name: str, **fields: object) -> None:
        """Change fields of a note."""
        self.write_note(name, {**self.note(name), **fields})

    def table(self, name: str) -> pa.Table:
        """The rows of a file."""
        with pq.ParquetFile(self.path(name)) as file:
            return file.read()

    def rows(self, name: str) -> list[Cells]:
        """The rows of a file, as dicts."""
        rows: list[Cells] = self.table(name).to_pylist()
        return rows

    def write(self, name: str, table: pa.Table, **facts: str) -> None:
        """Write a file, with other ``facts`` about itself, and make its note fit."""
        said = dict(table.schema.metadata or {})
        said |= {f"delayd.{fact}".encode(): each.encode() for fact, each in facts.items()}
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(said), self.path(name))
        self.fit(name, rows=table.num_rows)

    def fit(self, name: str, **fields: object) -> None:
        """Have a note name the bytes that its file has."""
        data = self.path(name).read_bytes()
        self.say(name, **fields, bytes=len(data), sha256=sha256(data).hexdigest())

    def edit(self, name: str, change: Change, *, thoroughly: bool = False) -> None:
        """Change the rows of a file; ``thoroughly``: a schedule gets a seal of these rows, and the chain fits it."""
        table = self.table(name)
        self.write(name, pa.Table.from_pylist(change(table.to_pylist()), table.schema))
        if thoroughly:
            self.seal(name, **sealed(self.rows(name)))
            self.chain(self.note(name)["origin"])

    def remove(self, name: str) -> None:
        """Remove a file and its note."""
        self.path(name).unlink(missing_ok=True)
        self.note_path(name).unlink()

    def seal(self, name: str, **facts: object) -> None:
        """Change what the seal in a note says; its own digest fits."""
        seal = {**self.note(name)["seal"], **facts}
        seal["sha256"] = sha256(_packed(seal)).hexdigest()
        self.say(name, seal=seal)

    def chain(self, origin: str) -> None:
        """Number the seals of a delay server anew, and have each name the one before."""
        before = bytes(32).hex()
        for number, name in enumerate(self.notes(origin)):
            self.seal(name, number=number, previous_sha256=before)
            before = self.note(name)["seal"]["sha256"]


def sealed(rows: list[Cells]) -> dict[str, object]:
    """The facts of a seal over the rows of an archived schedule."""
    numbers: dict[str, int] = {}
    schedule, outcomes = sha256(), sha256()
    sums = [0, 0]
    for row in rows:
        content = (row["content_hash"] or 0) & BITS
        subject = numbers.setdefault(row["subject"], len(numbers))
        packed = row["sequence"], row["deliver_at_ms"], subject, row["body_bytes"], content
        schedule.update(struct.pack("<QqIIQ", *packed))
        stated = row["outcome_content_hash"]
        stated = content if stated is None else stated & BITS
        outcomes.update(_outcome(row, stated))
        if row["outcome"] == "DISPATCHED":
            for lane in (0, 1):
                state = _mix(lane + 1)
                for number in (row["sequence"], row["deliver_at_ms"], stated):
                    state = _mix(state + number & BITS)
                sums[lane] += state
    for name in numbers:
        schedule.update(len(name).to_bytes(4, "little") + name.encode())
    due = [row["deliver_at_ms"] for row in rows]
    return {
        "rows": len(rows),
        "body_bytes": sum(row["body_bytes"] for row in rows),
        **{name: sum(row["outcome"] == name.upper() for row in rows) for name in COUNTED},
        "due_min_ms": min(due),
        "due_max_ms": max(due),
        "tally_first": sums[0] & BITS,
        "tally_second": sums[1] & BITS,
        "schedule_sha256": schedule.hexdigest(),
        "outcomes_sha256": outcomes.hexdigest(),
    }


def _outcome(row: Cells, stated: int) -> bytes:
    longs = [row[name] or 0 for name in ("epoch", "batch_id", "target_appended_at_ms", "target_offset")]
    return struct.pack(
        "<QqqQQQqQBBHIQ",
        *(row["sequence"], row["deliver_at_ms"], row["claimed_at_ms"] or 0, int(row["target"] or "0", 16), *longs),
        *(OUTCOMES[row["outcome"]], REASONS[row["reason"]], row["attempt"] or 0, 0, stated),
    )


def _packed(seal: Mapping[str, Any]) -> bytes:
    """The 200 bytes of a seal, from what a note says of it."""
    head = int(seal["log_id"], 16), hour_from_name(seal["hour"]), seal["number"]
    digests = (bytes.fromhex(seal[name]) for name in DIGESTS)
    return struct.pack("<QII7Q2q2Q32s32s32s", *head, *(seal[name] for name in NUMBERS), *digests)


def _mix(number: int) -> int:
    for _ in range(2):
        number ^= number >> 32
        number = number * FACTOR & BITS
    return number ^ number >> 32
