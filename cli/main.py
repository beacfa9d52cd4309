"""The command ``delayd``: one click group, whose commands receive what the launcher injects as ``click`` object.

Invariant: an error that a user can act on is one sentence on stderr and a documented exit code other than 1, never a
traceback (docs/cli.md). A command's module is imported when it is run, so ``delayd send`` pays for no supervisor and
``--help`` for nothing.
"""

import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

import click

import delayd
from delayd.errors import (
    CallerError,
    DamagedData,
    DataError,
    DelaydError,
    OutcomeUnknown,
    ProtocolError,
    RequestFailed,
    RetryLater,
    ServerStopped,
    StaleHandle,
)

from .shared_options import examples

if TYPE_CHECKING:
    from delayd.address import Tls
    from delayd.reading.books import AuditReport
    from delayd.reading.proved import ProvedHours
    from delayd.secret import Secret

    from .listing import Cell

OK = 0
BUG = 1  # A traceback is on stderr.
USAGE = 2  # An argument, a setting or the state of a directory; the same command fails again.
NOT_BALANCED = 3  # The books do not balance, data is damaged, or a server stopped itself because of that.
TRY_LATER = 4  # A server can't be reached or asks to wait.
INTERRUPTED = 130  # What a shell reports for a program that Ctrl-C ended.
NOBODY_READS = 141  # What a shell reports for a program whose reader went away, such as `head`.

# The first that fits decides, so the narrower one comes first.
_CODES: tuple[tuple[type[DelaydError], int], ...] = (
    (DamagedData, NOT_BALANCED),
    (ServerStopped, NOT_BALANCED),
    (DataError, USAGE),
    (CallerError, USAGE),
    (ProtocolError, USAGE),  # Whatever listens there does not speak as we do: the address is wrong, or a version.
    (RetryLater, TRY_LATER),
    (RequestFailed, TRY_LATER),
    (OutcomeUnknown, TRY_LATER),
    (StaleHandle, TRY_LATER),
)


