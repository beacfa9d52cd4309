"""Lies of the seal log, and how a thorough liar makes it fit again.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from delayd.batch.batch import parse
from delayd.batch.columns import ColumnId
from delayd.delay.books.sealing import ContentDiffers, compare
from delayd.log.hour import SEALED, NewPart, Seal, decode_outcomes, dispatch_path, encode_outcomes, schedule_path
from delayd.outcome import Outcome
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import Told, hour_that_is


def seal_anew(liar: Liar) -> None:
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
    note_seals(liar)


def note_seals(liar: Liar) -> None:
    seals = liar.seals
    liar.publish(seals=[len(seals), seals[-1].sha256])


def seal_lies() -> Told:
    yield "the last seal is gone", lambda liar: liar.write_seals(liar.seals[:-1]), "CONSERVATION BROKEN"

    def cut(liar: Liar, until: int) -> None:
        """Seals of deleted hours, which no table names."""
        liar.write_seals(liar.seals[until:], chained=True)
        note_seals(liar)

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
        note_seals(liar)

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
        lambda liar: liar.set_hour(hour_that_is(liar, "pending"), flags=SEALED),
        "BROKEN DAMAGE",
    )
    for which, fields in {
        "tally": {"tally_first": 1},
        "lowest due time": {"due_min_ms": -1},
        "bytes": {"body_bytes": 1},
        "kinds of outcomes": {"dispatched": -1, "cancelled": 1},
    }.items():
        yield f"a standing hour's seal has another {which}", partial(_standing, fields=fields), "BROKEN"
    yield "a standing hour's seal has another digest", _other_digest, "BROKEN"
    yield "an hour to come is sealed", partial(_seal_ahead, outcome=Outcome.DISPATCHED, delete=False), "CONSERVATION"
    for outcome in (Outcome.DISPATCHED, Outcome.DEAD):
        yield (
            f"an hour to come is sealed with all of it {outcome.name}, and deleted",
            partial(_seal_ahead, outcome=outcome, delete=True),
            "CONSERVATION",
        )
    yield "an hour with DEAD messages is deleted", _delete_dead, "CONSERVATION"


def _replace_seal(liar: Liar, number: int, seal: Seal) -> None:
    liar.write_seals([*liar.seals[:number], seal, *liar.seals[number + 1 :]], chained=True)
    note_seals(liar)


def _standing(liar: Liar, fields: dict[str, int]) -> None:
    seal = liar.seals[-1]
    facts = seal.facts._replace(**{name: getattr(seal.facts, name) + by for name, by in fields.items()})
    _replace_seal(liar, len(liar.seals) - 1, seal._replace(facts=facts))


def _other_digest(liar: Liar) -> None:
    seal = liar.seals[-1]
    facts = seal.facts._replace(outcomes_sha256=bytes(32))
    _replace_seal(liar, len(liar.seals) - 1, seal._replace(facts=facts))


def _seal_ahead(liar: Liar, outcome: Outcome, delete: bool) -> None:
    hour = hour_that_is(liar, "pending")
    path = schedule_path(DELAY, hour)
    batches = [batch for group in liar.groups(path) for batch in group.parsed]
    sequences = np.concatenate([batch.uint64s(ColumnId.SEQUENCE) for batch in batches])
    due = np.concatenate([batch.int64s(ColumnId.DELIVER_AT_MS) for batch in batches])
    hashes = np.concatenate([batch.content_hashes() for batch in batches])
    part = NewPart(sequences, due, outcome, int(due[0]), 0x7001, 2, 10_000, int(due[0]), 1 << 20, hashes=hashes)
    told = decode_outcomes([parse(encode_outcomes(hour, [part]))])
    facts = compare(hour, batches, told)
    assert facts is not None
    liar.write_seals([*liar.seals, liar.seals[-1]._replace(facts=facts)], chained=True)
    rows = liar.hours
    if delete:
        liar.disk.remove(path)
        liar.set_hours(rows[rows["hour"] != hour])
    note_seals(liar)


def _delete_dead(liar: Liar) -> None:
    """The seal of a deleted hour says that some of it was DEAD: nobody deletes such an hour."""
    seal = liar.seals[0]
    facts = seal.facts._replace(dispatched=seal.facts.dispatched - 1, dead=1)
    _replace_seal(liar, 0, seal._replace(facts=facts))
