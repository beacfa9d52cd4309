"""Lies of archives: files and notes that are others than the archiver wrote, with all digests valid.

Invariant: each is told to the honest archive alone. One told *thoroughly* also makes the seal of its hour anew, and the
chain behind it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.books import DELAY_ID, REALTIME_ID
from tests.tamper.archived import NOBODY, Cells, Change, Forger

OWN, TARGET = f"{DELAY_ID:016x}", f"{REALTIME_ID:016x}"
FIRST, SECOND = "0000000000007001", "0000000000007002"  # The realtime servers of the other delay server.
HOUR_MS = 3_600_000
ANOTHER_HASH = 4_711
NEW_SEQUENCE = 50_000
# Columns of schedules that no digest covers. Were the message past due, or did it expire, others would contradict.
OUTSIDE = {"appended_at_ms": 1, "expires_at_ms": 1, "labels_hash": 1, "left_out": True, "other_sequence": 1}
Tell = Callable[[Forger], None]
Name = Callable[[Forger, int], str]


@dataclass(frozen=True)
class ArchiveLie:
    """What is done, and what is said of it: all of these names."""

    name: str
    tell: Tell
    names: frozenset[str]


def archive_lies() -> list[ArchiveLie]:
    """Every lie that must be found; the names are all that a full audit gives to it."""
    told = (*_of_schedules(), *_of_messages(), *_of_files(), *_of_seals(), *_of_removed())
    return [ArchiveLie(name, tell, frozenset(names.split())) for name, tell, names in told]


def untold_of_archives() -> list[tuple[str, Tell]]:
    """What nobody can find in an archive alone, and docs/archive.md says so."""
    return [
        ("retention removed an hour, by its note, and its file is gone", _nowhere),
        ("a realtime server's retention had removed what it held, by its note, and its file is gone", _not_held),
        ("the last hour is gone, with its seal", _no_last),
        ("the last seal is another one, of rows that are left out of both files", _left_out_at_last),
        ("a message is left out of both files, and all seals from there on are made anew", _left_out_thoroughly),
        ("a message is added to both files, and all seals from there on are made anew", _added_thoroughly),
        *(
            (f"{column} of an archived message is another one", partial(_edit_outside, column=column, value=value))
            for column, value in OUTSIDE.items()
        ),
    ]


def _nowhere(forger: Forger) -> None:
    name = schedule(forger)
    forger.path(name).unlink()
    forger.say(name, bytes=0, sha256="")


def _not_held(forger: Forger) -> None:
    name = message(forger)
    forger.path(name).unlink()
    forger.say(name, rows=0, bytes=0, sha256="", start_offset=1 << 40)


def _no_last(forger: Forger) -> None:
    forger.remove(message(forger, -1))
    forger.remove(schedule(forger, -1))


def _left_out_at_last(forger: Forger) -> None:
    forger.edit(schedule(forger, -1), lambda rows: rows[1:], thoroughly=True)
    forger.edit(message(forger, -1), lambda rows: rows[1:])


def _left_out_thoroughly(forger: Forger) -> None:
    forger.edit(schedule(forger), lambda rows: rows[1:], thoroughly=True)
    forger.edit(message(forger), lambda rows: rows[1:])


def _added_thoroughly(forger: Forger) -> None:
    forger.edit(schedule(forger), _added, thoroughly=True)
    forger.edit(message(forger), _added)


def _edit_outside(forger: Forger, column: str, value: object) -> None:
    forger.edit(schedule(forger), first(**{column: value}))


def _last(forger: Forger) -> str:
    return forger.notes(OWN)[-1]


def schedule(forger: Forger, number: int = 1) -> str:
    """One of the hours with all kinds of outcomes."""
    return forger.files("schedule", OWN)[number]


def message(forger: Forger, number: int = 1) -> str:
    """What the realtime server of these hours holds."""
    return forger.files("message", TARGET)[number]


def first(**cells: object) -> Change:
    """Change cells of the first row, which was handed over."""
    return lambda rows: [{**rows[0], **cells}, *rows[1:]]


def more(name: str, by: int, row: int = 0) -> Change:
    """Raise a number of one row."""
    return lambda rows: [
        {**each, name: (each[name] or 0) + by} if number == row else each for number, each in enumerate(rows)
    ]


def _edit(of: Name, change: Change, *, thoroughly: bool = False) -> Tell:
    return lambda forger: forger.edit(of(forger, 1), change, thoroughly=thoroughly)


def _ended(rows: list[Cells], outcome: str, reason: str | None = None) -> list[Cells]:
    nothing = dict.fromkeys(("target", "target_appended_at_ms", "target_offset", "epoch", "batch_id", "attempt"))
    return [{**rows[0], **nothing, "outcome": outcome, "reason": reason}, *rows[1:]]


def _added(rows: list[Cells]) -> list[Cells]:
    return [*rows, {**rows[0], "sequence": NEW_SEQUENCE}]


def _of_schedules() -> Iterator[tuple[str, Tell, str]]:
    edits: list[tuple[str, Change, str]] = [
        ("is called cancelled", partial(_ended, outcome="CANCELLED", reason="CANCELLED"), "MISMATCH"),
        ("is called cancelled without a reason", partial(_ended, outcome="CANCELLED"), "MISMATCH"),
        ("is called dead", partial(_ended, outcome="DEAD"), "MISMATCH"),
        ("is called expired", partial(_ended, outcome="EXPIRED"), "MISMATCH"),
        ("is due later", more("deliver_at_ms", 1), "MISMATCH"),
        ("is due in another hour", more("deliver_at_ms", HOUR_MS), "MISMATCH EARLY"),
        ("has another subject", first(subject="bills"), "MISMATCH"),
        ("has another content", first(content_hash=ANOTHER_HASH), "MISMATCH"),
        ("was handed over with another content", first(outcome_content_hash=ANOTHER_HASH), "MISMATCH"),
        ("was claimed before it was due", more("claimed_at_ms", -HOUR_MS), "MISMATCH EARLY"),
        ("was claimed later", more("claimed_at_ms", 1), "MISMATCH"),
        ("came to its target later", more("target_appended_at_ms", 1), "MISMATCH"),
        ("is at another offset", more("target_offset", 8), "MISMATCH"),
        ("is at another server", first(target=NOBODY), "MISMATCH"),
        ("is of an earlier epoch", more("epoch", -1), "MISMATCH"),
        ("is of another batch", more("batch_id", 1), "MISMATCH"),
        ("was a second attempt", first(attempt=2), "MISMATCH"),
        ("is left out", lambda rows: rows[1:], "ORPHAN"),
        ("is added", _added, "LOST"),
        ("has another sequence", lambda rows: [*rows[1:], {**rows[0], "sequence": NEW_SEQUENCE}], "LOST ORPHAN"),
    ]
    for name, change, names in edits:
        for thoroughly in (False, True):
            how = ", thoroughly" * thoroughly
            yield (
                f"a message of an archived schedule {name}{how}",
                _edit(schedule, change, thoroughly=thoroughly),
                names + ("" if thoroughly else " BROKEN"),
            )
    for name, change, names in (
        ("has another length", more("body_bytes", 1), "BROKEN"),
        ("that moved was cancelled", more("claimed_at_ms", 1, row=7), "BROKEN"),
        ("that expired did so before its expiry", more("claimed_at_ms", -HOUR_MS, row=6), "BROKEN MISMATCH"),
        ("is there twice", lambda rows: [rows[0], *rows], "CONSERVATION"),
        ("stands before another one", lambda rows: [rows[1], rows[0], *rows[2:]], "CONSERVATION"),
    ):
        yield (
            f"a message of an archived schedule {name}",
            _edit(schedule, change),
            names,
        )


def _of_messages() -> Iterator[tuple[str, Tell, str]]:
    edits: list[tuple[str, Change, str]] = [
        ("is due later", more("deliver_at_ms", 1), "MISMATCH"),
        ("has another subject", first(subject="bills"), "MISMATCH"),
        ("has another content", first(content_hash=ANOTHER_HASH), "MISMATCH"),
        ("was claimed before it was due", more("claimed_at_ms", -HOUR_MS), "MISMATCH EARLY"),
        ("came later", more("appended_at_ms", 1), "MISMATCH"),
        ("is at another offset", more("offset", 8), "MISMATCH"),
        ("is of an earlier epoch", more("epoch", -1), "MISMATCH"),
        ("is of another batch", more("batch_id", 1), "MISMATCH"),
        ("is left out", lambda rows: rows[1:], "LOST"),
        ("is added", _added, "ORPHAN"),
        ("is there twice", lambda rows: [rows[0], *rows], "DUPLICATE"),
        ("is there twice, once with a new sequence", _added, "ORPHAN"),
    ]
    for name, change, names in edits:
        yield (
            f"a message that an archived target held {name}",
            _edit(message, change),
            names,
        )


def _left_out_in_both(forger: Forger) -> None:
    for name in (schedule(forger), message(forger)):
        forger.edit(name, lambda rows: rows[1:])


def _other_hour(forger: Forger, name: str, other: str, *, facts: bool) -> None:
    """The file of one hour is put in the place of another one; ``facts``: it says of itself that it belongs there."""
    note = forger.note(name)
    own = {"hour": note["hour"], "log_id": note["log_id"], "origin": note["origin"]} if facts else {}
    forger.write(name, forger.table(other), **own)


def _of_hour_before(of: Name) -> Tell:
    return lambda forger: _other_hour(forger, of(forger, 1), of(forger, 0), facts=False)


def _swap(forger: Forger, one: str, other: str) -> None:
    """Two files change places, and each says of itself that it belongs there."""
    tables = [forger.table(name) for name in (one, other)]
    for name, table in zip((one, other), reversed(tables), strict=True):
        note = forger.note(name)
        forger.write(name, table, log_id=note["log_id"], origin=note["origin"], hour=note["hour"])


def _rename(forger: Forger, name: str, server: str) -> None:
    """A server's directory has another log_id, and so have the file and its note."""
    new = "/".join(f"server={server}" if part.startswith("server=") else part for part in name.split("/"))
    note = {**forger.note(name), "log_id": server}
    table = forger.table(name)
    forger.remove(name)
    forger.write_note(new, note)
    forger.write(new, table, log_id=server)


