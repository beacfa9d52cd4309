"""Files and folders in memory, each in two states: what running programs see, and what a power loss would leave.

Invariant: the durable state changes only by a sync. Data and folder entries are apart, as on Linux: syncing a file
does not make its name durable, and syncing a folder does not make its files' data durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from random import Random

SECTOR_BYTES = 512  # The unit that disks write whole.


class PowerLoss(Enum):
    """The fate of changes that no sync covered; the first two are exact, the others draw from a seed."""

    ALL_LOST = "nothing unsynced is there"
    ALL_KEPT = "everything unsynced is there, as after a SIGKILL, which loses no page cache"
    DATA_LOST = "folder entries are there, data is not: new files are empty"
    ENTRIES_LOST = "data is there, folder entries are not: new files are missing, removed ones are back"
    PREFIX = "each file and folder keeps its first changes, up to any one"
    TORN = "all is there but the end of each file's last write, cut at any byte"
    TORN_SECTOR = "all is there but the end of each file's last write, cut at a multiple of 512"
    REORDERED = "any sectors and entries are missing while later ones are there"
    ZEROED = "lengths are there, new data reads as zeros"


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes written at a position and not yet durable."""

    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PendingCut:
    """A truncation not yet durable."""

    size: int


DataChange = Write | PendingCut


@dataclass(slots=True)
class Inode:
    """A file without its name."""

    cached: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[DataChange] = field(default_factory=list)
    number: int = field(default_factory=count().__next__, compare=False)  # No other one has it.
    loss_untold: bool = False  # A sync of the whole file system lost data of it, which its own next sync reports.

    def change(self, change: DataChange) -> None:
        """Change the state that programs see; not durable before `sync`."""
        _apply(self.cached, change)
        self.pending.append(change)

    def sync(self) -> None:
        """Make data and length durable."""
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def fail_sync(self) -> None:
        """Lose the dirty pages as Linux does: programs still read them, and no later sync writes them."""
        self.pending.clear()

    def fail_sync_with_others(self) -> None:
        """Lose them in a sync of the file system: this file's own next sync says so, once, as on Linux."""
        self.loss_untold = self.loss_untold or bool(self.pending)
        self.fail_sync()

    def __deepcopy__(self, memo: dict[int, object]) -> Inode:
        # Changes never change, so twins share them; disks are copied thousands of times in one test.
        twin = Inode(bytearray(self.cached), bytearray(self.durable), list(self.pending), self.number)
        twin.loss_untold = self.loss_untold
        return twin

    def after_power_loss(self, way: PowerLoss, random: Random) -> Inode:
        """The file as the next start finds it."""
        data = bytearray(self.durable)
        for change in _surviving(self.pending, way, random):
            _apply(data, change)
        return Inode(cached=data, durable=bytearray(data))

    def copied(self) -> Inode:
        """A file of its own with the same data, all durable."""
        return Inode(cached=bytearray(self.cached), durable=bytearray(self.cached))


EntryChange = tuple[tuple[str, "Inode | Folder | None"], ...]
"""Names set (or unset, with None) in one folder in one step: a rename within it sets two."""


