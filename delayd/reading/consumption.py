"""Consumption: what each group of consumers was given and what became of it, by a realtime server's pull log; and its
consume logs, compared with the message log that they are derived from (docs/formats/consume.md, rule L9).

Invariant: everything is counted in arrays, by the ranges that entries name, and never by single messages. Pull log
entries are removed once a checkpoint holds their effect, so the figures cover only the entries that are still kept
(docs/formats/pull.md). Entries of a consume log follow each other as the subject's messages do. A log that ends early
is not damaged: its server's state says how much of it is valid, and the rest is made anew.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import BatchKind, ColumnId, Int64s
from delayd.batch.sequences import ROW_BITS, ROW_MASK
from delayd.errors import BatchMalformed, DamagedData, DataError
from delayd.log.checkpoint import read_checkpoint
from delayd.log.consume import Entries, entries_in, entries_of, entry_position
from delayd.log.control import GroupCreated, GroupDeleted, GroupMoved, GroupSetBack, RetryDecided, decode_sound
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.log import LogPlace
from delayd.log.pull import PullOp, decode_rows
from delayd.log.segment import FileKind, UnfinishedFile, open_segment
from delayd.machine.disk import Disk
from delayd.reading.files.directory import Directory
from delayd.reading.files.row_arrays import Batches
from delayd.reading.files.stored_groups import LogMoved, TornTail, log_size, read_log, segment_bases
from delayd.reading.files.target_index import TargetIndex, TargetIndexer
from delayd.reading.findings import HourKey

ENTRY = np.dtype(
    [
        ("op", "u1"),
        ("zero", "u1"),
        ("attempt", "<u2"),
        ("group_id", "<u4"),
        ("incarnation", "<u8"),
        ("pull_first", "<u8"),
        ("consume_first", "<u8"),
        ("count", "<u4"),
        ("lease_ms", "<u4"),
        ("at_ms", "<i8"),
    ]
)
SENT_BACK = 128  # The op of a row of a retry record, which is counted like an entry.
SUMMED = (
    *("pulled", "redelivered", "acknowledged", "given_back", "sent_back", "lapsed", "outstanding", "gaps"),
    "ack_ms_total",
)
_CONSUME_MAX = 1 << 62  # Above every consume sequence.
FAULTS_TOLD = 100  # Faults of one realtime server that are reported; the others are not.
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GroupBooks:
    """One group: messages by what became of them. ``pulled`` counts each time that a message was given out.

    ``pulled == acknowledged + given_back + sent_back + lapsed + outstanding``. ``gaps`` are messages between the
    first and the last pulled one that no pull names. ``subject`` and ``group`` are "" where their record is not kept.
    """

    log_id: int
    group_id: int
    subject: str
    group: str
    pulled: int
    redelivered: int  # How many of these had an attempt above 1.
    acknowledged: int
    given_back: int  # Given back by a consumer, whether a handler was given them or not.
    sent_back: int  # They live on at their delay server: to come again later, or as dead letters.
    lapsed: int
    outstanding: int
    gaps: int
    ack_ms_total: int = 0  # How long acknowledged messages were held before that, all of them together.
    ack_ms_max: int = 0


class Consumption(NamedTuple):
    """The contents of the pull log of one realtime server, and its faults."""

    groups: tuple[GroupBooks, ...] = ()
    faults: tuple[str, ...] = ()
    # By subject: the consume sequence behind the last message that a group was given, as far as that was durable.
    ends: tuple[tuple[str, int], ...] = ()


class _GroupLife(NamedTuple):
    """A group from its record on, or from where an operator has moved it, or a start has set it back; its id may have
    had a life before.
    """

    group_id: int
    begin: int  # Number of its first entry.
    subject: str = ""
    group: str = ""
    goes_on: bool = False  # A start set it back, so what it was given before can still be ended.
    end: int = _CONSUME_MAX  # A power cut may have taken what it was given from here on (rule L2).


class HourRuns(NamedTuple):
    """The messages of one subject, by consume sequence: run i begins at ``first[i]``, and ends before the next one."""

    first: Int64s  # One more than there are runs.
    key_of: Int64s  # For each run, which of ``keys`` its messages are of.
    keys: Sequence[HourKey]


def read_consumption(disk: Disk, directory: Directory, torn: list[TornTail]) -> Consumption:
    """Read the pull log of a realtime server, before its message log; LogMoved or DamagedData as `read_log`."""
    books, unsound = _read_books(disk, directory, torn)
    found = Consumption() if books is None else books.close()
    if unsound:
        what = f"{unsound} entries of the pull log say what no server writes"
        return found._replace(faults=(what, *found.faults))
    return found


def pull_log_start(disk: Disk, directory: Directory) -> int | None:
    """The offset from which on a realtime server's pull log is kept; None: nobody ever pulled."""
    bases = segment_bases(disk, _pull_place(directory))
    return bases[0] if bases else None


