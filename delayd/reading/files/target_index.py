"""Targets: realtime message logs as an audit reads them: an index of handed-over batches, and their rows hour by
hour.

Invariant: a log is scanned once, whole and verified, up to the size that it had before the other logs' sizes were
taken. Then later batches are scanned, so that an outcome that was recorded meanwhile finds its row. One index row a
batch is kept; the rows of an hour are read again, columns only, each batch verified by its own checksum.

A scan is cut into pieces, which anybody may read: each gives its chunks, and `TargetIndexer` takes all chunks in the
order of the log. What concerns two groups is compared there, so it does not matter where a log was cut.

Many batches have one row, so no work is done for each batch alone: numpy decodes those of a group at once. The group's
checksum covers them; whether their own checksums fit too is checked by `delayd log verify`.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.columns import HEADER_BYTES, MAGIC, VERSION, BatchKind, ColumnId, Int64s
from delayd.batch.content import NOT_STATED
from delayd.batch.names import SUBJECT_BYTES_MAX
from delayd.errors import DamagedData
from delayd.log.checkpoint import read_checkpoint
from delayd.log.control import HelloHeard, decode_sound
from delayd.log.group import HEADER, CommitGroup, GroupKind, content_position
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.machine.disk import Disk, File, open_named
from delayd.reading.files.directory import Directory
from delayd.reading.files.row_arrays import (
    BATCH,
    NO_INT64S,
    NO_UINT64S,
    Batches,
    Target,
    TargetRows,
    UInt64s,
    rows_of_part,
)
from delayd.reading.files.stored_groups import (
    Checked,
    Follow,
    Followed,
    LogMoved,
    ReadMemory,
    StoredGroup,
    TornTail,
    followed,
    log_size,
    read_known,
    segment_bases,
)

GROUP = np.dtype(
    [
        (name, "<i8" if name == "appended_at_ms" else "u1" if name == "kind" else "<u4" if "crc" in name else "<u8")
        for name in Followed._fields
    ]
)
# The beginning of a DISPATCH batch (docs/formats/batch.md): header, kind part, and the first two columns' entries.
FRONT = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("kind", "u1"),
        ("flags", "<u2"),
        ("total_bytes", "<u4"),
        ("count", "<u4"),
        ("heap_offset", "<u4"),
        ("column_count", "<u2"),
        ("kind_bytes", "<u2"),
        ("subject_count", "<u4"),
        ("columns_crc32c", "<u4"),
        ("heap_crc32c", "<u4"),
        ("header_crc32c", "<u4"),
        ("origin_log_id", "<u8"),
        ("epoch", "<u8"),
        ("batch_id", "<u8"),
        ("w_epoch", "<u8"),
        ("w_id", "<u8"),
        ("claimed_at_ms", "<i8"),
        ("hour", "<u4"),
        ("zero", "<u4"),
        ("first_id", "<u2"),
        ("first_width", "<u2"),
        ("first_at", "<u4"),
        ("second_id", "<u2"),
        ("second_width", "<u2"),
        ("second_at", "<u4"),
    ]
)
FRONT_BYTES = FRONT.itemsize
FRONT_WORDS = np.arange(FRONT_BYTES // 8)
KIND_AT = 5
COLUMNS_AT = FRONT_BYTES - 16  # Where the bytes begin that the checksum of the columns covers: the directory.
NAME_WORDS_MAX = 33  # A name of 255 bytes, and its length before it.
MIXERS = np.random.default_rng(1).integers(0, 1 << 64, NAME_WORDS_MAX, np.uint64, endpoint=False) | np.uint64(1)
AHEAD = "is called decided by itself"
NO_BATCH = "this is no batch as a delay server hands it over"
DECODE_BATCHES = 32_768  # Fronts that are decoded at a time: 4 MB.
# Reading this much costs no more than a call: batches that lie closer than this are read together.
GAP_BYTES = 16 << 10
READ_BYTES = 1 << 20  # This much stays in the processor's cache.
PIECE_BYTES = 64 << 20  # A piece of a scan that others read has at least this much: half a second of one core.


class LoggedHello(NamedTuple):
    """A hello in a realtime log: where it stands, the watermark that it names, its epoch, and when it was appended."""

    offset: int
    watermark: tuple[int, int]
    epoch: int
    at_ms: int


HourOf = tuple[int, int]  # A delay server's log_id, and the hour since the epoch.
HourPlaces = Mapping[HourOf, Int64s]  # Where its batches stand in an index, rising.


@dataclass(frozen=True, slots=True)
class TargetIndex:
    """All handed-over batches of some realtime logs, in order of target and offset."""

    targets: tuple[Target, ...]
    batches: Batches  # BATCH[n]
    subjects: tuple[str, ...]
    last_appended_ms: tuple[int, ...]  # For each target, of its last group; 0 for an empty log.
    faults: tuple[tuple[int, str], ...] = ()  # By log_id of the target: where its log does not follow (rule S5).
    # By target and log_id of the delay server: all hellos of the kept log, in its order.
    hellos: Mapping[tuple[int, int], Sequence[LoggedHello]] = field(default_factory=dict)

    def by_hour(self) -> dict[HourOf, Int64s]:
        """The places of the batches of each delay server and hour, in the order of the index."""
        hours, origins = self.batches["hour"], self.batches["origin_log_id"]
        order = np.lexsort((hours, origins))
        if not len(order):
            return {}
        hours, origins = hours[order], origins[order]
        changes = (hours[1:] != hours[:-1]) | (origins[1:] != origins[:-1])
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]
        keys = zip(origins[bounds[:-1]].tolist(), hours[bounds[:-1]].tolist(), strict=True)
        return {key: order[first:until] for key, (first, until) in zip(keys, pairwise(bounds), strict=True)}

    def rows_by_hour(self) -> dict[HourOf, int]:
        """How many rows the targets hold of each delay server and hour."""
        counts = self.batches["count"]
        return {key: int(counts[places].sum(dtype=np.int64)) for key, places in self.by_hour().items()}

    def at(self, places: Int64s) -> Batches:
        """The batches at rising places; those that lie behind each other are not copied."""
        if len(places) and int(places[-1] - places[0]) == len(places) - 1:
            return self.batches[int(places[0]) : int(places[-1]) + 1]
        return self.batches[places]


NO_INDEX = TargetIndex((), np.empty(0, BATCH), (), ())


class LogPiece(NamedTuple):
    """A part of one target's log that is scanned by itself: the groups in [start, stop)."""

    target: int  # Index into the targets of the `TargetIndex`.
    place: LogPlace
    start: int
    durable: int  # All below it is known to be durable.
    stop: int


