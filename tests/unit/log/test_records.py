"""Records of logs: control records, rows that decisions ended, and outcomes come back as they were written."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.errors import BatchMalformed
from delayd.log.control import (
    NO_LIMITS,
    Ended,
    GroupCreated,
    GroupDeleted,
    GroupIdsSkipped,
    HelloHeard,
    Known,
    LogTime,
    OperatorWord,
    OriginAccepted,
    QuotaLimits,
    Record,
    SkippedSequences,
    TargetNote,
    as_record,
    decode_known,
    decode_sound,
    encode_known,
    encode_records,
)
from delayd.log.hour import (
    ENDED,
    EndedRows,
    NewPart,
    OutcomeRows,
    decode_ended,
    decode_outcomes,
    encode_outcomes,
    missing_parts,
)
from delayd.outcome import Outcome, Reason

KNOWN: list[Known] = [
    TargetNote(b"orders", 7),
    SkippedSequences(1 << 40),
    LogTime(5, 3),
    OperatorWord("drop", "schedule/2026112203", 4),
    HelloHeard(1, 2, 3, 4, [5, 6]),
    OriginAccepted(9),
    GroupCreated(1, "orders", "billing"),
    GroupDeleted(1),
    GroupIdsSkipped(1 << 20),
    Ended(bytes(40)),
]


def test_known_records_come_back_and_a_type_that_nobody_knows_is_passed_over() -> None:
    assert decode_known(parse(encode_known(KNOWN))) == KNOWN
    batch = parse(encode_records([{"type": "note"}, {"rows": 1}, as_record(KNOWN[0]), {"type": 3}]))
    assert decode_known(batch) == decode_sound(batch) == [KNOWN[0]]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: type(known).__name__)
def test_a_record_that_lacks_a_field_or_has_another_kind_of_it_is_refused_by_name(known: Known) -> None:
    whole = dict(as_record(known))
    for name in known._fields:
        without: Record = {key: value for key, value in whole.items() if key != name}
        for record in (without, {**whole, name: [1, 2, 3]}):
            batch = parse(encode_records([record, as_record(KNOWN[-1])]))
            with pytest.raises(BatchMalformed, match=f"has no {name}"):
                decode_known(batch)
            assert decode_sound(batch) == [KNOWN[-1]]


def ended(*sequences: int, reason: int = Reason.CANCELLED) -> EndedRows:
    made = np.zeros(len(sequences), ENDED)
    made["sequence"], made["reason"] = sequences, reason
    return made


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (ended(1).tobytes()[:-1], "47 bytes"),
        (ended(2, 1).tobytes(), "do not rise"),
        (ended(2, 2).tobytes(), "do not rise"),
        (ended(1, reason=2).tobytes(), "unknown reason"),
        (ended(1).tobytes()[:-1] + b"\1", "unknown reason"),
    ],
)
def test_ended_rows_that_no_server_writes_are_refused(data: bytes, why: str) -> None:
    assert decode_ended(ended(3, 5, 9).tobytes())["sequence"].tolist() == [3, 5, 9]
    with pytest.raises(BatchMalformed, match=why):
        decode_ended(data)


def part(reason: Reason, base: int, count: int, other: int) -> NewPart:
    sequences = np.arange(base, base + count, dtype=np.uint64)
    return NewPart(sequences, sequences.astype(np.int64), Outcome.CANCELLED, batch_id=other, reason=reason)


def rows_of(*parts: NewPart) -> OutcomeRows:
    return decode_outcomes([parse(encode_outcomes(500_000, parts))])


def test_outcomes_that_another_file_lacks_keep_their_reasons_and_the_rows_that_they_name() -> None:
    every = rows_of(part(Reason.MOVED, 1, 5, 101), part(Reason.CANCELLED, 10, 3, 0))
    known = rows_of(part(Reason.MOVED, 3, 1, 103), part(Reason.CANCELLED, 11, 1, 0))
    found = rows_of(*missing_parts(every, known))
    others = found.others(np.arange(len(found.sequences))).tolist()
    assert found.sequences.tolist() == [1, 2, 4, 5, 10, 12] and others == [101, 102, 104, 105, 0, 0]
    # Rows of a part that name no neighbours of each other are split.
    chosen = np.array([True, True, False, True, False])
    moved = part(Reason.MOVED, 1, 5, 101).only(chosen)
    assert [(each.sequences.tolist(), each.batch_id) for each in moved] == [([1, 2], 101), ([4], 104)]
    assert [each.sequences.tolist() for each in part(Reason.CANCELLED, 1, 5, 0).only(chosen)] == [[1, 2, 4]]


def test_the_shares_of_all_servers_add_up_to_the_limit() -> None:
    limits = QuotaLimits(per_second=100, pending=7, pending_bytes=None)
    for servers in (1, 3, 8):
        shares = [limits.share(place, servers) for place in range(servers)]
        assert sum(share.per_second or 0 for share in shares) == 100
        assert sum(share.pending or 0 for share in shares) == 7 and not any(share.pending_bytes for share in shares)
    assert NO_LIMITS.share(0, 3) == NO_LIMITS
