"""``delayd gateway`` and ``delayd dev``: HTTP for programs without a client of delayd, and for their tests.

Invariant: an option that `delayd up` hands on to its gateway is written once, here.
"""

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from delayd.address import PORT_MAX, Tls
from delayd.config import GATEWAY_PORT
from delayd.errors import BadSetting
from delayd.secret import SECRET_FILE, Secret

from .main import Programs
from .shared_options import Command, Decorator, bundle, meta_option, secret_data_option, secret_of, secret_option
from .times import instant

SECRET_WAIT_S = 30.0  # A gateway may start before the server that makes the secret, which takes seconds.
SECRET_LOOK_S = 0.1


class GatewayOption(NamedTuple):
    """An option of `delayd gateway` that `delayd up` has, too, behind ``--gateway-``."""

    word: str
    terms: Mapping[str, Any]  # What `click.option` takes.

    def own(self) -> Decorator:
        """The option of a command that serves HTTP itself."""
        return click.option(self.word, **self.terms)

    def handed_on(self, default: str | None = None) -> Decorator:
        """The option of a command that hands it on; ``default``: what the help calls it when it is left out."""
        shown = default or self.terms.get("default")
        terms = {**self.terms, "default": None, "show_default": False}
        if shown is not None:
            terms["help"] += f"  [default: {shown}]"
        return click.option(self.word.replace("--", "--gateway-"), **terms)


_HOST = GatewayOption(
    "--host",
    {
        "default": "127.0.0.1",
        "show_default": True,
        "metavar": "HOST",
        "help": "Address to listen on with HTTP; the default lets no other machine in.",
    },
)
_PORT = GatewayOption(
    "--port",
    {
        "type": click.IntRange(0, PORT_MAX),
        "default": GATEWAY_PORT,
        "show_default": True,
        "metavar": "PORT",
        "help": "Port to listen on with HTTP; 0 takes a free one, which the ready line names.",
    },
)
_NAME = GatewayOption(
    "--name",
    {"multiple": True, "metavar": "HOST", "help": "A name by which clients of HTTP ask it; may be repeated."},
)
_ALLOW_PRIVATE = GatewayOption(
    "--allow-private",
    {"is_flag": True, "help": "Let push targets be on this machine and in private networks, too."},
)
_AUDITS = GatewayOption(
    "--audits",
    {"metavar": "FOLDER", "help": "Show the audits of this folder in the console: `delayd audit --report FOLDER`."},
)
_insecure = click.option(
    "--insecure", is_flag=True, help="Let other machines in: whoever reaches it may send, take and cancel messages."
)


def gateway_words(**given: str | bool | Sequence[str] | None) -> list[str]:
    """The options of `delayd gateway` for those that `delayd up` was given."""
    words: list[str] = []
    for name, value in given.items():
        option = f"--{name.removeprefix('gateway_').replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, str):
            words += [option, value]
        elif value:
            words += [word for each in value for word in (option, each)]
    return words


gateway_port_option = _PORT.handed_on("the one behind those of the servers")
gateway_options = bundle(
    "gateway_given",
    gateway_words,
    _HOST.handed_on(),
    _NAME.handed_on(),
    _ALLOW_PRIVATE.handed_on(),
    _AUDITS.handed_on(),
)


