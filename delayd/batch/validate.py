"""Validation: what intake checks in a batch before it keeps it (docs/formats/batch.md).

A batch that passed can't make a later gather read out of bounds, whatever its bytes are. Checksums are checked
elsewhere: `Batch.verify` does that, before or after. Bytes that no reader uses, such as those between items, must be
zeros, so that nobody can hide anything there that a later version would read.

An expiry is the instant from which on a message is not delivered any more (rule S8): 0 in the column expires_at_ms, or
no such column, means never.
"""

import struct
from functools import lru_cache
from operator import sub

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import PADS, SINGLE_TABLES_REMEMBERED, Batch
from delayd.batch.columns import (
    ASKED_BY_KEY,
    FEW_ROWS,
    HEADER_BYTES,
    KIND_COLUMNS,
    REGIONS,
    BatchKind,
    ColumnId,
    Int64s,
    padded,
)
from delayd.batch.labels import bad_headers, bad_tags
from delayd.batch.names import (
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    LIFE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    RETRY_PREFIX,
    SUBJECT_ALPHABET,
    SUBJECT_BYTES_MAX,
    check_subject,
)
from delayd.errors import (
    BadExpiry,
    BadHeaders,
    BadKey,
    BadSubject,
    BadTags,
    BatchMalformed,
    CallerError,
    DelaydError,
    MessageTooLarge,
)
from delayd.hours import INSTANT_MS_MAX, instant_text
from delayd.kernel import choose

ROWS_NAMED_MAX = 1_000  # An answer names at most this many rows at fault.
OUTCOME_PART_BYTES = 64

# By how many bytes of its last word an item uses: a mask of the others. With 0 the item ends with the word before.
_BEHIND = np.array([0, *((1 << 64) - (1 << 8 * inside) for inside in range(1, 8))], np.uint64)

_REMEMBERED_TABLES = 4_096
_REMEMBERED_BYTES_MAX = 4_096  # Longer tables are checked each time, so that the remembered ones stay below 16 MiB.

# How long an item of a region may be, before keys and tags are looked at; headers and body of one row together may have
# MESSAGE_BYTES_MAX.
_ITEM_BYTES_MAX = dict.fromkeys(REGIONS, MESSAGE_BYTES_MAX) | {ColumnId.HEADERS_END: HEADERS_BYTES_MAX}
# A column of the left only stands beside that of the right.
_ONLY_WITH = (
    (ColumnId.ROW_FLAGS, ColumnId.KEY_END),
    (ColumnId.TAG_BLOOM, ColumnId.TAGS_END),
    (ColumnId.TAGS_END, ColumnId.TAG_BLOOM),
)
_WITH_SUBJECTS = frozenset({BatchKind.PRODUCER, BatchKind.SCHEDULE, BatchKind.DISPATCH})
_KEYS_ALONE = (ColumnId.KEY_END,)
_IN_ONE_MESSAGE = frozenset({ColumnId.HEADERS_END, ColumnId.BODY_END})
ON_CONFLICT_MAX = 3  # 0 reject, 1 keep, 2 replace, 3 record: the row flags that there are (docs/keys.md).
_CONTINUES = 0x80  # A byte of UTF-8 with these two highest bits, under the mask, goes on with a character.
_CONTINUES_MASK = 0xC0
_WITH_RESERVE = frozenset({BatchKind.DISPATCH, BatchKind.OUTCOME})  # Their parts end in four zeros.


