"""Lies of schedule logs: what was filed.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from delayd.batch.batch import Batch
from delayd.log.hour import SEALED, schedule_path
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import HOUR_MS, Told, hour_that_is
from tests.tamper.lies.seals import seal_anew
from tests.tamper.rows import Row, batch_of, rows_of


def each(change: Callable[[Row], Row]) -> Callable[[list[Row]], list[Row]]:
    """Change the first row."""
    return lambda rows: [change(rows[0]), *rows[1:]]


def schedule_lies() -> Told:
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
        "has a key": (lambda row: replace(row, key=b"order-1"), "MISMATCH"),
        "expires, which nobody asked for": (lambda row: replace(row, expires_at_ms=row.due_ms + HOUR_MS), "MISMATCH"),
        "has another sequence": (lambda row: replace(row, sequence=1_000_000), "LOST ORPHAN"),
    }
    for name, (edit, names) in edits.items():
        for which in ("pending", "sealed"):
            for thorough in (False, True) if which == "sealed" else (False,):
                tell = partial(edit_schedule, which=which, change=each(edit), thorough=thorough)
                yield (
                    f"a {'thoroughly ' * thorough}{which} message {name}",
                    tell,
                    names + (" BROKEN" if which == "sealed" else ""),
                )
    same_length = each(lambda row: replace(row, body=bytes(reversed(row.body))).hashed())
    yield (
        "a pending message has another body of the same length",
        partial(edit_schedule, which="pending", change=same_length),
        "MISMATCH",
    )
    yield (
        "a pending message's body is left out",
        partial(edit_schedule, which="pending", change=each(_left_out)),
        "MISMATCH",
    )
    yield (
        "a message is taken out of a pending hour",
        partial(edit_schedule, which="pending", change=lambda rows: rows[1:]),
        "CONSERVATION LOST",
    )
    yield (
        "a message is taken out of a sealed hour",
        partial(edit_schedule, which="sealed", change=lambda rows: rows[1:]),
        "CONSERVATION LOST BROKEN",
    )
    yield (
        "a message is in its hour twice",
        partial(edit_schedule, which="pending", change=lambda rows: [rows[0], *rows]),
        "DUPLICATE CONSERVATION",
    )
    for name in ("has a longer body", "has a key", "is due later"):
        edit = edits[name][0]
        for which in ("pending", "sealed"):
            yield (
                f"a {which} message is in its hour twice, and the second one {name}",
                partial(edit_schedule, which=which, change=partial(_twice, edit=edit)),
                "DUPLICATE CONSERVATION",
            )
            yield (
                f"a {which} message is in its hour twice, and the first one {name}",
                partial(edit_schedule, which=which, change=partial(_twice, edit=edit, first=True)),
                "DUPLICATE CONSERVATION",
            )
    yield "a message is invented", partial(edit_schedule, which="pending", change=_invent), "ORPHAN CONSERVATION"
    yield "a message is filed in two hours", _file_twice, "MISMATCH CONSERVATION"
    yield "a message is filed twice in another hour", partial(_file_twice, times=2), "DUPLICATE CONSERVATION"
    yield "a message is moved to another hour", _move, "MISMATCH LOST"
    yield "an hour's file says that it is of another hour", _other_hour, "DAMAGE MISMATCH"
    yield "a batch names a range above the replay offset", partial(_edit_range, by=1 << 40), "CONSERVATION LOST"
    yield "two pending messages change places", _swap, "MISMATCH"
    for thorough in (False, True):
        yield (
            f"rows of a {'thoroughly ' * thorough}sealed hour stand in another order than they are filed in",
            partial(edit_schedule, which="sealed", change=lambda rows: rows[::-1], thorough=thorough),
            "VERIFY",
        )
    for by in (-1, 1):
        yield (
            f"a message was accepted {'later' if by > 0 else 'earlier'}, when it was past due",
            partial(_accept_at, by=by),
            "MISMATCH",
        )
    yield "a message was not past due when it was accepted", partial(_accept_at, by=None), "MISMATCH"
    yield "a batch is of a range of the message log that ends before it begins", _overlap, "VERIFY"


def _accept_at(liar: Liar, by: int | None) -> None:
    def change(row: Row) -> Row:
        if not row.accepted_at_ms:
            return row
        return replace(row, accepted_at_ms=0 if by is None else row.accepted_at_ms + by)

    liar.edit_schedule(hour_that_is(liar, "last sealed"), lambda rows: [change(row) for row in rows])


def _overlap(liar: Liar) -> None:
    hour = hour_that_is(liar, "last sealed")

    def changed(batch: Batch) -> bytes:
        part = batch.schedule
        return batch_of(batch, rows_of(batch), part._replace(source_start=part.source_end + 8))

    segment = liar.edit_batches(schedule_path(DELAY, hour), changed)
    liar.set_hour(hour, length=segment.end, last_crc32c=segment.crc32c)


def edit_schedule(liar: Liar, which: str, change: Callable[[list[Row]], list[Row]], thorough: bool = False) -> None:
    done: list[int] = []

    def first_batch(rows: list[Row]) -> list[Row]:
        if done:
            return rows
        done.append(1)
        return change(rows)

    liar.edit_schedule(hour_that_is(liar, which), first_batch)
    if thorough:
        seal_anew(liar)


def _twice(rows: list[Row], edit: Callable[[Row], Row], *, first: bool = False) -> list[Row]:
    """The first row stands there twice; one of the two is edited."""
    pair = [edit(rows[0]), rows[0]] if first else [rows[0], edit(rows[0])]
    return [*pair, *rows[1:]]


def _left_out(row: Row) -> Row:
    return replace(row, body=b"", left_out=len(row.body))


def _invent(rows: list[Row]) -> list[Row]:
    return [*rows, replace(rows[-1], sequence=rows[-1].sequence + 10_000)]


def pending_pair(liar: Liar) -> tuple[int, int]:
    pending = [int(row["hour"]) for row in liar.hours if not row["flags"] & SEALED]
    return pending[-2], pending[-1]


def rows_in(liar: Liar, hour: int) -> list[Row]:
    return [
        row for group in liar.groups(schedule_path(DELAY, hour)) for batch in group.parsed for row in rows_of(batch)
    ]


def _file_twice(liar: Liar, times: int = 1) -> None:
    one, other = pending_pair(liar)
    extra = rows_in(liar, one)[:1] * times
    liar.edit_schedule(other, lambda rows: [*rows, *extra])


def _move(liar: Liar) -> None:
    one, other = pending_pair(liar)
    moved = rows_in(liar, one)[0]
    liar.edit_schedule(other, lambda rows: [*rows, moved])
    rows = liar.hours
    liar.set_hours(rows[rows["hour"] != one])
    liar.disk.remove(schedule_path(DELAY, one))


def _swap(liar: Liar) -> None:
    one, other = pending_pair(liar)
    first, second = rows_in(liar, one)[0], rows_in(liar, other)[0]
    liar.edit_schedule(one, each(lambda row: replace(row, body=second.body, subject=second.subject).hashed()))
    liar.edit_schedule(other, each(lambda row: replace(row, body=first.body, subject=first.subject).hashed()))


def _other_hour(liar: Liar) -> None:
    hour = hour_that_is(liar, "pending")

    def change(batch: Batch) -> bytes:
        return batch_of(batch, rows_of(batch), batch.schedule._replace(hour=hour + 1))

    segment = liar.edit_batches(schedule_path(DELAY, hour), change)
    liar.set_hour(hour, length=segment.end, last_crc32c=segment.crc32c)


def _edit_range(liar: Liar, by: int) -> None:
    hour = hour_that_is(liar, "pending")

    def change(batch: Batch) -> bytes:
        part = batch.schedule
        return batch_of(batch, rows_of(batch), part._replace(source_end=part.source_end + by))

    segment = liar.edit_batches(schedule_path(DELAY, hour), change)
    liar.set_hour(hour, length=segment.end, last_crc32c=segment.crc32c)
