"""Which rows of a realtime server's stored bytes differ from the hash that they state (rule S6)."""

import random
from contextlib import suppress

import pytest

from delayd.batch.batch import Batch
from delayd.errors import BatchMalformed
from delayd.log.group import CommitGroup, GroupKind, NewGroup, content_position, encode_header, parse_header
from delayd.reading.files.stored_content import differing_rows
from tests.worlds.dispatch_batches import Row, hashed_batch


def group(*batches: bytes, offset: int = 0) -> CommitGroup:
    rows = 0
    new = NewGroup(GroupKind.DATA, list(batches), 1, 1, 0, rows)
    header, _ = encode_header(new, [len(each) for each in batches], 7, offset, 0, 0)
    buffer = memoryview(b"".join((header, *batches)))
    return CommitGroup(parse_header(buffer, 0, 7, offset), buffer)


def batches_in(stored: CommitGroup) -> list[tuple[int, Batch]]:
    return [(offset - stored.header.offset, batch) for offset, batch in stored.batches()]


def some_headers(size: int) -> bytes:
    return b"\x81\xa1k" + bytes([0xA0 + size]) + bytes(size)


def some_rows(rng: random.Random, count: int, first: int, *, headers: bool) -> list[Row]:
    return [
        (
            first + number,
            rng.randrange(1 << 40),
            some_headers(rng.randrange(9)) if headers and rng.random() < 0.7 else b"",
            rng.randbytes(rng.choice((0, 1, 7, 8, 9, 40, 200))),
            -1,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_rule_S6_of_batches_of_all_shapes_exactly_the_changed_rows_are_named(seed: int) -> None:
    rng = random.Random(seed)
    batches, first, wrong = [], 0, []
    for number in range(rng.randrange(1, 60)):
        subject = bytes(rng.choices(b"abcdefgh.", k=rng.choice((1, 3, 8, 9, 40))))
        headers, count = rng.random() < 0.4, rng.choice((1, 1, 1, 2, 5, 30, 300) + (5_000,) * (seed == 0))
        rows = some_rows(rng, count, first, headers=headers)
        first += count
        if rng.random() < 0.3:
            row = rng.randrange(count)
            rows[row] = (*rows[row][:4], 99)
            wrong.append((number, row))
        key = rng.choice((1, 2)), rng.choice((500_000, 500_001))
        batches.append(hashed_batch(subject, rows, *key, headers=headers, tags=rng.random() < 0.4))
    stored = group(*batches, offset=4_096)
    starts = [begin for begin, _ in batches_in(stored)]
    assert sorted(differing_rows(stored.buffer, batches_in(stored))) == [(starts[number], row) for number, row in wrong]


@pytest.mark.parametrize("count", [1, 5, 5_000])
@pytest.mark.parametrize("headers", [False, True])
def test_a_row_that_states_no_hash_is_not_compared(count: int, headers: bool) -> None:
    rows = some_rows(random.Random(3), count, 10, headers=headers)
    rows[-1] = (*rows[-1][:4], 0)
    good = hashed_batch(b"orders", some_rows(random.Random(4), 2, 900, headers=False))
    stored = group(good, good, *[hashed_batch(b"orders", rows, headers=headers)] * 2)
    assert list(differing_rows(stored.buffer, batches_in(stored))) == []


@pytest.mark.parametrize("seed", range(100))
def test_bytes_with_valid_checksums_that_are_no_batch_are_damage_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    good = [
        hashed_batch(b"orders", some_rows(rng, 3, 10 * n, headers=bool(n & 1)), headers=bool(n & 1)) for n in range(4)
    ]
    bad = bytearray(good[2])
    place = rng.choice([rng.randrange(len(bad)), rng.randrange(40, 200)]) % len(bad)
    bad[place] ^= 1 << rng.randrange(8)
    stored = group(good[0], bytes(bad), good[1], good[3])
    begin = content_position(4) + len(good[0])
    with suppress(BatchMalformed):
        assert {at for at, _ in differing_rows(stored.buffer, batches_in(stored))} <= {begin}