class Chunk(NamedTuple):
    """What a scan found in some groups that lie behind each other; it can be pickled."""

    target: int
    folder: str
    groups: NDArray[np.void]  # GROUP[n]
    batches: Batches  # Their subjects are indexes into ``names``.
    watermarks: UInt64s  # For each batch the pair (epoch, id) that it names: u64[n, 2].
    names: list[bytes]
    greetings: list[tuple[int, LoggedHello]]  # With the log_id of the delay server.
    torn: list[TornTail]


class TargetColumns(NamedTuple):
    """Sequences, due instants and content hashes of rows; a hash is 0 where it is not stated."""

    sequence: UInt64s
    deliver_at_ms: Int64s
    content_hash: UInt64s


NO_COLUMNS = TargetColumns(NO_UINT64S, NO_INT64S, NO_UINT64S)


Scan = Callable[[Sequence[LogPiece]], Iterable[Chunk]]  # Gives the chunks of all pieces, in their order.


def scan_piece(disk: Disk, piece: LogPiece) -> Iterator[Chunk]:
    """Read the groups of a piece; LogMoved when segments went away, DamagedData when a durable one does not check."""
    place = piece.place
    bases = segment_bases(disk, place)
    fronts = _Fronts(piece.target, place.folder)
    groups: list[Followed] = []
    greetings: list[tuple[int, LoggedHello]] = []
    torn: list[TornTail] = []

    def chunk() -> Chunk:
        found = Chunk(
            piece.target, place.folder, np.array(groups, GROUP), *fronts.decode(), greetings.copy(), torn.copy()
        )
        for each in (groups, greetings, torn):
            each.clear()
        return found

    # The bytes of each group are copied before the next group uses their memory.
    for group in read_known(disk, place, (piece.start, piece.durable, piece.stop), torn):
        header = group.header
        groups.append(followed(group))
        base = bases[bisect.bisect_right(bases, header.offset) - 1]
        if isinstance(group, StoredGroup):
            raise AssertionError("a log that is read whole has no group without bodies")
        elif header.kind == GroupKind.DATA:
            fronts.add(group, base)
        else:
            greetings += _hellos(group)
        if fronts.are_many or len(groups) >= DECODE_BATCHES:
            yield chunk()
    if groups or torn:
        yield chunk()


