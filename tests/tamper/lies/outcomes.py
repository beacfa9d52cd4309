"""Lies of dispatch logs: what became of messages.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from delayd.log.control import Ended, encode_known
from delayd.log.hour import ENDED, NewPart, decode_outcomes, dispatch_path, encode_outcomes, schedule_path
from delayd.outcome import Outcome, Reason
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import HOUR_MS, Told, hour_that_is
from tests.tamper.lies.message_log import say
from tests.tamper.lies.seals import seal_anew
from tests.tamper.rows import rows_of


def first_part(change: Callable[[NewPart], NewPart | None]) -> Callable[[NewPart], NewPart | None]:
    done: list[int] = []

    def changed(part: NewPart) -> NewPart | None:
        if done:
            return part
        done.append(1)
        return change(part)

    return changed


def edit_outcomes(liar: Liar, which: str, change: Callable[[NewPart], NewPart | None], thorough: bool) -> None:
    liar.edit_outcomes(hour_that_is(liar, which), first_part(change))
    if thorough:
        seal_anew(liar)


def call_ended(
    liar: Liar, reason: Reason = Reason.CANCELLED, *, decided: bool | Reason = False, beside: tuple[int, int] = (0, 0)
) -> None:
    """A pending message gets the outcome CANCELLED; with ``decided`` a decision of it is in the message log, too.

    The decision names no other message. The outcome names one ``beside`` it, by sequence and due instant.
    """
    hour, like = hour_that_is(liar, "pending"), dispatch_path(DELAY, hour_that_is(liar, "open"))
    path, (group, *_) = dispatch_path(DELAY, hour), liar.groups(like)
    (row, *_) = rows_of(liar.groups(schedule_path(DELAY, hour))[0].parsed[0])
    ended = np.zeros(1, ENDED)
    ended["sequence"], ended["deliver_at_ms"], ended["hour"] = row.sequence, row.due_ms, hour
    ended["decided_at_ms"] = row.due_ms - HOUR_MS
    ended["reason"] = reason if isinstance(decided, bool) else decided
    part = NewPart(
        np.array([row.sequence], np.uint64),
        np.array([row.due_ms], np.int64),
        Outcome.CANCELLED,
        claimed_at_ms=row.due_ms - HOUR_MS,
        target_log_id=0xBAD if reason is Reason.DRAINED else 0,
        batch_id=int(reason is Reason.DRAINED) or beside[0],
        target_appended_at_ms=beside[1],
        reason=reason,
    )
    liar.disk.make_folder(path.rpartition("/")[0])
    liar.copy_file(like, path)
    liar.write(path, [group.with_batches(encode_outcomes(hour, [part]))], number=hour)
    if decided:
        liar.edit(liar.message_log, partial(say, record=encode_known([Ended(ended.tobytes())])))


def outcome_lies() -> Told:
    for reason in Reason:
        name = f"a pending message is called {reason.name}, and nobody decided it"
        yield name, partial(call_ended, reason=reason), "MISMATCH"
    yield (
        "a pending message is called REPLACED, and it was cancelled",
        partial(call_ended, reason=Reason.REPLACED, decided=Reason.CANCELLED),
        "MISMATCH",
    )
    for name, beside in (("another message", (7, 0)), ("another due instant of the message", (0, HOUR_MS))):
        yield (
            f"a pending message was moved, and its outcome names {name} in its place",
            partial(call_ended, reason=Reason.MOVED, decided=True, beside=beside),
            "MISMATCH",
        )
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
            tell = partial(edit_outcomes, which=which, change=edit, thorough=thorough)
            yield (
                f"a {'thoroughly ' * thorough}{which} outcome says {name}",
                tell,
                names + (" BROKEN" if which == "sealed" else ""),
            )

    def expired(part: NewPart) -> NewPart:
        return part._replace(outcome=Outcome.EXPIRED, target_log_id=0, target_offset=0, target_appended_at_ms=0)

    for which in ("last sealed", "sealed"):
        yield (
            f"a message of a {which} hour has expired, which nobody asked for, and no target is named",
            partial(edit_outcomes, which=which, change=expired, thorough=True),
            "MISMATCH",
        )

    def twice(liar: Liar) -> None:
        path = dispatch_path(DELAY, hour_that_is(liar, "sealed"))
        liar.edit(path, lambda groups: [*groups, groups[0]])

    yield "an outcome is there twice", twice, "DUPLICATE"

    def otherwise(liar: Liar) -> None:
        hour = hour_that_is(liar, "open")
        path = dispatch_path(DELAY, hour)
        (group, *rest) = liar.groups(path)
        told = decode_outcomes(group.parsed)
        dead = NewPart(told.sequences[:1], told.deliver_at_ms[:1], Outcome.DEAD, hashes=told.content_hash[:1])
        liar.write(path, [group, *rest, group.with_batches(encode_outcomes(hour, [dead]))])

    yield "a message is DISPATCHED, and DEAD as well", otherwise, "DUPLICATE"

    def elsewhere(liar: Liar) -> None:
        """The first outcome of an open hour stands in the dispatch log of another one."""
        moved: list[NewPart] = []

        def take(part: NewPart) -> None:
            moved.append(part)

        liar.edit_outcomes(hour_that_is(liar, "open"), first_part(take))
        other = hour_that_is(liar, "last sealed")
        path = dispatch_path(DELAY, other)
        groups = liar.groups(path)
        liar.write(path, [*groups, groups[-1].with_batches(encode_outcomes(other, moved))])

    yield "an outcome is in the dispatch log of another hour", elsewhere, "ORPHAN BROKEN"
