"""Lies of a checkpoint file: totals, hours, what it notes of logs.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from delayd.log.hour import DEAD, END_ROW, REMOVED, RESTORED_STEP, SEALED, dispatch_path, schedule_path
from tests.simulation.audit import BOOKS
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import Told, hour_that_is


def checkpoint_lies() -> Told:
    def vanish(liar: Liar, *, files: bool) -> None:
        hour = hour_that_is(liar, "pending")
        rows = liar.hours
        liar.set_hours(rows[rows["hour"] != hour])
        if files:
            liar.disk.remove(schedule_path(DELAY, hour))

    def call_removed(liar: Liar, which: str, flags: int) -> None:
        hour = hour_that_is(liar, which)
        liar.set_hour(hour, flags=flags)
        liar.disk.remove(schedule_path(DELAY, hour))
        if liar.disk.exists(dispatch_path(DELAY, hour)):
            liar.disk.remove(dispatch_path(DELAY, hour))

    def counted(liar: Liar, field: str, by: int) -> None:
        hour = hour_that_is(liar, "pending")
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
        lambda liar: liar.set_hour(hour_that_is(liar, "sealed"), flags=SEALED | DEAD),
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
    yield "the checkpoint is of an older epoch than its log", partial(number, field="epoch", by=-1), "CONSERVATION"
    yield "an operator gave up a pending hour", _give_up, "CONSERVATION LOST"
    yield "messages stand beside a damaged file", _stand_beside, "CONSERVATION"
    yield "a dispatch log is durable up to the middle of a group", _split_outcomes, "DAMAGE CONSERVATION"
    yield "an open hour's dispatch log is gone with its length", _forget_outcomes, "ORPHAN"
    yield "the checkpoint is that of another server", _swap_checkpoints, "DAMAGE VERIFY"
    yield from _target_checkpoint()


def _give_up(liar: Liar) -> None:
    hour = hour_that_is(liar, "pending")
    rows = liar.hours
    counted = int(rows["rows"][rows["hour"] == hour][0])
    liar.set_hours(rows[rows["hour"] != hour], dropped=[[hour, counted]])
    liar.disk.remove(schedule_path(DELAY, hour))


def _stand_beside(liar: Liar) -> None:
    rows = liar.hours
    liar.publish(beside=rows[-1:].tobytes(), next_sequence=cast(int, liar.checkpoint()["next_sequence"]) + 1)


def _split_outcomes(liar: Liar) -> None:
    ends = np.frombuffer(cast(bytes, liar.checkpoint()["outcomes"]), END_ROW).copy()
    ends["length"][-1] -= 8
    liar.publish(outcomes=ends.tobytes())


def _forget_outcomes(liar: Liar) -> None:
    hour = hour_that_is(liar, "open")
    ends = np.frombuffer(cast(bytes, liar.checkpoint()["outcomes"]), END_ROW)
    liar.publish(outcomes=ends[ends["hour"] != hour].tobytes())
    liar.disk.remove(dispatch_path(DELAY, hour))


def _swap_checkpoints(liar: Liar) -> None:
    liar.copy_file(f"{BOOKS}/realtime-1/checkpoint", f"{BOOKS}/realtime-0/checkpoint")


def _target_checkpoint() -> Told:
    folder = f"{BOOKS}/realtime-0"

    def number(liar: Liar, field: str, by: int) -> None:
        liar.publish(folder, **{field: cast(int, liar.checkpoint(folder)[field]) + by})

    numbers = {
        "next message is a later one": ("next_sequence", 1, "CONSERVATION"),
        "next message is an earlier one": ("next_sequence", -1, "CONSERVATION"),
        "checkpoint is of an older epoch": ("epoch", -1, "CONSERVATION"),
        "log is indexed up to the middle of a group": ("indexed_offset", -8, "CONSERVATION"),
        "log is indexed behind its end": ("indexed_offset", 1 << 20, "DAMAGE"),
        "pull log is counted behind its end": ("pull_offset", 1 << 20, "DAMAGE"),
        "log is kept from behind its index": ("keep_from", 1 << 20, "CONSERVATION"),
    }
    for name, (field, by, names) in numbers.items():
        yield f"a realtime server's {name}", partial(number, field=field, by=by), names


def _call_open_removed(liar: Liar) -> None:
    hour = hour_that_is(liar, "pending")
    liar.set_hour(hour, flags=REMOVED)
