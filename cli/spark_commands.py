"""``delayd spark``: jobs for Spark about the logs of a fleet, one command each (docs/spark.md).

Invariant: a command shows the columns of its job's frame, in their order; what runs in Spark is the launcher's to
start.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import click

from delayd.hours import hour_name
from delayd.reading.audit import LATE_MS_LIMIT

from .hour_commands import HourRange, hours_options
from .listing import Column, columns, show
from .main import Programs
from .shared_options import Callback, CommandGroup, bundle, format_option, paths_of, place_params
from .times import duration

STDOUT = "-"
_MS = timedelta(milliseconds=1)
COUNTS = "scheduled dispatched cancelled expired dead in_doubt lost pending"
LATE = "late_p50_ms late_p99_ms late_p999_ms late_max_ms"
WORK = "pulled redelivered acknowledged given_back sent_back lapsed outstanding gaps retries"
DEAD = "dead_waiting dead_redriven dead_purged"


def _numbers(names: str) -> str:
    return " ".join(f"{name}:number" for name in names.split())


COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "lateness": columns(
        f"day subject {_numbers(COUNTS)} body_bytes:size late:number"
        f" {' '.join(f'{name}:duration' for name in LATE.split())}"
    ),
    "forecast": columns(
        f"day subject {_numbers('limit_per_s messages')} body_bytes:size busiest_at"
        f" {_numbers('busiest_messages seconds_over messages_over')}"
    ),
    "hot-instants": columns("second messages:number body_bytes:size subjects:number top_subject top_messages:number"),
    "anomalies": columns("day subject figure value:number usual_low:number usual_high:number days:number"),
    "what-if": columns(
        f"day {_numbers('messages capacity_per_s busy_share busiest_messages queue_max')} queue_max_at"
        " wait_ms_max:duration"
    ),
    "consumers": columns(f"subject group {_numbers(WORK)} {_numbers(DEAD)} ack_ms_mean:duration ack_ms_max:duration"),
}


class Quota(click.ParamType[tuple[str, int]]):
    """``SUBJECT=N``."""

    name = "quota"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """See click."""
        if not isinstance(value, str):
            return value
        subject, _, number = value.rpartition("=")
        if not subject or not number.isdecimal():
            self.fail(f"{value} is not SUBJECT=N, such as orders.cancel=500", param, ctx)
        return subject, int(number)


def job_options(command: Callback) -> Callback:
    """The parameters that all jobs share."""
    for option in (
        format_option,
        click.option("--master", help="The Spark master; the default is local[2], or that of spark-submit."),
        click.option(
            "--out",
            default=STDOUT,
            show_default=True,
            metavar="FOLDER",
            help="A new folder, or its URI, that receives the rows as Parquet; a folder such as date=2026-11-27 is"
            " replaced; - shows them.",
        ),
        hours_options,
        bundle("places", paths_of, *place_params),
    ):
        command = option(command)
    return command


@click.group(cls=CommandGroup)
def spark() -> None:
    """Run jobs for Spark over the books of one place, or of a fleet: the places of `delayd audit`.

    They need Java 17 and the extra packages of `pip install 'delayd[spark]'`.

    $ delayd spark lateness /var/lib/delayd s3://books/delayd --from -7d
    """


@spark.command()
@job_options
@click.option(
    "--late",
    "late_limit",
    type=duration,
    default=f"{LATE_MS_LIMIT}ms",
    show_default=True,
    help="A message that left later than this counts as late.",
)
@click.pass_obj
def lateness(programs: Programs, /, late_limit: timedelta, **given: Any) -> None:
    """Count the messages of each day and subject, what became of them, and how late they left.

    $ delayd spark lateness --data /var/lib/delayd --from -7d
    """
    _run(programs, "lateness", {"late_limit_ms": late_limit // _MS}, **given)


@spark.command()
@job_options
@click.option(
    "--capacity",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Messages a second that consumers can take.",
)
@click.option(
    "--quota", "quotas", type=Quota(), multiple=True, metavar="SUBJECT=N", help="The same of one subject; give several."
)
@click.pass_obj
def forecast(programs: Programs, /, capacity: int, quotas: Sequence[tuple[str, int]], **given: Any) -> None:
    """Foresee what falls due on each day, and where it is more in a second than consumers can take.

    $ delayd spark forecast --data /var/lib/delayd --capacity 5000 --quota orders.cancel=500
    """
    _run(programs, "forecast", {"capacity": capacity, "quotas": dict(quotas)}, **given)


@spark.command("hot-instants")
@job_options
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="So many seconds.")
@click.pass_obj
def hot_instants(programs: Programs, /, top: int, **given: Any) -> None:
    """Find the seconds in which most messages fall due, the fullest first.

    $ delayd spark hot-instants --data /var/lib/delayd --top 10
    """
    _run(programs, "hot-instants", {"top": top}, **given)


@spark.command()
@job_options
@click.option(
    "--days",
    type=click.IntRange(min=5),
    default=28,
    show_default=True,
    metavar="N",
    help="So many days before say what is usual.",
)
@click.option(
    "--factor",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    metavar="X",
    help="How many times the distance of the quartiles a day may lie outside of them.",
)
@click.pass_obj
def anomalies(programs: Programs, /, days: int, factor: float, **given: Any) -> None:
    """Name the days on which a subject's volume, lateness or share of failures left its usual range.

    $ delayd spark anomalies --data /var/lib/delayd --from -60d
    """
    _run(programs, "anomalies", {"days": days, "factor": factor}, **given)


@spark.command("what-if")
@job_options
@click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="X",
    help="So many times the messages.",
)
@click.option(
    "--servers", type=click.IntRange(min=1), required=True, metavar="N", help="How many servers there would be."
)
@click.option(
    "--per-server",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Messages a second that each of them takes.",
)
@click.pass_obj
def what_if(programs: Programs, /, rate: float, servers: int, per_server: int, **given: Any) -> None:
    """Show how long messages would have waited at another rate, or with another number of servers.

    $ delayd spark what-if --data /var/lib/delayd --from -30d --rate 1.5 --servers 3 --per-server 20000
    """
    _run(programs, "what-if", {"rate": rate, "servers": servers, "per_server": per_server}, **given)


@spark.command()
@job_options
@click.pass_obj
def consumers(programs: Programs, /, **given: Any) -> None:
    """Sum up what groups of consumers did: attempts, what they gave back, dead letters, time to acknowledge.

    $ delayd spark consumers --data /var/lib/delayd --out work-of-consumers
    """
    _run(programs, "consumers", {}, **given)


def _run(
    programs: Programs,
    job: str,
    settings: Mapping[str, object],
    *,
    places: Sequence[str],
    out: str,
    hours: HourRange,
    master: str | None,
    form: str,
) -> None:
    bounds = {"from": hours.first, "to": None if hours.until is None else hours.until - 1}
    named = {name: hour_name(hour) for name, hour in bounds.items() if hour is not None}
    place = None if out == STDOUT else out
    rows = programs.spark_job(job, places, place, hours=named, settings=settings, master=master)
    if place is None:
        show(COLUMNS[job], rows, form)
