"""Conservation: the messages that a delay server has accepted are as many as its table of hours and its seals count
(rule S5).

    next sequence - 1 - what an operator left unused
        = rows of the hours in the table + rows beside damaged schedule logs + rows that operators gave up
        + rows in the seals of hours that are in the table no longer

Invariant: only the checkpoint, the seal log and file names are read, so the cost depends on the number of hours.
"""

from collections.abc import Iterable, Iterator

from delayd.disk import Disk
from delayd.hours import hour_name, hour_start_ms
from delayd.log.schedule import RESTORED_STEP
from delayd.log.seal import Seal
from delayd.reading.findings import Finding, FindingKind
from delayd.reading.groups import segment_bases
from delayd.reading.seals import SealBook
from delayd.reading.word import ScheduleSnapshot


def server_faults(disk: Disk, snapshot: ScheduleSnapshot, follows: Iterable[str], book: SealBook) -> list[Finding]:
    """Contradictions in the totals of one delay server; ``hour`` is 0 for one that concerns no single hour.

    ``follows`` says where its message log does not follow.
    """
    found = [(0, what) for what in (*_totals(snapshot, book), *follows, *_missing_seals(snapshot, book))]
    found += [(0, what) for what in _message_log(disk, snapshot)]
    found += _hours(snapshot, book)
    return [
        Finding(hour, FindingKind.CONSERVATION, 0, 0, "", what, snapshot.directory.log_id)
        for hour, what in sorted(found)
    ]


def _totals(snapshot: ScheduleSnapshot, book: SealBook) -> Iterator[str]:
    word = snapshot.word
    accepted = word.next_sequence - 1 - sum(count for _, count in word.skipped)
    in_table = sum(filed.rows for filed in snapshot.hours.values())
    beside = sum(filed.rows for filed in word.beside.values())
    dropped = sum(word.dropped.values())
    sealed = sum(seal.facts.rows for seal in book.seals if seal.facts.hour not in snapshot.hours)
    filed = in_table + beside + dropped + sealed
    if filed != accepted:
        parts = [f"{in_table:,} in the hour table", f"{sealed:,} in the seals of deleted hours"]
        parts += [f"{beside:,} beside damaged files"] if beside else []
        parts += [f"{dropped:,} given up by an operator"] if dropped else []
        what = f"{accepted - filed:,} messages were accepted and are filed nowhere"
        if filed > accepted:
            what = f"{filed - accepted:,} messages more are filed than were accepted"
        yield f"{what}: {accepted:,} sequences were given up to the checkpoint; {', '.join(parts)}"
    for first, count in word.skipped:
        if count != RESTORED_STEP or first + count > word.next_sequence:
            yield f"{count:,} sequences from {first} on are called unused; an accepted server leaves {RESTORED_STEP:,}"


def _missing_seals(snapshot: ScheduleSnapshot, book: SealBook) -> Iterator[str]:
    """Seals that were cut off the end of the seal log, or written anew: the checkpoint notes how many there were."""
    word, seals = snapshot.word, book.seals
    if len(seals) < word.seals:
        yield f"the seal log has {len(seals)} seals, and had {word.seals} when the checkpoint was published"
    elif word.seals and seals[word.seals - 1].sha256 != word.seals_sha256:
        yield f"seal {word.seals - 1} is another one than when the checkpoint was published"


def _message_log(disk: Disk, snapshot: ScheduleSnapshot) -> Iterator[str]:
    bases, keep_from = segment_bases(disk, snapshot.place), snapshot.word.keep_from
    if bases and bases[0] > keep_from:
        yield f"the message log begins at offset {bases[0]}, and its server has removed nothing from {keep_from} on"
    if keep_from > snapshot.replay_offset:
        yield f"the message log is kept from {keep_from} on, behind the replay offset {snapshot.replay_offset}"


def _hours(snapshot: ScheduleSnapshot, book: SealBook) -> Iterator[tuple[int, str]]:
    seals: dict[int, Seal] = {seal.facts.hour: seal for seal in book.seals}
    for number, each in enumerate(book.seals):
        hour, name = each.facts.hour, hour_name(each.facts.hour)
        # A seal that was written after the checkpoint may be of an hour that has ended since.
        if number < snapshot.word.seals and hour_start_ms(hour + 1) > snapshot.appended_at_ms:
            yield hour, f"hour {name} was sealed before it was over"
        if each.facts.dead and hour not in snapshot.hours:
            yield hour, f"hour {name} had {each.facts.dead:,} DEAD messages, and is deleted"
    for hour, filed in snapshot.hours.items():
        seal, name = seals.get(hour), hour_name(hour)
        if filed.removed and (seal is None or not filed.sealed):
            yield hour, f"hour {name} with {filed.rows:,} messages is called removed, and was never sealed"
        if filed.sealed and seal is not None:
            if seal.facts.rows != filed.rows:
                what = f"the checkpoint counts {filed.rows:,} messages in hour {name}"
                yield hour, f"{what}, its seal {seal.facts.rows:,}"
            if filed.dead != bool(seal.facts.dead):
                yield hour, f"the checkpoint and the seal of hour {name} disagree whether it has DEAD messages"
        if filed.dead and filed.removed:
            yield hour, f"hour {name} has DEAD messages, and is called removed"
        if (filed.rows == 0) != (filed.length == 0):
            yield hour, f"the checkpoint counts {filed.rows:,} messages and {filed.length:,} bytes in hour {name}"