def split_piece(disk: Disk, piece: LogPiece, bytes_min: int = PIECE_BYTES) -> list[LogPiece]:
    """Cut a piece where segments begin, as far as all is known to be durable; each part but the last has some bytes."""
    bounds = [piece.start]
    for base in segment_bases(disk, piece.place):
        if base - bounds[-1] >= bytes_min and base < piece.stop and base <= piece.durable:
            bounds.append(base)
    return [piece._replace(start=start, stop=stop) for start, stop in pairwise((*bounds, piece.stop))]


def scan_nothing(pieces: Sequence[LogPiece]) -> Iterable[Chunk]:
    """The scan of a reader who asks for no row of a realtime log."""
    del pieces
    return ()


class TargetIndexer:
    """Scans the message logs of realtime directories, twice: before and after the other logs' sizes are taken."""

    def __init__(self, disk: Disk, directories: Sequence[Directory], torn: list[TornTail]) -> None:
        self._disk = disk
        self._torn = torn
        self._places = [LogPlace(one.message_folder, FileKind.REALTIME, one.log_id) for one in directories]
        self._starts = [(segment_bases(disk, place) or [0])[0] for place in self._places]
        self._read = list(self._starts)  # Offset up to which each log was scanned.
        self._crcs: list[int | None] = [None] * len(self._places)  # Of the last group's header.
        self._names: dict[bytes, int] = {}
        self._pieces: list[Batches] = [np.empty(0, BATCH)]
        self._watermarks: dict[tuple[int, int], tuple[int, int]] = {}
        self._last_appended_ms = [0] * len(self._places)
        # The checkpoints are read before the logs, so everything that they count is there when the logs are scanned.
        published = [read_checkpoint(disk, one.path, one.log_id) or {} for one in directories]
        self._follows: list[Follow] = []
        self._durable: list[int] = []  # Offsets up to which each server has published that its log is durable.
        for payload in published:
            indexed, keep_from, *said = (
                value if isinstance(value := payload.get(name), int) else None
                for name in ("indexed_offset", "keep_from", "next_sequence", "epoch")
            )
            follow = Follow(Checked(indexed or 0, *said) if payload else None)
            if (keep_from or 0) > (indexed or 0):
                follow.faults.append(f"it is kept from {keep_from} on, and indexed up to {indexed}")
            self._follows.append(follow)
            self._durable.append(indexed or 0)
        self._greeted: dict[tuple[int, int], list[LoggedHello]] = {}
        # By target and origin, the first batch that is called decided by itself: its epoch and number.
        self._ahead: dict[tuple[int, int], tuple[int, int]] = {}

    def scan(self, *, newer: bool, scan: Scan | None = None) -> None:
        """Index the groups that were appended since the last scan; ``scan`` reads them, None: this process."""
        pieces: list[LogPiece] = []
        for number, place in enumerate(self._places):
            stop = log_size(self._disk, place)
            if stop > self._read[number]:
                pieces.append(LogPiece(number, place, self._read[number], self._durable[number], stop))
        here = (chunk for piece in pieces for chunk in scan_piece(self._disk, piece))
        for chunk in here if scan is None else scan(pieces):
            self._take(chunk, newer)

    def index(self) -> TargetIndex:
        targets = [
            Target(place.folder, place.log_id, start) for place, start in zip(self._places, self._starts, strict=True)
        ]
        batches = np.concatenate(self._pieces)
        for (number, origin), watermark in self._watermarks.items():
            covered = _covered(batches, watermark)
            covered &= (batches["target"] == number) & (batches["origin_log_id"] == origin) & (batches["newer"] == 0)
            batches["decided"][covered] = 1
        subjects = tuple(name.decode("ascii") for name in self._names)
        return TargetIndex(
            *(tuple(targets), batches, subjects, tuple(self._last_appended_ms), tuple(self._all_faults(batches))),
            hellos=self._greeted,
        )

    def _all_faults(self, batches: Batches) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for number, place in enumerate(self._places):
            here = batches["target"] == number
            for origin in np.unique(batches["origin_log_id"][here]).tolist():
                own = here & (batches["origin_log_id"] == origin)
                first = _first_behind(batches["epoch"][own], batches["batch_id"][own])
                told = (first, "does not follow the one before it"), (self._ahead.get((number, origin)), AHEAD)
                for (epoch, batch_id), what in ((which, what) for which, what in told if which is not None):
                    text = f"batch {batch_id} of epoch {epoch} of delay server {origin:016x} {what}"
                    found.append((place.log_id, text))
        for place, follow in zip(self._places, self._follows, strict=True):
            found += [(place.log_id, what) for what in follow.end()]
        for (number, origin), greetings in self._greeted.items():
            own = batches[(batches["target"] == number) & (batches["origin_log_id"] == origin)]
            found += [(self._places[number].log_id, what) for what in _decided_before(own, greetings, origin)]
        return found

    def _take(self, chunk: Chunk, newer: bool) -> None:
        target, groups, rows = chunk.target, chunk.groups, chunk.batches
        self._torn += chunk.torn
        if len(groups):
            begin, crc = int(groups["offset"][0]), int(groups["previous_crc32c"][0])
            if begin != self._read[target] or self._crcs[target] not in (None, crc):
                raise DamagedData(
                    f"{chunk.folder}/{segment_name(begin)}", 0, "it does not follow the segment before it"
                )
            self._read[target], self._crcs[target] = int(groups["end"][-1]), int(groups["header_crc32c"][-1])
            self._last_appended_ms[target] = max(self._last_appended_ms[target], int(groups["appended_at_ms"].max()))
            for group in groups.tolist():
                self._follows[target].take(Followed._make(group))
        numbers = [self._names.setdefault(name, len(self._names)) for name in chunk.names]
        rows["subject"] = np.array(numbers, np.uint32)[rows["subject"]]
        rows["newer"] = newer
        self._pieces.append(rows)
        for origin in np.unique(rows["origin_log_id"]).tolist():
            self._note_watermarks(target, origin, chunk, newer)
        for origin, greeting in chunk.greetings:
            self._greeted.setdefault((target, origin), []).append(greeting)
            if not newer:
                self._note_watermark(target, origin, greeting.watermark)

    def _note_watermarks(self, target: int, origin: int, chunk: Chunk, newer: bool) -> None:
        own = np.flatnonzero(chunk.batches["origin_log_id"] == origin)
        epochs, ids = chunk.batches["epoch"][own], chunk.batches["batch_id"][own]
        w_epochs, w_ids = chunk.watermarks[own].T
        ahead = (w_epochs > epochs) | ((w_epochs == epochs) & (w_ids >= ids))
        if ahead.any():
            first = int(np.argmax(ahead))
            self._ahead.setdefault((target, origin), (int(epochs[first]), int(ids[first])))
        # Watermarks from the second scan are left out: they may cover outcomes that were recorded after the dispatch
        # logs' sizes were taken.
        if not newer:
            epoch = w_epochs.max()
            self._note_watermark(target, origin, (int(epoch), int(w_ids[w_epochs == epoch].max())))

    def _note_watermark(self, target: int, origin: int, watermark: tuple[int, int]) -> None:
        known = self._watermarks.get((target, origin), (0, 0))
        self._watermarks[target, origin] = max(known, watermark)


