"""Proofs: the tree over the rows of each sealed hour, the log of these trees, and the proof of one message, from files
(docs/formats/proof.md).

    row ──▶ tree of the hour ──┐
                               ├──▶ entry ──▶ tree of the log ──▶ checkpoint, signed
    seal of the hour ──────────┘

Invariant: a tree is made only of rows that agree with the seal of their hour, and is written once. The log only grows:
before a checkpoint is signed, its tree is compared with the one that was signed last. Servers neither read nor write
these files, so sealing costs what it did, and a proof costs them nothing.

An hour's rows are hashed in groups of GROUP_ROWS. Its file keeps the hashes of the groups alone: 10 KB for a million
rows. So a proof reads and hashes the rows of one group; 1,000,000 rows are 245 groups, and the path of a row has 12
hashes within its group and 8 above.
"""

import hashlib
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.errors import BadArgument, BadSetting, DamagedData, DataError, NewerFormat
from delayd.hours import hour_name, hour_of_ms
from delayd.log.hour import SEAL, OutcomeRows, Seal, schedule_path, seal_of
from delayd.machine.disk import Disk, RealDisk, create_whole, open_named, replace_whole
from delayd.outcome import Outcome
from delayd.reading.files.directory import Directory, Role, find_directories, take_snapshot
from delayd.reading.files.origins import collect_hour, in_order, read_outcomes
from delayd.reading.files.row_arrays import RowCollector, ScheduleRows, Sorter, rows_of_part
from delayd.reading.files.stored_groups import TornTail
from delayd.reading.seals import SealBook
from delayd.reading.tlog import (
    HASH_BYTES,
    Checkpoint,
    Growth,
    Key,
    LogProof,
    NotProved,
    Signer,
    Tree,
    check_consistency,
    check_origin,
    checkpoint_body,
    leaf_hash,
    parse_checkpoint,
    parse_signatures,
    parse_signer,
    root_of_path,
)

FOLDER = "proofs"  # In a delay server's folder.
KEY_FILE = "proof.key"  # In the data directory, beside the cluster's secret.
CHECKPOINT_FILE = "checkpoint"
TREE_SUFFIX = ".tree"
FILE_NAME = re.compile(r"[0-9]{10}\.tree|checkpoint")
VERSION = 1
GROUP_ROWS = 4096
FILE_MODE, KEY_MODE = 0o644, 0o600
KEY_FILE_BYTES_MAX = 1024
NO_TREE = bytes(HASH_BYTES)  # Stands in the entry of an hour whose rows were removed before it had a tree.
NO_KEY = bytes(HASH_BYTES)  # Stands in the row of a message that had no key.
HEADER = struct.Struct("<QQ32s32s")  # Version, rows, SHA-256 of the seal, root.
GROUP = np.dtype([("first_sequence", "<u8"), ("hash", "V32")])
PROVED = struct.Struct("<QQ")  # Version, and the place of the row in its hour.
CHECKSUM = struct.Struct("<II")
ROW = np.dtype(
    [
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        ("dispatched_at_ms", "<i8"),
        ("content_hash", "<u8"),
        ("outcome", "u1"),
        ("reason", "u1"),
        ("attempt", "<u2"),
        ("reserved", "<u4"),
        ("key_sha256", "V32"),
    ]
)
ROW_BYTES = np.dtype((np.void, ROW.itemsize))
KEY_SHA256 = np.dtype((np.void, HASH_BYTES))
Rows = NDArray[np.void]  # Of ROW.
Progress = Callable[[int, int], None]  # Hours that have a tree, hours in all.


class ProvedRow(NamedTuple):
    """What a proof says of one message; docs/formats/proof.md says what that is worth."""

    log_id: int
    hour: int
    sequence: int
    deliver_at_ms: int
    dispatched_at_ms: int  # 0 unless it was dispatched: when the realtime server kept it.
    content_hash: int
    outcome: Outcome
    reason: int  # Of a cancelled one, as `delayd.outcome.Reason` numbers it.
    key_sha256: bytes  # Zeros: it had no key.