def read_whole_log(disk: Disk, directory: Directory) -> "PullBooks | None":
    """The entries of a pull log that is kept from its beginning; None: that is gone by now. See `read_consumption`."""
    books, unsound = _read_books(disk, directory, [])
    if unsound:
        raise DamagedData(_pull_place(directory).folder, 0, f"{unsound} entries say what no server writes")
    return books if books is not None and books.whole else None


def _pull_place(directory: Directory) -> LogPlace:
    return LogPlace(f"{directory.path}/pull", FileKind.PULL, directory.log_id)


def _read_books(disk: Disk, directory: Directory, torn: list[TornTail]) -> "tuple[PullBooks | None, int]":
    """The entries of a pull log, and how many others it has, which no server writes."""
    place = _pull_place(directory)
    bases = segment_bases(disk, place)
    if not bases:
        return None, 0
    counted = (read_checkpoint(disk, directory.path, directory.log_id) or {}).get("pull_offset", 0)
    pieces, epochs, lives = [np.empty(0, ENTRY)], [np.empty(0, np.int64)], list[_GroupLife]()
    count = durable = 0
    for group in read_log(disk, place, bases[0], log_size(disk, place), torn):
        for entries in _entries_of(group, count, lives):
            pieces.append(entries)
            epochs.append(np.full(len(entries), group.header.epoch))
            count += len(entries)
        if isinstance(counted, int) and group.end <= counted:
            durable = count
    entries, epoch = np.concatenate(pieces), np.concatenate(epochs)
    sound = _sound(entries)
    books = PullBooks(
        directory.log_id,
        entries[sound],
        epoch[sound],
        _moved(lives, sound),
        whole=bases[0] == 0,
        durable=int(sound[:durable].sum()),
    )
    return books, int((~sound).sum())


def hour_runs(disk: Disk, directory: Directory, index: TargetIndex) -> dict[str, HourRuns] | None:
    """The kept messages of each subject of a realtime server, whose index this is, by hour and delay server.

    None: nobody knows how many messages of a subject stood before the kept ones.
    """
    (target,), batches = index.targets, index.batches
    removed = _removed_before(disk, directory, index) if target.start else {}
    found: dict[str, HourRuns] = {}
    for number, subject in enumerate(index.subjects):
        own = batches[batches["subject"] == number]
        if len(own) and target.start and number not in removed:
            return None
        if len(own):
            pairs = np.stack((own["origin_log_id"].astype(np.uint64), own["hour"].astype(np.uint64)), axis=1)
            keys, key_of = np.unique(pairs, axis=0, return_inverse=True)
            first = removed.get(number, 0) + np.concatenate(([0], np.cumsum(own["count"].astype(np.int64))))
            found[subject] = HourRuns(first, key_of.reshape(-1), [(int(one), int(hour)) for one, hour in keys.tolist()])
    return found


