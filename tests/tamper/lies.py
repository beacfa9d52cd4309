"""The lies: each changes an honest directory, with all checksums made valid again, and says what must be found.

Invariant: a lie is one thing that a person with write access and delayd's own writers could do to the books. One told
*thoroughly* also makes the seals anew, and the digest that the checkpoint notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from delayd.batch import Batch
from delayd.delay.sealing import ContentDiffers, compare
from delayd.log.control import encode_records
from delayd.log.dispatch import NewPart, Outcome, decode_outcomes
from delayd.log.group import GroupKind
from delayd.log.schedule import DEAD, REMOVED, RESTORED_STEP, SEALED, dispatch_path, schedule_path
from delayd.log.tally import decode_tallies, encode_tallies
from delayd.reading.directory import open_any
from tests.simulation.audit import BOOKS
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar, Written
from tests.tamper.rows import Row, batch_of, rows_of

HOUR_MS = 3_600_000
Tell = Callable[[Liar], None]


@dataclass(frozen=True)
class Lie:
    """What is done, and what is said of it: any of these names is right."""

    name: str
    tell: Tell
    names: frozenset[str]


def all_lies() -> list[Lie]:
    """Every lie that must be found."""
    return [Lie(name, tell, frozenset(names.split())) for name, tell, names in _lies()]


def _lies() -> Iterator[tuple[str, Tell, str]]:
    yield from _conservation()
    yield from _schedule()
    yield from _outcomes()
    yield from _targets()
    yield from _message_log()
    yield from _seals()
    yield from _missing()
    yield from _tallies()


# Hours by what became of them, in the honest directory.


def _hour(liar: Liar, which: str) -> int:
    rows = liar.hours
    sealed = [int(row["hour"]) for row in rows if row["flags"] == SEALED]
    pending = [int(row["hour"]) for row in rows if not row["flags"] & SEALED]
    return {"sealed": sealed[0], "last sealed": sealed[-1], "open": sealed[-1] + 1, "pending": pending[-1]}[which]


# Totals.


def _conservation() -> Iterator[tuple[str, Tell, str]]:
    def vanish(liar: Liar, *, files: bool) -> None:
        hour = _hour(liar, "pending")
        rows = liar.hours
        liar.set_hours(rows[rows["hour"] != hour])
        if files:
            liar.disk.remove(schedule_path(DELAY, hour))

    def call_removed(liar: Liar, which: str, flags: int) -> None:
        hour = _hour(liar, which)
        liar.set_hour(hour, flags=flags)
        liar.disk.remove(schedule_path(DELAY, hour))
        if liar.disk.exists(dispatch_path(DELAY, hour)):
            liar.disk.remove(dispatch_path(DELAY, hour))

    def counted(liar: Liar, field: str, by: int) -> None:
        hour = _hour(liar, "pending")
        rows = liar.hours
        liar.set_hour(hour, **{field: int(rows[field][rows["hour"] == hour][0]) + by})

    def number(liar: Liar, field: str, by: int) -> None:
        liar.publish(**{field: cast(int, liar.checkpoint()[field]) + by})

    yield "a pending hour's table row and file are gone", partial(vanish, files=True), "CONSERVATION LOST"
    yield "a pending hour's table row is gone", partial(vanish, files=False), "CONSERVATION LOST"
    yield "a pending hour is called removed", partial(call_removed, which="pending", flags=REMOVED), "CONSERVATION"
    sealed = SEALED | REMOVED
    yield (
        "a pending hour is called sealed and removed",
        partial(call_removed, which="pending", flags=sealed),
        "CONSERVATION",
    )
    yield "an open hour is called removed", partial(_call_open_removed), "CONSERVATION"
    yield (
        "a sealed hour has DEAD messages by the table",
        lambda liar: liar.set_hour(_hour(liar, "sealed"), flags=SEALED | DEAD),
        "CONSERVATION",
    )
    yield "the table counts a message less", partial(counted, field="rows", by=-1), "CONSERVATION"
    yield "the table counts a message more", partial(counted, field="rows", by=1), "CONSERVATION"
    yield "the table counts fewer bytes", partial(counted, field="length", by=-8), "DAMAGE"
    yield "the table names another last group", partial(counted, field="last_crc32c", by=-1), "DAMAGE"
    yield "the next sequence is lower", partial(number, field="next_sequence", by=-1), "CONSERVATION"
    yield "the next sequence is higher", partial(number, field="next_sequence", by=1), "CONSERVATION"
    yield "the replay offset is at another place", partial(number, field="replay_offset", by=-8), "CONSERVATION"
    yield "the replay offset is behind the end", partial(number, field="replay_offset", by=1 << 20), "DAMAGE"
    yield "the replay checksum is another one", partial(number, field="replay_crc32c", by=-1), "CONSERVATION"
    yield "the last append was at another time", partial(number, field="appended_at_ms", by=-1), "CONSERVATION"
    yield (
        "sequences were never used",
        lambda liar: liar.publish(skipped=[[3, 5]], next_sequence=cast(int, liar.checkpoint()["next_sequence"]) + 5),
        "CONSERVATION",
    )
    yield "2^40 sequences were never used", lambda liar: liar.publish(skipped=[[3, RESTORED_STEP]]), "CONSERVATION"
    yield "the message log may begin later", partial(number, field="keep_from", by=1 << 30), "CONSERVATION"


def _call_open_removed(liar: Liar) -> None:
    hour = _hour(liar, "pending")
    liar.set_hour(hour, flags=REMOVED)


# The schedule side.


def _each(change: Callable[[Row], Row]) -> Callable[[list[Row]], list[Row]]:
    """Change the first row."""
    return lambda rows: [change(rows[0]), *rows[1:]]


def _schedule() -> Iterator[tuple[str, Tell, str]]:
    edits: dict[str, tuple[Callable[[Row], Row], str]] = {
        "is due later": (lambda row: replace(row, due_ms=row.due_ms + 1), "MISMATCH"),
        "is due earlier": (lambda row: replace(row, due_ms=row.due_ms - 1), "MISMATCH"),
        "is due in another hour": (lambda row: replace(row, due_ms=row.due_ms + 3 * HOUR_MS), "MISMATCH"),
        "has another subject": (lambda row: replace(row, subject=row.subject[:-1] + b"X").hashed(), "MISMATCH"),
        "has another subject and the old hash": (lambda row: replace(row, subject=row.subject[:-1] + b"X"), "MISMATCH"),
        "has a longer body": (lambda row: replace(row, body=row.body + b"more").hashed(), "MISMATCH"),
        "has headers": (lambda row: replace(row, headers=b"\x81\xa1k\xa1v").hashed(), "MISMATCH"),
        "has another hash": (lambda row: replace(row, content_hash=row.content_hash ^ 1), "MISMATCH"),
        "has no hash": (lambda row: replace(row, content_hash=0), "MISMATCH"),
        "has another sequence": (lambda row: replace(row, sequence=1_000_000), "LOST ORPHAN"),
    }
    for name, (edit, names) in edits.items():
        for which in ("pending", "sealed"):
            for thorough in (False, True) if which == "sealed" else (False,):
                tell = partial(_edit_schedule, which=which, change=_each(edit), thorough=thorough)
                yield (
                    f"a {'thoroughly ' * thorough}{which} message {name}",
                    tell,
                    names + (" BROKEN" if which == "sealed" else ""),
                )
    same_length = _each(lambda row: replace(row, body=bytes(reversed(row.body))).hashed())
    yield (
        "a pending message has another body of the same length",
        partial(_edit_schedule, which="pending", change=same_length),
        "MISMATCH",
    )
    yield (
        "a pending message's body is left out",
        partial(_edit_schedule, which="pending", change=_each(_left_out)),
        "MISMATCH",
    )
    yield (
        "a message is taken out of a pending hour",
        partial(_edit_schedule, which="pending", change=lambda rows: rows[1:]),
        "CONSERVATION LOST",
    )
    yield (
        "a message is taken out of a sealed hour",
        partial(_edit_schedule, which="sealed", change=lambda rows: rows[1:]),
        "CONSERVATION LOST BROKEN",
    )
    yield (
        "a message is in its hour twice",
        partial(_edit_schedule, which="pending", change=lambda rows: [rows[0], *rows]),
        "DUPLICATE CONSERVATION",
    )
    yield "a message is invented", partial(_edit_schedule, which="pending", change=_invent), "ORPHAN CONSERVATION"
    yield "a message is filed in two hours", _file_twice, "MISMATCH CONSERVATION"
    yield "a message is moved to another hour", _move, "MISMATCH LOST"
    yield "an hour's file says that it is of another hour", _other_hour, "DAMAGE MISMATCH"
    yield "a batch names a range above the replay offset", partial(_edit_range, by=1 << 40), "CONSERVATION LOST"
    yield "two pending messages change places", _swap, "MISMATCH"


def _edit_schedule(liar: Liar, which: str, change: Callable[[list[Row]], list[Row]], thorough: bool = False) -> None:
    done: list[int] = []

    def first_batch(rows: list[Row]) -> list[Row]:
        if done:
            return rows
        done.append(1)
        return change(rows)

    liar.edit_schedule(_hour(liar, which), first_batch)
    if thorough:
        _seal_anew(liar)


def _left_out(row: Row) -> Row:
    return replace(row, body=b"", left_out=len(row.body))


def _invent(rows: list[Row]) -> list[Row]:
    return [*rows, replace(rows[-1], sequence=rows[-1].sequence + 10_000)]


def _pending_pair(liar: Liar) -> tuple[int, int]:
    pending = [int(row["hour"]) for row in liar.hours if not row["flags"] & SEALED]
    return pending[-2], pending[-1]


def _rows_in(liar: Liar, hour: int) -> list[Row]:
    return [
        row for group in liar.groups(schedule_path(DELAY, hour)) for batch in group.parsed for row in rows_of(batch)
    ]


def _file_twice(liar: Liar) -> None:
    one, other = _pending_pair(liar)
    extra = _rows_in(liar, one)[0]
    liar.edit_schedule(other, lambda rows: [*rows, extra])


def _move(liar: Liar) -> None:
    one, other = _pending_pair(liar)
    moved = _rows_in(liar, one)[0]
    liar.edit_schedule(other, lambda rows: [*rows, moved])
    rows = liar.hours
    liar.set_hours(rows[rows["hour"] != one])
    liar.disk.remove(schedule_path(DELAY, one))


def _swap(liar: Liar) -> None:
    one, other = _pending_pair(liar)
    first, second = _rows_in(liar, one)[0], _rows_in(liar, other)[0]
    liar.edit_schedule(one, _each(lambda row: replace(row, body=second.body, subject=second.subject).hashed()))
    liar.edit_schedule(other, _each(lambda row: replace(row, body=first.body, subject=first.subject).hashed()))


def _other_hour(liar: Liar) -> None:
    hour = _hour(liar, "pending")

    def change(batch: Batch) -> bytes:
        return batch_of(batch, rows_of(batch), batch.schedule._replace(hour=hour + 1))

    segment = liar.edit_batches(schedule_path(DELAY, hour), change)
    liar.set_hour(hour, length=segment.end, last_crc32c=segment.crc32c)


def _edit_range(liar: Liar, by: int) -> None:
    hour = _hour(liar, "pending")

    def change(batch: Batch) -> bytes:
        part = batch.schedule
        return batch_of(batch, rows_of(batch), part._replace(source_end=part.source_end + by))

    segment = liar.edit_batches(schedule_path(DELAY, hour), change)
    liar.set_hour(hour, length=segment.end, last_crc32c=segment.crc32c)


# The dispatch logs.


def _first_part(change: Callable[[NewPart], NewPart | None]) -> Callable[[NewPart], NewPart | None]:
    done: list[int] = []

    def changed(part: NewPart) -> NewPart | None:
        if done:
            return part
        done.append(1)
        return change(part)

    return changed


def _edit_outcomes(liar: Liar, which: str, change: Callable[[NewPart], NewPart | None], thorough: bool) -> None:
    liar.edit_outcomes(_hour(liar, which), _first_part(change))
    if thorough:
        _seal_anew(liar)


def _outcomes() -> Iterator[tuple[str, Tell, str]]:
    edits: dict[str, tuple[Callable[[NewPart], NewPart | None], str]] = {
        "another target": (lambda part: part._replace(target_log_id=0x7001 ^ 0x7002 ^ part.target_log_id), "MISMATCH"),
        "an unknown target": (lambda part: part._replace(target_log_id=0xBAD), "MISMATCH"),
        "another epoch": (lambda part: part._replace(epoch=part.epoch + 1), "MISMATCH"),
        "another batch": (lambda part: part._replace(batch_id=part.batch_id + 100), "MISMATCH"),
        "another claim": (lambda part: part._replace(claimed_at_ms=part.claimed_at_ms + 1), "MISMATCH"),
        "a claim before it was due": (lambda part: part._replace(claimed_at_ms=part.claimed_at_ms - HOUR_MS), "EARLY"),
        "another append": (
            lambda part: part._replace(target_appended_at_ms=part.target_appended_at_ms + 1),
            "MISMATCH",
        ),
        "another offset": (lambda part: part._replace(target_offset=part.target_offset + 8), "MISMATCH"),
        "a second attempt": (lambda part: part._replace(attempt=2), "MISMATCH"),
        "another due time": (lambda part: part._replace(deliver_at_ms=part.deliver_at_ms + 1), "MISMATCH"),
        "CANCELLED": (lambda part: part._replace(outcome=Outcome.CANCELLED), "MISMATCH"),
        "EXPIRED": (lambda part: part._replace(outcome=Outcome.EXPIRED), "MISMATCH"),
        "DEAD": (lambda part: part._replace(outcome=Outcome.DEAD), "MISMATCH"),
        "another hash": (lambda part: part._replace(hashes=part.stated_hashes() ^ np.uint64(1)), "MISMATCH"),
        "no hash": (lambda part: part._replace(hashes=None), "MISMATCH"),
        "no outcome": (lambda part: None, "ORPHAN"),
        "another sequence": (lambda part: part._replace(sequences=part.sequences + np.uint64(1_000_000)), "ORPHAN"),
    }
    for name, (edit, names) in edits.items():
        for which, thorough in (("open", False), ("sealed", False), ("sealed", True)):
            if name == "no outcome":
                names = "ORPHAN DAMAGE"
            tell = partial(_edit_outcomes, which=which, change=edit, thorough=thorough)
            yield (
                f"a {'thoroughly ' * thorough}{which} outcome says {name}",
                tell,
                names + (" BROKEN" if which == "sealed" else ""),
            )

    def twice(liar: Liar) -> None:
        path = dispatch_path(DELAY, _hour(liar, "sealed"))
        liar.edit(path, lambda groups: [*groups, groups[0]])

    yield "an outcome is there twice", twice, "DUPLICATE"


# The realtime servers' logs.


def _edit_target(liar: Liar, change: Callable[[Batch], bytes | None], which: str = "sealed") -> None:
    """Change the first batch of a sealed hour, of a realtime server that holds one; offsets behind it stay."""
    hour, done = _hour(liar, which), list[int]()
    for number in (0, 1):

        def changed(batch: Batch) -> bytes | None:
            if done or batch.dispatch.hour != hour:
                return bytes(batch.buffer)
            done.append(1)
            return change(batch)

        liar.edit_batches(liar.target_log(number), changed)
    assert done, "no batch of that hour is there"


def _edit_target_row(liar: Liar, change: Callable[[Row], Row]) -> None:
    _edit_target(liar, lambda batch: batch_of(batch, [change(rows_of(batch)[0]), *rows_of(batch)[1:]]))


def _targets() -> Iterator[tuple[str, Tell, str]]:
    rows: dict[str, tuple[Callable[[Row], Row], str]] = {
        "another body": (lambda row: replace(row, body=bytes(reversed(row.body))), "VERIFY"),
        "another body and its hash": (lambda row: replace(row, body=bytes(reversed(row.body))).hashed(), "MISMATCH"),
        "another hash": (lambda row: replace(row, content_hash=row.content_hash ^ 1), "MISMATCH"),
        "no hash": (lambda row: replace(row, content_hash=0), "MISMATCH"),
        "another due time": (lambda row: replace(row, due_ms=row.due_ms + 1), "MISMATCH"),
        "another sequence": (lambda row: replace(row, sequence=row.sequence + 1_000_000), "ORPHAN LOST"),
    }
    for name, (edit, names) in rows.items():
        yield f"a delivered message has {name}", partial(_edit_target_row, change=edit), names
    yield "a delivered batch has another subject", partial(_edit_target, change=_other_subject), "MISMATCH"
    yield (
        "a delivered batch has another subject and its hashes",
        partial(_edit_target, change=partial(_other_subject, hashed=True)),
        "MISMATCH",
    )
    parts: dict[str, tuple[dict[str, int], str]] = {
        "another epoch": ({"epoch": 77}, "MISMATCH CONSERVATION"),
        "another number": ({"batch_id": 10_000}, "MISMATCH CONSERVATION"),
        "another claim": ({"claimed_at_ms": 1_800_100_000_000}, "MISMATCH"),
        "an early claim": ({"claimed_at_ms": 1_700_000_000_000}, "EARLY"),
        "another filing hour": ({"hour": 500_100}, "ORPHAN LOST"),
        "another delay server": ({"origin_log_id": 5}, "LOST"),
        "a watermark behind itself": ({"w_epoch": 2, "w_id": 1 << 40}, "CONSERVATION ORPHAN"),
    }
    for name, (fields, names) in parts.items():
        yield f"a delivered batch has {name}", partial(_edit_target, change=partial(_other_part, fields)), names
    yield "a delivered batch is gone", partial(_edit_target, change=lambda batch: None), "DAMAGE"
    yield "a delivered batch is gone, and the checkpoint counts less", _lose_batch, "LOST"
    yield "a delivered batch is there twice", _store_twice, "DUPLICATE"
    yield "a delivered group was appended at another time", _append_later, "MISMATCH"
    yield "the numbers of a realtime server's messages have a gap", _number_gap, "CONSERVATION"


def _other_part(fields: dict[str, int], batch: Batch) -> bytes:
    return batch_of(batch, rows_of(batch), batch.dispatch._replace(**fields))


def _lose_batch(liar: Liar) -> None:
    _edit_target(liar, lambda batch: None)
    for number in (0, 1):
        folder = f"{BOOKS}/realtime-{number}"
        path = liar.target_log(1)
        size = sum(map(_size_of, liar.groups(path)))
        liar.publish(folder, indexed_offset=min(size, cast(int, liar.checkpoint(folder)["indexed_offset"])))


def _other_subject(batch: Batch, *, hashed: bool = False) -> bytes:
    rows = [replace(row, subject=row.subject[:-1] + b"X") for row in rows_of(batch)]
    return batch_of(batch, [row.hashed() if hashed else row for row in rows])


def _store_twice(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        data = next(group for group in reversed(groups) if group.kind is GroupKind.DATA)
        return [*groups, replace(data, base_sequence=groups[-1].base_sequence + groups[-1].row_count)]

    liar.edit(liar.target_log(1), change)


def _append_later(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA][-1]
        return [
            replace(group, appended_at_ms=group.appended_at_ms + (number >= data))
            for number, group in enumerate(groups)
        ]

    liar.edit(liar.target_log(1), change)


def _number_gap(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA][-1]
        return [
            replace(group, base_sequence=group.base_sequence + (number == data)) for number, group in enumerate(groups)
        ]

    liar.edit(liar.target_log(1), change)


# The message log.


def _edit_message_log(liar: Liar, change: Callable[[list[Written]], list[Written]]) -> None:
    """Change the message log, and what the checkpoint says of the group before the replay offset."""
    liar.edit(liar.message_log, change)
    liar.publish(replay_crc32c=_crc_below(liar, cast(int, liar.checkpoint()["replay_offset"])))


def _size_of(group: Written) -> int:
    table = -(-4 * len(group.batches) // 8) * 8
    return 80 + table + sum(map(len, group.batches))


def _crc_below(liar: Liar, offset: int) -> int:
    segment, crc = open_any(liar.disk, liar.message_log), 0
    for group in segment.scan(0):
        if group.header.offset >= offset:
            break
        crc = group.header.header_crc32c
    segment.close()
    return crc


def _edit_sent(liar: Liar, change: Callable[[Row], Row]) -> None:
    """Change the last row that is filed and pending, in the message log."""
    target = _rows_in(liar, _hour(liar, "pending"))[0].sequence

    def changed(groups: list[Written]) -> list[Written]:
        found = []
        for group in groups:
            base, batches = group.base_sequence, []
            for batch in group.parsed if group.kind is GroupKind.DATA else ():
                rows = rows_of(batch)
                batches.append(
                    batch_of(batch, [change(row) if base + at == target else row for at, row in enumerate(rows)])
                )
                base += batch.count
            found.append(group.with_batches(*batches) if batches else group)
        return found

    _edit_message_log(liar, changed)


def _message_log() -> Iterator[tuple[str, Tell, str]]:
    rows: dict[str, Callable[[Row], Row]] = {
        "another due time": lambda row: replace(row, due_ms=row.due_ms + 1),
        "another body": lambda row: replace(row, body=bytes(reversed(row.body))),
        "another subject": lambda row: replace(row, subject=row.subject[:-1] + b"X"),
    }
    for name, edit in rows.items():
        yield f"an accepted message has {name}", partial(_edit_sent, change=edit), "MISMATCH"

    def shift(liar: Liar, field: str, by: int, last: bool) -> None:
        def change(groups: list[Written]) -> list[Written]:
            data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
            at = data[-1] if last else data[len(data) // 2]
            return [
                replace(group, **{field: getattr(group, field) + by * (number == at)})
                for number, group in enumerate(groups)
            ]

        _edit_message_log(liar, change)

    yield (
        "a group of the message log has other sequences",
        partial(shift, field="base_sequence", by=3, last=False),
        "CONSERVATION",
    )
    yield (
        "the last group of the message log has other sequences",
        partial(shift, field="base_sequence", by=3, last=True),
        "CONSERVATION",
    )
    yield (
        "a group of the message log was appended earlier",
        partial(shift, field="appended_at_ms", by=-10 * HOUR_MS, last=False),
        "CONSERVATION",
    )
    yield (
        "a group of the message log is of an older epoch",
        partial(shift, field="epoch", by=-1, last=True),
        "CONSERVATION",
    )
    yield (
        "a group of the message log counts other rows",
        partial(shift, field="row_count", by=1, last=False),
        "CONSERVATION",
    )

    def cut_accepted(liar: Liar) -> None:
        """The last group, which no checkpoint has passed, is what a torn end looks like; one before it is not."""

        def change(groups: list[Written]) -> list[Written]:
            data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
            return [group for number, group in enumerate(groups) if number != data[-2]]

        _edit_message_log(liar, change)

    yield "an accepted group is cut out of the message log", cut_accepted, "CONSERVATION"

    def skip(liar: Liar) -> None:
        def change(groups: list[Written]) -> list[Written]:
            record = encode_records([{"type": "skipped", "sequences": 7}])
            after = replace(groups[-1], kind=GroupKind.CONTROL, batches=(record,), row_count=0)
            return [*groups, after]

        liar.edit(liar.message_log, change)

    yield "a control record leaves sequences unused", skip, "CONSERVATION"


# Seals.


def _seal_anew(liar: Liar) -> None:
    """Make the seals of the hours that stand, the chain and the noted digest fit what is there now."""
    seals = []
    for seal in liar.seals:
        path = schedule_path(DELAY, seal.facts.hour)
        facts = None
        if liar.disk.exists(path):
            batches = [batch for group in liar.groups(path) for batch in group.parsed]
            dispatch = dispatch_path(DELAY, seal.facts.hour)
            told = decode_outcomes([batch for group in liar.groups(dispatch) for batch in group.parsed])
            try:
                facts = compare(seal.facts.hour, batches, told)
            except ContentDiffers:
                facts = None  # No server would seal it.
        seals.append(seal if facts is None else seal._replace(facts=facts))
    liar.write_seals(seals, chained=True)
    _note_seals(liar)


def _note_seals(liar: Liar) -> None:
    seals = liar.seals
    liar.publish(seals=[len(seals), seals[-1].sha256])


def _seals() -> Iterator[tuple[str, Tell, str]]:
    yield "the last seal is gone", lambda liar: liar.write_seals(liar.seals[:-1]), "CONSERVATION BROKEN"

    def cut(liar: Liar, until: int) -> None:
        """Seals of deleted hours, which no table names."""
        liar.write_seals(liar.seals[until:], chained=True)
        _note_seals(liar)

    yield "the first seal is gone, the rest made anew", partial(cut, until=1), "CONSERVATION"
    yield (
        "two seals change places",
        lambda liar: liar.write_seals([liar.seals[1], liar.seals[0], *liar.seals[2:]]),
        "BROKEN",
    )
    yield (
        "two seals change places, the chain made anew",
        lambda liar: liar.write_seals([liar.seals[1], liar.seals[0], *liar.seals[2:]], chained=True),
        "CONSERVATION",
    )
    yield "a seal is there twice", lambda liar: liar.write_seals([*liar.seals, liar.seals[-1]], chained=True), "BROKEN"
    yield "a seal is taken out", lambda liar: liar.write_seals([liar.seals[0], *liar.seals[2:]]), "BROKEN"
    yield "all seals are gone", lambda liar: liar.disk.remove(liar.seal_log), "DAMAGE"

    def other(liar: Liar, **fields: int) -> None:
        first = liar.seals[0]
        facts = first.facts._replace(**{name: getattr(first.facts, name) + by for name, by in fields.items()})
        liar.write_seals([first._replace(facts=facts), *liar.seals[1:]], chained=True)
        _note_seals(liar)

    yield "the seal of a deleted hour counts fewer messages", partial(other, rows=-1, dispatched=-1), "CONSERVATION"
    yield "the seal of a deleted hour counts more messages", partial(other, rows=1, dispatched=1), "CONSERVATION"
    yield (
        "the seal of a deleted hour was of another server",
        lambda liar: liar.write_seals([liar.seals[0]._replace(log_id=1), *liar.seals[1:]], chained=True),
        "BROKEN CONSERVATION",
    )
    yield (
        "the checkpoint notes another seal",
        lambda liar: liar.publish(seals=[cast(list[int], liar.checkpoint()["seals"])[0], bytes(32)]),
        "CONSERVATION",
    )
    yield (
        "an open hour is called sealed",
        lambda liar: liar.set_hour(_hour(liar, "pending"), flags=SEALED),
        "BROKEN DAMAGE",
    )


# Files that are gone or short.


def _missing() -> Iterator[tuple[str, Tell, str]]:
    files: dict[str, Callable[[Liar], str]] = {
        "a pending hour's schedule log": lambda liar: schedule_path(DELAY, _hour(liar, "pending")),
        "a sealed hour's schedule log": lambda liar: schedule_path(DELAY, _hour(liar, "sealed")),
        "a sealed hour's dispatch log": lambda liar: dispatch_path(DELAY, _hour(liar, "sealed")),
        "an open hour's dispatch log": lambda liar: dispatch_path(DELAY, _hour(liar, "open")),
        "the delay server's message log": lambda liar: liar.message_log,
        "the first segment of a realtime server's log": lambda liar: liar.target_log(0),
        "a realtime server's whole log": lambda liar: liar.target_log(1),
    }
    for name, path in files.items():
        yield f"{name} is gone", partial(_remove, path=path), "DAMAGE"
        yield f"{name} is empty", partial(_truncate, path=path, size=0), "DAMAGE"
        yield f"{name} has no groups", partial(_truncate, path=path, size=64), "DAMAGE"

    def cut_head(liar: Liar) -> None:
        """As retention would; but it notes first where the log may begin."""
        first = liar.target_log(0)
        liar.disk.remove(first)
        segments = liar.disk.list_folder(first.rpartition("/")[0])
        assert segments, "another segment is left"

    yield "a realtime server's log is cut at its head as if by retention", cut_head, "DAMAGE"
    yield "the pull log is gone", lambda liar: _remove_all(liar, f"{BOOKS}/realtime-0/pull"), "DAMAGE"


def _remove(liar: Liar, path: Callable[[Liar], str]) -> None:
    liar.disk.remove(path(liar))


def _truncate(liar: Liar, path: Callable[[Liar], str], size: int) -> None:
    file = liar.disk.open(path(liar), write=True)
    file.truncate(size)
    file.sync()
    file.close()


def _remove_all(liar: Liar, folder: str) -> None:
    for name in liar.disk.list_folder(folder):
        liar.disk.remove(f"{folder}/{name}")


# The tallies of a realtime server (docs/formats/tally.md).


TARGET = f"{BOOKS}/realtime-0"


def _tallies() -> Iterator[tuple[str, Tell, str]]:
    def change(choose: Callable[[Liar], int], name: str, after: Tell | None = None) -> Tell:
        """Raise a figure of the first entry of an hour by one."""

        def tell(liar: Liar) -> None:
            hour, done = choose(liar), list[bool]()

            def changed(batch: Batch) -> bytes:
                entries = decode_tallies(batch).copy()
                rows = np.flatnonzero(entries["hour"] == hour)
                if len(rows) and not done:
                    entries[name][rows[0]] += 1
                    done.append(True)
                return encode_tallies(entries)[0]

            if after is not None:
                after(liar)
            liar.edit_batches(f"{TARGET}/tally/{0:020}.log", changed)
            assert done, "no entry of the hour was found"

        return tell

    def deleted(liar: Liar) -> int:
        return min(seal.facts.hour for seal in liar.seals)

    def sealed(liar: Liar) -> int:
        return _hour(liar, "sealed")

    for name in ("rows", "first", "second"):
        yield f"a tally has other {name} of a deleted hour", change(deleted, name), "CONSERVATION"
        yield f"a tally has other {name} of a sealed hour", change(sealed, name), "VERIFY"
        what = f"a tally has other {name} of a sealed hour that the message log keeps no more"
        yield what, change(sealed, name, _retain), "BROKEN"
    yield "a tally of the entries is of another delay server", change(deleted, "origin_log_id"), "CONSERVATION VERIFY"
    yield "a tally says that messages differ from their hash", change(sealed, "differing"), "VERIFY"
    yield "a tally says another range of the message log", change(sealed, "end"), "VERIFY"
    yield "the tally log is gone", lambda liar: _remove_all(liar, f"{TARGET}/tally"), "DAMAGE"
    path = f"{TARGET}/tally/{0:020}.log"
    yield "the last entries of the tally log are cut off", lambda liar: _cut_last(liar, path), "DAMAGE VERIFY"

    def of_deleted_hour(change_row: Callable[[Row], list[Row]]) -> Tell:
        def tell(liar: Liar) -> None:
            hour, done = deleted(liar), list[bool]()

            def changed(batch: Batch) -> bytes | None:
                if batch.dispatch.hour != hour or done:
                    return bytes(batch.buffer)
                done.append(True)
                first, *rest = rows_of(batch)
                return batch_of(batch, [*change_row(first), *rest])

            # Its messages are in the segment that is written to, so no entry speaks of them yet.
            liar.edit_batches(liar.target_log(1), changed)
            assert done, "no batch of the hour was found"

        return tell

    other = of_deleted_hour(lambda row: [replace(row, body=row.body + b"!").hashed()])
    yield "a message of a deleted hour is another one at its target", other, "CONSERVATION"
    more = of_deleted_hour(lambda row: [row, replace(row, sequence=row.sequence + 900).hashed()])
    yield "a message of a deleted hour is invented at its target", more, "CONSERVATION"


def _retain(liar: Liar) -> None:
    """What the retention of a realtime server may do."""
    bases = [int(name[:-4]) for name in liar.disk.list_folder(f"{TARGET}/message")]
    for base in bases[:-1]:
        liar.disk.remove(f"{TARGET}/message/{base:020}.log")
    liar.publish(TARGET, keep_from=bases[-1])


def _cut_last(liar: Liar, path: str) -> None:
    liar.edit(path, lambda groups: groups[:-1])


# What nothing tells.


def undetectable() -> list[tuple[str, Tell, str]]:
    """Lies that no reader of the files can find, and why; docs/guarantees.md lists them."""

    def newest(liar: Liar) -> None:
        hour = max(int(name[:-4]) for name in liar.disk.list_folder(f"{DELAY}/dispatch/20270115"))
        path = f"{DELAY}/dispatch/20270115/{hour}.log"
        liar.edit(path, lambda groups: groups[:-1])

    def cut_message_log(liar: Liar) -> None:
        liar.edit(liar.message_log, _without_last_rows)

    def earlier_checkpoint(liar: Liar) -> None:
        liar.publish(settled_ms=0)

    return [
        (
            "an outcome that no checkpoint and no watermark covers yet is taken out",
            newest,
            "it looks as if it was in flight",
        ),
        (
            "the newest group of the message log is cut off",
            cut_message_log,
            "a crash leaves the same, before the receipt",
        ),
        ("the delay server's word is that nothing is settled", earlier_checkpoint, "what waits is not lost"),
    ]


def _without_last_rows(groups: list[Written]) -> list[Written]:
    data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
    return groups[: data[-1]]
