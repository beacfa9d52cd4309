"""Labels: the keys and tags that a caller gives to messages, checked, and as columns of a batch (docs/keys.md).

Invariant: what passes here is not refused by a server because of a key or a tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from delayd import validate
from delayd.batch import ColumnId, Columns, Int64s
from delayd.client.limits import lengths_of
from delayd.client.sending.expiries import NEVER, Expiry, expiry_column
from delayd.client.sending.packing import Items
from delayd.errors import BadArgument, BadKey, BadTags
from delayd.life import TAG_PREFIX
from delayd.ordering import ordering_hash
from delayd.tags import bloom_of_item, encode_tags

OnConflict = Literal["reject", "keep", "replace"]
Key = str | bytes
Tags = Iterable[str]

ON_CONFLICT: dict[str, int] = {"reject": 0, "keep": 1, "replace": 2}
REJECT: OnConflict = "reject"
NO_KEY = b""


class Label(NamedTuple):
    """Key, tags, expiry and ordering key of one message.

    These are plain values, so that a waiting row costs the garbage collector nothing.
    """

    key: bytes
    on_conflict: int
    tags: bytes
    expires_at_ms: int = 0
    ttl_ms: int = 0  # It begins when the message is due; the server hears of the instant at which it ends.
    ordering: int = 0  # The hash of its ordering key; 0 without one.


NO_LABEL = Label(NO_KEY, 0, b"")


class Labels(NamedTuple):
    """Keys, tags, expiries and ordering keys of many messages: columns of equal length."""

    keys: Sequence[bytes]
    on_conflict: Sequence[int]
    tags: Sequence[bytes]
    expires_at_ms: Sequence[int]
    ttl_ms: Sequence[int]
    ordering: Sequence[int]

    def cut(self, run: range) -> Labels:
        """Neighbouring rows."""
        piece = slice(run.start, run.stop)
        return Labels(*(column[piece] for column in self))  # type: ignore[arg-type]

    def pick(self, rows: Sequence[int]) -> Labels:
        """Some rows."""
        return Labels(*([column[row] for row in rows] for column in self))  # type: ignore[arg-type]

    def add_to(self, columns: dict[ColumnId, Columns], regions: dict[ColumnId, Items]) -> None:
        """Add the columns and regions that these labels need, to columns that say when the rows are due."""
        if any(self.keys):
            regions[ColumnId.KEY_END] = Items(self.keys, lengths_of(self.keys))
            if any(self.on_conflict):
                columns[ColumnId.ROW_FLAGS] = np.array(self.on_conflict, np.uint16)
        if any(self.tags):
            regions[ColumnId.TAGS_END] = Items(self.tags, lengths_of(self.tags))
            columns[ColumnId.TAG_BLOOM] = np.array([bloom_of_item(item) for item in self.tags], np.uint64)
        if any(self.ordering):
            columns[ColumnId.ORDERING_KEY_HASH] = np.array(self.ordering, np.uint64)
        if any(self.expires_at_ms) or any(self.ttl_ms):
            due_ms = columns[ColumnId.DELIVER_AT_MS].astype(np.int64, copy=False)
            instants, lengths = np.array(self.expires_at_ms, np.int64), np.array(self.ttl_ms, np.int64)
            columns[ColumnId.EXPIRES_AT_MS] = expiry_column(instants, lengths, due_ms)

    def keyed_rows(self) -> list[int]:
        """The rows that have a key."""
        return [row for row, key in enumerate(self.keys) if key]

    def sizes(self) -> Int64s:
        """How many bytes the labels of each row have."""
        return lengths_of(self.keys) + lengths_of(self.tags)


def label_of(
    key: Key | None,
    on_conflict: OnConflict,
    tags: Tags | None,
    expiry: Expiry = NEVER,
    ordering_key: Key | None = None,
) -> Label | None:
    """Check key, tags and ordering key of one message; None when it has none of them, and no expiry.

    Raises:
        BadKey, BadTags, BadArgument: what is wrong with them.
    """
    flag = _flag(on_conflict)
    if key is None:
        _need_key(flag)
    item = b"" if tags is None else _tags_item(tags)
    ordering = 0 if ordering_key is None else _hash_of(ordering_key)
    if key is None:
        return Label(NO_KEY, 0, item, *expiry, ordering) if item or ordering or expiry != NEVER else None
    return Label(check_key(key), flag, item, *expiry, ordering)


def labels_of(
    keys: Sequence[Key | None] | None,
    on_conflict: OnConflict,
    tags: Tags | Sequence[Tags | None] | None,
    count: int,
    expiries: Sequence[Expiry] | None = None,
    ordering_keys: Sequence[Key | None] | None = None,
) -> Labels | None:
    """Check keys, tags and ordering keys of ``count`` messages; None when none of them has any, nor an expiry.

    Raises:
        BadKey, BadTags, BadArgument: what is wrong with them, with the row.
    """
    flag = _flag(on_conflict)
    packed_keys: Sequence[bytes] = [NO_KEY] * count
    flags: Sequence[int] = [0] * count
    if keys is None:
        _need_key(flag)
    else:
        packed_keys = _keys_of(keys, count)
        flags = [flag if key else 0 for key in packed_keys]
    items = [b""] * count if tags is None else _items_of(tags, count)
    ordering = [0] * count if ordering_keys is None else _ordering_of(ordering_keys, count)
    if not (any(packed_keys) or any(items) or any(ordering) or expiries):
        return None
    expiries = [NEVER] * count if expiries is None else expiries
    ends = [each.at_ms for each in expiries], [each.ttl_ms for each in expiries]
    return Labels(packed_keys, flags, items, *ends, ordering)


def check_key(key: Key) -> bytes:
    """A key as bytes; BadKey when a server would not take it."""
    if isinstance(key, str):
        try:
            packed = key.encode()
        except UnicodeEncodeError as error:
            raise BadKey(f"key {key[:300]!r} can't be written as UTF-8: {error.reason}") from error
    elif isinstance(key, bytes):
        packed = key
    else:
        raise BadKey(f"a key is text or bytes, not {type(key).__name__}")
    validate.check_key(packed)
    return packed


def check_keys(keys: Sequence[Key]) -> list[bytes]:
    """The keys of a question about many messages as bytes: each row has one."""
    packed = _keys_of(keys, None)
    if NO_KEY in packed:
        raise BadKey(f"the key of row {packed.index(NO_KEY)} is None; a question by key needs one for each row")
    return packed


def _flag(on_conflict: object) -> int:
    if not isinstance(on_conflict, str) or on_conflict not in ON_CONFLICT:
        raise BadArgument(f'on_conflict is {on_conflict!r}; it is "reject", "keep" or "replace"')
    return ON_CONFLICT[on_conflict]


def _need_key(flag: int) -> None:
    if flag:
        raise BadArgument("on_conflict says what to do about a key, and none was given")


def _keys_of(keys: Sequence[Key | None], count: int | None) -> list[bytes]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise BadArgument(f"keys are a list with one key for each message, not {type(keys).__name__}")
    packed: list[bytes] = []
    for row, key in enumerate(keys):
        try:
            packed.append(NO_KEY if key is None else check_key(key))
        except BadKey as error:
            raise BadKey(f"row {row}: {error.message}") from error
    if count is not None and len(packed) != count:
        raise BadArgument(f"{len(packed)} keys were given for {count} bodies; give one for each, or None")
    return packed


def _hash_of(ordering_key: Key) -> int:
    try:
        return ordering_hash(check_key(ordering_key))
    except BadKey as error:
        raise BadKey(f"ordering_key: {error.message}") from error


def _ordering_of(keys: Sequence[Key | None], count: int) -> list[int]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise BadKey(f"ordering_keys are a list with one key for each message, not {type(keys).__name__}")
    hashes: list[int] = []
    for row, key in enumerate(keys):
        try:
            hashes.append(0 if key is None else _hash_of(key))
        except BadKey as error:
            raise BadKey(f"row {row}: {error.message}") from error
    if len(hashes) != count:
        raise BadArgument(f"{len(hashes)} ordering_keys were given for {count} bodies; give one for each, or None")
    return hashes


def _tags_item(tags: Tags) -> bytes:
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        raise BadTags(f"tags are a list of texts, not {type(tags).__name__}")
    listed = list(tags)
    if any(str(tag).startswith(TAG_PREFIX) for tag in listed):
        raise BadTags(f"tags that begin with {TAG_PREFIX} are the servers' own; choose another one")
    return encode_tags(listed)


def _items_of(tags: Tags | Sequence[Tags | None], count: int) -> list[bytes]:
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        raise BadTags(f"tags are a list of texts, or one list for each message, not {type(tags).__name__}")
    listed = list(tags)
    if all(isinstance(tag, str) for tag in listed):
        return [_tags_item([tag for tag in listed if isinstance(tag, str)])] * count
    if len(listed) != count:
        raise BadArgument(
            f"{len(listed)} lists of tags were given for {count} bodies; give one for each, or one for all"
        )
    items: list[bytes] = []
    for row, own in enumerate(listed):
        try:
            items.append(b"" if own is None else _tags_item(own))
        except BadTags as error:
            raise BadTags(f"row {row}: {error.message}") from error
    return items