def exit_code_of(error: DelaydError) -> int:
    """The exit code that tells a script who must act."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    # An error that bundles others, such as that of a batch, means what its cause means.
    return exit_code_of(error.__cause__) if isinstance(error.__cause__, DelaydError) else BUG


ServerConfig = object

OWN_COMMAND = (sys.executable, "-m", "delayd")


class SparkAudit(Protocol):
    """Audits directories and archives in Spark; see `spark.session.audit`."""

    def __call__(
        self,
        *places: str,
        hours: Container[int],
        late_ms_limit: int,
        lost_grace_ms: int,
        findings_limit: int,
        proved: "ProvedHours",
    ) -> "AuditReport": ...


class RunGateway(Protocol):
    """Serves HTTP until it is told to stop; returns the exit code."""

    def __call__(
        self,
        meta: str,
        host: str,
        port: int,
        names: Sequence[str],
        *,
        insecure: bool,
        require_token: bool = False,
        tls: "Tls | None" = None,
        find_secret: "Callable[[], Secret | None]" = lambda: None,
        allow_private: bool = False,
        audits: str | None = None,
        exit_with_stdin: bool = False,
    ) -> int: ...


class RunDev(Protocol):
    """Serves HTTP over servers in memory until it is told to stop; returns the exit code."""

    def __call__(
        self, host: str, port: int, names: Sequence[str], *, insecure: bool, start_ms: int | None, stands: bool
    ) -> int: ...


class SparkJob(Protocol):
    """Runs a job in Spark, named by the word behind ``delayd spark``: its rows, or none when a folder receives them."""

    def __call__(
        self,
        job: str,
        data: Sequence[str],
        out: str | None,
        *,
        hours: Mapping[str, str],
        settings: Mapping[str, object],
        master: str | None,
    ) -> "Iterable[Sequence[Cell]]": ...


@dataclass(frozen=True, slots=True)
class Programs:
    """The three servers by role, the gateway, the audit and jobs in Spark, and how delayd is started in another
    process.
    """

    run_server: Mapping[str, Callable[[ServerConfig], int]]
    run_gateway: RunGateway
    run_dev: RunDev
    spark_audit: SparkAudit
    spark_job: SparkJob
    command: Sequence[str] = OWN_COMMAND  # Followed by a role and its options.
    gateway_lacks: Callable[[], str | None] = lambda: None  # The first package of a gateway that is not installed.


# Without any handler Python writes the warnings of clients to stderr, which is for one sentence; servers set up others.
_SILENT = logging.NullHandler()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NICE = 5  # Commands that only look give way to servers on this machine, from their imports on.
LOOKS = frozenset(
    {
        "top",
        "schedule",
        "dispatch",
        "trace",
        "log",
        "audit",
        "export",
        "archive",
        "sql",
        "seals",
        "spark",
        "spark-audit",
        "tree-head",
        "prove",
    }
)


class CommandPlace(NamedTuple):
    """Where a command is defined, and the line that the overview shows."""

    module: str
    name: str
    summary: str


PLACES = {
    "up": CommandPlace("serve", "up", "Run all servers on this machine."),
    "meta": CommandPlace("serve", "meta", "Run the meta server: who is alive, who serves what."),
    "delay": CommandPlace("serve", "delay", "Run a delay server: it holds messages until they are due."),
    "realtime": CommandPlace("serve", "realtime", "Run a realtime server: it serves due messages to consumers."),
    "gateway": CommandPlace("gateway_command", "gateway", "Serve HTTP, for programs without a client of delayd."),
    "push": CommandPlace("push_commands", "push", "Have gateways POST due messages to URLs."),
    "dev": CommandPlace("gateway_command", "dev", "Serve HTTP in memory, with a clock that tests move."),
    "token": CommandPlace("token_commands", "token", "Say which clients are let in, and what each may do."),
    "send": CommandPlace("send", "send", "Send messages that become due later."),
    "consume": CommandPlace("consume_command", "consume", "Take due messages and acknowledge them."),
    "work": CommandPlace("work", "work", "Call the handlers of a worker for due messages."),
    "get": CommandPlace("message_commands", "get", "Show what became of messages."),
    "cancel": CommandPlace("message_commands", "cancel", "End messages that are pending."),
    "reschedule": CommandPlace("message_commands", "reschedule", "Move messages that are pending to another instant."),
    "pending": CommandPlace("message_commands", "pending", "List the pending messages of a subject."),
    "cron": CommandPlace("cron_commands", "cron", "Send messages again and again: recurring schedules."),
    "status": CommandPlace(
        "status_command", "status", "Show which servers serve, what waits for whom, and what servers refuse."
    ),
    "top": CommandPlace("status_command", "top", "Watch rates, pending messages and the lag of groups."),
    "servers": CommandPlace("servers", "servers", "List the servers that meta knows."),
    "server": CommandPlace("servers", "server", "Cordon, empty, retire or forget a server."),
    "target": CommandPlace(
        "owners", "target", "List realtime servers, and decide on those that lost data or are gone."
    ),
    "route": CommandPlace("owners", "route", "Give a subject to another realtime server."),
    "slots": CommandPlace("owners", "slots", "Show which delay server judges which keys, and move keys."),
    "clock": CommandPlace("servers", "clock", "Compare the servers' clocks, or tell servers that theirs is right."),
    "subjects": CommandPlace("subject_commands", "subjects", "List subjects and who serves them; set and show quotas."),
    "groups": CommandPlace(
        "group_commands", "groups", "List consumer groups and their progress; pause, rewind or delete one."
    ),
    "dead": CommandPlace(
        "group_commands", "dead", "List messages that no handler could work on; send them again, or end them."
    ),
    "mend": CommandPlace("mend", "mend", "List what servers can't read, and decide what to do about it."),
    "schedule": CommandPlace("schedule", "schedule", "Look at what is scheduled, from files."),
    "dispatch": CommandPlace("schedule", "dispatch", "Look at what became of messages, from files."),
    "trace": CommandPlace("file_commands", "trace", "Follow one message through all logs, from files."),
    "log": CommandPlace("log_commands", "log", "Verify or dump log files."),
    "audit": CommandPlace("audit_commands", "audit", "Check from files that each message left once and on time."),
    "export": CommandPlace("file_commands", "export", "Write the logs as Parquet or CSV, from files."),
    "archive": CommandPlace("archive_command", "archive", "Put sealed hours into an archive of Parquet files."),
    "sql": CommandPlace("sql_command", "sql", "Ask a query in SQL, of files and archives."),
    "seals": CommandPlace("audit_commands", "seals", "Verify the seals of hours, from files."),
    "tree-head": CommandPlace("proof_commands", "tree_head", "Sign the log of sealed hours, from files."),
    "prove": CommandPlace("proof_commands", "prove", "Print the proof of what became of a message, from files."),
    "check-proof": CommandPlace("proof_commands", "check_proof", "Check such a proof, without any other file."),
    "spark-audit": CommandPlace("audit_commands", "spark_audit", "Do the same as audit, with Spark."),
    "spark": CommandPlace(
        "spark_commands", "spark", "Run jobs for Spark: lateness, forecast, anomalies, work of consumers."
    ),
    "backup": CommandPlace(
        "backup_commands", "backup", "Copy the servers of a directory while they run, and check the copy."
    ),
    "cut": CommandPlace(
        "backup_commands", "cut", "Have all servers keep one moment while a command makes backups of them."
    ),
    "restore": CommandPlace("backup_commands", "restore", "Put a backup into the place of servers."),
    "completion": CommandPlace("completion", "completion", "Print the script that has a shell complete command lines."),
}


class Commands(click.Group):
    """The commands by name; each is imported when it is wanted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the overview."""
        return list(PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        place = PLACES.get(cmd_name)
        if place is None:
            return None
        command: click.Command = getattr(import_module(f".{place.module}", __package__), place.name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a reader that went away, such as ``head``, is no error."""
        try:
            try:
                result: object = super().invoke(ctx)
            finally:
                # Before an error is told; and at the interpreter's end nobody could catch what fails here.
                sys.stdout.flush()
        except BrokenPipeError:
            return _quietly()
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in PLACES.items()])


