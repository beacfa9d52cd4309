"""Reserved: names, tags and headers that only servers give to messages (rule Q2).

Invariant: a batch that a client sends has none of them, so what has them was made by a server of the cluster.
"""

from delayd.batch import Batch, ColumnId
from delayd.errors import BadHeaders, BadSubject, BadTags, BatchMalformed
from delayd.headers import decode_headers
from delayd.life import LIFE_PREFIX, TAG_PREFIX
from delayd.retry_subject import RETRY_PREFIX, is_reserved
from delayd.tags import decode_tags

_RETRY = RETRY_PREFIX.encode()
_LIFE = LIFE_PREFIX.encode()
_TAG = TAG_PREFIX.encode()


def comes_again(batch: Batch) -> bool:
    """Whether a batch has messages of a retry subject."""
    return any(is_reserved(name.decode()) for name in batch.subjects())


def check_own(batch: Batch) -> None:
    """Check a batch of a client, whose layout was checked: nothing of it is reserved.

    Raises:
        BatchMalformed, BadSubject, BadTags, BadHeaders: what is reserved.
    """
    if ColumnId.ORIGIN_SEQUENCE in batch.offsets:
        raise BatchMalformed("the column origin_sequence is given by the server, to rows that it moves")
    if _RETRY in batch.subject_table and comes_again(batch):
        raise BadSubject(f"subjects that begin with {RETRY_PREFIX} are the servers' own; choose another name")
    # One search over a region settles nearly every batch.
    if ColumnId.TAGS_END in batch.offsets and _TAG in _region(batch, ColumnId.TAGS_END):
        for item in _items(batch, ColumnId.TAGS_END):
            if item and any(tag.startswith(TAG_PREFIX) for tag in decode_tags(item)):
                raise BadTags(f"tags that begin with {TAG_PREFIX} are the servers' own; choose another one")
    if ColumnId.HEADERS_END in batch.offsets and _LIFE in _region(batch, ColumnId.HEADERS_END):
        for item in _items(batch, ColumnId.HEADERS_END):
            if item and any(name.startswith(LIFE_PREFIX) for name in decode_headers(item)):
                raise BadHeaders(f"headers that begin with {LIFE_PREFIX} are the servers' own; choose another name")


def check_again(batch: Batch) -> None:
    """Check a batch that a realtime server sends again.

    Raises:
        BatchMalformed, BadSubject: it is none.
    """
    if ColumnId.ORIGIN_SEQUENCE not in batch.offsets or ColumnId.KEY_END in batch.offsets:
        raise BatchMalformed("what comes again names its first messages, and has no keys")
    if not all(is_reserved(name.decode()) for name in batch.subjects()):
        raise BadSubject(f"what comes again is on a subject that begins with {RETRY_PREFIX}")


def check_drained(batch: Batch) -> None:
    """Check a batch that another delay server sends, because it is drained.

    Raises:
        BatchMalformed: it is none.
    """
    if ColumnId.ORIGIN_SEQUENCE not in batch.offsets:
        raise BatchMalformed("messages of another delay server name their first ones")


def _region(batch: Batch, column: ColumnId) -> bytes:
    starts, ends = batch.region(column)
    return bytes(batch.heap[int(starts[0]) : int(ends[-1])])


def _items(batch: Batch, column: ColumnId) -> list[bytes]:
    starts, ends = batch.region(column)
    return [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
