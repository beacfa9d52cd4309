"""Lies of the delay server's message log.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

from delayd.log.control import encode_records
from delayd.log.group import GroupKind
from delayd.reading.files.directory import open_any
from tests.tamper.liar import Liar, Written
from tests.tamper.lies.lie import HOUR_MS, Told, hour_that_is
from tests.tamper.lies.schedule import rows_in
from tests.tamper.rows import Row, batch_of, rows_of


def edit_message_log(liar: Liar, change: Callable[[list[Written]], list[Written]]) -> None:
    """Change the message log, and what the checkpoint says of the group before the replay offset."""
    liar.edit(liar.message_log, change)
    liar.publish(replay_crc32c=crc_below(liar, cast(int, liar.checkpoint()["replay_offset"])))


def say(groups: list[Written], record: bytes) -> list[Written]:
    """The groups, and behind them one with a batch of records."""
    last = groups[-1]
    base = last.base_sequence + last.row_count
    return [*groups, Written(GroupKind.CONTROL, last.epoch, last.appended_at_ms, base, 0, (record,))]


def size_of(group: Written) -> int:
    table = -(-4 * len(group.batches) // 8) * 8
    return 80 + table + sum(map(len, group.batches))


def crc_below(liar: Liar, offset: int) -> int:
    segment, crc = open_any(liar.disk, liar.message_log), 0
    for group in segment.scan(0):
        if group.header.offset >= offset:
            break
        crc = group.header.header_crc32c
    segment.close()
    return crc


def edit_sent(liar: Liar, change: Callable[[Row], Row]) -> None:
    """Change the last row that is filed and pending, in the message log."""
    target = rows_in(liar, hour_that_is(liar, "pending"))[0].sequence

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

    edit_message_log(liar, changed)


def message_log_lies() -> Told:
    rows: dict[str, Callable[[Row], Row]] = {
        "another due time": lambda row: replace(row, due_ms=row.due_ms + 1),
        "another body": lambda row: replace(row, body=bytes(reversed(row.body))),
        "headers": lambda row: replace(row, headers=b"\x81\xa1k\xa1v"),
        "another subject": lambda row: replace(row, subject=row.subject[:-1] + b"X"),
    }
    for name, edit in rows.items():
        yield f"an accepted message has {name}", partial(edit_sent, change=edit), "MISMATCH"

    def shift(liar: Liar, field: str, by: int, last: bool) -> None:
        def change(groups: list[Written]) -> list[Written]:
            data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
            at = data[-1] if last else data[len(data) // 2]
            return [
                replace(group, **{field: getattr(group, field) + by * (number == at)})
                for number, group in enumerate(groups)
            ]

        edit_message_log(liar, change)

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

    def append_late_rows(liar: Liar, which: str, by: int) -> None:
        """Rows that were past due when they were accepted are filed with that instant."""
        filed = {row.sequence for row in rows_in(liar, hour_that_is(liar, which)) if row.due_ms < row.accepted_at_ms}

        def change(groups: list[Written]) -> list[Written]:
            return [
                replace(group, appended_at_ms=group.appended_at_ms + by)
                if filed.intersection(range(group.base_sequence, group.base_sequence + group.row_count))
                else group
                for group in groups
            ]

        assert filed
        edit_message_log(liar, change)

    for which, by in product(("sealed", "last sealed"), (-1, 1)):
        yield (
            f"the group of a {which} hour's late rows was appended {'later' if by > 0 else 'earlier'}",
            partial(append_late_rows, which=which, by=by),
            "MISMATCH",
        )

    def cut_accepted(liar: Liar) -> None:
        """The last group, which no checkpoint has passed, is what a torn end looks like; one before it is not."""

        def change(groups: list[Written]) -> list[Written]:
            data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
            return [group for number, group in enumerate(groups) if number != data[-2]]

        edit_message_log(liar, change)

    yield "an accepted group is cut out of the message log", cut_accepted, "CONSERVATION"

    def skip(liar: Liar) -> None:
        def change(groups: list[Written]) -> list[Written]:
            record = encode_records([{"type": "skipped", "sequences": 7}])
            after = replace(groups[-1], kind=GroupKind.CONTROL, batches=(record,), row_count=0)
            return [*groups, after]

        liar.edit(liar.message_log, change)

    yield "a control record leaves sequences unused", skip, "CONSERVATION"

    def twice(liar: Liar) -> None:
        def change(groups: list[Written]) -> list[Written]:
            first = next(group for group in groups if group.kind is GroupKind.DATA)
            last = groups[-1]
            again = replace(first, epoch=last.epoch, appended_at_ms=last.appended_at_ms)
            return [*groups, replace(again, base_sequence=last.base_sequence + last.row_count)]

        liar.edit(liar.message_log, change)

    yield "a batch is accepted twice", twice, "VERIFY"
