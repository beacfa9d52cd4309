"""``delayd gateway``: HTTP for programs without a client of delayd."""

import click

from delayd.address import PORT_MAX
from delayd.config import GATEWAY_PORT

from .main import Programs
from .shared_options import Command, meta_option


@click.command(cls=Command)
@meta_option
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Address to listen on; the default lets no other machine in.",
)
@click.option(
    "--port",
    type=click.IntRange(0, PORT_MAX),
    default=GATEWAY_PORT,
    show_default=True,
    metavar="PORT",
    help="Port to listen on; 0 takes a free one, which the ready line names.",
)
@click.option("--name", "names", multiple=True, metavar="HOST", help="A name by which clients ask it; may be repeated.")
@click.option(
    "--insecure", is_flag=True, help="Let other machines in: whoever reaches it may send, take and cancel messages."
)
@click.pass_obj
def gateway(programs: Programs, meta: str, host: str, port: int, names: tuple[str, ...], insecure: bool) -> int:
    """Serve HTTP: send, look at, cancel, move, pull and acknowledge messages; and metrics for Prometheus.

    It prints `ready gateway HOST:PORT pid=PID` when it serves, and logs to stderr. SIGTERM stops it within five
    seconds; messages that it holds for its callers go back to their groups. Several gateways may run side by side.

    To try it: curl -d hello 'http://127.0.0.1:7403/v1/subjects/world/messages?delay=5s'

    The command needs a web server: pip install 'delayd[gateway]'.

    $ delayd gateway
    $ delayd gateway --meta 10.0.0.5:7400 --port 8080
    """
    return programs.run_gateway(meta, host, port, names, insecure=insecure)
