"""Matching: which rows of a batch a search wants, by columns first, then by the bytes of their items.

Invariant: the result is that of a search in each row's item alone. A pattern is searched in the whole region of a
batch where that gives the same rows, because a call for each row costs more than the bytes do.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch, ColumnId, Int64s
from delayd.errors import BadArgument, BadHeaders
from delayd.headers import decode_headers
from delayd.life import KEY
from delayd.tags import rows_with_tags

Mask = NDArray[np.bool_]

# A pattern that may match any number of bytes, or that looks at what is around a match, must see one item only.
_ITEM_ONLY = re.compile(rb"[*+$^]|\{\d*,\}|\\[bBAZ]|\(\?[=!<(>]")
_FLAGS = re.compile(rb"\(\?[a-zA-Z]*[ix]")
_REPEAT = re.compile(rb"\{(\d*)(,\d*)?\}")
_ESCAPED_NUMBER = re.compile(rb"\\(?:x[0-9a-fA-F]{2}|[0-9]+)")
_CLASS = re.compile(rb"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
FEW = 64  # When only one row in this many is left, the rows are looked at one by one.


class Pattern:
    """A regular expression on bytes, and the bytes that each match must have."""

    def __init__(self, pattern: bytes) -> None:
        """Raises BadArgument when it is no regular expression."""
        try:
            self.compiled = re.compile(pattern)
        except re.error as error:
            shown = pattern.decode("utf-8", "backslashreplace")
            raise BadArgument(
                f"{shown!r} is no regular expression: {error}; write \\ before a special character"
            ) from None
        self.literal, self.is_literal = required_literal(pattern)
        self._by_item = _ITEM_ONLY.search(pattern) is not None
        # It then matches at any place, as it looks at nothing around.
        self._matches_nothing = not self._by_item and self.compiled.search(b"") is not None

    def holds(self, item: bytes) -> bool:
        """Whether it matches in an item."""
        return self.compiled.search(item) is not None

    def rows(self, data: bytes | bytearray, starts: Int64s, ends: Int64s, wanted: Mask) -> Mask:
        """In which items it matches; ``starts`` and ``ends`` are places in ``data``.

        Only rows that are ``wanted`` are looked at, one by one when they are few.
        """
        if self._matches_nothing:
            return wanted
        found = np.zeros(len(starts), np.bool_)
        rows = np.flatnonzero(wanted)
        if len(rows) * FEW > len(starts):
            if self.literal:
                rows = rows[holding(data, starts, ends, self.literal)[rows]]
                if self.is_literal:
                    found[rows] = True
                    return found
            elif not self._by_item:
                return self._in_region(data, starts, ends) & wanted
        search = self.compiled.search
        for row, start, end in zip(rows.tolist(), starts[rows].tolist(), ends[rows].tolist(), strict=True):
            found[row] = search(data[start:end]) is not None
        return found

    def _in_region(self, data: bytes | bytearray, starts: Int64s, ends: Int64s) -> Mask:
        found = np.zeros(len(starts), np.bool_)
        search, position, until = self.compiled.search, int(starts[0]), int(ends[-1])
        firsts, lasts = starts.tolist(), ends.tolist()
        while match := search(data, position, until):
            row = bisect_right(firsts, match.start()) - 1
            # A match may reach into the next item; then the item alone decides.
            if match.end() <= lasts[row] or search(data[firsts[row] : lasts[row]]):
                found[row] = True
            if row + 1 == len(firsts):
                break
            position = firsts[row + 1]
        return found


def holding(data: bytes | bytearray, starts: Int64s, ends: Int64s, literal: bytes) -> Mask:
    """Which items have some bytes in them."""
    found = np.zeros(len(starts), np.bool_)
    places: list[int] = []
    find, place, until = data.find, int(starts[0]) - 1, int(ends[-1])
    while (place := find(literal, place + 1, until)) >= 0:
        places.append(place)
    if places:
        at = np.array(places, np.int64)
        rows = np.searchsorted(starts, at, side="right") - 1
        found[rows[at + len(literal) <= ends[rows]]] = True
    return found


def required_literal(pattern: bytes) -> tuple[bytes, bool]:
    """The longest bytes that each match must have, as far as they are plain to see, and whether they are all of it.

    1. `order-42` is `order-42`, and this is all of it.
    2. `customer [0-9]+ paid` needs ` paid` and `customer `: the longer one is taken.
    3. `a|b`, `[ab]`, `(?i)a` need nothing that is plain to see.
    """
    if _FLAGS.search(pattern):
        return b"", False
    longest, run, whole, depth, position = b"", b"", True, 0, 0
    while position < len(pattern):
        char = pattern[position : position + 1]
        literal, size = char, 1
        if char == b"\\":
            number = _ESCAPED_NUMBER.match(pattern, position)
            size = len(number[0]) if number else 2
            literal = pattern[position + 1 : position + 2]
            if number or literal.isalnum():
                literal = b""
        elif char == b"[":
            known = _CLASS.match(pattern, position)
            literal, size = b"", len(known[0]) if known else len(pattern)
        elif char in b"()":
            depth += 1 if char == b"(" else -1
            literal = b""
        elif char in b".^$":
            literal = b""
        elif char == b"|" and not depth:
            return b"", False
        elif char in b"*?+" or (char == b"{" and _REPEAT.match(pattern, position)):
            repeat = _REPEAT.match(pattern, position)
            size = len(repeat[0]) if repeat else 1
            # What may be missing does not count; what is there once or more often ends the run.
            run = run if char == b"+" else run[:-1]
            literal = b""
        if literal and not depth:
            run += literal
        else:
            longest, run, whole = max(longest, run, key=len), b"", False
        position += size
    return max(longest, run, key=len), whole and bool(pattern)


class Held(NamedTuple):
    """A verified batch, and the bytes that it stands in: they are searched where they are, without a copy."""

    batch: Batch
    data: bytes | bytearray
    position: int  # Of the batch in ``data``.

    def items(self, column: ColumnId) -> tuple[Int64s, Int64s]:
        """Where each item of a region begins and ends in ``data``."""
        starts, ends = self.batch.region(column)
        heap = self.position + self.batch.heap_offset
        return starts + heap, ends + heap


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages a search wants; None sets no bound.

    A message that was accepted after its time counts as due when it was accepted, as it is filed (rule P5). A ``key``
    also wants the later lives of messages that had it, which are of the retry subjects of their groups.
    """

    from_ms: int | None = None
    to_ms: int | None = None
    subject: bytes | None = None
    sequence: int | None = None
    key: bytes | None = None
    tags: tuple[str, ...] = ()
    grep: Pattern | None = None
    headers: tuple[tuple[str, Pattern], ...] = ()

    def rows(self, held: Held, sequences: NDArray[np.uint64], accepted_at_ms: Int64s | int) -> Int64s:
        """The rows of a verified batch that are wanted, rising.

        Args:
            held: the batch.
            sequences: of its rows.
            accepted_at_ms: when the server took them, 0 where that is not known.
        """
        batch = held.batch
        wanted = np.ones(batch.count, np.bool_)
        if self.from_ms is not None or self.to_ms is not None:
            due_ms = np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), accepted_at_ms)
            if self.from_ms is not None:
                wanted &= due_ms >= self.from_ms
            if self.to_ms is not None:
                wanted &= due_ms < self.to_ms
        if self.sequence is not None:
            wanted &= sequences == np.uint64(self.sequence)
        if self.subject is not None and wanted.any():
            wanted &= _of_subject(batch, self.subject)
        if self.key is not None and wanted.any():
            # In its later lives a message does not hold its key any more: it is a header of theirs.
            label = Pattern(rb"\A" + re.escape(self.key) + rb"\Z")
            wanted &= _of_key(batch, self.key) | _with_header(held, KEY, label, wanted)
        if self.tags and wanted.any():
            wanted &= rows_with_tags(batch, self.tags, wanted)
        for name, pattern in self.headers:
            if wanted.any():
                wanted &= _with_header(held, name, pattern, wanted)
        if self.grep is not None and wanted.any():
            wanted &= _grepped(held, self.grep, wanted)
        return np.flatnonzero(wanted)


