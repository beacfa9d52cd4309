"""Room in a head: rows of a listing are taken while the head that names them stays below its limit.

Invariant: a head made of results of `take_rows` and `cut_text` can be encoded, whatever names and numbers it holds
(rule E1). The rest of a listing is asked for behind the last row that was given.
"""

from collections.abc import Iterable

from delayd.wire.frame import HEAD_BYTES_MAX, Head

ROWS_BYTES_MAX = HEAD_BYTES_MAX - (64 << 10)  # The rest of a head holds the other fields of any answer.
ITEM_BYTES_MAX = 9  # The longest number in msgpack, with its type.
TEXT_PREFIX_BYTES_MAX = 5
CUT = "…"


def take_rows(rows: Iterable[Head], limit: int) -> tuple[list[Head], bool]:
    """The first rows, at most `limit` and as many as a head holds, and whether there are more; values are scalars.

    At least one row is taken, because a row is far below the limit of a head.
    """
    taken: list[Head] = []
    size = 0
    for row in rows:
        size += row_bytes_max(row)
        if taken and (len(taken) >= limit or size > ROWS_BYTES_MAX):
            return taken, True
        taken.append(row)
    return taken, False


def row_bytes_max(row: Head) -> int:
    """An upper bound of the bytes that a row of scalars has in msgpack."""
    size = TEXT_PREFIX_BYTES_MAX
    for name, value in row.items():
        size += TEXT_PREFIX_BYTES_MAX + len(name)
        size += ITEM_BYTES_MAX
        if isinstance(value, str):
            size += len(value) if value.isascii() else 4 * len(value)
    return size


def text_bytes(text: str) -> bytes:
    """A text as it goes over the wire: file names and texts of peers may hold characters that UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace")


def cut_text(text: str, bytes_max: int) -> str:
    """A text that can be encoded and has at most ``bytes_max`` bytes of UTF-8; an ellipsis shows that it was cut."""
    whole = text_bytes(text)
    if len(whole) <= bytes_max:
        return whole.decode()
    return whole[: max(0, bytes_max - len(CUT.encode()))].decode("utf-8", "ignore") + CUT