def _hellos(group: CommitGroup) -> Iterator[tuple[int, LoggedHello]]:
    for _, batch in group.batches():
        for record in decode_sound(batch):
            if isinstance(record, HelloHeard):
                header = group.header
                watermark = record.w[0], record.w[1]
                yield record.log_id, LoggedHello(header.offset, watermark, record.epoch, header.appended_at_ms)


def _first_behind(epochs: UInt64s, ids: UInt64s) -> tuple[int, int] | None:
    """The first batch of a delay server whose epoch and number are not above those of the one before it."""
    rises = (epochs[1:] > epochs[:-1]) | ((epochs[1:] == epochs[:-1]) & (ids[1:] > ids[:-1]))
    if len(ids) and (epochs[0], ids[0]) <= (0, 0):
        return int(epochs[0]), int(ids[0])
    if rises.all():
        return None
    first = 1 + int(np.argmin(rises))
    return int(epochs[first]), int(ids[first])


def _covered(batches: Batches, watermark: tuple[int, int]) -> NDArray[np.bool_]:
    """Which batches of one origin a watermark calls decided."""
    epoch, batch_id = map(np.uint64, watermark)
    same: NDArray[np.bool_] = (batches["epoch"] == epoch) & (batches["batch_id"] <= batch_id)
    return same | (batches["epoch"] < epoch)