def main(programs: Programs, arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` are those of the process unless given. Returns the exit code."""
    logging.getLogger("delayd").addHandler(_SILENT)
    _prepare_output()
    if arguments is None and LOOKS.intersection(sys.argv[1:2]):
        os.nice(NICE)
    try:
        result: object = commands.main(arguments, prog_name="delayd", obj=programs, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as help_instead:
        help_instead.show()
        return help_instead.exit_code
    except click.ClickException as error:
        click.echo(f"delayd: {_sentence(error)}", err=True)
        return error.exit_code
    except DelaydError as error:
        click.echo(f"delayd: {error.message}", err=True)
        return exit_code_of(error)
    except OSError as error:
        return _refused_by_the_system(error)
    except click.Abort:
        # A Ctrl-C between the making of a coroutine and its run leaves one that is never awaited.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        click.echo("delayd: stopped", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else OK


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    epilog=examples(
        "delayd up",
        'delayd send orders.cancel "order 42" --in 10s',
        "delayd consume orders.cancel --group billing",
        "delayd audit",
        of="Examples, the first in a terminal of its own",
    ),
)
@click.version_option(delayd.__version__, prog_name="delayd")
def commands() -> None:
    """Holds messages until they are due and delivers each of them once, on time.

    Exit codes: 0 done, 1 a bug of delayd, 2 an argument or setting, 3 damage or books that do not balance,
    4 try later, 130 interrupted.
    """


def _sentence(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".").replace("\n", " ")
    message = message[:1].lower() + message[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message}; see {error.ctx.command_path} --help"
    return message


def _prepare_output() -> None:
    """Have a stdout and a stderr, also when they were closed, that write every character in some way."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A message's body may have what the terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")


def _refused_by_the_system(error: OSError) -> int:
    """Tell what a user or an operator can mend; all else is a bug and keeps its traceback."""
    if isinstance(error, PermissionError) and error.filename is not None:
        click.echo(
            f"delayd: {os.fsdecode(error.filename)} can't be used ({error.strerror}); give this user the right to, or "
            "be the user that the servers run as",
            err=True,
        )
        return USAGE
    if error.errno in _FULL and error.filename is None:
        click.echo(
            f"delayd: the output can't be written ({error.strerror}); free space where it goes, or send it elsewhere",
            err=True,
        )
        _discard_output()
        return USAGE
    raise error


def _quietly() -> int:
    _discard_output()
    return NOBODY_READS


def _discard_output() -> None:
    # The interpreter flushes stdout once more at its end, to where nothing more can be written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