def check_batch(batch: Batch) -> None:
    """Check that columns, subject table and heap of a parsed batch fit each other and the limits of a message.

    Raises:
        BatchMalformed: they do not fit; says which row and column.
        BadSubject, BadKey, BadTags, MessageTooLarge: with the rows at fault, see `refused_rows`.
    """
    _check_columns(batch.kind, batch.layout.columns)
    if batch.layout.gaps or batch.kind in _WITH_RESERVE:
        _check_zeros(batch)
    begin = check_subjects(batch)
    heap_bytes = batch.total_bytes - batch.heap_offset
    regions = batch.layout.regions
    by_key = regions == _KEYS_ALONE
    if not regions:
        _check_parts(batch, heap_bytes)
    elif not _items_fit(batch, HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX):
        if batch.count <= FEW_ROWS:
            _check_few_rows(batch, begin, heap_bytes)
        else:
            _check_rows(batch, begin, heap_bytes)
    if len(regions) > 1 or by_key:
        if ColumnId.KEY_END in batch.offsets:
            _check_keys(batch)
        if ColumnId.TAGS_END in batch.offsets:
            _check_tags(batch)
    if batch.kind is BatchKind.SCHEDULE:
        batch.verify_subjects()


def check_headers(batch: Batch) -> None:
    """Check that the headers of each row of a batch, which `check_batch` has checked, can be decoded (rule E2).

    Raises:
        BadHeaders: with the rows at fault.
    """
    if ColumnId.HEADERS_END not in batch.offsets:
        return
    bad = list(bad_headers(batch, ROWS_NAMED_MAX))
    if bad:
        row, error = bad[0]
        rows = np.array([row for row, _ in bad], np.int64)
        raise BadHeaders(f"row {row}: {error.message}", rows=rows_detail(rows))


def refused_rows(error: DelaydError) -> list[int]:
    """The rows that a refusal of a batch is about, at most 1,000; none when it is about the whole batch."""
    rows = error.details.get("rows")
    return np.frombuffer(rows, "<u4").tolist() if isinstance(rows, bytes) else []


def check_subjects(batch: Batch) -> int:
    """Check the subject table and the column that refers to it; return where the heap's first region begins.

    Raises:
        BatchMalformed, BadSubject: what is wrong with them.
    """
    count = batch.subject_count
    # Of ASKED batches those that name keys have subjects, too.
    if batch.kind not in _WITH_SUBJECTS and not (batch.kind is BatchKind.ASKED and batch.layout.regions):
        if count:
            raise BatchMalformed(f"a {batch.kind.name} batch has no subjects")
        return 0
    if count == 0 or (count > 1 and batch.kind is BatchKind.DISPATCH):
        raise BatchMalformed(f"a {batch.kind.name} batch can't have {count} subjects")
    if count > batch.count:
        # Each subject must be that of a row. This is checked before the names, because checking names costs as much as
        # rows do.
        raise BatchMalformed(f"{count} subjects for {batch.count} rows")
    ends_bytes = 4 * count
    (last,) = struct.unpack_from("<I", batch.buffer, batch.heap_offset + ends_bytes - 4)
    table_bytes = padded(ends_bytes) + padded(last)
    if table_bytes > min(batch.total_bytes, len(batch.buffer)) - batch.heap_offset:
        raise BatchMalformed(f"its subject table of {table_bytes} bytes is longer than its heap")
    table = bytes(batch.buffer[batch.heap_offset : batch.heap_offset + table_bytes])
    check = _check_table if table_bytes > _REMEMBERED_BYTES_MAX else _check_table_once
    try:
        check(table, count)
    except _BadName as bad:
        raise _bad_subject(batch, bad.index, bad.reason) from None
    if ColumnId.SUBJECT in batch.offsets:
        _check_subject_of(batch, count)
    elif count > 1:
        raise BatchMalformed(f"{count} subjects without a column that says which row has which")
    return table_bytes


def check_key(key: bytes) -> None:
    """Check that a key has 1 to 200 bytes of UTF-8; BadKey says what is wrong."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise BadKey(f"a key of {len(key)} bytes; it has 1 to {KEY_BYTES_MAX}")
    try:
        key.decode()
    except UnicodeDecodeError as error:
        raise BadKey(f"key {key!r} is not UTF-8: {error.reason}") from error


def rows_detail(rows: NDArray[np.int64]) -> bytes:
    """Pack row numbers for an error's details, so that `refused_rows` reads them on either side of a connection."""
    return rows[:ROWS_NAMED_MAX].astype("<u4").tobytes()