@click.command(cls=Command)
@meta_option
@_HOST.own()
@_PORT.own()
@_NAME.own()
@_insecure
@click.option("--tls-cert", metavar="FILE", help="Certificate for HTTPS, in PEM.  [default: no TLS]")
@click.option("--tls-key", metavar="FILE", help="Its key in PEM, mode 600.  [default: no TLS]")
@click.option("--require-token", is_flag=True, help="Serve nobody without a token, also while there is none.")
@secret_option
@secret_data_option
@_ALLOW_PRIVATE.own()
@_AUDITS.own()
@click.option("--exit-with-stdin", is_flag=True, help="Stop also when stdin is closed; supervisors use it.")
@click.pass_context
def gateway(
    context: click.Context,
    meta: str,
    host: str,
    port: int,
    name: tuple[str, ...],
    insecure: bool,
    tls_cert: str | None,
    tls_key: str | None,
    require_token: bool,
    secret_file: str | None,
    data: str,
    allow_private: bool,
    audits: str | None,
    exit_with_stdin: bool,
) -> int:
    """Serve HTTP: send, look at, cancel, move, pull and acknowledge messages; and metrics for Prometheus.

    It prints `ready gateway HOST:PORT pid=PID` when it serves, and logs to stderr. SIGTERM stops it within five
    seconds; messages that it holds for its callers go back to their groups. Several gateways may run side by side.

    To try it: curl -d hello 'http://127.0.0.1:7403/v1/subjects/world/messages?delay=5s'

    With the cluster's secret it also serves push targets (`delayd push`), and asks its callers for a token where
    servers ask for one: -H 'Authorization: Bearer dlyd_...'. Where --data or --secret-file names it and it is not there
    yet, the gateway waits for it for up to 30 s.

    `delayd up` runs one, too. The command needs a web server: pip install 'delayd[gateway]'.

    $ delayd gateway
    $ delayd gateway --meta 10.0.0.5:7400 --port 8080
    $ delayd gateway --data /var/lib/delayd --audits /var/lib/delayd-audits
    """
    if (tls_cert is None) != (tls_key is None):
        raise BadSetting("a certificate and its key go together: give --tls-cert and --tls-key", setting="tls_cert")
    is_told = bool(secret_file) or context.get_parameter_source("data") is ParameterSource.COMMANDLINE
    programs = context.find_object(Programs)
    assert programs is not None, "a gateway is started through the launcher only"
    return programs.run_gateway(
        meta,
        host,
        port,
        name,
        insecure=insecure,
        require_token=require_token,
        tls=None if tls_cert is None or tls_key is None else Tls("", tls_cert, tls_key),
        find_secret=partial(_secret, secret_file, data, is_told=is_told),
        allow_private=allow_private,
        audits=audits,
        exit_with_stdin=exit_with_stdin,
    )


def _secret(secret_file: str | None, data: str, *, is_told: bool) -> Secret | None:
    """The cluster's secret. When the gateway was told where it is, it waits until it is there; else it does without.

    Raises:
        BadSetting: it was told a place where there is none in time, or what is there is no secret.
    """
    path = secret_file or os.path.join(data, SECRET_FILE)
    if not os.path.exists(path):
        if not is_told:
            click.echo(
                f"delayd: there is no {path}, so this gateway asks nobody for a token and serves no push targets; give"
                " --secret-file, or --data, if it should",
                err=True,
            )
            return None
        click.echo(f"delayd: the gateway waits for {path}, which the first server of the directory makes", err=True)
        until = time.monotonic() + SECRET_WAIT_S
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(SECRET_LOOK_S)
    return secret_of(secret_file, data)


@click.command(cls=Command)
@_HOST.own()
@_PORT.own()
@_NAME.own()
@_insecure
@click.option("--start", "start_ms", type=instant, metavar="INSTANT", help="What the clock shows at first; else now.")
@click.option("--stand", "stands", is_flag=True, help="Let the clock stand still until it is moved.")
@click.pass_obj
def dev(
    programs: Programs,
    host: str,
    port: int,
    name: tuple[str, ...],
    start_ms: int | None,
    *,
    insecure: bool,
    stands: bool,
) -> int:
    """Serve HTTP over servers in memory, for tests of programs in any language; nothing is kept.

    It serves what `delayd gateway` does, and a clock that tests move: POST /v1/clock/advance lets two days pass in
    milliseconds, and answers when all that is due by then is there. It prints `ready dev HOST:PORT pid=PID`.

    To try it: curl -d '{"by": "2d"}' http://127.0.0.1:7403/v1/clock/advance

    The command needs a web server: pip install 'delayd[gateway]'.

    $ delayd dev
    $ delayd dev --stand --start 2027-01-01T00:00:00Z
    """
    return programs.run_dev(host, port, name, insecure=insecure, start_ms=start_ms, stands=stands)
