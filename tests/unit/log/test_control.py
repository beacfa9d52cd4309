"""Control records: each known one comes back as it was written, and what lacks a field is refused or passed over."""

import pytest

from delayd.batch import parse
from delayd.errors import BatchMalformed
from delayd.log.control import (
    Ended,
    GroupCreated,
    GroupDeleted,
    HelloHeard,
    Known,
    LogTime,
    OperatorWord,
    OriginAccepted,
    Record,
    SkippedSequences,
    TargetNote,
    as_record,
    decode_known,
    decode_sound,
    encode_known,
    encode_records,
)

KNOWN: list[Known] = [
    TargetNote(b"orders", 7),
    SkippedSequences(1 << 40),
    LogTime(5, 3),
    OperatorWord("drop", "schedule/2026112203", 4),
    HelloHeard(1, 2, 3, 4, [5, 6]),
    OriginAccepted(9),
    GroupCreated(1, "orders", "billing"),
    GroupDeleted(1),
    Ended(bytes(40)),
]


def test_known_records_come_back_as_they_were_written() -> None:
    assert decode_known(parse(encode_known(KNOWN))) == KNOWN


def test_a_type_that_nobody_knows_is_passed_over() -> None:
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
