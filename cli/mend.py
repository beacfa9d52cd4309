"""``delayd mend``: what servers can't read and have set aside, and an operator's word on it (rules L5, L10).

Invariant: a decision is carried out by the server that lists the entry. Only the end of a log that keeps its server
from starting is given up here, in the files, and for that its server must not run.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import click
import msgpack

from delayd.client.asking import ask
from delayd.errors import BadArgument, DamagedData
from delayd.log.control import SkippedSequences, encode_known
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import RESTORED_STEP
from delayd.log.log import LogPlace
from delayd.log.segment import Confirmed, FileKind
from delayd.log.tail import Damage, LogEnd, decided_behind, end_of, find_damage, give_up, ids_skipped, named_behind
from delayd.machine.disk import RealDisk
from delayd.machine.operating import Wait
from delayd.machine.state import LmdbState, OperatorLog
from delayd.net.connection import Connection
from delayd.reading.verify import verify_directory
from delayd.wire.frame import Head
from delayd.wire.heads import need_bool, need_str
from delayd.wire.requests import RequestType
from delayd.wire.status import ENTRIES_MAX, Decision, Quarantined, find_entry, read_list, read_waits

from .listing import Cell, columns, progress, show
from .main import NOT_BALANCED, OK
from .operate import Operator, all_pages, of_each, run
from .shared_options import (
    CommandGroup,
    DataFolder,
    LogIdParam,
    confirm,
    format_option,
    meta_option,
    secret_data_option,
    secret_option,
    yes_option,
)

COLUMNS = columns(
    "role log_id id messages:number since_ms:instant hour:detail subject:detail path:detail "
    "position:number,detail reason decision costs command"
)
NOT_RUNNING = "start the server now; one that waits for this goes on by itself"
WITH_MESSAGES = "it is given up with the message log"
UNDAMAGED = "nothing in it is damaged by itself"


class ListedEntry(NamedTuple):
    """An entry and the server that lists it; None for one that was found in files."""

    server: ask.Known | None
    entry: Quarantined


@click.group(cls=CommandGroup)
def mend() -> None:
    """List what servers can't read and have set aside, and decide on it.

    A damaged or missing file stops only its own messages. The server tries each entry again every 30 s, so it finds by
    itself a file that you restored from a copy. When there is no copy, give the entry up.

    $ delayd mend list
    $ delayd mend give-up schedule/2026112203
    """


@mend.command("list")
@click.option("--data", type=DataFolder(), metavar="DIR", help="Look into the files there; ask no server.")
@meta_option
@format_option
def list_(data: str | None, meta: str, form: str) -> None:
    """List what waits to be mended, why, and for each decision what it costs and the command that takes it.

    When a server can't be asked, its entries are missing, and stderr says so. A server whose start met damage is asked,
    too. What meta waits for is decided by other commands, which are named.

    $ delayd mend list
    $ delayd mend list --format json
    $ delayd mend list --data /var/lib/delayd
    """
    found, of_meta = (_in_files(data), []) if data is not None else run(lambda: _all(meta))
    rows = [row for each in found for row in _rows(each)]
    rows += [("meta", None, wait.what, *[None] * 6, wait.why, None, None, wait.command or None) for wait in of_meta]
    show(COLUMNS, rows, form)


def _add(decision: Decision, id_name: str, help_: str) -> None:
    """Add the command that takes a decision."""

    @mend.command(decision.value, help=help_)
    @click.argument("id_", metavar=id_name)
    @click.option(
        "--server", type=LogIdParam(), metavar="LOG_ID", help="The server that lists it; needed when several do."
    )
    @meta_option
    @secret_option
    @secret_data_option
    @yes_option
    def command(id_: str, server: int | None, meta: str, secret_file: str | None, data: str, yes: bool) -> int:
        if decision is Decision.GIVE_UP and end_of(id_) is not None:
            _give_up(id_, yes)
            return OK
        return _decide(decision, id_, server, Operator.of(meta, secret_file, data, yes))


_add(
    Decision.TAKE,
    "ID",
    """Make a server read an entry again at once, because its file was put back.

    The command first says what that does, and asks.

    Exit codes: 3 the entry is still as it was.

    $ delayd mend take schedule/2026112203
    """,
)
_add(
    Decision.RELEASE,
    "ID",
    """Make a server go on without a value that can't be read, as if it were new.

    The command first says what that costs, and asks.

    Exit codes: 3 the entry is still as it was.

    $ delayd mend release group/00000001
    """,
)
_add(
    Decision.GIVE_UP,
    "ID|FOLDER",
    """Give an entry up for good, when there is no copy of its file.

    FOLDER is delay/message, realtime/message or realtime/pull of a data directory: the damaged end of that log keeps
    its server from starting, which is stopped, or waits for this. The bytes that are given up stay in the folder
    quarantine of that server.

    The command first says what is lost by that, and asks.

    Exit codes: 3 the entry is still as it was.

    $ delayd mend give-up schedule/2026112203
    $ delayd mend give-up /var/lib/delayd/realtime/pull
    """,
)


def _decide(decision: Decision, id_: str, server: int | None, operator: Operator) -> int:
    found, _ = run(lambda: _all(operator.meta))
    listing = [each for each in found if each.entry.id == id_ and (server is None or _log_id(each) == server)]
    entry = find_entry([each.entry for each in listing], id_)
    if len(listing) > 1:
        raise BadArgument(f"{len(listing)} servers list {id_}; say which one with --server")
    entry.check(decision)
    operator.confirm(f"{id_}: {entry.costs[decision]}")
    asked = listing[0].server
    assert asked is not None, "servers have listed it"
    answer = operator.tell(asked, RequestType.MEND, {"id": id_, "decision": decision.value})
    click.echo(need_str(answer, "message"))
    return OK if need_bool(answer, "done") else NOT_BALANCED


async def _all(address: str) -> tuple[list[ListedEntry], list[Wait]]:
    """What all servers list, and what meta waits for."""

    async def read(connection: Connection) -> list[Quarantined]:
        head: Head = {"after": "", "limit": ENTRIES_MAX}
        pages = all_pages(connection, RequestType.MEND_LIST, read_list, lambda entry: entry.id, head)
        return [entry async for page in pages for entry in page]

    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection)
        waits = read_waits(await ask.ask(connection, RequestType.STATUS, {}), "waits")
    listed = await of_each(servers, "entries", read)
    return [ListedEntry(server, entry) for server, entries in listed for entry in entries], waits


def _in_files(data: str) -> list[ListedEntry]:
    """Each damaged file of a directory; the end of a log that may be given up goes by the name of its folder."""
    with progress("files", None) as advance:
        report = verify_directory(data, progress=lambda done, total: advance(1, total))
    found: list[ListedEntry] = []
    for file in report.damaged:
        folder = os.path.dirname(file.path)
        end = end_of(folder)
        costs = {} if end is None else {Decision.GIVE_UP: end.cost}
        entry = Quarantined(
            file.path if end is None else folder, file.path, file.position, file.sentence, 0, 0, costs=costs
        )
        found.append(ListedEntry(None, entry))
    return found


def _rows(found: ListedEntry) -> Iterator[tuple[Cell, ...]]:
    """One row for each decision; one for an entry that offers none."""
    server, entry = found
    role = entry.id.split("/")[-2] if server is None and entry.costs else None if server is None else server.role
    where = (entry.hour, entry.subject, entry.path, entry.position, entry.reason)
    what = (role, None if server is None else f"{server.log_id:016x}", entry.id, entry.rows, entry.since_ms or None)
    for decision, cost in entry.costs.items():
        of_server = "" if server is None or end_of(entry.id) is not None else f" --server {server.log_id:016x}"
        yield (*what, *where, decision, cost, f"delayd mend {decision} {shlex.quote(entry.id)}{of_server}")
    if not entry.costs:
        yield (*what, *where, None, None, None)


def _log_id(found: ListedEntry) -> int:
    return 0 if found.server is None else found.server.log_id


# Files of a server that does not run.


class _Stopped:
    """The directory of a stopped server, which is locked meanwhile."""

    def __init__(self, disk: RealDisk, home: str, state: LmdbState) -> None:
        self.disk = disk
        self.home = home
        self.state = state
        self.now_ms = time.time_ns() // 1_000_000
        self.log_id = self._number(b"log_id")
        self.marks = self._marks()

    def place(self, folder: str, end: LogEnd) -> LogPlace:
        """Where a log of this server is."""
        return LogPlace(folder, end.kind, self.log_id)

    def damage(self, folder: str, end: LogEnd) -> Damage | None:
        """What keeps a start from a log."""
        confirmed: Confirmed | None = None
        if end.kind is FileKind.MESSAGE:
            confirmed = partial(decided_behind, self.disk, self.home, self.log_id)
        elif end.kind is FileKind.REALTIME:
            confirmed = partial(named_behind, self.disk, self.state.scan, self.home, self.log_id)
        counted = self.marks.get(end.offset, 0), self.marks.get(end.crc32c, 0)
        return find_damage(self.disk, self.place(folder, end), *counted, self.now_ms, confirmed)

    def behind_checkpoint(self, folder: str, end: LogEnd, why: str) -> Damage:
        """All that a log has behind its last checkpoint."""
        found = self.damage(folder, end)
        if found is not None and found.good_until == found.start:
            return found
        start = self.marks.get(end.offset, 0)
        return Damage(DamagedData(folder, 0, why), start, self.marks.get(end.crc32c, 0), start, 0, 0, 0)

    def skips(self, damage: Damage, kind: FileKind) -> list[NewGroup]:
        """A record that leaves sequences, or ids of groups, unused: those that were given behind the damage are never
        given again (rules I5, Q2).
        """
        if kind is FileKind.PULL:
            return [ids_skipped(damage, self._number(b"epoch"), self.now_ms)]
        if kind is not FileKind.MESSAGE:
            return []
        sequence = max(self.marks.get("next_sequence", 1), damage.next_sequence) + RESTORED_STEP
        appended_at_ms = max(self.marks.get("appended_at_ms", 0), damage.appended_at_ms)
        batch = encode_known([SkippedSequences(RESTORED_STEP)])
        return [NewGroup(GroupKind.CONTROL, [batch], self._number(b"epoch"), appended_at_ms, sequence)]

    def note(self, what: str) -> None:
        """Keep in the state what was decided, and when."""
        self.state.commit(*OperatorLog(self.state).entry(self.now_ms, what))

    def _marks(self) -> dict[str, int]:
        row = self._value(b"checkpoint") if self.state.get(b"checkpoint") is not None else {}
        if not isinstance(row, dict):
            raise self._malformed(b"checkpoint")
        return {name: number for name, number in row.items() if isinstance(name, str) and isinstance(number, int)}

    def _number(self, key: bytes) -> int:
        number = self._value(key)
        if not isinstance(number, int):
            raise self._malformed(key)
        return number

    def _value(self, key: bytes) -> object:
        value = self.state.get(key)
        found: object = None if value is None else msgpack.unpackb(value)
        return found

    def _malformed(self, key: bytes) -> DamagedData:
        return DamagedData(f"{self.home}/state.lmdb", 0, f"the value of {key!r} is not what a server writes there")


@contextmanager
def _stopped(home: str) -> Iterator[_Stopped]:
    disk = RealDisk()
    lock = disk.lock(f"{home}/LOCK", "mend give-up")
    try:
        state = LmdbState(f"{home}/state.lmdb")
        try:
            yield _Stopped(disk, home, state)
        finally:
            state.close()
    finally:
        lock.release()
        disk.close()


def _give_up(folder: str, yes: bool) -> None:
    """Give up the damaged end of the log in a folder such as ``delayd-data/realtime/pull``; its server is down."""
    folder = os.path.abspath(folder)
    end, home = end_of(folder), os.path.dirname(folder)
    if end is None or not os.path.isdir(home):
        raise BadArgument(f"{home} can't be read; give up the end of a log on the machine that has it")
    with _stopped(home) as stopped:
        damage = stopped.damage(folder, end)
        if damage is None and end.kind is FileKind.PULL:
            # It may name messages that the message log has lost with its end.
            damage = stopped.behind_checkpoint(folder, end, UNDAMAGED)
        if damage is None:
            pulls = f"; its pull log may: delayd mend give-up {home}/pull" if end.kind is FileKind.REALTIME else ""
            raise BadArgument(f"nothing in {folder} keeps its server from starting{pulls}")
        confirm(
            f"{damage.error.message}. What was behind offset {damage.good_until} is given up (files still hold "
            f"{damage.lost_bytes:,} bytes of it): {end.cost}.",
            yes,
        )
        cuts = [(folder, end, damage)]
        pulled = f"{home}/pull"
        if end.kind is FileKind.REALTIME and (pull := end_of(pulled)) is not None:
            # Its entries name messages by numbers that will be given again, so it goes first: no start may find them.
            cuts.insert(0, (pulled, pull, stopped.behind_checkpoint(pulled, pull, WITH_MESSAGES)))
        for each, of_log, cut in cuts:
            groups = stopped.skips(cut, of_log.kind)
            place = stopped.place(each, of_log)
            for path in give_up(stopped.disk, place, cut, f"{home}/quarantine", stopped.now_ms, groups):
                click.echo(f"put aside as {path}")
        stopped.note(f"gave up {os.path.basename(folder)} behind {damage.good_until}")
    click.echo(NOT_RUNNING)
