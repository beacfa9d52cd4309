"""Retry batches: messages of a group as the batch that its delay server takes again (rule Q2).

Such a message has the body, the tags, the expiry, the ordering key and the headers that it was sent with. Beside them
it has headers of the servers: how often handlers got it, which message it began as, and what went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import msgpack
import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, Buffer, ColumnArray, ColumnId, ProducerPart
from delayd.batch.gather import Gathered, GatheredItems, compose_new, item_of
from delayd.batch.labels import (
    ATTEMPT,
    DEAD_AT_MS,
    DEAD_TAG,
    ERROR,
    FIRST_DUE_MS,
    HISTORY,
    HISTORY_MAX,
    KEY,
    LIFE_PREFIX,
    ORIGIN,
    REASON,
    Headers,
    bloom_of_item,
    decode_headers,
    decode_tags,
    encode_tags,
)
from delayd.batch.names import HEADERS_BYTES_MAX, LIFE_BYTES_MAX, MESSAGE_BYTES_MAX, TAGS_MAX
from delayd.errors import BadHeaders
from delayd.log.pull import RetryRow


class Source(NamedTuple):
    """Neighbouring rows of a stored batch, and how they live on."""

    batch: Batch
    row: int
    how: RetryRow


def retry_batch(part: ProducerPart, subject: str, sources: Sequence[Source], at_ms: int) -> bytes:
    """The PRODUCER batch of these rows; ``at_ms`` is when they were decided about."""
    rows = list(_rows(sources))
    bodies = [item_of(batch, ColumnId.BODY_END, row) for batch, row, _ in rows]
    lives = [
        _headers(batch, row, how, at_ms, length) for (batch, row, how), (length, _) in zip(rows, bodies, strict=True)
    ]
    regions = {ColumnId.HEADERS_END: _items([headers for headers, _ in lives])}
    others: dict[ColumnId, ColumnArray] = {
        ColumnId.DELIVER_AT_MS: np.array([how.due_ms for _, _, how in rows], np.int64),
        ColumnId.ORIGIN_SEQUENCE: np.array([origin for _, origin in lives], np.uint64),
    }
    tags = [_tags(batch, row, dead=bool(how.reason)) for batch, row, how in rows]
    if any(tags):
        regions = {ColumnId.TAGS_END: _items(tags), **regions}
        others[ColumnId.TAG_BLOOM] = np.array([bloom_of_item(item) for item in tags], np.uint64)
    expires = [_expiry(batch, row) if not how.reason else 0 for batch, row, how in rows]
    if any(expires):
        others[ColumnId.EXPIRES_AT_MS] = np.array(expires, np.int64)
    keys = [ordering_key_of(batch, row) for batch, row, _ in rows]
    if any(keys):
        others[ColumnId.ORDERING_KEY_HASH] = np.array(keys, np.uint64)
    lengths = np.array([length for length, _ in bodies], np.int64)
    regions[ColumnId.BODY_END] = GatheredItems(lengths, [item for _, item in bodies])
    gathered = Gathered(others[ColumnId.DELIVER_AT_MS].astype(np.int64, copy=False), regions)
    return compose_new(BatchKind.PRODUCER, part, gathered, [subject.encode()], others)


def _rows(sources: Sequence[Source]) -> Iterator[tuple[Batch, int, RetryRow]]:
    for batch, first, how in sources:
        for row in range(first, first + how.covered):
            yield batch, row, how


def _items(items: Sequence[bytes]) -> GatheredItems:
    pieces: list[Buffer] = [item + bytes(-len(item) & 7) for item in items]
    return GatheredItems(np.array([len(item) for item in items], np.int64), pieces)


def _expiry(batch: Batch, row: int) -> int:
    """When a message expires; 0 for never."""
    return int(batch.int64s(ColumnId.EXPIRES_AT_MS)[row]) if ColumnId.EXPIRES_AT_MS in batch.offsets else 0


def ordering_key_of(batch: Batch, row: int) -> int:
    """The hash of a message's ordering key; 0 without one."""
    column = ColumnId.ORDERING_KEY_HASH
    return int(batch.uint64s(column)[row]) if column in batch.offsets else 0


def _headers(batch: Batch, row: int, how: RetryRow, at_ms: int, body_bytes: int) -> tuple[bytes, int]:
    """The headers of a message in its next life, packed, and the sequence of its first one."""
    before = headers_of(batch, row)
    sequence, due_ms = int(batch.uint64s(ColumnId.SEQUENCE)[row]), int(batch.int64s(ColumnId.DELIVER_AT_MS)[row])
    # A dead letter that was sent back to its group begins anew.
    attempts = how.attempt + (0 if REASON in before else number_in(before, ATTEMPT))
    origin = number_in(before, ORIGIN) or sequence
    kept: Headers = {name: value for name, value in before.items() if not name.startswith(LIFE_PREFIX)}
    kept |= {ATTEMPT: str(attempts), ORIGIN: str(origin), FIRST_DUE_MS: str(number_in(before, FIRST_DUE_MS) or due_ms)}
    if key := _key(batch, row) or before.get(KEY):
        kept[KEY] = key
    if how.reason:
        kept |= {REASON: how.reason, DEAD_AT_MS: str(at_ms)}
    error = how.error or before.get(ERROR, "")
    told: Headers = {ERROR: error} if error else {}
    history = [*_history(before), [attempts, at_ms, how.error or how.reason]][-HISTORY_MAX:]
    room = min(HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX - body_bytes) + LIFE_BYTES_MAX
    for more in ({**told, HISTORY: json.dumps(history, ensure_ascii=False, separators=(",", ":"))}, told):
        packed = cast(bytes, msgpack.packb({**kept, **more}))
        if len(packed) <= room:
            return packed, origin
    return cast(bytes, msgpack.packb(kept)), origin


def headers_of(batch: Batch, row: int) -> Headers:
    """The headers of a stored row; none where nobody can decode them."""
    if ColumnId.HEADERS_END not in batch:
        return {}
    length, item = item_of(batch, ColumnId.HEADERS_END, row)
    try:
        return decode_headers(bytes(item[:length]))
    except BadHeaders:
        return {}


def number_in(headers: Headers, name: str) -> int:
    """A number in the headers of an earlier life; 0 when there is none."""
    value = headers.get(name)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else 0


def _history(headers: Headers) -> list[object]:
    value = headers.get(HISTORY)
    if not isinstance(value, str):
        return []
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _key(batch: Batch, row: int) -> str:
    """The key with which a message was sent; empty without one, and for a message that came again."""
    length, item = item_of(batch, ColumnId.KEY_END, row) if ColumnId.KEY_END in batch else (0, b"")
    return bytes(item[:length]).decode()


def _tags(batch: Batch, row: int, *, dead: bool) -> bytes:
    """A message's tags, with that of dead letters first where it is one."""
    length, item = item_of(batch, ColumnId.TAGS_END, row) if ColumnId.TAGS_END in batch else (0, b"")
    own = [tag for tag in decode_tags(bytes(item[:length])) if tag != DEAD_TAG]
    return encode_tags([DEAD_TAG, *own][:TAGS_MAX] if dead else own)
