"""``delayd log give-up``: an operator's word on a log whose damaged end keeps its server from starting."""

import os
import time
from functools import partial

import click
import msgpack

from delayd.disk import RealDisk
from delayd.errors import BadArgument, DamagedData
from delayd.log.control import SkippedSequences, encode_known
from delayd.log.give_up import Damage, find_damage, give_up
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import LogPlace
from delayd.log.proof import decided_behind, pulled_behind
from delayd.log.schedule import RESTORED_STEP
from delayd.log.segment import Confirmed, FileKind
from delayd.operator_log import OperatorLog
from delayd.state import LmdbState, State

from .options import confirm

KINDS = {
    ("delay", "message"): FileKind.MESSAGE,
    ("realtime", "message"): FileKind.REALTIME,
    ("realtime", "pull"): FileKind.PULL,
}
MARKS = {
    FileKind.MESSAGE: ("replay_offset", "replay_crc32c"),
    FileKind.REALTIME: ("indexed_offset", "indexed_crc32c"),
    FileKind.PULL: ("pull_offset", "pull_crc32c"),
}
COSTS = {
    FileKind.MESSAGE: "messages that were accepted there and are not delivered are lost for good",
    FileKind.REALTIME: "messages that were delivered there are lost for good, and what was acknowledged since the "
    "last checkpoint comes again; delay servers that delivered them wait for `delayd target accept`, and for `delayd "
    "quarantine drop window` where it is listed",
    FileKind.PULL: "what was acknowledged there comes again, and groups that were made there begin anew",
}


def run(folder: str, yes: bool) -> None:
    """Give up the damaged end of the log in a folder such as ``delayd-data/realtime/pull``; its server is down."""
    home, name = os.path.split(os.path.abspath(folder))
    kind = KINDS.get((os.path.basename(home), name))
    if kind is None:
        raise BadArgument(f"{folder} is no folder delay/message, realtime/message or realtime/pull of a data directory")
    disk = RealDisk()
    lock = disk.lock(f"{home}/LOCK", "log give-up")
    try:
        state = LmdbState(f"{home}/state.lmdb")
        try:
            _decide(disk, state, home, kind, yes)
        finally:
            state.close()
    finally:
        lock.release()
        disk.close()


def _decide(disk: RealDisk, state: State, home: str, kind: FileKind, yes: bool) -> None:
    now_ms = time.time_ns() // 1_000_000
    damage = _damage(disk, state, home, kind, now_ms)
    if damage is None and kind is FileKind.PULL:
        # It may name messages that the message log has lost with its end.
        damage = _all_behind_checkpoint(disk, state, home, kind, now_ms, "nothing in it is damaged by itself")
    if damage is None:
        raise BadArgument(f"nothing in {home}/{_folder_of(kind)} keeps its server from starting")
    confirm(
        f"{damage.error.message}. What was behind offset {damage.good_until} is given up (files still hold "
        f"{damage.lost_bytes:,} bytes of it): {COSTS[kind]}.",
        yes,
    )
    kinds = [kind]
    if kind is FileKind.REALTIME:
        # Its entries name messages by numbers that will be given again, so it goes first: no start may find them.
        kinds.insert(0, FileKind.PULL)
    put_aside: list[str] = []
    for each in kinds:
        why = "it is given up with the message log"
        cut = damage if each is kind else _all_behind_checkpoint(disk, state, home, each, now_ms, why)
        groups = [_skip(state, cut)] if each is FileKind.MESSAGE else []
        put_aside += give_up(disk, _place(state, home, each), cut, f"{home}/quarantine", now_ms, groups)
    puts, removes = OperatorLog(state).entry(now_ms, f"gave up {_folder_of(kind)} behind {damage.good_until}")
    state.commit(puts, removes)
    for path in put_aside:
        click.echo(f"put aside as {path}")
    click.echo("start the server now; one that waits for this goes on by itself")


def _damage(disk: RealDisk, state: State, home: str, kind: FileKind, now_ms: int) -> Damage | None:
    offset, crc32c = MARKS[kind]
    marks = _row(state, home, b"checkpoint") if state.get(b"checkpoint") is not None else {}
    confirmed: Confirmed | None = None
    if kind is FileKind.MESSAGE:
        confirmed = partial(decided_behind, disk, home, _number(state, b"log_id"))
    elif kind is FileKind.REALTIME:
        confirmed = partial(pulled_behind, disk, state.scan, home, _number(state, b"log_id"))
    return find_damage(disk, _place(state, home, kind), marks.get(offset, 0), marks.get(crc32c, 0), now_ms, confirmed)


def _all_behind_checkpoint(disk: RealDisk, state: State, home: str, kind: FileKind, now_ms: int, why: str) -> Damage:
    found = _damage(disk, state, home, kind, now_ms)
    if found is not None and found.good_until == found.start:
        return found
    offset, crc32c = MARKS[kind]
    marks = _row(state, home, b"checkpoint")
    error = DamagedData(f"{home}/{_folder_of(kind)}", 0, why)
    return Damage(error, marks.get(offset, 0), marks.get(crc32c, 0), marks.get(offset, 0), 0, 0, 0)


def _skip(state: State, damage: Damage) -> NewGroup:
    """A record that leaves sequences unused: those that were given behind the damage are never given again (I5)."""
    marks = _row(state, "state", b"checkpoint") if state.get(b"checkpoint") is not None else {}
    sequence = max(marks.get("next_sequence", 1), damage.next_sequence) + RESTORED_STEP
    appended_at_ms = max(marks.get("appended_at_ms", 0), damage.appended_at_ms)
    batch = encode_known([SkippedSequences(RESTORED_STEP)])
    return NewGroup(GroupKind.CONTROL, [batch], _number(state, b"epoch"), appended_at_ms, sequence)


def _place(state: State, home: str, kind: FileKind) -> LogPlace:
    return LogPlace(f"{home}/{_folder_of(kind)}", kind, _number(state, b"log_id"))


def _folder_of(kind: FileKind) -> str:
    return "pull" if kind is FileKind.PULL else "message"


def _row(state: State, home: str, key: bytes) -> dict[str, int]:
    value = state.get(key)
    row: object = None if value is None else msgpack.unpackb(value)
    if not isinstance(row, dict):
        raise DamagedData(f"{home}/state.lmdb", 0, f"the value of {key!r} is no map")
    return {name: number for name, number in row.items() if isinstance(name, str) and isinstance(number, int)}


def _number(state: State, key: bytes) -> int:
    value = state.get(key)
    number: object = None if value is None else msgpack.unpackb(value)
    if not isinstance(number, int):
        raise DamagedData("state.lmdb", 0, f"the value of {key!r} is no number")
    return number
