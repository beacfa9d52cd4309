"""``delayd backup``, ``delayd restore`` and ``delayd cut``: copies of servers, putting them back, and one moment that
all servers keep while they are copied (docs/backup.md).

Invariant: the servers that run are cut by themselves, one after the other, and from its own cut on until all are cut a
delay server tells no other server anything: what the copy of one server says of another one, the copy of that one
holds, too. A server that does not run is locked for as long as it is copied. A cut of the cluster ends with its
connection, so the command learns in any case whether the servers kept the moment until it had ended.
"""

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import NamedTuple

import click

import delayd
from delayd.backup import (
    ROLES,
    STATE,
    BackupTerms,
    Held,
    Manifest,
    ServersCut,
    ServerSource,
    Stage,
    read_journal,
    read_manifest,
    take,
)
from delayd.backup import restore as put_back
from delayd.client.asking import ask
from delayd.errors import BadArgument, DelaydError, NotReady, ServerUnavailable
from delayd.hours import instant_text
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.machine.disk import RealDisk
from delayd.machine.identity import LOCK, is_held
from delayd.machine.operating import counted
from delayd.machine.state import LMDB_FILE
from delayd.net.connection import Connection
from delayd.net.cut import FOLDER, SIZES, read_sizes
from delayd.reading.verify import verify_directory
from delayd.secret import FILE_MODE, SECRET_FILE
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_bool, need_str, need_u64
from delayd.wire.requests import RequestType

from .listing import Cell, columns, progress, show, size_text
from .main import NOT_BALANCED, OK, TRY_LATER
from .operate import Operator, run
from .shared_options import (
    Command,
    DataFolder,
    format_option,
    meta_option,
    secret_data_option,
    secret_option,
)

COLUMNS = columns(
    "role log_id instant_ms:instant next_sequence:number replay_offset:number log_end:number,spare "
    "hours:number,spare first_hour:spare last_hour:spare size_bytes:size"
)
role_option = click.option(
    "--role", "roles", multiple=True, type=click.Choice(ROLES), help="Only this server; may be repeated."
)
_HOLDER = re.compile(r"pid (\d+) ")


class Running(NamedTuple):
    """A running server, which has heard the secret of its cluster."""

    role: str
    name: str
    connection: Connection


@click.command(cls=Command)
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@role_option
@click.option("--show", "only_show", is_flag=True, help="Say what the backup in DIR holds, and copy nothing.")
@click.option("--cut", "joins", is_flag=True, help="Copy the moment at which `delayd cut` holds the cluster.")
@secret_data_option
@meta_option
@secret_option
@format_option
def backup(
    folder: str,
    roles: Sequence[str],
    only_show: bool,
    joins: bool,
    data: str,
    meta: str,
    secret_file: str | None,
    form: str,
) -> int:
    """Copy the servers of a data directory into DIR, while they run or not.

    Servers that run serve on. DIR is new or empty, or has an earlier backup of the same servers: then only what came
    since is copied, and until that is done DIR holds no whole backup. A backup that was interrupted goes on where it
    stopped when the command is given again. Each file is checked.

    Exit codes: 3 a file is damaged; everything else is copied, and stderr names it.

    $ delayd backup /mnt/backup --data /var/lib/delayd
    $ delayd backup /mnt/backup --show
    """
    folder = os.path.abspath(folder)
    disk = RealDisk()
    if only_show:
        manifest = _manifest(disk, folder)
    else:
        DataFolder().convert(data, None, None)
        manifest = _take(disk, folder, os.path.abspath(data), roles, meta, secret_file, joins)
    return _tell(folder, manifest, form)


