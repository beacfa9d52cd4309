"""Lies that nothing in the files tells; docs/guarantees.md lists them, each with its reason.

Invariant: the tests show that nobody finds them, so that one that becomes detectable leaves this list.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from delayd.log.checkpoint import Value
from delayd.log.control import encode_records
from delayd.log.group import GroupKind
from delayd.log.hour import END_ROW, schedule_path
from delayd.log.pull import PullEntry, PullOp
from tests.simulation.audit import BOOKS
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar, Written
from tests.tamper.lies.consumers import cut_entries
from tests.tamper.lies.lie import HOUR_MS, Tell, hour_that_is
from tests.tamper.lies.message_log import edit_sent, say
from tests.tamper.lies.outcomes import call_ended
from tests.tamper.lies.pulls import edit_pulls, last
from tests.tamper.lies.schedule import each, edit_schedule
from tests.tamper.lies.seals import note_seals
from tests.tamper.rows import Row, batch_of, rows_of


def undetectable() -> list[tuple[str, Tell]]:
    """Lies that no reader of the files can find, each as a row of the page says it."""
    return [
        ("an outcome that no checkpoint and no watermark covers yet is taken out", _newest_outcome),
        ("the newest group of the message log is cut off", _cut_newest),
        ("a message that nobody sent is added behind the others", _add_message),
        ("a message that no checkpoint has filed yet is changed", _change_unfiled),
        ("a pending message is changed in schedule log and message log alike", _change_both),
        ("nothing is settled", lambda liar: liar.publish(settled_ms=0)),
        ("more is settled", lambda liar: liar.publish(settled_ms=cast(int, liar.checkpoint()["settled_ms"]) + HOUR_MS)),
        ("a target that is not here holds something", _name_a_target),
        ("messages were given up by an operator, whose word is in the message log", _give_up_with_word),
        ("two seals change places, with the chain and the noted digest", _swap_seals),
        ("a seal of a deleted hour is replaced, with the chain and the noted digest", _replace_seal),
        ("a sealed hour is deleted before its time", _delete_early),
        ("the directory of a realtime server is left out", _leave_out),
        ("a pending message is called cancelled, and a decision of it is written", partial(call_ended, decided=True)),
        ("a consume log ends early", cut_entries),
        ("an acknowledgement is written for what a group held", edit_pulls(_acknowledge_held)),
        ("the newest entries of a life of the pull log are taken out", edit_pulls(_forget_newest)),
        ("an old part of the pull log is changed", edit_pulls(_give_back)),
    ]


def _newest_outcome(liar: Liar) -> None:
    hour = max(int(name[:-4]) for name in liar.disk.list_folder(f"{DELAY}/dispatch/20270115"))
    liar.edit(f"{DELAY}/dispatch/20270115/{hour}.log", lambda groups: groups[:-1])


def _cut_newest(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
        return groups[: data[-1]]

    liar.edit(liar.message_log, change)


def _add_message(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        last = next(group for group in reversed(groups) if group.kind is GroupKind.DATA)
        (batch,) = last.parsed[-1:]
        rows = [replace(row, body=b"nobody sent this", due_ms=row.due_ms + HOUR_MS) for row in rows_of(batch)]
        part = batch.producer._replace(producer_batch=batch.producer.producer_batch + 1)
        base = last.base_sequence + last.row_count
        return [*groups, replace(last.with_batches(batch_of(batch, rows, part)), base_sequence=base)]

    liar.edit(liar.message_log, change)


def _change_unfiled(liar: Liar) -> None:
    def change(groups: list[Written]) -> list[Written]:
        at = max(number for number, group in enumerate(groups) if group.kind is GroupKind.DATA)
        batches = [
            batch_of(batch, [replace(row, body=bytes(reversed(row.body))) for row in rows_of(batch)])
            for batch in groups[at].parsed
        ]
        return [*groups[:at], groups[at].with_batches(*batches), *groups[at + 1 :]]

    liar.edit(liar.message_log, change)


def _change_both(liar: Liar) -> None:
    def change(row: Row) -> Row:
        return replace(row, body=bytes(reversed(row.body)))

    edit_sent(liar, change)
    edit_schedule(liar, "pending", each(lambda row: change(row).hashed()))


def _name_a_target(liar: Liar) -> None:
    links = cast(list[Value], liar.checkpoint()["links"])
    unknown: list[Value] = [0xBAD, 0, ""]
    liar.publish(links=[*links, unknown])


def _give_up_with_word(liar: Liar) -> None:
    hour = hour_that_is(liar, "pending")
    rows = liar.hours
    counted = int(rows["rows"][rows["hour"] == hour][0])
    name = schedule_path(DELAY, hour).rpartition("/")[2].removesuffix(".log")
    record = encode_records([{"type": "operator", "action": "drop", "id": f"schedule/{name}", "rows": counted}])

    liar.edit(liar.message_log, partial(say, record=record))
    liar.set_hours(rows[rows["hour"] != hour], dropped=[[hour, counted]])
    liar.disk.remove(schedule_path(DELAY, hour))


def _swap_seals(liar: Liar) -> None:
    liar.write_seals([liar.seals[1], liar.seals[0], *liar.seals[2:]], chained=True)
    note_seals(liar)


def _replace_seal(liar: Liar) -> None:
    first = liar.seals[0]
    facts = first.facts._replace(body_bytes=first.facts.body_bytes + 1, schedule_sha256=bytes(32))
    liar.write_seals([first._replace(facts=facts), *liar.seals[1:]], chained=True)
    note_seals(liar)


def _delete_early(liar: Liar) -> None:
    hour = hour_that_is(liar, "sealed")
    rows = liar.hours
    ends = np.frombuffer(cast(bytes, liar.checkpoint()["outcomes"]), END_ROW)
    liar.set_hours(rows[rows["hour"] != hour], outcomes=ends[ends["hour"] != hour].tobytes())
    for log in ("schedule", "dispatch"):
        liar.disk.remove(schedule_path(DELAY, hour).replace("/schedule/", f"/{log}/"))


def _acknowledge_held(entries: list[PullEntry]) -> list[PullEntry]:
    # Consumers of the honest directory hold nothing at its end, but they did before their last acknowledgement.
    held = entries[: last(entries, PullOp.ACK)]
    newest = held[last(held, PullOp.PULL)]
    return [*held, newest._replace(op=PullOp.ACK, attempt=0, consume_first=0, at_ms=newest.at_ms + 1, lease_ms=0)]


def _forget_newest(entries: list[PullEntry]) -> list[PullEntry]:
    return entries[: last(entries, PullOp.PULL)]


def _give_back(entries: list[PullEntry]) -> list[PullEntry]:
    at = last(entries, PullOp.ACK)
    return [*entries[:at], entries[at]._replace(op=PullOp.NACK), *entries[at + 1 :]]


def _leave_out(liar: Liar) -> None:
    folder = f"{BOOKS}/realtime-0"
    liar.disk.remove(f"{folder}/checkpoint")
    for log in ("message", "pull", "consume/00000000", "consume/00000001"):
        for name in liar.disk.list_folder(f"{folder}/{log}"):
            liar.disk.remove(f"{folder}/{log}/{name}")
