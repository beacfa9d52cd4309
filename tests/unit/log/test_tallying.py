"""What a realtime server's stored bytes are tallied to, and which rows differ from their hash (rule S6)."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from delayd.batch.columns import BatchKind
from delayd.batch.content import Tally, content_hash, tally
from delayd.errors import BatchMalformed
from delayd.log.group import CommitGroup, GroupKind, NewGroup, encode_header, parse_header
from delayd.log.tally import Tallier
from tests.worlds.dispatch_batches import Row, hashed_batch


def tallies_of(groups: Iterator[CommitGroup], begin: int) -> Tallier:
    tallier = Tallier(begin)
    for group in groups:
        tallier.take(group)
    return tallier


def group(*batches: bytes, offset: int = 0) -> CommitGroup:
    rows = 0
    new = NewGroup(GroupKind.DATA, list(batches), 1, 1, 0, rows)
    header, _ = encode_header(new, [len(each) for each in batches], 7, offset, 0, 0)
    buffer = memoryview(b"".join((header, *batches)))
    return CommitGroup(parse_header(buffer, 0, 7, offset), buffer)


def found(tallier: Tallier) -> dict[tuple[int, int], Tally]:
    return {
        (int(each["origin_log_id"]), int(each["hour"])): Tally(
            int(each["rows"]), int(each["first"]), int(each["second"])
        )
        for each in tallier.entries()
    }


def some_headers(size: int) -> bytes:
    return b"\x81\xa1k" + bytes([0xA0 + size]) + bytes(size)


def tally_of(rows: Sequence[tuple[int, int, int]]) -> Tally:
    sequence, due, hashes = zip(*rows, strict=True)
    return tally(np.array(sequence, np.uint64), np.array(due, np.int64), np.array(hashes, np.uint64))


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
def test_batches_of_all_shapes_are_tallied_as_the_page_has_it(seed: int) -> None:
    rng = random.Random(seed)
    expected: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    batches, first = [], 0
    for _ in range(rng.randrange(1, 60)):
        subject = bytes(rng.choices(b"abcdefgh.", k=rng.choice((1, 3, 8, 9, 40))))
        headers, count = rng.random() < 0.4, rng.choice((1, 1, 1, 2, 5, 30, 300) + (5_000,) * (seed == 0))
        rows = some_rows(rng, count, first, headers=headers)
        first += count
        key = rng.choice((1, 2)), rng.choice((500_000, 500_001))
        batches.append(hashed_batch(subject, rows, *key, headers=headers, tags=rng.random() < 0.4))
        hashed = [(row[0], row[1], content_hash(subject, row[2], row[3])) for row in rows]
        expected.setdefault(key, []).extend(hashed)
    tallier = tallies_of(iter([group(*batches[:7]), *([group(*batches[7:])] if batches[7:] else [])]), 0)
    assert tallier.differing == []
    assert found(tallier) == {key: tally_of(rows) for key, rows in expected.items()}


@pytest.mark.parametrize("count", [1, 5, 5_000])
@pytest.mark.parametrize("headers", [False, True])
def test_rule_S6_a_row_that_is_not_what_its_hash_says_is_named(count: int, headers: bool) -> None:
    rows = some_rows(random.Random(3), count, 10, headers=headers)
    rows[-1] = (*rows[-1][:4], 99)
    good = hashed_batch(b"orders", some_rows(random.Random(4), 2, 900, headers=False))
    tallier = tallies_of(iter([group(good, hashed_batch(b"orders", rows, headers=headers))]), 0)
    ((offset, row, sequence, origin),) = tallier.differing
    assert (row, sequence, origin) == (count - 1, 10 + count - 1, 1) and offset > len(good)
    assert tallier.differing_count == int(tallier.entries()["differing"].sum()) == 1
    # The tally has the hash of the stored bytes, so that a comparison with the other side shows the difference too.
    honest = tallies_of(
        iter([group(good, hashed_batch(b"orders", [*rows[:-1], (*rows[-1][:4], -1)], headers=headers))]), 0
    )
    assert found(tallier) == found(honest)


@pytest.mark.parametrize("seed", range(100))
def test_bytes_with_valid_checksums_that_are_no_batch_are_damage_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    good = [
        hashed_batch(b"orders", some_rows(rng, 3, 10 * n, headers=bool(n & 1)), headers=bool(n & 1)) for n in range(4)
    ]
    bad = bytearray(good[2])
    place = rng.choice([rng.randrange(len(bad)), rng.randrange(40, 200)]) % len(bad)
    bad[place] ^= 1 << rng.randrange(8)
    try:
        tallier = tallies_of(iter([group(good[0], bytes(bad), good[1], good[3])]), 0)
    except BatchMalformed:
        return
    assert sum(entry.rows for entry in found(tallier).values()) == 12 or bad[5] != BatchKind.DISPATCH
