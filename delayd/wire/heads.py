"""Heads: the fields of requests and answers, errors as heads, and the room that a head has for rows.

Invariant: a head comes from a peer, so no field of it is used before its presence, type and range were checked; a field
that is wrong leads to a BadRequest that names it. Fields that nobody asks for are ignored (docs/protocol.md).

Rows of a listing are taken while the head that names them stays below its limit. Invariant: a head made of results of
`take_rows` and `cut_text` can be encoded, whatever names and numbers it holds (rule E1). The rest of a listing is asked
for behind the last row that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeGuard, TypeVar, get_type_hints

from delayd.address import HOST_BYTES_MAX, NOT_SENT, PORT_MAX, Host, Port, host_fault
from delayd.errors import BadRequest, DelaydError, Detail, error_by_code
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.frame import HEAD_BYTES_MAX, Head, HeadValue

U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1
INT_MAX = (1 << 63) - 1  # Times, offsets and counts are stored as signed columns somewhere.
# A peer that names a longer time would make this side stand still because of an error of its clock.
RETRY_AFTER_MS_MAX = 3_600_000
HANDLE_MOST = (U64_MAX, INT_MAX, U32_MAX)  # Incarnation, first pull sequence, count: as the pull log stores them.
PART_MOST = (INT_MAX, INT_MAX, U32_MAX, U32_MAX)  # First pull sequence, first consume sequence, count, attempt.
WINDOW_ROW_BYTES = 24  # A row in a window's answer has a sequence, deliver_at_ms and a content hash.
WINDOW_MOST = (U64_MAX, U64_MAX, U32_MAX, INT_MAX, INSTANT_MS_MAX, INSTANT_MS_MAX, U32_MAX)
"""Epoch, batch id, hour, offset, appended_at_ms, claimed_at_ms, count: as the dispatch logs store them."""
LANDED_MOST = (U64_MAX, INT_MAX)  # Batch id and offset, of DISPATCH's answer.
ERROR_TEXT_BYTES_MAX = 64 << 10  # The longest sentence of an error.
# Only this much of the sentence is sent; a text that the peer sent itself need not come back as a whole.
ERROR_TEXT_BYTES_SENT_MAX = 8 << 10
DETAIL_BYTES_MAX = 8_000  # The longest raw bytes, such as 1,000 row numbers; a multiple of any number's width.
TEXT_BYTES_MAX = 4096  # Longer than any name, so that a stray megabyte never reaches a log line.

T = TypeVar("T")
Fields = tuple[tuple[str, Callable[[Head, str], HeadValue], bool], ...]

# How a declared row says what a number is; a plain int is one of 63 bits.
U32 = Annotated[int, "u32"]
U64 = Annotated[int, "u64"]
Instant = Annotated[int, "instant"]

_KINDS: dict[type, str] = {
    type(None): "nothing",
    bool: "true or false",
    int: "a whole number",
    float: "a fraction",
    str: "a text",
    bytes: "bytes",
    list: "a list",
    dict: "a map",
}


def need_int(head: Head, name: str, least: int = 0, most: int = INT_MAX) -> int:
    """An integer field within [least, most]."""
    value = head.get(name)
    # Servers read several such fields of each request, so the usual case costs no further call.
    if type(value) is int and least <= value <= most:
        return value
    return _bounded(_need(head, name), name, least, most)


def need_u32(head: Head, name: str, least: int = 0) -> int:
    """A value that is stored in 32 bits: a count, a process id, an hour."""
    return need_int(head, name, least, U32_MAX)


def need_instant(head: Head, name: str) -> int:
    """Milliseconds since the epoch, up to the last instant that can be shown as a date."""
    return need_int(head, name, 0, INSTANT_MS_MAX)


def need_retry_after(head: Head) -> int:
    """After which time to try again: at most an hour, whatever the peer says."""
    return min(need_int(head, "retry_after_ms"), RETRY_AFTER_MS_MAX)


def need_u64(head: Head, name: str) -> int:
    """A value of 64 bits: a log_id, a producer_id, an instance, a sequence."""
    return need_int(head, name, 0, U64_MAX)


def need_bool(head: Head, name: str) -> bool:
    """A field that is true or false."""
    value = head.get(name)
    return value if value is True or value is False else _typed(_need(head, name), name, bool)


def need_str(head: Head, name: str, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """A text of at most `bytes_max` bytes in UTF-8."""
    return _short(_typed(_need(head, name), name, str), name, bytes_max)


def optional_str(head: Head, name: str, bytes_max: int = TEXT_BYTES_MAX) -> str | None:
    """A text or nil; the field itself must be there."""
    value = _need(head, name)
    return None if value is None else _short(_typed(value, name, str), name, bytes_max)


def need_host(head: Head, name: str) -> str:
    """A name or an address that a connection can be tried to."""
    host = need_str(head, name, HOST_BYTES_MAX)
    fault = host_fault(host)
    if fault is not None:
        raise BadRequest(f"{name} is {host!r}, and nobody could reach this server there, for {fault}", field=name)
    return host


def need_port(head: Head, name: str) -> int:
    """The port of a server."""
    return need_int(head, name, 1, PORT_MAX)


def need_bytes(head: Head, name: str) -> bytes:
    """A field of raw bytes."""
    return _typed(_need(head, name), name, bytes)


def need_list(head: Head, name: str) -> list[HeadValue]:
    """A list whose items are not yet checked."""
    value = head.get(name)
    return value if type(value) is list else _typed(_need(head, name), name, list)


def need_map(head: Head, name: str) -> Head:
    """A map whose values are not yet checked; its keys are text."""
    return as_head(_need(head, name), name)


def need_maps(head: Head, name: str) -> list[Head]:
    """A list of maps whose values are not yet checked."""
    return [as_head(item, name) for item in need_list(head, name)]


def read_row(row: type[T], head: Head) -> T:
    """Read a row whose fields are declared by the annotations of a class, as `U64`, `Instant`, ``str | None``.

    A field with a default may be left out. A declared row is written by the same names, so nothing else lists them:

        class TargetInfo(NamedTuple):
            log_id: U64            0 to 2^64 - 1
            state: str             at most 4,096 bytes
            waiting: int           0 to 2^63 - 1
            alarm: str | None      or nil

    Raises:
        BadRequest: a field is missing, of another type, or out of its bounds; it names the field.
    """
    fields = _FIELDS.get(row) or _FIELDS.setdefault(row, _fields_of(row))
    return row(**{name: field(head, name) for name, field, may_lack in fields if not may_lack or name in head})


def read_page(row: type[T], head: Head, name: str) -> tuple[list[T], bool]:
    """One page of a listing: its rows, each as `read_row` reads it, and whether there are more behind the last."""
    return [read_row(row, item) for item in need_maps(head, name)], need_bool(head, "more")


def declared(row: type) -> str:
    """The fields of a declared row, as `delayd.wire.requests` declares those of heads: ``log_id:u64 alarm:str|nil``."""
    hints, defaults = _hints_of(row), getattr(row, "_field_defaults", {})
    return " ".join(f"{name}{'?' * (name in defaults)}:{_kind_of(hint)[1]}" for name, hint in hints.items())


def need_strs(head: Head, name: str, bytes_max: int = TEXT_BYTES_MAX) -> list[str]:
    """A list of texts."""
    return [_short(_typed(item, name, str), name, bytes_max) for item in need_list(head, name)]


def need_ints(head: Head, name: str, width: int | None = None) -> list[int]:
    """A list of unsigned 64-bit integers, of exactly `width` items if given, such as the pair W."""
    return _row(_need(head, name), name, width)


def need_rows(head: Head, name: str, width: int, most: Sequence[int] = ()) -> list[list[int]]:
    """A list of rows, each of exactly `width` unsigned integers, such as handles.

    `most` has for each column the highest number that can be stored; without it all 64 bits are taken.
    """
    rows = [_row(item, name, width) for item in need_list(head, name)]
    if most:
        assert len(most) == width, "each column has its own limit"
        for row in rows:
            for value, limit in zip(row, most, strict=True):
                if value > limit:
                    raise BadRequest(f"{name} has a {value} where at most {limit} can be", field=name)
    return rows


def _fields_of(row: type) -> Fields:
    """The fields of a declared row: name, how it is read, and whether it may be left out."""
    defaults = getattr(row, "_field_defaults", {})
    return tuple((name, _kind_of(hint)[0], name in defaults) for name, hint in _hints_of(row).items())


def _hints_of(row: type) -> dict[str, object]:
    """The annotations of the fields of a declared row that go over the wire."""
    hints = get_type_hints(row, include_extras=True)
    return {name: hint for name, hint in hints.items() if NOT_SENT not in getattr(hint, "__metadata__", ())}


def _kind_of(hint: object) -> tuple[Callable[[Head, str], HeadValue], str]:
    """How a value is read that has this annotation, and the word for it."""
    if hint in _READERS:
        return _READERS[hint]
    for each, (reader, word) in _READERS.items():
        if hint == each | None:  # type: ignore[operator]
            return _or_nil(reader), f"{word}|nil"
    raise AssertionError(f"a row declares a field as {hint}, which no reader here knows")


def _or_nil(reader: Callable[[Head, str], HeadValue]) -> Callable[[Head, str], HeadValue]:
    return lambda head, name: None if _need(head, name) is None else reader(head, name)


def is_u64(value: HeadValue) -> TypeGuard[int]:
    """Whether an item of a list is a log_id or another number of 64 bits; a bool is not."""
    return type(value) is int and 0 <= value <= U64_MAX


def as_head(value: HeadValue, name: str) -> Head:
    """A map inside a head as a head of its own."""
    head = _typed(value, name, dict)
    if not all(isinstance(key, str) for key in head):
        raise BadRequest(f"{name} has a key that is no text", field=name)
    return head


_FIELDS: dict[type, Fields] = {}  # Of each declared row that was read once.
_READERS: dict[object, tuple[Callable[[Head, str], HeadValue], str]] = {
    int: (need_int, "int"),
    U32: (need_u32, "u32"),
    U64: (need_u64, "u64"),
    Instant: (need_instant, "instant"),
    bool: (need_bool, "bool"),
    str: (need_str, "str"),
    bytes: (need_bytes, "bytes"),
    Host: (need_host, "host"),
    Port: (need_port, "1..65535"),
}


def error_head(error: DelaydError) -> Head:
    """The head of an error answer; it always fits and can be encoded, whatever text of a peer or path the error
    quotes.
    """
    return {
        "code": error.code,
        "message": cut_text(error.message, ERROR_TEXT_BYTES_SENT_MAX),
        "retry_after_ms": error.retry_after_ms,
        "details": {name: _detail(value) for name, value in error.details.items()},
    }


def error_from_head(head: Head) -> DelaydError:
    """Rebuild the error of an error answer; an unknown code becomes a RemoteError that keeps the code."""
    retry_after_ms = head.get("retry_after_ms")
    details: dict[str, Detail] = {
        name: value for name, value in need_map(head, "details").items() if isinstance(value, str | int | bytes)
    }
    message = need_str(head, "message", ERROR_TEXT_BYTES_MAX)
    return error_by_code(
        need_str(head, "code"), message, 0 if retry_after_ms is None else need_retry_after(head), details
    )


def _detail(value: Detail) -> Detail:
    if isinstance(value, str):
        return cut_text(value, TEXT_BYTES_MAX)
    if isinstance(value, bytes):
        return value[:DETAIL_BYTES_MAX]
    return max(-INT_MAX, min(value, U64_MAX))


def _need(head: Head, name: str) -> HeadValue:
    try:
        return head[name]
    except KeyError:
        raise BadRequest(f"the field {name} is missing", field=name) from None


def _typed(value: HeadValue, name: str, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _wrong_kind(value, name, kind)
    return value


def _bounded(value: HeadValue, name: str, least: int, most: int) -> int:
    # A bool is an int in Python and never one on the wire.
    if type(value) is not int:
        raise _wrong_kind(value, name, int)
    if not least <= value <= most:
        raise BadRequest(f"{name} is {value} and must lie within {least} and {most}", field=name)
    return value


def _wrong_kind(value: HeadValue, name: str, kind: type) -> BadRequest:
    found = _KINDS.get(type(value), type(value).__name__)
    return BadRequest(f"{name} is {found} instead of {_KINDS[kind]}", field=name)


def _short(text: str, name: str, bytes_max: int) -> str:
    try:
        fits = len(text) <= bytes_max and len(text.encode()) <= bytes_max
    except UnicodeEncodeError:
        raise BadRequest(f"{name} has half a surrogate pair, which is no text", field=name) from None
    if not fits:
        raise BadRequest(f"{name} is longer than {bytes_max} bytes", field=name)
    return text


def _row(value: HeadValue, name: str, width: int | None) -> list[int]:
    row: Sequence[HeadValue] = _typed(value, name, list)
    if width is not None and len(row) != width:
        raise BadRequest(f"{name} has a row of {len(row)} items instead of {width}", field=name)
    numbers: list[int] = []
    for item in row:
        if type(item) is int and 0 <= item <= U64_MAX:
            numbers.append(item)
        else:
            numbers.append(_bounded(item, name, 0, U64_MAX))
    return numbers


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