def _decided_before(batches: Batches, greetings: Sequence[LoggedHello], origin: int) -> Iterator[str]:
    """Batches of one origin that an earlier greeting called decided, though nobody knew of them yet (rule H1)."""
    highest = (0, 0)
    for greeting in greetings:
        if greeting.watermark <= highest:
            continue
        highest = greeting.watermark
        covered = _covered(batches, highest) & (batches["offset"] > greeting.offset)
        if covered.any():
            first = batches[int(np.argmax(covered))]
            text = f"batch {first['batch_id']} of epoch {first['epoch']} of delay server {origin:016x}"
            yield f"{text} is called decided by a greeting before it"


class _Fronts:
    """The beginnings of batches, copied out of their groups, and decoded all at once."""

    def __init__(self, target: int, folder: str) -> None:
        self._target = target
        self._folder = folder
        self._clear()

    @property
    def are_many(self) -> bool:
        return self._count >= DECODE_BATCHES

    def add(self, group: CommitGroup, segment_base: int) -> None:
        header, buffer = group.header, group.buffer
        sizes = np.frombuffer(buffer, np.uint32, header.batch_count, HEADER.size).astype(np.int64)
        begins = np.cumsum(sizes) - sizes + content_position(header.batch_count)
        # A batch is longer than the bytes in front of its kind, so this reads within it.
        handed_over = np.frombuffer(buffer, np.uint8).take(begins + KIND_AT) == BatchKind.DISPATCH
        if not handed_over.all():
            sizes, begins = sizes[handed_over], begins[handed_over]
        if not len(sizes):
            return
        words = np.frombuffer(buffer, np.uint64)
        whole = sizes >= FRONT_BYTES
        heap_at = np.zeros(len(sizes), np.int64)
        ends = heap_at.copy()
        if whole.all():
            fronts = words.take((begins >> 3)[:, None] + FRONT_WORDS)
            heap_at = fronts.view(FRONT)["heap_offset"].ravel().astype(np.int64)
            whole = (heap_at & 7 == 0) & (heap_at > FRONT_BYTES) & (heap_at + 8 <= sizes)
        if whole.all():
            ends = np.frombuffer(buffer, np.uint32).take((begins + heap_at) >> 2).astype(np.int64)
            whole = (ends > 0) & (heap_at + 8 + ends <= sizes)
        if not whole.all():
            self._fail(segment_base, header.offset + int(begins[np.argmin(whole)]))
        too_long = ends > SUBJECT_BYTES_MAX
        if too_long.any():
            self._fail(segment_base, header.offset + int(begins[np.argmax(too_long)]))
        self._fronts.append(fronts)
        self._offsets.append(begins + header.offset)
        self._sizes.append(sizes)
        self._subjects.append(_names(words, ((begins + heap_at) >> 3) + 1, ends))
        self._groups.append((len(sizes), segment_base, header.appended_at_ms))
        self._count += len(sizes)

    def _numbers(self) -> tuple[list[bytes], Int64s]:
        """The subjects of the gathered batches, and for each batch its place among them."""
        width = max(names.shape[1] for names in self._subjects)
        names = np.zeros((self._count, width), np.uint64)
        first = 0
        for piece in self._subjects:
            names[first : first + len(piece), : piece.shape[1]] = piece
            first += len(piece)
        # Names are compared by one word each; if two names give the same word, they are compared as a whole.
        mixed = np.einsum("ij,j->i", names, MIXERS[:width])
        _, found, which = np.unique(mixed, return_index=True, return_inverse=True)
        if (names != names[found][which]).any():
            _, found, which = np.unique(names, axis=0, return_index=True, return_inverse=True)
        return [names[row, 1:].tobytes()[: int(names[row, 0])] for row in found], which.ravel()

    def decode(self) -> tuple[Batches, UInt64s, list[bytes]]:
        """The batches gathered since the last call, the watermark of each, and their subjects."""
        words = np.concatenate([np.empty((0, len(FRONT_WORDS)), np.uint64), *self._fronts])
        fronts = words.view(FRONT).ravel()
        rows = np.zeros(len(fronts), BATCH)
        rows["target"] = self._target
        names: list[bytes] = []
        if len(rows):
            counts, bases, appended = zip(*self._groups, strict=True)
            rows["segment_base"] = np.repeat(np.array(bases, np.uint64), counts)
            rows["appended_at_ms"] = np.repeat(np.array(appended, np.int64), counts)
            rows["offset"] = np.concatenate(self._offsets)
            names, rows["subject"] = self._numbers()
            for name in ("origin_log_id", "epoch", "batch_id", "claimed_at_ms", "hour", "count", "columns_crc32c"):
                rows[name] = fronts[name]
            rows["columns_end"], rows["deliver_at"] = fronts["heap_offset"], fronts["first_at"]
            self._check(fronts, rows)
        self._clear()
        return rows, np.stack((fronts["w_epoch"], fronts["w_id"]), axis=1), names

    def _check(self, fronts: NDArray[np.void], rows: Batches) -> None:
        """Check that the columns of each batch lie where the index says; intake has proved that of each batch."""
        bytes_a_column = 8 * fronts["count"].astype(np.int64)
        wrong = (fronts["magic"] != MAGIC) | (fronts["version"] != VERSION) | (fronts["subject_count"] != 1)
        wrong |= (fronts["kind_bytes"] != COLUMNS_AT - HEADER_BYTES) | (
            fronts["total_bytes"] != np.concatenate(self._sizes)
        )
        wrong |= (fronts["first_id"] != ColumnId.DELIVER_AT_MS) | (fronts["second_id"] != ColumnId.SEQUENCE)
        wrong |= fronts["first_at"] != COLUMNS_AT + 8 * fronts["column_count"].astype(np.int64)
        wrong |= fronts["second_at"] != fronts["first_at"] + bytes_a_column
        wrong |= fronts["second_at"] + bytes_a_column > fronts["heap_offset"]
        if wrong.any():
            first = rows[int(np.argmax(wrong))]
            self._fail(int(first["segment_base"]), int(first["offset"]))

    def _fail(self, segment_base: int, offset: int) -> None:
        path = f"{self._folder}/{segment_name(segment_base)}"
        raise DamagedData(path, offset - segment_base + FILE_HEADER_BYTES, NO_BATCH)

    def _clear(self) -> None:
        self._count = 0
        self._fronts: list[UInt64s] = []  # A row of words for each batch.
        self._offsets: list[Int64s] = []
        self._sizes: list[Int64s] = []
        self._subjects: list[UInt64s] = []  # As `_names` gives them.
        self._groups: list[tuple[int, int, int]] = []  # Batches, base offset of the segment, append instant.


