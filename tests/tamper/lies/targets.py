"""Lies of realtime servers' message logs.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from delayd.batch.batch import Batch
from delayd.log.control import Record, decode_records, encode_records
from delayd.log.group import GroupKind
from tests.simulation.audit import BOOKS
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar, Written
from tests.tamper.lies.lie import HOUR_MS, Told, hour_that_is
from tests.tamper.lies.message_log import size_of
from tests.tamper.rows import Row, batch_of, rows_of


def edit_target(liar: Liar, change: Callable[[Batch], bytes | None], which: str = "sealed") -> None:
    """Change the first batch of a sealed hour, of a realtime server that holds one; offsets behind it stay."""
    hour, done = hour_that_is(liar, which), list[int]()
    for number in (0, 1):

        def changed(batch: Batch) -> bytes | None:
            if done or batch.dispatch.hour != hour:
                return bytes(batch.buffer)
            done.append(1)
            return change(batch)

        liar.edit_batches(liar.target_log(number), changed)
    assert done, "no batch of that hour is there"


def edit_target_row(liar: Liar, change: Callable[[Row], Row]) -> None:
    edit_target(liar, lambda batch: batch_of(batch, [change(rows_of(batch)[0]), *rows_of(batch)[1:]]))


def target_lies() -> Told:
    rows: dict[str, tuple[Callable[[Row], Row], str]] = {
        "another body": (lambda row: replace(row, body=bytes(reversed(row.body))), "VERIFY"),
        "another body and its hash": (lambda row: replace(row, body=bytes(reversed(row.body))).hashed(), "MISMATCH"),
        "another hash": (lambda row: replace(row, content_hash=row.content_hash ^ 1), "MISMATCH"),
        "no hash": (lambda row: replace(row, content_hash=0), "MISMATCH"),
        "another due time": (lambda row: replace(row, due_ms=row.due_ms + 1), "MISMATCH"),
        "another sequence": (lambda row: replace(row, sequence=row.sequence + 1_000_000), "ORPHAN LOST"),
    }
    for name, (edit, names) in rows.items():
        yield f"a delivered message has {name}", partial(edit_target_row, change=edit), names
    yield "a delivered batch has another subject", partial(edit_target, change=_other_subject), "MISMATCH"
    yield (
        "a delivered batch has another subject and its hashes",
        partial(edit_target, change=partial(_other_subject, hashed=True)),
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
        yield f"a delivered batch has {name}", partial(edit_target, change=partial(_other_part, fields)), names
    yield "a delivered batch is gone", partial(edit_target, change=lambda batch: None), "DAMAGE"
    yield "a delivered batch is gone, and the checkpoint counts less", _lose_batch, "LOST"
    yield "a delivered batch is there twice", _store_twice, "DUPLICATE"
    yield "a delivered group was appended at another time", _append_later, "MISMATCH"
    yield "the numbers of a realtime server's messages have a gap", _number_gap, "CONSERVATION"
    yield "messages of an hour that nobody ever had are at a realtime server", partial(_invent, hour=480_000), "ORPHAN"
    yield "messages of an hour to come are at a realtime server", partial(_invent, hour=500_100), "ORPHAN"
    yield "a message is added to a delivered batch", partial(edit_target, change=_add_row), "ORPHAN"
    yield "a delivered message is left out of its batch", partial(edit_target, change=_drop_row), "LOST DAMAGE"
    yield "a greeting says that more is decided", _greet, "CONSERVATION ORPHAN"
    yield "a group of a realtime server is of an older epoch", _older_epoch, "CONSERVATION VERIFY"
    yield (
        "a message that was on its way is at a realtime server, by no outcome, called decided",
        _decide_newest,
        "ORPHAN CONSERVATION",
    )


def _other_part(fields: dict[str, int], batch: Batch) -> bytes:
    return batch_of(batch, rows_of(batch), batch.dispatch._replace(**fields))


def _lose_batch(liar: Liar) -> None:
    edit_target(liar, lambda batch: None)
    for number in (0, 1):
        folder = f"{BOOKS}/realtime-{number}"
        path = liar.target_log(number)
        size = sum(map(size_of, liar.groups(path)))
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


def _invent(liar: Liar, hour: int) -> None:
    def change(groups: list[Written]) -> list[Written]:
        data = next(group for group in reversed(groups) if group.kind is GroupKind.DATA)
        (batch,) = data.parsed[:1]
        rows = [replace(row, sequence=row.sequence + 70_000, due_ms=hour * HOUR_MS) for row in rows_of(batch)]
        part = batch.dispatch._replace(hour=hour, batch_id=batch.dispatch.batch_id + 1, claimed_at_ms=hour * HOUR_MS)
        new = data.with_batches(batch_of(batch, rows, part))
        return [*groups, replace(new, base_sequence=groups[-1].base_sequence + groups[-1].row_count)]

    liar.edit(liar.target_log(1), change)


def _add_row(batch: Batch) -> bytes:
    rows = rows_of(batch)
    return batch_of(batch, [*rows, replace(rows[-1], sequence=rows[-1].sequence + 90_000)])


def _drop_row(batch: Batch) -> bytes | None:
    return batch_of(batch, rows_of(batch)[1:]) if batch.count > 1 else None


def _greet(liar: Liar) -> None:
    """The first greeting names a watermark that was reached later."""

    def change(groups: list[Written]) -> list[Written]:
        at = next(number for number, group in enumerate(groups) if group.kind is GroupKind.CONTROL)
        (record,) = decode_records(groups[at].parsed[0])
        said = replace(groups[at], batches=(encode_records([{**record, "w": [cast(int, record["epoch"]), 4]}]),))
        return [*groups[:at], said, *groups[at + 1 :]]

    liar.edit(liar.target_log(1), change)


def _older_epoch(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        return [*groups[:-1], replace(groups[-1], epoch=0)]

    liar.edit(liar.target_log(1), change)


def _decide_newest(liar: Liar) -> None:
    """The newest outcomes are taken out, and a greeting behind them says that they were there."""
    hour = max(int(name[:-4]) for name in liar.disk.list_folder(f"{DELAY}/dispatch/20270115"))
    liar.edit(f"{DELAY}/dispatch/20270115/{hour}.log", lambda groups: groups[:-1])
    log_id = cast(int, liar.checkpoint()["log_id"])
    record: Record = {"type": "hello", "log_id": log_id, "epoch": 9, "instance": 1, "session": 1, "w": [8, 1 << 40]}

    def change(groups: list[Written]) -> list[Written]:
        batches = (encode_records([record]),)
        return [*groups, replace(groups[-1], kind=GroupKind.CONTROL, batches=batches, row_count=0, base_sequence=0)]

    for number in (0, 1):
        liar.edit(liar.last_target_log(number), change)