@lru_cache(maxsize=256)
def _check_columns(kind: BatchKind, found: frozenset[int]) -> None:
    by_key = kind is BatchKind.ASKED and ColumnId.KEY_END in found
    required, allowed = ASKED_BY_KEY if by_key else KIND_COLUMNS[kind]
    for missing in sorted(required - found):
        raise BatchMalformed(f"a {kind.name} batch needs the column {ColumnId(missing).name.lower()}")
    for extra in sorted(found - allowed):
        raise BatchMalformed(f"a {kind.name} batch can't have the column {ColumnId(extra).name.lower()}")
    for column, other in _ONLY_WITH:
        if column in found and other not in found:
            names = ColumnId(column).name.lower(), ColumnId(other).name.lower()
            raise BatchMalformed("column {} is there without column {}".format(*names))


def _check_zeros(batch: Batch) -> None:
    """Check that the reserved bytes of the kind part and the bytes between columns are zeros."""
    reserve = HEADER_BYTES + batch.kind_bytes - 4
    if batch.kind in _WITH_RESERVE and batch.buffer[reserve : reserve + 4] != PADS[4]:
        raise BatchMalformed(f"the last four bytes of its {batch.kind.name} part are reserved and not zeros")
    for column, begin, end in batch.layout.gaps:
        if batch.buffer[begin:end] != PADS[end - begin]:
            raise BatchMalformed(f"the bytes behind column {ColumnId(column).name.lower()} are not zeros")


def _check_subject_of(batch: Batch, count: int) -> None:
    """Check that each row has a subject of the table; in batches of producers each subject must also have a row."""
    subject_of = batch.uint32s(ColumnId.SUBJECT)
    beyond = subject_of >= count
    if beyond.any():
        raise BatchMalformed(f"row {int(beyond.argmax())}: column subject names none of its {count} subjects")
    used = np.zeros(count, bool)
    used[subject_of] = True
    if not used.all():
        raise BatchMalformed(f"subject {int(used.argmin())} of its {count} subjects is that of no row")


def _check_table(table: bytes, count: int) -> None:
    ends: tuple[int, ...] = struct.unpack_from(f"<{count}I", table)
    lengths = list(map(sub, ends, (0, *ends[:-1])))
    if min(lengths) < 1 or max(lengths) > SUBJECT_BYTES_MAX:
        index = next(at for at, length in enumerate(lengths) if not 1 <= length <= SUBJECT_BYTES_MAX)
        raise _BadName(index, f"a subject of {lengths[index]} bytes; it has 1 to {SUBJECT_BYTES_MAX}")
    # The ends rise, and the last one is known to be inside.
    names = padded(4 * count)
    if table[4 * count : names].strip(b"\0") or table[names + ends[-1] :].strip(b"\0"):
        raise BatchMalformed("the bytes behind the ends or the names of its subject table are not zeros")
    starts = [names + end - length for end, length in zip(ends, lengths, strict=True)]
    if table[names : names + ends[-1]].translate(None, SUBJECT_ALPHABET):
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            try:
                check_subject(table[start : start + length])
            except BadSubject as error:
                raise _BadName(index, error.message) from None
    if count > 1:
        found = {table[start : start + length] for start, length in zip(starts, lengths, strict=True)}
        if len(found) < count:
            raise BatchMalformed(f"only {len(found)} of its {count} subjects differ; a table names each once")


_check_table_once = lru_cache(maxsize=_REMEMBERED_TABLES)(_check_table)


@lru_cache(maxsize=SINGLE_TABLES_REMEMBERED)
def names_one_subject(table: bytes) -> bool:
    """Whether these are the bytes of a subject table of one subject."""
    try:
        _check_table(table, 1)
    except (_BadName, BatchMalformed):
        return False
    return True