def _names(words: UInt64s, places: Int64s, lengths: Int64s) -> UInt64s:
    """Names as rows of words: the length, then the name with zeros behind it; each begins at a word of ``places``."""
    counts = (lengths + 7) >> 3
    width = int(counts.max())
    # Behind a shorter name other words stand, and behind the last one perhaps none.
    names = words.take(places[:, None] + np.arange(-1, width), mode="clip")
    names[:, 0] = lengths
    if int(counts.min()) < width:
        names[:, 1:][np.arange(width) >= counts[:, None]] = 0
    return names


def read_target_rows(disk: Disk, index: TargetIndex, batches: Batches, part: range | None = None) -> TargetRows:
    """The rows of some batches of an index, in its order; with a ``part`` only those with its sequences.

    Raises LogMoved when a segment went away meanwhile, DamagedData when a batch's columns do not check.
    """
    pieces = [(NO_COLUMNS, NO_INT64S)]
    memory = ReadMemory()
    for path, first, until in _by_segment(index, batches):
        with closing(_open(disk, path)) as file:
            for start, stop in _runs(batches[first:until]):
                low, high = first + start, first + stop
                columns = _read_run(path, file, batches[low:high], memory)
                batch_of = np.repeat(np.arange(low, high), batches["count"][low:high])
                if part is not None:
                    rows = rows_of_part(columns.sequence, part)
                    columns, batch_of = TargetColumns._make(column[rows] for column in columns), batch_of[rows]
                pieces.append((columns, batch_of))
    sequence, due, hashes = map(np.concatenate, zip(*(columns for columns, _ in pieces), strict=True))
    batch_of = np.concatenate([each for _, each in pieces])
    return TargetRows(sequence, due, batch_of, batches, index.targets, index.subjects, hashes)