@click.command(cls=Command)
@click.argument("folder", type=click.Path(exists=True, file_okay=False), metavar="DIR")
@role_option
@click.option("--damaged", is_flag=True, help="Restore although files do not check; the servers name these.")
@secret_data_option
def restore(folder: str, roles: Sequence[str], damaged: bool, data: str) -> int:
    """Copy the servers of the backup in DIR into the directory of --data.

    The folders of these servers must be new or empty, and no server may run there. Each file is checked against the
    backup. A restore that was interrupted goes on where it stopped when the command is given again; until it is done
    no server starts there. The command ends by saying what to do next.

    Exit codes: 3 a file of the backup does not check, and nothing is restored unless --damaged is given.

    $ delayd restore /mnt/backup --data /var/lib/delayd
    """
    folder, data = os.path.abspath(folder), os.path.abspath(data)
    disk = RealDisk()
    manifest = _manifest(disk, folder)
    wanted = [each.role for each in manifest.servers if not roles or each.role in roles]
    wanted += [role for role in roles if role not in wanted]
    disk.make_folder(data)
    with progress("bytes", manifest.size_bytes) as advance:
        found = put_back(disk, disk, folder, manifest, data, wanted, advance, damaged_too=damaged)
    for sentence in found:
        click.echo(f"delayd: {sentence}", err=True)
    if found and not damaged:
        click.echo("delayd: nothing is restored; take another backup, or give --damaged", err=True)
        return NOT_BALANCED
    _copy_secret(folder, data)
    restored = [each for each in manifest.servers if each.role in wanted]
    instants = ", ".join(f"{each.role} of {instant_text(each.cut_ms)}" for each in restored)
    click.echo(f"restored into {data}: {instants}")
    if manifest.moment_ms:
        click.echo(f"the whole cluster was cut at {instant_text(manifest.moment_ms)}: restore all of its servers from")
        click.echo("  their backups of this cut, in any order, before you start the first one")
    fits = manifest.at_one_instant or bool(manifest.moment_ms)
    for line in next_steps(wanted, fits, whole=bool(manifest.moment_ms)):
        click.echo(line)
    return NOT_BALANCED if found else OK


def next_steps(roles: Sequence[str], at_one_instant: bool, *, whole: bool = False) -> list[str]:
    """What an operator has to do after a restore (docs/backup.md, After a restore); ``whole``: of the whole cluster."""
    steps = ["never start the servers that the backup is of again: they and the restored ones would deliver twice"]
    if whole or ("delay" in roles and "realtime" in roles):
        if at_one_instant:
            steps.append("start the servers: they go on from that moment; what came or was acknowledged since is lost")
        else:
            steps.append("start the servers: they are of different moments, so `delayd target list` may name an alarm;")
            steps.append("  `delayd target accept TARGET` then says what that costs")
    elif "delay" in roles:
        steps.append("start it: it is fenced once its target says that it knows more; bring back its newest directory")
        steps.append("  or run `delayd target accept TARGET`: what was delivered since is delivered a second time")
    elif "realtime" in roles:
        steps.append("start it: delay servers refuse it when its log ends before what it had acknowledged; then run")
        steps.append("  `delayd target accept TARGET`: what it lost is not delivered again; `delayd audit` names it")
    if whole:
        return steps
    if "meta" in roles:
        steps.append("meta: subjects that got a server since get one anew; `delayd route move` puts them back")
    elif roles:
        steps.append(
            "a meta that knows a later life refuses it (`fenced`): then `delayd server forget`, and restart it"
        )
    return steps