def _of_subject(batch: Batch, subject: bytes) -> Mask:
    numbers = [number for number, name in enumerate(batch.subjects()) if name == subject]
    if ColumnId.SUBJECT in batch:
        return np.isin(batch.uint32s(ColumnId.SUBJECT), np.array(numbers, np.uint32))
    return np.full(batch.count, bool(numbers))


def _of_key(batch: Batch, key: bytes) -> Mask:
    if ColumnId.KEY_END not in batch:
        return np.zeros(batch.count, np.bool_)
    starts, ends = batch.region(ColumnId.KEY_END)
    same: Mask = ends - starts == len(key)
    heap = batch.heap
    for row in np.flatnonzero(same).tolist():
        same[row] = heap[int(starts[row]) : int(ends[row])] == key
    return same


def _with_header(held: Held, name: str, pattern: Pattern, wanted: Mask) -> Mask:
    found = np.zeros(held.batch.count, np.bool_)
    if ColumnId.HEADERS_END in held.batch:
        starts, ends = held.items(ColumnId.HEADERS_END)
        likely = wanted & holding(held.data, starts, ends, name.encode("utf-8", "surrogateescape"))
        for row in np.flatnonzero(likely).tolist():
            try:
                value = decode_headers(bytes(held.data[int(starts[row]) : int(ends[row])])).get(name)
            except BadHeaders:
                continue  # Intake refuses such headers, and there is no value to compare.
            if value is not None:
                found[row] = pattern.holds(value.encode() if isinstance(value, str) else value)
    return found


def _grepped(held: Held, pattern: Pattern, wanted: Mask) -> Mask:
    batch = held.batch
    found = pattern.rows(held.data, *held.items(ColumnId.BODY_END), wanted)
    if ColumnId.BODY_LEFT_OUT in batch:
        found &= batch.uint32s(ColumnId.BODY_LEFT_OUT) == 0
    if ColumnId.HEADERS_END in batch:
        starts, ends = held.items(ColumnId.HEADERS_END)
        found |= pattern.rows(held.data, starts, ends, wanted & ~found & (ends > starts))
    return found