def _by_segment(index: TargetIndex, batches: Batches) -> Iterator[tuple[str, int, int]]:
    if not len(batches):
        return
    changes = (batches["target"][1:] != batches["target"][:-1]) | (
        batches["segment_base"][1:] != batches["segment_base"][:-1]
    )
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(batches)]
    for first, until in pairwise(bounds):
        folder = index.targets[batches["target"][first]].folder
        yield f"{folder}/{segment_name(int(batches['segment_base'][first]))}", first, until


def _runs(batches: Batches) -> Iterator[tuple[int, int]]:
    """Ranges of batches of one file that are read together: near each other, and not too many."""
    begins = batches["offset"].astype(np.int64)
    ends = begins + batches["columns_end"]
    far = np.flatnonzero(begins[1:] - ends[:-1] > GAP_BYTES) + 1
    bounds = [0, *far.tolist(), len(batches)]
    for first, until in pairwise(bounds):
        while first < until:
            stop = max(first + 1, int(np.searchsorted(ends[first:until], begins[first] + READ_BYTES)) + first)
            yield first, stop
            first = stop


def _read_run(path: str, file: File, batches: Batches, memory: ReadMemory) -> TargetColumns:
    begin = int(batches["offset"][0]) + COLUMNS_AT
    position = begin - int(batches["segment_base"][0]) + FILE_HEADER_BYTES
    starts = batches["offset"].astype(np.int64) - begin
    ends = starts + batches["columns_end"]
    view = memory.view(int(ends[-1]))
    if file.pread_into(view, position) < len(view):
        raise DamagedData(path, position, "the batches are cut short")
    known = batches["columns_crc32c"].tolist()
    for start, end, crc in zip((starts + COLUMNS_AT).tolist(), ends.tolist(), known, strict=True):
        if crc32c(view[start:end]) != crc:
            raise DamagedData(path, position + start, "the checksum of a batch's columns differs")
    return _columns_of(np.frombuffer(view, np.uint64), starts, batches)


def _columns_of(words: UInt64s, starts: Int64s, batches: Batches) -> TargetColumns:
    """The rows of batches that begin at the bytes ``starts`` of ``words``, which hold their columns."""
    counts = batches["count"].astype(np.int64)
    # For each row the word of its due instant; the word of its sequence is as many words further as its batch has rows.
    first_rows = np.cumsum(counts) - counts
    places = np.repeat(((starts + batches["deliver_at"]) >> 3) - first_rows, counts)
    places += np.arange(len(places))
    due = words.take(places).view(np.int64)
    places += np.repeat(counts, counts)
    return TargetColumns(words.take(places), due, _hashes_of(words, starts >> 3, batches, counts))


def _hashes_of(words: UInt64s, starts: Int64s, batches: Batches, counts: Int64s) -> UInt64s:
    """The content hashes of batches that begin at the words ``starts``; zeros for a batch that states none.

    No column has a higher number, so the hash column is the last one, and ends where the columns end.
    """
    last_entries = words.take(starts + (batches["deliver_at"].astype(np.int64) >> 3) - 1)
    begins = (batches["columns_end"].astype(np.int64) >> 3) - counts
    expected = (begins.astype(np.uint64) << np.uint64(35)) | np.uint64(8 << 16 | ColumnId.CONTENT_HASH)
    places = np.repeat(starts + begins - (np.cumsum(counts) - counts), counts)
    places += np.arange(len(places))
    hashes = words.take(places)
    states_none = last_entries != expected
    if states_none.any():
        hashes[np.repeat(states_none, counts)] = NOT_STATED
    return hashes


def _open(disk: Disk, path: str) -> File:
    try:
        return open_named(disk, path)
    except FileNotFoundError:
        raise LogMoved(f"{path} is gone") from None