class _BadName(Exception):
    """An invalid name in a subject table, before its rows are known."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


def _bad_subject(batch: Batch, index: int, reason: str) -> BadSubject:
    if ColumnId.SUBJECT in batch.offsets:
        rows = np.flatnonzero(batch.uint32s(ColumnId.SUBJECT) == index)
    else:
        rows = np.arange(batch.count if index == 0 else 0)
    return BadSubject(reason, rows=rows_detail(rows))


def _check_few_rows(batch: Batch, begin: int, heap_bytes: int) -> None:
    """Do the same as `_check_rows`, without the fixed cost of numpy calls."""
    start, size, too_large = begin, [0] * batch.count, set[int]()
    for column in batch.layout.regions:
        most = _ITEM_BYTES_MAX.get(column, MESSAGE_BYTES_MAX)
        for row, end in enumerate(struct.unpack_from(f"<{batch.count}I", batch.buffer, batch.offsets[column])):
            if not start <= end <= heap_bytes:
                raise _outside(column, row, end, start, heap_bytes)
            if end & 7 and batch.buffer[batch.heap_offset + end : batch.heap_offset + padded(end)] != PADS[-end & 7]:
                raise _not_zeros(column, row)
            length = end - start
            if column in _IN_ONE_MESSAGE:
                size[row] += length
                if size[row] > MESSAGE_BYTES_MAX or length > most:
                    too_large.add(row)
            start = (end + 7) & ~7
    if start != heap_bytes:
        raise _bytes_behind(start, heap_bytes)
    if too_large and not _fits_with_its_life(batch):
        raise _too_large(np.array(sorted(too_large), np.int64))


def items_fit(batch: Batch, headers_bytes_max: int, message_bytes_max: int) -> bool:
    """Whether all items of a batch are certainly valid; the twin of a compiled piece.

    A batch of which this can't be said so cheaply is looked at again, and that tells what is wrong, if anything is.
    """
    buffer, heap_offset, offsets = batch.buffer, batch.heap_offset, batch.offsets
    heap_bytes = batch.total_bytes - heap_offset
    # For many rows numpy is faster, and in a heap below all limits no item can be too large.
    most = headers_bytes_max if ColumnId.HEADERS_END in offsets else message_bytes_max
    if batch.count > FEW_ROWS or heap_bytes > most:
        return False
    start = batch.subject_bytes
    for column in batch.layout.regions:
        for end in struct.unpack_from(f"<{batch.count}I", buffer, offsets[column]):
            if end < start:
                return False
            if end & 7:
                start = (end + 7) & ~7
                if buffer[heap_offset + end : heap_offset + start] != PADS[-end & 7]:
                    return False
            else:
                start = end
    # Each item begins behind the one before it, so the last end is the highest.
    return start == heap_bytes


_items_fit = choose("items_fit", items_fit)


def _check_rows(batch: Batch, begin: int, heap_bytes: int) -> None:
    regions: list[tuple[Int64s, int]] = []  # Lengths, and how long one may be.
    longest_row = 0  # No row has more bytes than this.
    one_too_long = False
    for column in batch.layout.regions:
        ends = batch.uint32s(column).astype(np.int64)
        starts = np.empty_like(ends)
        starts[0] = begin
        np.bitwise_and(ends[:-1] + 7, ~7, out=starts[1:])
        lengths = ends - starts
        last = int(ends[-1])
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or last > heap_bytes:
            # If no end falls, the last end is the highest, so it is outside.
            row = int((lengths < 0).argmax()) if shortest < 0 else batch.count - 1
            raise _outside(column, row, int(ends[row]), int(starts[row]), heap_bytes)
        most = _ITEM_BYTES_MAX[column]
        if column in _IN_ONE_MESSAGE:
            regions.append((lengths, most))
            longest_row += longest
            one_too_long |= longest > most
        begin = padded(last)
        if longest & 7 or shortest < longest:
            # The word with an item's last byte, with the item's own bytes masked out; nothing is left of a whole word.
            behind = _words(batch).take(ends >> 3, mode="clip")
            behind &= _BEHIND.take(ends & 7)
            if behind.any():
                raise _not_zeros(column, int((behind != 0).argmax()))
    if begin != heap_bytes:
        raise _bytes_behind(begin, heap_bytes)
    # In nearly every batch the messages are so short that no row needs a look.
    if one_too_long or longest_row > MESSAGE_BYTES_MAX:
        too_large = np.sum([lengths for lengths, _ in regions], axis=0) > MESSAGE_BYTES_MAX
        for lengths, most in regions:
            too_large |= lengths > most
        if too_large.any() and not _fits_with_its_life(batch):
            raise _too_large(np.flatnonzero(too_large))


def _fits_with_its_life(batch: Batch) -> bool:
    """Whether its messages come again, and fit with the headers that servers have added to them."""
    if RETRY_PREFIX.encode() not in batch.subject_table:
        return False
    sizes = np.zeros(batch.count, np.int64)
    for column in _IN_ONE_MESSAGE:
        if column in batch.offsets:
            starts, ends = batch.region(column)
            starts = (starts + 7) & ~7
            most = _ITEM_BYTES_MAX[column] + LIFE_BYTES_MAX
            if bool((ends - starts > most).any()):
                return False
            sizes += ends - starts
    return bool((sizes <= MESSAGE_BYTES_MAX + LIFE_BYTES_MAX).all())


def _check_keys(batch: Batch) -> None:
    """Check the keys of a batch, whose ends were checked, and the flags of its rows."""
    if batch.count <= FEW_ROWS and _few_keys_are_good(batch):
        return
    starts, ends = batch.region(ColumnId.KEY_END)
    lengths = ends - starts
    if int(lengths.max()) > KEY_BYTES_MAX or not _is_text(batch, starts, ends):
        raise _bad_keys(batch, starts.tolist(), ends.tolist())
    if ColumnId.ROW_FLAGS in batch.offsets:
        flags = batch.column(ColumnId.ROW_FLAGS).astype(np.int64)
        wrong = (flags > ON_CONFLICT_MAX) | ((flags > 0) & (lengths == 0))
        if wrong.any():
            row = int(wrong.argmax())
            has = "a key" if lengths[row] else "no key"
            raise BatchMalformed(f"row {row} has {has}, and column row_flags is {flags[row]}, which it can't be")


def _few_keys_are_good(batch: Batch) -> bool:
    """Whether keys and flags are certainly valid, without the fixed cost of numpy calls, for the batches of single
    sends.
    """
    count, buffer, heap_offset, offsets = batch.count, batch.buffer, batch.heap_offset, batch.offsets
    flags: tuple[int, ...] = (0,) * count
    if ColumnId.ROW_FLAGS in offsets:
        flags = struct.unpack_from(f"<{count}H", buffer, offsets[ColumnId.ROW_FLAGS])
    start = batch.region_start(ColumnId.KEY_END)
    for end, flag in zip(struct.unpack_from(f"<{count}I", buffer, offsets[ColumnId.KEY_END]), flags, strict=True):
        if end - start > KEY_BYTES_MAX or flag > (ON_CONFLICT_MAX if end > start else 0):
            return False
        try:
            str(buffer[heap_offset + start : heap_offset + end], "utf-8")
        except UnicodeDecodeError:
            return False
        start = (end + 7) & ~7
    return True


def _is_text(batch: Batch, starts: Int64s, ends: Int64s) -> bool:
    """Whether each key is UTF-8.

    All keys are decoded at once. When all their bytes together are UTF-8 and no key begins within a character, each key
    alone is UTF-8. The zeros between keys are characters, too.
    """
    first, last = int(starts[0]), padded(int(ends[-1]))
    keys = bytes(batch.heap[first:last])
    if keys.isascii():
        return True
    try:
        keys.decode()
    except UnicodeDecodeError:
        return False
    begins = starts[ends > starts] - first
    return not bool((np.frombuffer(keys, np.uint8).take(begins) & _CONTINUES_MASK == _CONTINUES).any())


def _bad_keys(batch: Batch, starts: list[int], ends: list[int]) -> CallerError:
    """The error of a batch in which at least one key is bad, with the rows at fault."""
    heap, rows, reason = batch.heap, list[int](), ""
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start == end:
            continue
        try:
            check_key(bytes(heap[start:end]))
        except BadKey as error:
            reason = reason or error.message
            rows.append(row)
            if len(rows) == ROWS_NAMED_MAX:
                break
    return BadKey(f"row {rows[0]}: {reason}", rows=rows_detail(np.array(rows, np.int64)))


def _check_tags(batch: Batch) -> None:
    """Check the tags of a batch, whose ends were checked, and their blooms."""
    bad = list(bad_tags(batch, ROWS_NAMED_MAX))
    if bad:
        row, error = bad[0]
        raise BadTags(f"row {row}: {error.message}", rows=rows_detail(np.array([row for row, _ in bad], np.int64)))


def _outside(column: int, row: int, end: int, start: int, heap_bytes: int) -> BatchMalformed:
    name = ColumnId(column).name.lower()
    return BatchMalformed(f"row {row}: column {name} is {end}, outside of {start} to {heap_bytes}")


def _words(batch: Batch) -> NDArray[np.uint64]:
    return np.frombuffer(batch.buffer, "<u8", (batch.total_bytes - batch.heap_offset) >> 3, batch.heap_offset)


def _not_zeros(column: int, row: int) -> BatchMalformed:
    name = ColumnId(column).name.lower().removesuffix("_end")
    return BatchMalformed(f"row {row}: the bytes behind its {name}, up to a multiple of 8, are not zeros")


def _bytes_behind(end: int, heap_bytes: int) -> BatchMalformed:
    return BatchMalformed(f"its items end at {end} of a heap of {heap_bytes} bytes; nothing may stand behind them")


def _too_large(rows: Int64s) -> MessageTooLarge:
    return MessageTooLarge(
        f"row {int(rows[0])}: headers over {HEADERS_BYTES_MAX} bytes, or more than {MESSAGE_BYTES_MAX} with the body",
        rows=rows_detail(rows),
    )


def _check_parts(batch: Batch, heap_bytes: int) -> None:
    if batch.kind in (BatchKind.PULL, BatchKind.SEAL, BatchKind.ASKED) and heap_bytes:
        raise BatchMalformed(f"a {batch.kind.name} batch with a heap of {heap_bytes} bytes")
    if batch.kind is BatchKind.OUTCOME:
        if heap_bytes % OUTCOME_PART_BYTES:
            raise BatchMalformed(f"a heap of {heap_bytes} bytes is not made of outcome parts")
        counts = np.frombuffer(batch.heap, "<u4").reshape(-1, OUTCOME_PART_BYTES // 4)[:, OUTCOME_COUNT_WORD]
        if int(counts.sum(dtype=np.int64)) != batch.count:
            raise BatchMalformed(f"outcome parts of {int(counts.sum(dtype=np.int64))} rows for {batch.count} rows")


OUTCOME_COUNT_WORD = 12  # Field ``count`` of a part is at its byte 48.


def check_expiry(batch: Batch, *, again: bool) -> None:
    """Check the column expires_at_ms of a batch that has one.

    ``again``: the messages come again to their group, perhaps due later than they expire; such a message ends as
    EXPIRED when it is due.

    Raises:
        BadExpiry: with the rows that expire before they are due.
        BatchMalformed: a message that comes again expires at no instant.
    """
    expires = batch.int64s(ColumnId.EXPIRES_AT_MS)
    wrong = (expires < 0) | (expires > INSTANT_MS_MAX)
    if again:
        if wrong.any():
            raise BatchMalformed(f"expires_at_ms is {int(expires[wrong][0])}, which is no instant")
        return
    wrong |= (expires != 0) & (expires <= batch.int64s(ColumnId.DELIVER_AT_MS))
    if wrong.any():
        rows = np.flatnonzero(wrong)
        first_ms = int(expires[rows[0]])
        when = instant_text(first_ms) if 0 <= first_ms <= INSTANT_MS_MAX else f"{first_ms} ms"
        what = f"a message expires at {when}, which is no instant after it is due"
        raise BadExpiry(what, rows=rows_detail(rows))
