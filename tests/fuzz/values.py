"""Values for fields of heads: those that a request should have, and those at and beyond the edges of every width."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

import msgpack

from delayd.wire.frame import HeadValue
from delayd.wire.meta import SLOTS, SLOTS_BYTES, VERSIONS

POWERS = (7, 8, 15, 16, 31, 32, 63, 64)
NUMBERS = [
    0,
    1,
    *(value for power in POWERS for value in ((1 << power) - 1, 1 << power) if value < 1 << 64),
    *((1 << power) + 1 for power in POWERS[:-1]),
    *(-(1 << power) + step for power in (7, 15, 31, 63) for step in (0, 1)),
    -1,
    253_402_300_799_999,
    253_402_300_800_000,
]
TEXTS = [
    "",
    "x",
    "\0",
    "a b",
    "é" * 40,
    "x" * 255,
    "x" * 256,
    "x" * 4_096,
    "x" * 4_097,
    "\U0001f600" * 64,
    "../..",
    "%s%n",
]
OTHERS: list[HeadValue] = [None, True, False, 0.5, float("nan"), float("inf"), b"", b"\xff" * 8, [], {}]
NESTED: list[HeadValue] = [
    [[]],
    [[0, 0, 0]],
    [[1, 2]],
    [[(1 << 64) - 1] * 3],
    [[1, 1, 0]],
    ["a", 1, None],
    {"a": {"b": [1]}},
    [["a", "b"]],
    [0] * 1_000,
    [""] * 50,
    [[0, 0, 1]] * 300,
]
BOUNDARY: list[HeadValue] = [*NUMBERS, *TEXTS, *OTHERS, *NESTED]

# Heads that no library of this project makes: extensions, keys that are no text or come twice, depth, cut short, and
# text that is no UTF-8.
RAW_HEADS: list[bytes] = [
    b"",
    b"\xc1",
    b"\x81",
    b"\x81\xa1a",
    b"\x81\xa1a\xa2\xed\xa0",
    b"\x81\xa1a\xa3\xed\xa0\x80",
    b"\x81\xa1a\xc7\x00\x05",
    b"\x81\xa1a\xc7\x0c\xff" + bytes(12),
    b"\x81\xa1a\xd6\xff\xff\xff\xff\xff",
    b"\x81\xa1a" + b"\x91" * 10_000 + b"\xc0",
    b"\x81\xa1a" + b"\x81\xa1a" * 3_000 + b"\xc0",
    b"\x82\xa1a\x01\xa1a\x02",
    b"\x82\x01\x01\x02\x02",
    b"\x81\xc4\x01a\x01",
    b"\x81\x90\x01",
    b"\xde\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa1a\xdd\xff\xff\xff\xff",
    b"\x81\xa1a\xdb\xff\xff\xff\xff",
    b"\x90",
    b"\xc0",
    msgpack.packb({"a": 1}) + b"\0",
    b"\x81\xa1a\xcf" + b"\xff" * 8,
    b"\x81\xa1a\xcb" + struct.pack(">d", float("nan")),
]

Make = Callable[[Random], HeadValue]

SUBJECTS = [f"fuzz.{number}" for number in range(64)]
GROUPS = ["g", "h", "é", "g" * 255]


def u64(random: Random) -> HeadValue:
    """An id, mostly one that was used before."""
    return random.choice([random.randrange(1, 50), random.randrange(1, 50), random.getrandbits(64)])


def small(random: Random) -> HeadValue:
    """A count, a limit, a port."""
    return random.choice([1, 2, 10, 100, 1_000, 65_535])


def flag(random: Random) -> HeadValue:
    """True or false."""
    return random.random() < 0.5


def subject(random: Random) -> HeadValue:
    """One of a few subjects, none of them the honest one's."""
    return random.choice(SUBJECTS)


def group(random: Random) -> HeadValue:
    """One of a few groups."""
    return random.choice(GROUPS)


def subjects(random: Random) -> HeadValue:
    """Some of the subjects."""
    return random.sample(SUBJECTS, random.randrange(8))


def text(random: Random) -> HeadValue:
    """A prefix, a name behind which to go on."""
    return random.choice(["", "f", "fuzz.", "fuzz.3", "z"])


def subject_or_none(random: Random) -> HeadValue:
    """A filter."""
    return random.choice([None, random.choice(SUBJECTS)])


def pair(random: Random) -> HeadValue:
    """A subject and a group."""
    return [random.choice(SUBJECTS), random.choice(GROUPS)]


def position(random: Random) -> HeadValue:
    """Where a group begins, or something like it."""
    at: HeadValue = {random.choice(("sequence", "instant_ms", "hour")): random.choice((0, 1, 7, 1 << 40, -1))}
    return random.choice(("earliest", "earliest", "latest", "first", at, at, {}))


def tags(random: Random) -> HeadValue:
    """Tags of a filter; mostly none."""
    return random.choice(([], [], [], ["red"], ["red", "blue"], ["%"], [7], "red"))


def watermark(random: Random) -> HeadValue:
    """W: an epoch and a batch id."""
    return [random.randrange(3), random.randrange(50)]


def handles(random: Random) -> HeadValue:
    """Rows of an acknowledgement."""
    return [[random.randrange(3), random.randrange(100), random.randrange(1, 5)] for _ in range(random.randrange(20))]


def retries(random: Random) -> HeadValue:
    """Rows of a RETRY."""
    return [[*row, random.choice([0, 50, 1 << 40]), random.choice(["", "no"])] for row in _rows(random)]


def schedules(random: Random) -> HeadValue:
    """Recurring schedules and the subjects of their messages."""
    return [[random.choice(SUBJECTS), random.choice(["k", "daily", ""])] for _ in range(random.randrange(8))]


def rejects(random: Random) -> HeadValue:
    """Rows of a REJECT."""
    return [[*row, random.choice(["bad", ""]), random.choice(["", "no"])] for row in _rows(random)]


def _rows(random: Random) -> list[list[int]]:
    return [[random.randrange(3), 10 * row + random.randrange(9), 1] for row in range(random.randrange(20))]


def wait_ms(random: Random) -> HeadValue:
    """How long a pull waits; seldom at all."""
    return random.choice([0, 0, 0, 1, 20])


def nonce(random: Random) -> HeadValue:
    """What a challenge begins with."""
    return random.randbytes(32)


def slots(random: Random) -> HeadValue:
    """A set of slots: a few of them."""
    return bytes(byte if random.random() < 0.05 else 0 for byte in random.randbytes(SLOTS_BYTES))


def versions(random: Random) -> HeadValue:
    """A version of each slot: none, a few low ones, or any."""
    kind = random.random()
    if kind < 0.6:
        return bytes(SLOTS * VERSIONS.itemsize)
    if kind < 0.9:
        return b"".join(random.choice((0, 0, 0, 1, 2, 3)).to_bytes(VERSIONS.itemsize, "little") for _ in range(SLOTS))
    return random.randbytes(SLOTS * VERSIONS.itemsize)


def log_ids(random: Random) -> HeadValue:
    """Some servers."""
    return [u64(random) for _ in range(random.randrange(4))]


def one_of(*values: HeadValue) -> Make:
    """A field of few values."""
    return lambda random: random.choice(values)