def _empty(forger: Forger) -> None:
    forger.path(message(forger)).write_bytes(b"")


def _held_nothing(forger: Forger) -> None:
    name = message(forger)
    forger.path(name).unlink()
    forger.say(name, rows=0, bytes=0, sha256="")


def _of_files() -> Iterator[tuple[str, Tell, str]]:
    for table, of in (("schedule", schedule), ("message", message)):
        yield (
            f"a {table} is that of another hour",
            _of_hour_before(of),
            "CONSERVATION",
        )
    yield (
        "a schedule is that of another hour, and says that it is of this one",
        lambda forger: _other_hour(forger, schedule(forger), schedule(forger, 0), facts=True),
        "BROKEN LOST ORPHAN",
    )
    yield (
        "a message file is that of another hour, and says that it is of this one",
        lambda forger: _other_hour(forger, message(forger), message(forger, 0), facts=True),
        "LOST ORPHAN",
    )
    yield (
        "the files of two realtime servers change places",
        lambda forger: _swap(forger, forger.files("message", FIRST)[-1], forger.files("message", SECOND)[-1]),
        "MISMATCH",
    )
    yield (
        "the files of a realtime server of two hours change places",
        lambda forger: _swap(forger, *forger.files("message", FIRST)[-2:]),
        "LOST ORPHAN",
    )
    yield (
        "a schedule is that of another delay server",
        lambda forger: _swap(forger, schedule(forger), forger.files("schedule")[-1]),
        "BROKEN LOST ORPHAN",
    )
    yield "a realtime server has another log_id", lambda forger: _rename(forger, message(forger), NOBODY), "MISMATCH"
    yield "a delay server has another log_id", lambda forger: _rename(forger, schedule(forger), NOBODY), "CONSERVATION"
    yield "a realtime server held nothing, by its note", _held_nothing, "LOST"
    yield "a message is left out of both files", _left_out_in_both, "BROKEN"
    yield (
        "a note counts other rows than its file has",
        lambda forger: forger.say(schedule(forger), rows=4_711),
        "CONSERVATION",
    )
    yield (
        "a note says that the realtime log began later than its file says",
        lambda forger: forger.say(message(forger), start_offset=1 << 40),
        "CONSERVATION",
    )
    yield (
        "a note is of another server",
        lambda forger: forger.say(message(forger), log_id=NOBODY),
        "CONSERVATION",
    )
    yield "a schedule and its note are gone", lambda forger: forger.remove(schedule(forger)), "CONSERVATION"
    yield "a file is empty", _empty, "CONSERVATION"
    yield (
        "a note is gone, and its file is there",
        lambda forger: forger.note_path(schedule(forger)).unlink(),
        "CONSERVATION",
    )