def _removed_before(disk: Disk, directory: Directory, index: TargetIndex) -> dict[int, int]:
    """How many messages of subjects, by number, stood before the first kept one: its consume log says it."""
    (target,), found = index.targets, dict[int, int]()
    folder = f"{directory.path}/consume"
    for name in disk.list_folder(folder):
        try:
            pieces = [(base, entries) for _, base, _, entries in _consume_pieces(disk, directory, f"{folder}/{name}")]
        except (DataError, FileNotFoundError, UnfinishedFile):
            continue
        if pieces:
            entries = np.concatenate([each for _, each in pieces])
            kept = np.flatnonzero((entries >> np.uint64(ROW_BITS) >= target.start) & (entries > 0))
            subject = _subject_at(index.batches, int(entries[kept[0]] >> np.uint64(ROW_BITS))) if len(kept) else None
            if subject is not None and not int(entries[kept[0]]) & ROW_MASK:
                found[subject] = pieces[0][0] + int(kept[0])
    return found


def sum_groups(parts: Iterable[GroupBooks]) -> list[GroupBooks]:
    """Figures of the same groups, added up; by realtime server and group."""
    found: dict[tuple[int, int, str, str], GroupBooks] = {}
    for books in parts:
        key = books.log_id, books.group_id, books.subject, books.group
        known = found.get(key)
        if known is not None:
            sums = {name: getattr(known, name) + getattr(books, name) for name in SUMMED}
            books = replace(books, **sums, ack_ms_max=max(known.ack_ms_max, books.ack_ms_max))
        found[key] = books
    return [found[key] for key in sorted(found)]


def beyond(consumption: Consumption, index: TargetIndex, number: int) -> Iterator[str]:
    """Groups that were given messages which their subject has never had, where the message log has lost none yet."""
    target = index.targets[number]
    if target.start:
        return
    own = index.batches["target"] == number
    subjects, counts = index.batches["subject"][own], index.batches["count"][own]
    rows = np.bincount(subjects, counts, len(index.subjects)).astype(np.int64)
    had = dict(zip(index.subjects, rows.tolist(), strict=True))
    for subject, end in consumption.ends:
        if end > had.get(subject, 0):
            what = f"a group of {subject} was given messages up to number {end - 1}"
            yield f"{what}, and the message log has {had.get(subject, 0)} of them"


def _entries_of(group: CommitGroup, count: int, lives: list[_GroupLife]) -> Iterator[NDArray[np.void]]:
    for _, batch in group.batches():
        if group.header.kind == GroupKind.CONTROL:
            for record in decode_sound(batch):
                if isinstance(record, GroupCreated):
                    lives.append(_GroupLife(record.group_id, count, record.subject, record.group))
                elif isinstance(record, GroupMoved):
                    # From here on it may get messages again that it had acknowledged.
                    known = next((life for life in reversed(lives) if life.group_id == record.group_id), None)
                    lives.append(_GroupLife(record.group_id, count, *(known[2:4] if known is not None else ())))
                elif isinstance(record, GroupSetBack):
                    # From here on it gets other messages under these numbers.
                    _end_lives(lives, record.group_id, record.next)
                    known = next((life for life in reversed(lives) if life.group_id == record.group_id), None)
                    names = known[2:4] if known is not None else ("", "")
                    lives.append(_GroupLife(record.group_id, count, *names, goes_on=True))
                elif isinstance(record, GroupDeleted):
                    # No start sets it back, so nobody knows what a power cut took of what it was given.
                    _end_lives(lives, record.group_id, 0)
                elif isinstance(record, RetryDecided):
                    found = _sent_back(record)
                    count += len(found)
                    yield found
        elif batch.kind == BatchKind.PULL:
            found = np.frombuffer(batch.buffer, ENTRY, batch.count, batch.offsets[ColumnId.ENTRY])
            count += len(found)
            yield found


