"""Lies of the tallies of a realtime server (docs/formats/tally.md), and of messages that only tallies can tell of.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from delayd.batch.batch import Batch
from delayd.log.tally import decode_tallies, encode_tallies
from tests.simulation.audit import BOOKS
from tests.tamper.liar import Liar
from tests.tamper.lies.files import remove_all
from tests.tamper.lies.lie import Tell, Told, hour_that_is
from tests.tamper.rows import Row, batch_of, rows_of

TARGET = f"{BOOKS}/realtime-0"


def tally_lies() -> Told:
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
        return hour_that_is(liar, "sealed")

    for name in ("rows", "first", "second"):
        yield f"a tally has other {name} of a deleted hour", change(deleted, name), "CONSERVATION"
        yield f"a tally has other {name} of a sealed hour", change(sealed, name), "VERIFY"
        what = f"a tally has other {name} of a sealed hour that the message log keeps no more"
        yield what, change(sealed, name, _retain), "BROKEN"
    yield "a tally of the entries is of another delay server", change(deleted, "origin_log_id"), "CONSERVATION VERIFY"
    yield "a tally says that messages differ from their hash", change(sealed, "differing"), "VERIFY"
    yield "a tally says another range of the message log", change(sealed, "end"), "VERIFY"
    yield "the tally log is gone", lambda liar: remove_all(liar, f"{TARGET}/tally"), "DAMAGE"
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