def _older_seal(forger: Forger) -> None:
    one, other = (forger.notes(OWN)[number] for number in (1, 0))
    forger.seal(one, **{**forger.note(other)["seal"], "hour": forger.note(one)["hour"]})


def _cut_chain(forger: Forger) -> None:
    forger.seal(forger.notes(OWN)[1], previous_sha256=bytes(32).hex())


def _gone_thoroughly(forger: Forger) -> None:
    """The first hour is taken out, and the others are numbered and chained anew."""
    forger.remove(schedule(forger, 0))
    forger.chain(OWN)


def _shorten(forger: Forger) -> None:
    shutil.rmtree(forger.folder / "notes" / forger.notes(OWN)[0].split("/server=")[0])


def _of_seals() -> Iterator[tuple[str, Tell, str]]:
    def say(**facts: object) -> Tell:
        return lambda forger: forger.seal(forger.notes(OWN)[1], **facts)

    yield "the seal before takes a seal's place", _older_seal, "CONSERVATION BROKEN"
    yield "a seal names no seal before it", _cut_chain, "BROKEN"
    yield "a seal has a later number", say(number=7), "CONSERVATION"
    yield "a seal has the number of another one", say(number=0), "CONSERVATION BROKEN"
    yield "a seal counts other rows", say(rows=9), "BROKEN"
    yield "a seal counts other outcomes", say(dead=1), "BROKEN"
    yield "a seal has another tally", say(tally_first=1), "BROKEN"
    yield "a seal has another digest of the schedule", say(schedule_sha256="11" * 32), "BROKEN"
    yield "a seal has another digest of the outcomes", say(outcomes_sha256="11" * 32), "BROKEN"
    yield "a seal is of another server", say(log_id=NOBODY), "CONSERVATION"
    yield (
        "a seal's digest is not that of the seal",
        lambda forger: forger.say(_last(forger), seal={**forger.note(_last(forger))["seal"], "sha256": "11" * 32}),
        "CONSERVATION",
    )
    yield "the schedule of the first hour is taken out, and the chain is made anew", _gone_thoroughly, "CONSERVATION"
    yield "the notes of the first hour's schedules are gone", _shorten, "CONSERVATION"


def _of_removed() -> Iterator[tuple[str, Tell, str]]:
    def edit(change: Change) -> Tell:
        return lambda forger: forger.edit(forger.files("message", FIRST)[0], change)

    yield "a target held more of a removed hour", edit(_added), "CONSERVATION"
    yield "a target held something twice of a removed hour", edit(lambda rows: [rows[0], *rows]), "CONSERVATION"
    yield "a target held another message of a removed hour", edit(more("deliver_at_ms", 1)), "CONSERVATION"
    yield "a target held another content of a removed hour", edit(first(content_hash=ANOTHER_HASH)), "CONSERVATION"
