"""Lies of a pull log: what no server writes about the messages that groups were given (rules Q1, Q5).

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from delayd.log.group import GroupKind
from delayd.log.pull import PullEntry, PullOp, decode_entries, encode_entries
from tests.simulation.audit import BOOKS
from tests.tamper.liar import Liar, Written
from tests.tamper.lies.lie import Tell, Told

TARGET = f"{BOOKS}/realtime-0"


def edit_pulls(change: Callable[[list[PullEntry]], list[PullEntry]]) -> Tell:
    """A lie that changes the entries of a pull log; they become one group."""

    def tell(liar: Liar) -> None:
        folder = f"{TARGET}/pull"
        path = f"{folder}/{liar.disk.list_folder(folder)[-1]}"

        def changed(groups: list[Written]) -> list[Written]:
            data = [group for group in groups if group.kind is GroupKind.DATA]
            entries = [entry for group in data for batch in group.parsed for entry in decode_entries(batch)]
            others = [group for group in groups if group.kind is not GroupKind.DATA]
            (batch,) = encode_entries(change(entries))
            return [*others, data[-1].with_batches(batch)]

        end = liar.edit(path, changed).end
        liar.publish(TARGET, pull_offset=min(end, cast(int, liar.checkpoint(TARGET)["pull_offset"])))

    return tell


def last(entries: list[PullEntry], op: PullOp) -> int:
    """The place of the last entry of a kind."""
    return max(number for number, entry in enumerate(entries) if entry.op is op)


def pull_lies() -> Told:
    def acknowledge_unpulled(entries: list[PullEntry]) -> list[PullEntry]:
        entry = entries[last(entries, PullOp.ACK)]
        return [*entries, entry._replace(pull_first=entry.pull_first + 1_000)]

    def of_another(entries: list[PullEntry]) -> list[PullEntry]:
        at = last(entries, PullOp.ACK)
        return [*entries[:at], entries[at]._replace(incarnation=entries[at].incarnation + 1), *entries[at + 1 :]]

    def again(entries: list[PullEntry]) -> list[PullEntry]:
        pulled = [entry for entry in entries if entry.op is PullOp.PULL]
        end = max(entry.pull_first + entry.covered for entry in pulled)
        acked = entries[last(entries, PullOp.ACK)]
        of = next(each for each in pulled if each.pull_first <= acked.pull_first < each.pull_first + each.covered)
        return [*entries, of._replace(pull_first=end, attempt=of.attempt + 1)]

    def twice(entries: list[PullEntry]) -> list[PullEntry]:
        return [*entries, entries[last(entries, PullOp.PULL)]]

    def beyond(entries: list[PullEntry]) -> list[PullEntry]:
        return [*entries, entries[last(entries, PullOp.PULL)]._replace(covered=0)]

    yield "an acknowledgement of what was never pulled", edit_pulls(acknowledge_unpulled), "CONSERVATION"
    yield "an acknowledgement by somebody else than the one who pulled", edit_pulls(of_another), "CONSERVATION"
    yield (
        "an acknowledgement is told twice",
        edit_pulls(lambda all_: [*all_, all_[last(all_, PullOp.ACK)]]),
        "CONSERVATION",
    )
    yield "an acknowledged message was given out again", edit_pulls(again), "CONSERVATION"
    yield "a pull is told twice", edit_pulls(twice), "CONSERVATION"
    yield "a pull of no message", edit_pulls(beyond), "CONSERVATION"