def _sent_back(record: RetryDecided) -> NDArray[np.void]:
    try:
        rows = decode_rows(record.rows)
    except BatchMalformed:
        return np.zeros(1, ENTRY)  # It is counted with the entries that no server writes.
    found = np.zeros(len(rows), ENTRY)
    found["op"], found["group_id"], found["at_ms"] = SENT_BACK, record.group_id, record.at_ms
    found["attempt"] = [row.attempt for row in rows]
    found["incarnation"] = [row.incarnation for row in rows]
    found["pull_first"] = [row.pull_first for row in rows]
    found["consume_first"] = [row.consume_first for row in rows]
    found["count"] = [row.covered for row in rows]
    return found


def _sound(entries: NDArray[np.void]) -> Mask:
    """Which entries have possible numbers: no value from a file is used before it was checked (rule E1)."""
    sound: Mask = (entries["count"] > 0) & np.isin(entries["op"], [*PullOp, SENT_BACK])
    for name in ("pull_first", "consume_first"):
        sound &= entries[name] < np.uint64(1 << 62)
    return sound


def _end_lives(lives: list[_GroupLife], group_id: int, end: int) -> None:
    """Note that what a group was given up to now proves nothing from this consume sequence on."""
    for at, life in enumerate(lives):
        if life.group_id == group_id:
            lives[at] = life._replace(end=min(life.end, end))


def _moved(lives: Sequence[_GroupLife], sound: Mask) -> list[_GroupLife]:
    """The same lives, with their first entries counted among the sound entries only."""
    before = np.concatenate(([0], np.cumsum(sound)))
    return [life._replace(begin=int(before[life.begin])) for life in lives]