def _take(
    disk: RealDisk, folder: str, data: str, roles: Sequence[str], meta: str, secret_file: str | None, joins: bool
) -> Manifest:
    inside = os.path.commonpath((os.path.realpath(folder), os.path.realpath(data)))
    if inside in (os.path.realpath(folder), os.path.realpath(data)):
        raise BadArgument(f"{folder} and {data} lie one within the other; give a folder on another disk")
    wanted = [role for role in ROLES if (role in roles if roles else os.path.isdir(f"{data}/{role}/state.lmdb"))]
    missing = [role for role in wanted if not os.path.isdir(f"{data}/{role}/state.lmdb")]
    if missing or not wanted:
        raise BadArgument(f"{data} holds no {' and no '.join(missing or ROLES)} server; give the directory of --data")
    with ExitStack() as stack, progress("bytes", None) as advance:
        running = [role for role in wanted if _runs(data, role)]
        for role in wanted:
            if role not in running:
                lock = disk.lock(f"{data}/{role}/{LOCK}", "backup")
                stack.callback(lock.release)
        operator = Operator.of(meta, secret_file, data) if running else None

        def cut(stage: Stage) -> ServersCut:
            found, sources = ServersCut((), True), [_stopped(data, role) for role in wanted if role not in running]
            for each in sources:
                stage(each)
            if operator is not None:
                found = run(lambda: _cut(data, running, operator, joins, stage))
            sources += found.sources
            return found._replace(sources=sorted(sources, key=lambda each: ROLES.index(each.role)))

        terms = BackupTerms(cut, _check, advance, _now_ms(), delayd.__version__)
        manifest = take(disk, disk, folder, wanted, terms)
        _copy_secret(data, folder)
        return manifest


def _stopped(data: str, role: str) -> ServerSource:
    home = f"{data}/{role}"
    return ServerSource(role, home, _now_ms(), f"{home}/{STATE}", f"{home}/{CHECKPOINT}", None)


async def _cut(data: str, roles: Sequence[str], operator: Operator, joins: bool, stage: Stage) -> ServersCut:
    """Cut the servers that run, and copy what they hold for this; the rest of their files is copied later."""
    meta, secret = operator.meta, operator.secret
    async with AsyncExitStack() as stack:
        connections: dict[str, Connection] = {}
        async with ask.meta(meta) as asked:
            known = await ask.known_servers(asked)
        pids = {_holder(data, role) for role in roles}
        others = sum(server.alive and server.pid not in pids for server in known)
        if others and not joins:
            click.echo(
                f"delayd: {others} more servers of this cluster are elsewhere: back them up there, too; "
                "`delayd cut` has all copies be of one moment",
                err=True,
            )
        for role in roles:
            if role == "meta":
                connection = await stack.enter_async_context(ask.connected(ask.endpoint_of(meta), "meta server"))
            else:
                connection = await stack.enter_async_context(ask.reached(_server_of(data, role, known, meta)))
            await ask.prove(connection, secret)
            connections[role] = connection
        servers = [Running(role, role, connection) for role, connection in connections.items()]
        moment_ms = await _moment(servers) if joins else 0
        if joins:
            at_ms, held = moment_ms, True
        else:
            fixed = await cut_servers(servers, {})
            at_ms, held = _now_ms(), fixed.held
            for server, answer in zip(servers, fixed.answers, strict=True):
                if not _same(need_str(answer, "folder"), f"{data}/{server.role}"):
                    raise ServerUnavailable(
                        f"the {server.role} server at {server.connection.peer} is not the one of "
                        f"{data}/{server.role}; give the address of its meta server with --meta"
                    )
        sources = [_running(data, role, at_ms) for role in connections]
        for each in sources:
            stage(each)
        if joins and await _moment(servers) != moment_ms:
            raise NotReady("the cut of the cluster ended while its files were copied; begin anew", retry_after_ms=0)
        return ServersCut(sources, held, moment_ms)


async def _moment(servers: Sequence[Running]) -> int:
    """The moment at which `delayd cut` holds all of these servers."""
    answers = [await ask.ask(server.connection, RequestType.CUT_READY, {"cut": 0}) for server in servers]
    moments = {need_u64(answer, "moment_ms") for answer in answers}
    if len(moments) > 1:
        raise NotReady("these servers are cut at different moments; begin anew", retry_after_ms=0)
    return moments.pop()


def _running(data: str, role: str, at_ms: int) -> ServerSource:
    home = f"{data}/{role}"
    path = f"{home}/{FOLDER}/{SIZES}"
    try:
        with open(path, "rb") as file:
            sizes = read_sizes(path, file.read())
    except FileNotFoundError:
        raise ServerUnavailable(
            f"the {role} server that was cut is not the one of {home}; give the address of its meta server with --meta"
        ) from None
    return ServerSource(role, home, at_ms, f"{home}/{FOLDER}/{LMDB_FILE}", f"{home}/{FOLDER}/{CHECKPOINT}", sizes)