@dataclass(slots=True)
class Folder:
    """Names and what they stand for."""

    cached: dict[str, Inode | Folder] = field(default_factory=dict)
    durable: dict[str, Inode | Folder] = field(default_factory=dict)
    pending: list[EntryChange] = field(default_factory=list)

    def change(self, *names: tuple[str, Inode | Folder | None]) -> None:
        """Set or unset names in one step; not durable before `sync`."""
        _set_names(self.cached, names)
        self.pending.append(names)

    def sync(self) -> None:
        """Make the names durable, but not the files that they name."""
        for names in self.pending:
            _set_names(self.durable, names)
        self.pending.clear()

    def fail_sync(self) -> None:
        """Lose the unsynced names for good, as `Inode.fail_sync` does with data."""
        self.pending.clear()

    def sync_all(self) -> None:
        """Make this folder and everything below it durable."""
        self.sync()
        for node in self.cached.values():
            if isinstance(node, Folder):
                node.sync_all()
            else:
                node.sync()

    def fail_sync_all(self) -> None:
        """Lose everything that is dirty in this folder and below it."""
        self.fail_sync()
        for node in self.cached.values():
            if isinstance(node, Folder):
                node.fail_sync_all()
            else:
                node.fail_sync_with_others()

    def after_power_loss(self, way: PowerLoss, random: Random) -> Folder:
        """The folder as the next start finds it, with all below it."""
        names = dict(self.durable)
        for change in _surviving_entries(self.pending, way, random):
            _set_names(names, change)
        found = {name: names[name].after_power_loss(way, random) for name in sorted(names)}
        return Folder(cached=dict(found), durable=found)

    def copied(self) -> Folder:
        """A folder of its own with copies of all below it, all durable."""
        found = {name: node.copied() for name, node in self.cached.items()}
        return Folder(cached=dict(found), durable=found)


def _apply(data: bytearray, change: DataChange) -> None:
    if isinstance(change, PendingCut):
        end = change.size
        del data[end:]
        data.extend(bytes(end - len(data)))
        return
    data.extend(bytes(max(0, change.position - len(data))))
    data[change.position : change.position + len(change.data)] = change.data


def _set_names(names: dict[str, Inode | Folder], change: EntryChange) -> None:
    for name, node in change:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _surviving(pending: Sequence[DataChange], way: PowerLoss, random: Random) -> Sequence[DataChange]:
    if way in (PowerLoss.ALL_LOST, PowerLoss.DATA_LOST) or not pending:
        return []
    if way is PowerLoss.PREFIX:
        return pending[: random.randint(0, len(pending))]
    if way in (PowerLoss.TORN, PowerLoss.TORN_SECTOR):
        return [*pending[:-1], *_torn(pending[-1], SECTOR_BYTES if way is PowerLoss.TORN_SECTOR else 1, random)]
    if way is PowerLoss.REORDERED:
        return _with_gaps([piece for change in pending for piece in _sectors(change)], random)
    if way is PowerLoss.ZEROED:
        return [_length_only(change) for change in pending]
    return pending


def _surviving_entries(pending: Sequence[EntryChange], way: PowerLoss, random: Random) -> Sequence[EntryChange]:
    if way in (PowerLoss.ALL_LOST, PowerLoss.ENTRIES_LOST):
        return []
    if way is PowerLoss.PREFIX:
        return pending[: random.randint(0, len(pending))]
    if way is PowerLoss.REORDERED:
        return [change for change in pending if random.random() < 0.5]
    return pending


def _torn(change: DataChange, unit: int, random: Random) -> list[DataChange]:
    if isinstance(change, PendingCut):
        return []
    # Sectors are counted from the start of the file, not of the write.
    first = change.position // unit + 1
    last = (change.position + len(change.data) - 1) // unit
    if first > last:
        return []
    return [Write(change.position, change.data[: random.randint(first, last) * unit - change.position])]


def _sectors(change: DataChange) -> list[DataChange]:
    if isinstance(change, PendingCut):
        return [change]
    pieces: list[DataChange] = []
    start, end = change.position, change.position + len(change.data)
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        pieces.append(Write(start, change.data[start - change.position : stop - change.position]))
        start = stop
    return pieces


def _with_gaps(pieces: Sequence[DataChange], random: Random) -> list[DataChange]:
    if len(pieces) < 2:
        return []
    # The last one is kept and one before it is not, or this would be a prefix.
    missing = random.randrange(len(pieces) - 1)
    kept = [piece for at, piece in enumerate(pieces[:-1]) if at != missing and random.random() < 0.5]
    return [*kept, pieces[-1]]


def _length_only(change: DataChange) -> DataChange:
    if isinstance(change, PendingCut):
        return change
    return Write(change.position + len(change.data), b"")