class PullBooks:
    """The entries of one pull log, in order.

    The pull sequences that entries name fall into stretches, each of which an entry covers as a whole or not at all.
    Example: entry 0 pulls 0 to 9, entry 1 pulls 10 to 14, entry 2 acknowledges 0 to 3, and the lease of 0 to 9 lapses
    by entry 3. The bounds are 0, 4, 10 and 15: the stretch 0 to 3 was pulled by entry 0 and ended by entry 2, 4 to 9 by
    0 and 3, and 10 to 14 by 1 and by nothing, so it is outstanding.
    """

    def __init__(
        self,
        log_id: int,
        entries: NDArray[np.void],
        epochs: Int64s,
        lives: Sequence[_GroupLife],
        *,
        whole: bool,
        durable: int,
    ) -> None:
        self._log_id = log_id
        self._faults: list[str] = []
        self.whole = whole
        self._durable = durable  # Entries that a checkpoint counts. What the others name, a power cut may have taken.
        self._op = entries["op"]
        self._number = np.arange(len(entries))
        self._first = entries["pull_first"].astype(np.int64)
        self._end = self._first + entries["count"]
        self._consume = entries["consume_first"].astype(np.int64)
        self._incarnation = entries["incarnation"]
        self._attempt = entries["attempt"]
        self._at_ms = entries["at_ms"]
        self._epochs = epochs
        self._lives = self._all_lives(entries["group_id"], lives)
        self._life = self._life_of(entries["group_id"])
        numbers = np.arange(len(self._lives))
        ids = [life.group_id for life in self._lives]
        goes_on = [
            life.goes_on and life.group_id == before for life, before in zip(self._lives, [-1, *ids], strict=False)
        ]
        # For each life the first one of its line: what that was given may be ended in all of them.
        self._line = np.maximum.accumulate(np.where(np.array(goes_on, bool), 0, numbers))
        self._pulls = np.flatnonzero(self._op == PullOp.PULL)
        self._others = np.flatnonzero(self._op != PullOp.PULL)

    def close(self) -> Consumption:
        """All groups, and what is wrong."""
        self._check_pulls()
        # The pull sequences fall into stretches; each entry covers a stretch as a whole or not at all.
        bounds = np.unique(np.concatenate((self._first, self._end)))
        if len(bounds) < 2:
            return Consumption(faults=tuple(self._faults))
        lengths = np.diff(bounds)
        pull_of = self._cover(bounds, self._pulls, last=True)
        closed_by = self._closed(bounds, pull_of)
        given = pull_of >= 0
        groups, ends = [], dict[str, int]()
        for number, life in enumerate(self._lives):
            own = given & (self._life[pull_of] == number)
            if own.any():
                groups.append(self._group(life, own, lengths, pull_of, closed_by, self._gaps(number)))
                self._check_again(life, own, bounds, pull_of, closed_by)
                if life.subject:
                    pulls = self._pulls[(self._life[self._pulls] == number) & (self._pulls < self._durable)]
                    end = int((self._consume[pulls] + self._end[pulls] - self._first[pulls]).max(initial=0))
                    ends[life.subject] = max(ends.get(life.subject, 0), min(end, life.end))
        return Consumption(tuple(groups), tuple(self._faults[:FAULTS_TOLD]), tuple(ends.items()))

    def _all_lives(self, group_ids: NDArray[np.uint32], lives: Sequence[_GroupLife]) -> list[_GroupLife]:
        """All groups by id and first entry, with or without a record in the log."""
        begun: dict[int, int] = {}
        for life in lives:
            begun.setdefault(life.group_id, life.begin)
        ids, firsts = np.unique(group_ids, return_index=True)
        found = list(lives)
        for group_id, first in zip(ids.tolist(), firsts.tolist(), strict=True):
            if first < begun.get(group_id, len(group_ids)):
                found.append(_GroupLife(group_id, -1))
                if self.whole:
                    self._faults.append(f"an entry names the group {group_id}, which no record before it made")
        return sorted(found, key=lambda life: (life.group_id, life.begin))

    def _life_of(self, group_ids: NDArray[np.uint32]) -> Int64s:
        # Ids are numbered, so that id and entry number fit into one number.
        ids = np.unique([life.group_id for life in self._lives])
        begins = np.array([life.begin for life in self._lives], np.int64)
        keys = (np.searchsorted(ids, [life.group_id for life in self._lives]) << 40) + begins + 1
        own = (np.searchsorted(ids, group_ids.astype(np.int64)) << 40) + self._number + 1
        found: Int64s = np.searchsorted(keys, own, "right") - 1
        return found

    def _check_pulls(self) -> None:
        """Pull sequences count up across all groups; a new life may leave out those that were lost with a cut end."""
        begins, ends = self._first[self._pulls], self._end[self._pulls]
        epochs = self._epochs[self._pulls]
        highest = np.maximum.accumulate(ends)
        again = begins[1:] < highest[:-1]
        left_out = (begins[1:] > highest[:-1]) & (epochs[1:] == epochs[:-1])
        for wrong, what in ((again, "are given out twice"), (left_out, "are left out")):
            for at in np.flatnonzero(wrong)[:FAULTS_TOLD].tolist():
                low, high = sorted((int(begins[at + 1]), int(highest[at])))
                self._faults.append(f"pull sequences {low} to {high - 1} {what}")

    def _cover(self, bounds: Int64s, entries: Int64s, *, last: bool) -> Int64s:
        """For each stretch the last, or the first, of some entries that covers it; -1 where none does."""
        place, entry = self._stretches(bounds, entries)
        covering = np.full(len(bounds) - 1, -1)
        # Where one place gets several values, the last one stays.
        covering[place if last else place[::-1]] = entry if last else entry[::-1]
        return covering

    def _stretches(self, bounds: Int64s, entries: Int64s) -> tuple[Int64s, Int64s]:
        places, which = _covered(bounds, self._first[entries], self._end[entries])
        return places, entries[which]

    def _closed(self, bounds: Int64s, pull_of: Int64s) -> Int64s:
        """For each stretch the first entry that ends its pull; one entry may span stretches of other groups."""
        places, entry = self._stretches(bounds, self._others)
        pull = pull_of[places]
        fits = (pull >= 0) & (pull < entry) & (self._line[self._life[pull]] == self._line[self._life[entry]])
        fits &= self._incarnation[pull] == self._incarnation[entry]
        closed_by = np.full(len(bounds) - 1, -1)
        closed_by[places[fits][::-1]] = entry[fits][::-1]
        if len(self._others):
            # An acknowledgement begins and ends with messages that are held. Below the log's beginning that can't be
            # checked.
            lowest = int(self._first[self._pulls].min(initial=np.iinfo(np.int64).max))
            known = self._others[(self._first[self._others] >= lowest) | self.whole]
            known = known[self._op[known] != PullOp.LAPSED]
            for side, place in (
                ("begins", np.searchsorted(bounds, self._first[known])),
                ("ends", np.searchsorted(bounds, self._end[known]) - 1),
            ):
                for entry_at in known[closed_by[place] != known][:FAULTS_TOLD].tolist():
                    life = self._lives[self._life[entry_at]]
                    op = int(self._op[entry_at])
                    what = "retry" if op == SENT_BACK else PullOp(op).name
                    what += f" of pull sequences {self._first[entry_at]} to "
                    what += f"{self._end[entry_at] - 1} {side} with what {_name(life)} did not hold"
                    self._faults.append(what)
        return closed_by

    def by_hour(self, runs: Mapping[str, HourRuns]) -> dict[HourKey, "list[GroupBooks] | None"]:
        """The groups of each hour with its messages alone, if each of these groups has ended with them; None: one has
        not, or has not come to them. ``runs`` are of the message log, which was read after this one.
        """
        lives = [(number, life) for number, life in enumerate(self._lives) if life.subject in runs]
        cuts = [self._cuts(number, runs[life.subject].first) for number, life in lives]
        bounds = np.unique(np.concatenate((self._first, self._end, *cuts)))
        if len(bounds) < 2:
            return {}
        lengths, pull_of = np.diff(bounds), self._cover(bounds, self._pulls, last=True)
        closed_by = self._closed(bounds, pull_of)
        begins = self._consume[pull_of] + bounds[:-1] - self._first[pull_of]
        found: dict[HourKey, list[GroupBooks] | None] = {}
        for number, life in lives:
            of_subject = runs[life.subject]
            own = (pull_of >= 0) & (self._life[pull_of] == number)
            # Of a group that was moved or deleted nothing more comes.
            last = self._lives[-1] is life or self._lives[number + 1].group_id != life.group_id
            is_over = life.end == 0 or not (last or self._lives[number + 1].goes_on)
            if not own.any() and is_over:
                continue
            low = int(begins[own].min()) if own.any() else 0
            high = int((begins + lengths)[own].max(initial=0))
            run_of = np.searchsorted(of_subject.first, begins, "right") - 1
            in_log = own & (begins >= of_subject.first[0]) & (begins < of_subject.first[-1])
            for each, key in enumerate(of_subject.keys):
                chosen = of_subject.key_of == each
                first, end = np.maximum(of_subject.first[:-1][chosen], low), of_subject.first[1:][chosen]
                if is_over:
                    end = np.minimum(end, high)
                messages = int(np.maximum(end - first, 0).sum())
                if not messages:
                    continue
                rows = in_log.copy()
                rows[rows] = of_subject.key_of[run_of[rows]] == each
                given = _distinct(begins[rows], (begins + lengths)[rows])
                books = self._group(life, rows, lengths, pull_of, closed_by, messages - given)
                known = found.setdefault(key, [])
                is_done = high >= int(end.max()) and books.acknowledged + books.sent_back == given
                if not is_done and not is_over:
                    found[key] = None
                elif known is not None:
                    known.append(books)
        return found

    def _cuts(self, number: int, first: Int64s) -> Int64s:
        """The pull sequences at which the pulls of a life come to messages of another run."""
        pulls = self._pulls[self._life[self._pulls] == number]
        begins = self._consume[pulls]
        ends = begins + self._end[pulls] - self._first[pulls]
        low, high = np.searchsorted(first, begins, "right"), np.searchsorted(first, ends, "left")
        counts = np.maximum(high - low, 0)
        places = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        cuts: Int64s = first[places] - np.repeat(begins - self._first[pulls], counts)
        return cuts

    def _gaps(self, number: int) -> int:
        pulls = self._pulls[self._life[self._pulls] == number]
        begins = self._consume[pulls]
        ends = begins + self._end[pulls] - self._first[pulls]
        return int(ends.max() - begins.min()) - _distinct(begins, ends)

    def _group(
        self, life: _GroupLife, own: Mask, lengths: Int64s, pull_of: Int64s, closed_by: Int64s, gaps: int
    ) -> GroupBooks:
        size, pulls = lengths[own], pull_of[own]
        closed = closed_by[own]
        op = np.where(closed >= 0, self._op[closed], 0)
        acked = op == PullOp.ACK
        # A clock that was set back makes no time negative.
        held_ms = np.maximum(self._at_ms[closed[acked]] - self._at_ms[pulls[acked]], 0)
        return GroupBooks(
            log_id=self._log_id,
            group_id=life.group_id,
            subject=life.subject,
            group=life.group,
            pulled=int(size.sum()),
            redelivered=int(size[self._attempt[pulls] > 1].sum()),
            acknowledged=int(size[acked].sum()),
            given_back=int(size[(op == PullOp.NACK) | (op == PullOp.RETURNED)].sum()),
            sent_back=int(size[op == SENT_BACK].sum()),
            lapsed=int(size[op == PullOp.LAPSED].sum()),
            outstanding=int(size[op == 0].sum()),
            gaps=gaps,
            ack_ms_total=int((held_ms * size[acked]).sum()),
            ack_ms_max=int(held_ms.max(initial=0)),
        )

    def _check_again(self, life: _GroupLife, own: Mask, bounds: Int64s, pull_of: Int64s, closed_by: Int64s) -> None:
        """Check that no acknowledged message comes again (rule Q5), and none that lives on elsewhere (rule Q2)."""
        acked = np.flatnonzero(own & (closed_by >= 0))
        acked = acked[np.isin(self._op[closed_by[acked]], (PullOp.ACK, SENT_BACK))]
        if not len(acked):
            return
        pulls = self._pulls[self._lives.index(life) == self._life[self._pulls]]
        offset = self._consume[pull_of[acked]] - self._first[pull_of[acked]]
        low, high = bounds[acked] + offset, bounds[acked + 1] + offset
        begins = self._consume[pulls]
        ends = begins + self._end[pulls] - self._first[pulls]
        edges = np.unique(np.concatenate((low, high, begins, ends)))
        last_pull = np.full(len(edges), -1)
        places, which = _covered(edges, begins, ends)
        last_pull[places] = pulls[which]
        places, which = _covered(edges, low, high)
        by = closed_by[acked[which]]
        wrong = last_pull[places] > by
        for at, closer in zip(places[wrong][:FAULTS_TOLD].tolist(), by[wrong].tolist(), strict=False):
            what = f"message {edges[at]} of {life.subject or 'its subject'} was given to {_name(life)} again"
            became = "sent back" if self._op[closer] == SENT_BACK else "acknowledged"
            self._faults.append(f"{what} after it was {became}")