def _server_of(data: str, role: str, known: Sequence[ask.Known], meta: str) -> ask.Known:
    """The running server of a folder: the one whose process holds the lock."""
    pid = _holder(data, role)
    for server in known:
        if (server.role, server.pid, server.alive) == (role, pid, True):
            return server
    raise ServerUnavailable(
        f"the {role} server of {data} runs (pid {pid}), and meta at {ask.endpoint_of(meta)} does not know it as alive; "
        "give the address of its meta server with --meta, or stop the server"
    )


def _holder(data: str, role: str) -> int:
    with open(f"{data}/{role}/{LOCK}", encoding="utf-8", errors="replace") as file:
        found = _HOLDER.match(file.read(100))
    return int(found[1]) if found else 0


def _runs(data: str, role: str) -> bool:
    try:
        return is_held(os.stat(f"{data}/{role}/{LOCK}"))
    except FileNotFoundError:
        return False


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _check(folder: str) -> list[str]:
    """Read every checksum of a backup, as `delayd log verify` does."""
    if not any(os.path.isdir(f"{folder}/{role}/message") for role in ROLES):
        return []
    with progress("files checked", None) as advance:
        report = verify_directory(folder, progress=lambda done, total: advance(1, total))
    return [each.sentence for each in report.damaged]


def _manifest(disk: RealDisk, folder: str) -> Manifest:
    left = read_journal(disk, folder)
    if left is not None and not os.path.exists(f"{folder}/backup.json"):
        raise BadArgument(
            f"the backup in {folder} was not finished: {left:,} files of it are copied; "
            "give `delayd backup` again, and it goes on"
        )
    return read_manifest(disk, folder)


def _tell(folder: str, manifest: Manifest, form: str) -> int:
    show(COLUMNS, [_row(manifest, each) for each in manifest.servers], form)
    if form == "table":
        roles = {each.role for each in manifest.servers}
        fit = "its servers fit each other" if manifest.at_one_instant else "its servers are of different moments"
        together = f"; {fit}" if {"delay", "realtime"} <= roles else ""
        if manifest.moment_ms:
            together = f"; it fits all backups of the cut of {instant_text(manifest.moment_ms)}"
        click.echo(
            f"{folder} is whole: {counted(len(manifest.entries), 'file|files')}, {size_text(manifest.size_bytes)}, "
            f"made {instant_text(manifest.made_at_ms)} by delayd {manifest.version}{together}"
        )
    for sentence in manifest.damaged:
        click.echo(f"delayd: {sentence}", err=True)
    return NOT_BALANCED if manifest.damaged else OK


def _row(manifest: Manifest, each: Held) -> tuple[Cell, ...]:
    own = sum(entry.size_bytes for entry in manifest.entries if entry.path.startswith(f"{each.role}/"))
    has_log = each.role != "meta"
    counts = (each.next_sequence, each.offset, each.end, each.hours) if has_log else (None,) * 4
    hours = (each.first_hour or None, each.last_hour or None)
    return (each.role, f"{each.log_id:016x}", each.cut_ms, *counts, *hours, own)