class HourTree(NamedTuple):
    """The file of an hour's tree: the hash of each group of rows, and the sequence with which it begins."""

    rows: int
    seal_sha256: bytes
    root: bytes  # Kept, so that the log of a year is read without hashing its trees.
    groups: NDArray[np.void]  # Of GROUP.

    @property
    def upper(self) -> Tree:
        """The part of the tree above the groups."""
        return Tree([bytes(each) for each in self.groups["hash"].tolist()])

    def encode(self) -> bytes:
        """Make the file."""
        data = HEADER.pack(VERSION, self.rows, self.seal_sha256, self.root) + self.groups.tobytes()
        return data + CHECKSUM.pack(crc32c(data), 0)

    def sequences_of(self, group: int) -> range:
        """The sequences that rows of a group may have."""
        first = self.groups["first_sequence"]
        return range(int(first[group]), int(first[group + 1]) if group + 1 < len(first) else 1 << 63)


def decode_tree(path: str, data: bytes) -> HourTree:
    """Read the file of an hour's tree. Raises DamagedData or NewerFormat when it can't be read."""
    body = data[: -CHECKSUM.size]
    groups = len(body) - HEADER.size
    if groups <= 0 or groups % GROUP.itemsize or CHECKSUM.unpack(data[-CHECKSUM.size :]) != (crc32c(body), 0):
        raise DamagedData(path, 0, "its checksum differs")
    version, rows, sha256, root = HEADER.unpack_from(body)
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    return HourTree(rows, sha256, root, np.frombuffer(body, GROUP, offset=HEADER.size))