def _distinct(begins: Int64s, ends: Int64s) -> int:
    """How many numbers some ranges have together, each counted once."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    reached = np.maximum.accumulate(np.concatenate((begins[:1], ends)))[:-1]
    return int(np.maximum(ends - np.maximum(begins, reached), 0).sum())


def _covered(edges: Int64s, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """The stretches between edges that ranges cover, one range behind the other, and for each which range it is."""
    low = np.searchsorted(edges, begins)
    counts = np.searchsorted(edges, ends) - low
    which = np.repeat(np.arange(len(counts)), counts)
    return (low - (np.cumsum(counts) - counts))[which] + np.arange(len(which)), which


def _name(life: _GroupLife) -> str:
    return f"group {life.group} of {life.subject}" if life.subject else f"group {life.group_id:08x}"


def wrong_entries(disk: Disk, directory: Directory) -> Iterator[DamagedData]:
    """Name the first wrong entry of each consume log; nothing where the message log or a file can't be read.

    Such damage is named where the file itself is verified.
    """
    try:
        published = read_checkpoint(disk, directory.path, directory.log_id) or {}
        indexer = TargetIndexer(disk, [directory], [])
        indexer.scan(newer=False)
    except (DataError, LogMoved):
        return
    index, stop = indexer.index(), published.get("indexed_offset", 0)
    of_subject: dict[int, str] = {}  # Folders, by the number of their subject in the index.
    folder = f"{directory.path}/consume"
    for name in disk.list_folder(folder):
        try:
            found = _check(disk, directory, f"{folder}/{name}", index, stop if isinstance(stop, int) else 0, of_subject)
        except (DataError, FileNotFoundError, UnfinishedFile):
            continue
        if found is not None:
            yield found


def _check(
    disk: Disk, directory: Directory, folder: str, index: TargetIndex, stop: int, of_subject: dict[int, str]
) -> DamagedData | None:
    """What is wrong with the consume log in a folder; ``of_subject`` is given the folder of its subject."""
    (target,) = index.targets
    pieces: list[tuple[str, int, Entries]] = []  # Path, consume sequence of the first entry, entries.
    for path, base, number, found in _consume_pieces(disk, directory, folder):
        if f"{number:08}" != folder.rpartition("/")[2]:
            return DamagedData(path, 0, f"its header says that it is of subject {number}")
        pieces.append((path, base, found))
    if not pieces:
        return None
    path, base, _ = pieces[0]
    entries = np.concatenate([piece for _, _, piece in pieces])
    offsets = entries >> np.uint64(ROW_BITS)
    # Zeros lie before the first entry of a rebuilt log; entries below the log's start are of removed messages.
    chosen = np.flatnonzero((offsets >= target.start) & (offsets < stop) & (entries > 0))
    if not len(chosen):
        return None
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    subject = _subject_at(index.batches, int(offsets[first]))
    if subject is None:
        return _wrong(pieces, first, "it names no stored batch")
    if subject in of_subject:
        return DamagedData(path, 0, f"it holds messages of {index.subjects[subject]!r}, as {of_subject[subject]} does")
    of_subject[subject] = folder
    own = index.batches[index.batches["subject"] == subject]
    expected = entries_of(own["offset"], own["count"].astype(np.int64))
    begin = int(np.searchsorted(expected, entries[first]))
    if target.start == 0 and begin != base + first:
        return _wrong(pieces, first, f"it is message {begin} of its subject, and stands in place {base + first}")
    wanted = expected[begin : begin + last - first]
    differs = np.flatnonzero(entries[first : first + len(wanted)] != wanted)
    if len(differs) or len(wanted) < last - first:
        at = first + (int(differs[0]) if len(differs) else len(wanted))
        return _wrong(pieces, at, "it is not that of the next message of its subject")
    return None


def _consume_pieces(disk: Disk, directory: Directory, folder: str) -> Iterator[tuple[str, int, int, Entries]]:
    """The segments of a consume log: path, consume sequence of the first entry, number of the subject, entries."""
    for name in sorted(each for each in disk.list_folder(folder) if each.endswith(".log")):
        path = f"{folder}/{name}"
        with closing(open_segment(disk, path, FileKind.CONSUME, directory.log_id, write=False)) as segment:
            yield path, segment.header.base_offset, segment.header.number, entries_in(segment)


def _wrong(pieces: list[tuple[str, int, Entries]], at: int, what: str) -> DamagedData:
    for path, base, entries in pieces:
        if at < len(entries):
            return DamagedData(path, entry_position(at), f"the entry of consume sequence {base + at}: {what}")
        at -= len(entries)
    raise IndexError(at)


def _subject_at(batches: Batches, offset: int) -> int | None:
    """The subject of the batch that is stored at an offset, as a number of the index."""
    at = int(np.searchsorted(batches["offset"], np.uint64(offset)))
    if at == len(batches) or batches["offset"][at] != offset:
        return None
    return int(batches["subject"][at])
