"""Lies of what a realtime server still holds of hours that its delay server has deleted: only their seals tell.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from delayd.batch.batch import Batch
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import Tell, Told
from tests.tamper.rows import Row, batch_of, rows_of


def removed_lies() -> Told:
    def of_deleted_hour(change_row: Callable[[Row], list[Row]]) -> Tell:
        def tell(liar: Liar) -> None:
            hour, done = min(seal.facts.hour for seal in liar.seals), list[bool]()

            def changed(batch: Batch) -> bytes | None:
                if batch.dispatch.hour != hour or done:
                    return bytes(batch.buffer)
                done.append(True)
                first, *rest = rows_of(batch)
                return batch_of(batch, [*change_row(first), *rest])

            liar.edit_batches(liar.target_log(1), changed)
            assert done, "no batch of the hour was found"

        return tell

    other = of_deleted_hour(lambda row: [replace(row, body=row.body + b"!").hashed()])
    yield "a message of a deleted hour is another one at its target", other, "CONSERVATION"
    more = of_deleted_hour(lambda row: [row, replace(row, sequence=row.sequence + 900).hashed()])
    yield "a message of a deleted hour is invented at its target", more, "CONSERVATION"
