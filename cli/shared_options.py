"""Options that several commands share, so that they are called and explained the same everywhere, and what a shell
offers for them while somebody types.

Invariant: a command that is run, and not completed, imports nothing for what is offered.
"""

import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib import import_module
from inspect import cleandoc
from types import ModuleType
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from delayd.address import META_LOCAL, META_VARIABLE, TOKEN_VARIABLE
from delayd.config import DATA_DEFAULT
from delayd.errors import BadArgument
from delayd.secret import SECRET_FILE, Secret, read_secret

from .listing import LIMIT_DEFAULT, Cell, Column, show
from .times import duration, instant

DATA_VARIABLE = "DELAYD_DATA"
SECRET_VARIABLE = "DELAYD_SECRET_FILE"

Callback = Callable[..., Any]
Decorator = Callable[[Callback], Callback]  # What `click.option` returns.


def offer_subjects(context: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    """Offer subjects."""
    found: list[str] = _names().subjects(_value(context, "meta", META_LOCAL), begin)
    return found


def offer_groups(context: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    """Offer groups of the subject that was typed before."""
    subject = context.params.get("subject")
    found: list[str] = _names().groups(_value(context, "meta", META_LOCAL), subject, begin)
    return found


def offer_instants(context: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    """Offer instants."""
    found: list[str] = _names().instants(_value(context, "data", DATA_DEFAULT), begin)
    return found


def _value(context: click.Context, name: str, default: str) -> str:
    value = context.params.get(name)
    return value if isinstance(value, str) else default


def _names() -> ModuleType:
    # Commands name these functions, and none of them needs what asks a server.
    return import_module(".completion", __package__)


class DataFolder(click.Path):
    """A data directory that is there; its default is not, for whoever started the servers on another one."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See click."""
        try:
            what = "" if stat.S_ISDIR(os.stat(value).st_mode) else "is no directory"
        except OSError as error:
            what = f"can't be read ({error.strerror})"
        if what:
            self.fail(f"{os.fspath(value)} {what}; give the directory that `delayd up --data` was given", param, ctx)
        return os.fspath(value)


def _let_in(context: click.Context, parameter: click.Parameter, address: str) -> str:
    """Prove the secret that the environment names wherever the command connects to, unless that names a token."""
    path = os.environ.get(SECRET_VARIABLE)
    if not path or not os.path.exists(path) or os.environ.get(TOKEN_VARIABLE):
        return address
    from delayd.client.asking.ask import as_operator  # Most commands that are completed ask nobody.

    return as_operator(address, read_secret(path))


meta_option = click.option(
    "--meta",
    callback=_let_in,
    envvar=META_VARIABLE,
    default=META_LOCAL,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="Address of the meta server.",
)
data_option = click.option(
    "--data",
    envvar=DATA_VARIABLE,
    type=DataFolder(),
    default=DATA_DEFAULT,
    show_default=True,
    show_envvar=True,
    metavar="DIR",
    help="Data directory, as given to `delayd up`. Its servers may run or not; a copy will do, too.",
)
secret_option = click.option(
    "--secret-file",
    envvar=SECRET_VARIABLE,
    metavar="FILE",
    show_envvar=True,
    help=f"File with the cluster's secret; the default is {SECRET_FILE} in the directory of --data.",
)
secret_data_option = click.option(
    "--data",
    envvar=DATA_VARIABLE,
    default=DATA_DEFAULT,
    show_default=True,
    show_envvar=True,
    metavar="DIR",
    help=f"Data directory of a server of the cluster, which holds {SECRET_FILE}.",
)
format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="A table for people; JSON or CSV with exact values for programs.",
)
limit_option = click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=LIMIT_DEFAULT,
    show_default=True,
    metavar="N",
    help="Show at most this many rows; 0 shows all.",
)
from_option = click.option(
    "--from",
    "from_ms",
    type=instant,
    metavar="INSTANT",
    shell_complete=offer_instants,
    help="Due at or after this, such as now, -2h or ISO 8601.",
)
to_option = click.option(
    "--to",
    "to_ms",
    type=instant,
    metavar="INSTANT",
    shell_complete=offer_instants,
    help="Due before this, such as now, +30m or ISO 8601.",
)
in_option = click.option(
    "--in", "delay", type=duration, metavar="DURATION", help="Due so long from now: 30s, 30m, 1h30m, 2d."
)
at_option = click.option(
    "--at",
    "at_ms",
    type=instant,
    metavar="INSTANT",
    help="Due then: ISO 8601 with its offset; past-due leaves at once.",
)
timeout_option = click.option("--timeout", type=duration, default="30s", show_default=True, help="Give up after this.")
subject_option = click.option(
    "--subject", metavar="NAME", shell_complete=offer_subjects, help="Messages of this subject only."
)
text_format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text for people; JSON with exact values for programs.",
)


yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


class LogIdParam(click.ParamType[int]):
    """A server's log_id as listings show it: up to 16 hexadecimal digits."""

    name = "log_id"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click."""
        if isinstance(value, int):
            return value
        try:
            number = int(value, 16)
        except ValueError:
            number = -1
        if not 0 <= number < 1 << 64:
            self.fail(f"{value} is no log_id; take one from `delayd servers`", param, ctx)
        return number


def confirm(costs: str, yes: bool) -> None:
    """Say in one sentence what a decision costs, and ask for it unless `--yes` was given."""
    click.echo(costs, err=True)
    if not yes:
        try:
            click.confirm("Do it?", abort=True, err=True)
        except click.Abort:
            if sys.stdin is None or not sys.stdin.isatty():
                # Nobody was there to stop it, or the answer was no.
                raise BadArgument(
                    "nothing was done: the answer was not yes; with --yes the command does not ask"
                ) from None
            raise


def secret_of(secret_file: str | None, data: str) -> Secret:
    """The secret with which an operator asks. Raises BadSetting when it can't be had."""
    return read_secret(secret_file or os.path.join(data, SECRET_FILE))


def operator_secret(secret_file: str | None, data: str) -> Secret | None:
    """The same; None for an operator who has a token, and no secret at the default place."""
    has_token = bool(os.environ.get(TOKEN_VARIABLE)) and not secret_file
    return None if has_token and not os.path.exists(os.path.join(data, SECRET_FILE)) else secret_of(secret_file, data)


class BooksPlace(DataFolder):
    """A data directory that is there, or the URI of an archive."""

    name = "place"

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See click."""
        text = os.fspath(value)
        # The default of --data need not be there when all places are named; click reads what was typed first.
        is_spare = ctx is not None and param is not None and param.name == "data" and ctx.params.get("places")
        return text if "://" in text or is_spare else super().convert(value, param, ctx)


def paths_of(places: tuple[str, ...], data: str) -> tuple[str, ...]:
    """The places that a command reads: those named one behind the other, or else that of --data."""
    source = click.get_current_context().get_parameter_source("data")
    if places and source is ParameterSource.COMMANDLINE:
        raise BadArgument("--data names the only place; leave it out, and name all places one behind the other")
    return places or (data,)


place_params = (
    click.argument("places", nargs=-1, type=BooksPlace(), metavar="[DIR|URI]..."),
    click.option(
        "--data",
        envvar=DATA_VARIABLE,
        type=BooksPlace(),
        default=DATA_DEFAULT,
        show_default=True,
        show_envvar=True,
        metavar="DIR|URI",
        help="Data directory, as given to `delayd up`, or a copy of it; or what `delayd archive --to` was given.",
    ),
)


def examples(*lines: str, of: str = "Examples") -> str:
    """The end of a help: command lines as they are typed."""
    # The mark keeps the lines as they are.
    return "\n".join(("\b", f"{of}:", *(f"  {line}" for line in lines)))


class Command(click.Command):
    """A command whose help is its docstring: at the end of that, each line that begins with ``$`` is an example."""

    def __init__(self, name: str | None, **given: Any) -> None:
        super().__init__(name, **_with_examples(given))


class CommandGroup(click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, name: str | None, **given: Any) -> None:
        super().__init__(name, **_with_examples(given))


def _with_examples(given: dict[str, Any]) -> dict[str, Any]:
    text, *lines = cleandoc(given["help"] or "").split("\n$ ")
    return {**given, "help": text, "epilog": examples(*lines)}


def bundle(name: str, made: Callable[..., object], *options: Decorator) -> Decorator:
    """Options that a command takes as one argument: ``made`` makes it of their values, which it takes by name."""

    def decorate(command: Callback) -> Callback:
        @wraps(command)
        def run(*passed: object, **given: object) -> object:
            return command(*passed, **{name: made(**{each: given.pop(each) for each in own})}, **given)

        decorated: Callback = run
        before = len(getattr(run, "__click_params__", ()))
        for option in reversed(options):
            decorated = option(decorated)
        own = [param.name for param in getattr(run, "__click_params__", ())[before:]]
        return decorated

    return decorate


class Shown(NamedTuple):
    """How a listing is shown: as a table, JSON or CSV, and at most so many rows."""

    form: str
    limit: int

    def show(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
        """Write it to stdout."""
        show(columns, rows, self.form, self.limit)


shown_options = bundle("shown", Shown, limit_option, format_option)
