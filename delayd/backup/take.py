"""Take: makes a whole backup, or goes on with one that was interrupted (docs/backup.md).

nothing ──▶ unfinished (journal, and no state under its name) ──▶ whole (manifest) ──▶ unfinished (a later call)

Invariant: while a backup is unfinished there is no manifest, and no server starts on it, because the file of its state
has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgpack

from delayd.disk import Disk, open_named
from delayd.errors import BadArgument, DamagedData, DataError
from delayd.hours import hour_name
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.schedule import decode_hours
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.state import check_stored
from delayd.state_file import read_pairs

from .copying import Copier, Progress
from .journal import Journal
from .manifest import NAME, UNFINISHED, Entry, Held, Manifest, read_manifest, write_manifest
from .sources import STATE, Source, files_of

LOCK = "backup.lock"
STAGED = ".new"  # Behind the names of files that get their own name at the end.
CUTS_MAX = 5  # Retention removes files once in minutes; a backup that loses files so often has another reason.

Stage = Callable[[Source], None]
"""Copies what a source may not have for long."""


class Cut(NamedTuple):
    """The servers of a backup at one moment, or at several."""

    sources: Sequence[Source]
    at_one_instant: bool
    moment_ms: int = 0  # When all servers of the cluster were cut; 0 when only these were.


@dataclass(frozen=True, slots=True)
class Terms:
    """What a backup asks of its surroundings."""

    cut: Callable[[Stage], Cut]  # Cuts or locks the servers, and calls its argument for each.
    check: Callable[[str], list[str]]  # Names the damaged files of a folder, each in a sentence.
    progress: Progress
    now_ms: int
    version: str


def take(source: Disk, target: Disk, folder: str, roles: Sequence[str], terms: Terms) -> Manifest:
    """Copy the servers into ``folder``, a new or empty one or one of an earlier call; returns what it holds then.

    Raises:
        BadArgument: the folder holds something else, or servers that this backup is not of.
        DirectoryInUse: another backup is written there.
        DiskFull, NotWritable: the backup can't go on; another call goes on where this one ended.
    """
    target.make_folder(folder)
    lock = target.lock(f"{folder}/{LOCK}", "backup")
    try:
        journal = _begin(target, folder, roles)
        try:
            manifest = _fill(source, target, folder, journal, terms)
        except BaseException:
            journal.close()
            raise
        journal.remove()
        return manifest
    finally:
        lock.release()


def _begin(disk: Disk, folder: str, roles: Sequence[str]) -> Journal:
    """Note in the journal what the folder holds already; a whole backup in it stays whole."""
    whole = disk.exists(f"{folder}/{NAME}")
    others = set(disk.list_folder(folder)) - {LOCK, NAME, UNFINISHED}
    if not whole and not disk.exists(f"{folder}/{UNFINISHED}") and others:
        raise BadArgument(f"{folder} is not empty and holds no backup; give a new folder, or that of an earlier backup")
    before = read_manifest(disk, folder).entries if whole else ()
    journal = Journal(disk, folder)
    try:
        known = {path.partition("/")[0] for path in (*journal.lines, *(entry.path for entry in before))}
        if not known <= set(roles):
            which = ", ".join(sorted(known - set(roles)))
            raise BadArgument(f"{folder} holds a backup of {which}, too; give another folder")
        if before:
            journal.add(before)
            journal.lines |= {entry.path: entry for entry in before}
    except BaseException:
        journal.close()
        raise
    return journal


def _begin_anew(disk: Disk, folder: str, roles: Sequence[str]) -> None:
    """Make the folder an unfinished backup; until here nothing of an earlier one was changed."""
    if disk.exists(f"{folder}/{NAME}"):
        disk.remove(f"{folder}/{NAME}")
        disk.sync_folder(folder)
    for role in roles:
        state = f"{folder}/{role}/{STATE}"
        if disk.exists(state):
            disk.remove(state)
            disk.sync_folder(state.rpartition("/")[0])


def _fill(source: Disk, target: Disk, folder: str, journal: Journal, terms: Terms) -> Manifest:
    for left in reversed(range(CUTS_MAX)):
        copier = Copier(source, target, folder, journal, terms.progress)
        entries: list[Entry] = []
        damaged: list[str] = []
        staged: list[Entry] = []

        cut = terms.cut(partial(_stage, source, copier, staged=staged, damaged=damaged))
        _begin_anew(target, folder, [each.role for each in cut.sources])
        gone = 0
        for each in cut.sources:
            state = f"{folder}/{each.role}/{STATE}{STAGED}"
            names = files_of(source, each, target, state)
            for name, size in names.items():
                try:
                    entry, failed = copier.copy(f"{each.folder}/{name}", f"{each.role}/{name}", size)
                except FileNotFoundError:
                    gone += 1
                    if left == 0 or not each.running:
                        damaged.append(f"{each.folder}/{name} is gone")
                    continue
                entries.append(entry)
                if failed is not None:
                    damaged.append(failed.message)
        if gone and left and any(each.running for each in cut.sources):
            copier.flush()
            continue  # Retention has removed files since the cut: a new cut knows which, and the rest is copied.
        break
    copier.flush()
    _remove_others(target, folder, cut.sources, {entry.path for entry in entries})
    for entry in staged:
        target.rename(f"{folder}/{entry.path}{STAGED}", f"{folder}/{entry.path}")
        target.sync_folder(f"{folder}/{entry.path}".rpartition("/")[0])
    found = terms.check(folder)
    held = tuple(_held(target, folder, each, entries) for each in cut.sources)
    damaged += [sentence for sentence in found if sentence not in damaged]
    copied = (*staged, *entries)
    manifest = Manifest(terms.now_ms, terms.version, cut.at_one_instant, held, tuple(damaged), copied, cut.moment_ms)
    write_manifest(target, folder, manifest)
    return manifest


def _stage(source: Disk, copier: Copier, each: Source, staged: list[Entry], damaged: list[str]) -> None:
    """Copy the state and the checkpoint under names that no server looks for."""
    for path, name in ((each.state, STATE), (each.checkpoint, CHECKPOINT)):
        if not source.exists(path):
            continue
        entry, failed = copier.fresh(path, f"{each.role}/{name}{STAGED}")
        if failed is not None:
            damaged.append(failed.message)
        staged.append(Entry(f"{each.role}/{name}", entry.size_bytes, entry.crc32c, entry.source))


def _remove_others(disk: Disk, folder: str, sources: Sequence[Source], wanted: set[str]) -> None:
    """Remove copies of files that retention has removed since an earlier call."""
    for each in sources:
        own = Source(each.role, f"{folder}/{each.role}", 0, "", "", None)
        for name in files_of(disk, own, disk, ""):
            if f"{each.role}/{name}" not in wanted:
                disk.remove(f"{folder}/{each.role}/{name}")


def _held(disk: Disk, folder: str, source: Source, entries: Sequence[Entry]) -> Held:
    home = f"{folder}/{source.role}"
    log_id, epoch = _identity(disk, f"{home}/{STATE}")
    try:
        published = read_checkpoint(disk, home) or {}
    except DataError:
        published = {}  # The check of the backup has named it.
    offset = published.get("replay_offset", published.get("indexed_offset", 0))
    following = published.get("next_sequence", 0)
    table = published.get("hours", b"")
    hours = decode_hours(table)["hour"].tolist() if isinstance(table, bytes) else []
    log = [entry for entry in entries if entry.path.startswith(f"{source.role}/message/")]
    base = int(log[-1].path.rpartition("/")[2].removesuffix(".log")) if log else 0
    return Held(
        role=source.role,
        log_id=log_id,
        epoch=epoch,
        running=source.running,
        cut_ms=source.cut_ms,
        offset=offset if isinstance(offset, int) else 0,
        end=max(0, base + log[-1].size_bytes - FILE_HEADER_BYTES) if log else 0,
        next_sequence=following if isinstance(following, int) else 0,
        hours=len(hours),
        first_hour=hour_name(hours[0]) if hours else "",
        last_hour=hour_name(hours[-1]) if hours else "",
    )


def _identity(disk: Disk, path: str) -> tuple[int, int]:
    """The log_id and the epoch that a state holds; 0 for what does not check."""
    if not disk.exists(path):
        return 0, 0
    file = open_named(disk, path)
    try:
        pairs = {pair.key: pair for pair in read_pairs(path, file.pread, file.size())}
        numbers = [
            msgpack.unpackb(check_stored(path, key, pairs[key].stored)) if key in pairs else 0
            for key in (b"log_id", b"epoch")
        ]
    except DamagedData:
        return 0, 0
    finally:
        file.close()
    return int(numbers[0]), int(numbers[1])