class HourLog:
    """The log of a delay server: one entry for each seal, in the order of the seal log."""

    def __init__(self, disk: Disk, data: str) -> None:
        """Read the seals; the servers may run.

        Raises:
            BadArgument: ``data`` is not the directory of exactly one delay server, or has no seal.
            DamagedData, NewerFormat: a checkpoint, the seal log or its chain can't be read.
        """
        self._disk = disk
        self._directory = _delay_in(disk, data)
        self._snapshot = take_snapshot(disk, self._directory)
        self._book = SealBook(disk, self._snapshot)
        # A seal that is newer than the table has no entry yet: nobody can tell whether its rows are there.
        self.seals = list(takewhile(self._is_told, self._book.seals))
        for report in self._book.reports():
            if report.differs:
                raise DamagedData(f"{self._directory.path}/seal", 0, f"hour {hour_name(report.hour)}: {report.differs}")

    def _is_told(self, seal: Seal) -> bool:
        return self._book.has_standing(seal.facts.hour) or self._book.is_deleted(seal.facts.hour)

    @property
    def log_id(self) -> int:
        return self._directory.log_id

    @property
    def folder(self) -> str:
        """Where the trees and the checkpoint are."""
        return f"{self._directory.path}/{FOLDER}"

    def make_trees(self, progress: Progress | None = None) -> None:
        """Write the tree of each hour that has rows and no tree yet; each is durable on return.

        Raises:
            LogMoved: retention has removed an hour meanwhile; read the log anew.
            DamagedData: the rows of an hour are not those under its seal.
            DiskFull, NotWritable: a tree was not written.
        """
        RealDisk().make_folder(self.folder)
        for done, seal in enumerate(self.seals, 1):
            if self.tree(seal) is None and self._book.has_standing(seal.facts.hour):
                with suppress(FileExistsError):  # Another command made the same tree.
                    create_whole(self._path(seal), self._made(seal).encode(), FILE_MODE)
            if progress is not None:
                progress(done, len(self.seals))

    def tree(self, seal: Seal) -> HourTree | None:
        """The tree of an hour; None when none was made. Raises DamagedData when it is not of this seal."""
        data = _read(self._disk, self._path(seal))
        if data is None:
            return None
        tree = decode_tree(self._path(seal), data)
        if (tree.seal_sha256, tree.rows) != (seal.sha256, seal.facts.rows):
            raise DamagedData(self._path(seal), 0, f"it is not of seal {seal.number}, {seal.sha256.hex()}")
        return tree

    def entries(self, size: int) -> Iterator[bytes]:
        """The first entries of the log."""
        for seal in self.seals[:size]:
            tree = self.tree(seal)
            yield seal.encode() + (NO_TREE if tree is None else tree.root)

    def grown(self, size: int) -> Tree:
        """The tree of the log over its first ``size`` entries."""
        return Tree([leaf_hash(each) for each in self.entries(size)])

    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that was signed; None before the first one."""
        path = f"{self.folder}/{CHECKPOINT_FILE}"
        data = _read(self._disk, path)
        return None if data is None else _checkpoint_of(path, data)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in the place of the former one; durable on return."""
        replace_whole(f"{self.folder}/{CHECKPOINT_FILE}", checkpoint.text.encode(), FILE_MODE)

    def prove(self, sequence: int, filed_at_ms: int) -> LogProof:
        """The proof of one message; ``filed_at_ms`` is an instant of its hour, the later of due and accepted.

        Raises:
            LogMoved: retention has removed the hour meanwhile; read the log anew.
            BadArgument: the hour is not sealed, has no tree, is not in the checkpoint, or never had the message.
            DamagedData: the rows or the seals are not those that were signed.
        """
        hour, name = hour_of_ms(filed_at_ms), hour_name(hour_of_ms(filed_at_ms))
        seal = next((each for each in self.seals if each.facts.hour == hour), None)
        checkpoint = self.checkpoint()
        if seal is None:
            raise BadArgument(f"hour {name} is not sealed: nothing can be proved until each of its messages has ended")
        if checkpoint is None or checkpoint.size <= seal.number:
            raise BadArgument(f"no checkpoint has hour {name} yet: run `delayd tree-head --data DIR`, then prove again")
        tree = self.tree(seal)
        if not self._book.has_standing(hour):
            raise BadArgument(f"retention has removed the rows of hour {name}: only a proof made before that is left")
        log = self.grown(checkpoint.size)
        if tree is None or log.root != checkpoint.root:
            raise DamagedData(self.folder, 0, "seals and trees are not those of the checkpoint; restore a copy of it")
        group = int(np.searchsorted(tree.groups["first_sequence"], sequence, "right")) - 1
        rows = self._sides(hour, tree.sequences_of(group), []).packed() if group >= 0 else np.empty(0, ROW)
        inner = _tree_of(rows)
        upper = tree.upper
        if upper.root != tree.root:
            raise DamagedData(self._path(seal), 0, "its hashes do not lead to its root")
        if group >= 0 and inner.root != bytes(tree.groups["hash"][group].tolist()):
            raise DamagedData(schedule_path(self._directory.path, hour), 0, "its rows are not those under the root")
        place = int(np.searchsorted(rows["sequence"], sequence))
        if place == len(rows) or int(rows["sequence"][place]) != sequence:
            raise BadArgument(f"hour {name} was sealed without a message {sequence}: the receipt is of another hour")
        path = [*inner.path(place), *upper.path(group)]
        extra = PROVED.pack(VERSION, group * GROUP_ROWS + place) + rows[place].tobytes() + seal.encode()
        return LogProof(extra + b"".join(path), seal.number, tuple(log.path(seal.number)), checkpoint)

    def _path(self, seal: Seal) -> str:
        return f"{self.folder}/{hour_name(seal.facts.hour)}{TREE_SUFFIX}"

    def _made(self, seal: Seal) -> HourTree:
        hour, torn = seal.facts.hour, list[TornTail]()
        sides, check = self._sides(hour, None, torn), self._book.check(hour)
        check.add(sides.schedule, sides.outcomes)
        if differs := check.differences(torn):
            path = schedule_path(self._directory.path, hour)
            raise DamagedData(path, 0, f"its rows are not those under its seal: {'; '.join(differs)}")
        rows = sides.packed()
        groups = np.empty(-(-len(rows) // GROUP_ROWS), GROUP)
        groups["first_sequence"] = rows["sequence"][::GROUP_ROWS]
        for number in range(len(groups)):
            root = _tree_of(rows[number * GROUP_ROWS : (number + 1) * GROUP_ROWS]).root
            groups["hash"][number] = np.void(root)
        made = HourTree(len(rows), seal.sha256, NO_TREE, groups)
        return made._replace(root=made.upper.root)

    def _sides(self, hour: int, part: range | None, torn: list[TornTail]) -> "_Sides":
        """The rows of an hour, or those with some sequences, by both of its logs."""
        sorter, keys = Sorter(), _KeyedRows(part, self._snapshot.counted(hour) if part is None else 0)
        outcomes = read_outcomes(self._disk, self._directory, hour, None, torn, part=part)
        collect_hour(self._disk, self._snapshot, hour, keys)
        return _Sides(in_order(keys.rows(), sorter), sorter.outcomes(outcomes), keys)


class _KeyedRows(RowCollector):
    """Rows of schedule batches, and the digests of their keys."""

    def __init__(self, part: range | None, rows_expected: int) -> None:
        super().__init__(part, rows_expected)
        self.digests: list[tuple[int, bytes]] = []  # Sequence and SHA-256 of each row that has a key.

    def add_schedule_batch(self, batch: Batch, offset: int) -> None:
        super().add_schedule_batch(batch, offset)
        if ColumnId.KEY_END not in batch:
            return
        own, (starts, ends) = batch.uint64s(ColumnId.SEQUENCE), batch.region(ColumnId.KEY_END)
        keyed = np.flatnonzero(ends > starts)
        rows = keyed if self.part is None else keyed[rows_of_part(own[keyed], self.part)]
        columns = own[rows].tolist(), starts[rows].tolist(), ends[rows].tolist()
        for sequence, start, end in zip(*columns, strict=True):
            self.digests.append((sequence, hashlib.sha256(batch.heap[start:end]).digest()))


class _Sides(NamedTuple):
    """Both sides of rows, by rising sequence."""

    schedule: ScheduleRows
    outcomes: OutcomeRows
    keys: _KeyedRows

    def packed(self) -> Rows:
        """The rows as they are hashed; none when both sides have other sequences."""
        schedule, outcomes = self.schedule, self.outcomes
        if not np.array_equal(schedule.sequence, outcomes.sequences):
            return np.empty(0, ROW)
        parts, dispatched = outcomes.parts, outcomes.parts["outcome"] == Outcome.DISPATCHED
        rows = np.zeros(len(schedule), ROW)
        rows["sequence"], rows["deliver_at_ms"] = schedule.sequence, schedule.deliver_at_ms
        rows["dispatched_at_ms"] = np.where(dispatched, parts["target_appended_at_ms"], 0)[outcomes.part_of]
        rows["content_hash"] = schedule.hashes()
        for name in ("outcome", "reason", "attempt"):
            rows[name] = parts[name][outcomes.part_of]
        if self.keys.digests:
            sequences, digests = zip(*self.keys.digests, strict=True)
            places = np.searchsorted(schedule.sequence, np.array(sequences, np.uint64))
            rows["key_sha256"][places] = np.frombuffer(b"".join(digests), KEY_SHA256)
        return rows


def proof_files(disk: Disk, folder: str) -> list[str]:
    """The names of the trees and of the checkpoint in a delay server's folder, without what a crash left unfinished."""
    return [name for name in disk.list_folder(f"{folder}/{FOLDER}") if FILE_NAME.fullmatch(name)]


def read_proof_files(disk: Disk, directory: Directory) -> Iterator[tuple[str, int, DataError | None]]:
    """The path and the size of each of these files, and what is wrong with it."""
    for name in proof_files(disk, directory.path):
        path = f"{directory.path}/{FOLDER}/{name}"
        data = _read(disk, path) or b""
        try:
            if name == CHECKPOINT_FILE:
                _checkpoint_of(path, data)
            else:
                decode_tree(path, data)
        except DataError as error:
            yield path, len(data), error
        else:
            yield path, len(data), None


def check_message(proof: LogProof, key: Key) -> ProvedRow:
    """What a proof shows of its message, given the key of the log.

    Raises:
        NotProved: the row does not lead to the root of its hour, or the hour not to a checkpoint that the key signed.
    """
    extra, fixed = proof.extra, PROVED.size + ROW.itemsize + SEAL.size
    if len(extra) < fixed or (len(extra) - fixed) % HASH_BYTES:
        raise NotProved(f"its extra data has {len(extra)} bytes, which no row, seal and path have")
    version, place = PROVED.unpack_from(extra)
    if version != VERSION:
        raise NotProved(f"it has version {version}, and this delayd checks version {VERSION}")
    row, record = extra[PROVED.size :][: ROW.itemsize], extra[fixed - SEAL.size : fixed]
    seal = seal_of(record)
    path = [extra[start : start + HASH_BYTES] for start in range(fixed, len(extra), HASH_BYTES)]
    root = root_of_path(leaf_hash(row), place, seal.facts.rows, path)
    if seal.number != proof.place:
        raise NotProved(f"seal {seal.number} is not entry {proof.place} of the log")
    proof.check(record + root, key)
    sequence, due_ms, at_ms, content, outcome, reason, _, _, key_sha256 = np.frombuffer(row, ROW)[0].tolist()
    try:
        ended = Outcome(outcome)
    except ValueError:
        raise NotProved(f"its outcome is {outcome}, which this delayd does not know") from None
    return ProvedRow(seal.log_id, seal.facts.hour, sequence, due_ms, at_ms, content, ended, reason, key_sha256)


def sign_head(log: HourLog, signer: Signer) -> Checkpoint:
    """Sign the tree of all seals, keep the checkpoint and return it; one of the same tree keeps its cosignatures.

    Raises:
        NotProved: the log does not begin with what was signed before; nothing is signed.
        BadArgument: the key is of another log than the last checkpoint.
    """
    tree, before = log.grown(len(log.seals)), log.checkpoint()
    if before is not None:
        if before.origin != signer.name:
            raise BadArgument(f"this log was signed as {before.origin}, and the key is of {signer.name}")
        if before.size > len(tree):
            raise NotProved(f"{before.size} seals were signed, and the seal log has {len(tree)}")
        check_consistency(before.head, (len(tree), tree.root), tree.consistency(before.size))
        if before.size == len(tree):
            return before
    checkpoint = parse_checkpoint(signer.sign(checkpoint_body(signer.name, len(tree), tree.root)))
    log.keep(checkpoint)
    return checkpoint


def add_cosignatures(log: HourLog, lines: str, witnesses: Sequence[Key]) -> Checkpoint:
    """Add what witnesses have answered to the newest checkpoint, keep and return it.

    Raises:
        NotProved: a line is not the true cosignature of one of ``witnesses`` over this checkpoint; nothing is added.
        BadArgument: nothing was signed yet.
    """
    checkpoint = log.checkpoint()
    if checkpoint is None:
        raise BadArgument("nothing is signed yet, so nobody can have cosigned it: run `delayd tree-head` first")
    known = {(each.name, each.id): each for each in witnesses}
    for found in parse_signatures(lines):
        witness = known.get((found.name, found.key_id))
        if witness is None:
            raise NotProved(f"a line is by {found.name}+{found.key_id.hex()}, which no --witness names")
        checkpoint._replace(signatures=(found,)).cosigned_at_s(witness)
        if found not in checkpoint.signatures:
            checkpoint = checkpoint._replace(signatures=(*checkpoint.signatures, found))
    log.keep(checkpoint)
    return checkpoint


def growth_since(log: HourLog, checkpoint: Checkpoint, old_size: int) -> Growth:
    """What a witness is sent that knows the first ``old_size`` entries. BadArgument when there are not so many."""
    if not 0 <= old_size <= checkpoint.size:
        raise BadArgument(f"the checkpoint has {checkpoint.size} entries, so none of {old_size} came before it")
    return Growth(old_size, tuple(log.grown(checkpoint.size).consistency(old_size)), checkpoint)


def open_signer(path: str, origin: str) -> Signer:
    """The private key of a log; one for ``origin`` is made when the file is missing.

    Raises:
        BadSetting: others may read the file, it holds no key, or the key is of another origin.
        NotWritable, DiskFull: it can't be made.
    """
    with suppress(FileExistsError):
        if not os.path.exists(path):
            signer = Signer(check_origin(origin), os.urandom(HASH_BYTES))
            create_whole(path, f"{signer.encode()}\n".encode(), KEY_MODE)
    try:
        if (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o077:
            raise BadSetting(f"{path} has mode {mode:03o}, so others may read it; run `chmod 600 {path}`")
        with open(path, encoding="ascii") as file:
            return parse_signer(file.read(KEY_FILE_BYTES_MAX))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} can't be read ({error}); be the user that the servers run as") from error


def _checkpoint_of(path: str, data: bytes) -> Checkpoint:
    try:
        return parse_checkpoint(data.decode())
    except (NotProved, ValueError) as error:
        raise DamagedData(path, 0, str(error)) from error


def _delay_in(disk: Disk, data: str) -> Directory:
    found = [each for each in find_directories(disk, data) if each.role == Role.DELAY]
    if len(found) != 1:
        raise BadArgument(f"{data} holds {len(found)} delay servers' directories; give that of one, such as DIR/delay")
    return found[0]


def _tree_of(rows: Rows) -> Tree:
    """The tree over some rows."""
    return Tree([leaf_hash(each) for each in rows.view(ROW_BYTES).tolist()])


def _read(disk: Disk, path: str) -> bytes | None:
    try:
        with closing(open_named(disk, path)) as file:
            return file.pread(file.size(), 0)
    except FileNotFoundError:
        return None
