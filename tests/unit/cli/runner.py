"""Runs the command line in this process, through its real entry, and keeps what it wrote."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from click.testing import CliRunner

from cli import main as entry
from cli.listing import Cell
from cli.main import Programs, SparkAudit, SparkJob
from delayd.address import Tls
from delayd.reading.books import AuditReport
from delayd.reading.proved import ProvedHours
from delayd.secret import Secret


class Ran(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str


def no_spark(
    *places: str,
    hours: Container[int],
    late_ms_limit: int,
    lost_grace_ms: int,
    findings_limit: int,
    proved: ProvedHours,
) -> AuditReport:
    """Stands for the Spark audit where none is wanted."""
    raise AssertionError(f"nobody asked for the Spark audit of {places}")


def no_job(
    job: str,
    data: Sequence[str],
    out: str | None,
    *,
    hours: Mapping[str, str],
    settings: Mapping[str, object],
    master: str | None,
) -> Iterable[Sequence[Cell]]:
    """Stands for jobs in Spark where none is wanted."""
    raise AssertionError(f"nobody asked for the job {job} in Spark")


def _no_gateway(
    meta: str,
    host: str,
    port: int,
    names: Sequence[str],
    *,
    insecure: bool,
    require_token: bool = False,
    tls: Tls | None = None,
    find_secret: Callable[[], Secret | None] = lambda: None,
    allow_private: bool = False,
    audits: str | None = None,
    exit_with_stdin: bool = False,
) -> int:
    find_secret()
    raise AssertionError("no test of this folder serves HTTP")


def _no_dev(host: str, port: int, names: Sequence[str], *, insecure: bool, start_ms: int | None, stands: bool) -> int:
    raise AssertionError("no test of this folder serves HTTP")


def run(
    *arguments: str,
    servers: Mapping[str, Callable[[object], int]] | None = None,
    spark_audit: SparkAudit = no_spark,
    spark_job: SparkJob = no_job,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Run one command line; ``servers`` stand for the programs that the launcher injects."""
    programs = Programs(servers or {}, _no_gateway, _no_dev, spark_audit, spark_job)
    with CliRunner().isolation(stdin, env=dict(environment or {})) as (out, err, _):
        code = entry.main(programs, arguments)
        return Ran(code, out.getvalue().decode(), err.getvalue().decode())