def _copy_secret(source: str, target: str) -> None:
    """Copy the cluster's secret, readable for this user only; one that is there already stays."""
    try:
        with open(f"{source}/{SECRET_FILE}", "rb") as file:
            data = file.read()
        descriptor = os.open(f"{target}/{SECRET_FILE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except (FileNotFoundError, FileExistsError):
        return
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# A hold ends once all servers are cut, after some milliseconds; this ends that of a dead command. Each try may take
# longer than the one before, because the machines may be busy.
HOLDS_MS = (2_000, 3_500, 5_000)
IN_TURN = ("delay", "realtime", "meta")  # Servers of one role are cut together, and each role behind the one before.


class Fixed(NamedTuple):
    """How servers were cut: the answers to CUT, and whether the copies fit each other."""

    answers: Sequence[Head]  # In the order of the servers.
    held: bool


async def cut_servers(servers: Sequence[Running], wishes: Mapping[str, HeadValue]) -> Fixed:
    """Cut these servers, and wait until the files of their cuts are written.

    ``wishes`` are more fields of each CUT. Raises what the servers answer, and ServerUnavailable.
    """
    held, cuts = False, dict[int, Head]()
    for hold_ms in HOLDS_MS:
        for role in IN_TURN:
            own = [place for place, server in enumerate(servers) if server.role == role]
            head = {"hold_ms": hold_ms if role == "delay" else 0, **wishes}
            answers = await asyncio.gather(
                *(ask.ask(servers[place].connection, RequestType.CUT, head) for place in own)
            )
            cuts.update(zip(own, answers, strict=True))
        ready = await asyncio.gather(
            *(
                ask.ask(server.connection, RequestType.CUT_READY, {"cut": need_u64(cuts[place], "cut")})
                for place, server in enumerate(servers)
            )
        )
        held = all(need_bool(answer, "held") for answer in ready)
        if held:
            break
    return Fixed([cuts[place] for place in range(len(servers))], held)


LOOK_S = 5.0  # How often each server is asked whether it is still there.


@click.command(cls=Command)
@click.argument("command", nargs=-1, required=True)
@secret_data_option
@meta_option
@secret_option
def cut(command: Sequence[str], data: str, meta: str, secret_file: str | None) -> int:
    """Cut all servers of the cluster at one moment, and run COMMAND while they keep it.

    COMMAND runs `delayd backup DIR --data DIR --cut` for each data directory, on whichever machine it is. The servers
    serve on meanwhile. Backups of one cut fit each other; they can be restored in any order.

    Exit codes: that of COMMAND; 4 a server can't be reached, or did not keep the moment until COMMAND had ended.

    $ delayd cut -- delayd backup /mnt/backup --data /var/lib/delayd --cut
    $ delayd cut -- sh backup-all.sh
    """
    operator = Operator.of(meta, secret_file, data)
    return run(lambda: _cut_all(command, operator))


async def _cut_all(command: Sequence[str], operator: Operator) -> int:
    async with AsyncExitStack() as stack:
        servers: list[Running] = []
        asked = await stack.enter_async_context(ask.connected(ask.endpoint_of(operator.meta), "meta server"))
        for known in await ask.known_servers(asked):
            name = f"{known.role} server {known.log_id:016x}"
            if not known.alive:
                click.echo(f"delayd: the {name} is away: leave it stopped until its directory is copied", err=True)
                continue
            servers.append(Running(known.role, name, await stack.enter_async_context(ask.reached(known))))
        servers.append(Running("meta", "meta server", asked))
        for server in servers:
            await ask.prove(server.connection, operator.secret)
        moment_ms = time.time_ns() // 1_000_000
        fixed = await cut_servers(servers, {"moment_ms": moment_ms})
        if not fixed.held:
            raise NotReady("the servers were too slow to be cut at one moment; try again", retry_after_ms=1_000)
        click.echo(f"{len(servers)} servers are cut at {instant_text(moment_ms)}", err=True)
        return await _run_beside(command, servers)


async def _run_beside(command: Sequence[str], servers: Sequence[Running]) -> int:
    try:
        child = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        raise click.UsageError(f"{command[0]} can't be run: {error.strerror}") from error
    ended = asyncio.create_task(child.wait())
    lost = set[str]()
    while not ended.done():
        await asyncio.wait([ended], timeout=LOOK_S)
        for server in servers:
            try:
                await ask.ask(server.connection, RequestType.PING, {})
            except DelaydError as error:
                if server.name not in lost:
                    click.echo(f"delayd: the cut of the {server.name} has ended: {error.message}", err=True)
                lost.add(server.name)
    code = ended.result()
    return TRY_LATER if lost else OK if code == 0 else code if code > 0 else 128 - code
