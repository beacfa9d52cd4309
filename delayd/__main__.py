"""The launcher, run as ``delayd`` or ``python -m delayd``: the one module that knows every program.

The command line, the three servers and the Spark audit never import each other. The launcher finds ``cli.main`` and
calls ``main(programs)`` with a ``cli.programs.Programs`` that holds what the command line may start:

    run_server["meta"](config)       calls  meta.program.run(config)
    run_server["delay"](config)      calls  delayd.delay.program.run(config)
    run_server["realtime"](config)   calls  realtime.server.run(config)
    run_gateway(meta, host, …)       calls  delayd.gateway.program.run(meta, host, …)
    run_dev(host, port, …)           calls  delayd.testing.dev.run(host, port, …)
    gateway_lacks()                  looks whether the packages of a gateway are installed
    spark_audit(*places, …)          calls  spark.session.audit(*places, …)
    spark_job(job, data, …)          calls  spark.pipelines.run.run(job, data, …)

``run`` serves until it is told to stop and returns the exit code of the process; it owns its event loop and signals.
Invariant: a program is imported when it is called, never before, so ``delayd send`` pays for no server and needs no
Spark.
"""

import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from delayd.errors import BadSetting
from delayd.programs import ProgramNotFound, find

if TYPE_CHECKING:
    from cli.listing import Cell
    from cli.main import Programs, RunDev, RunGateway, ServerConfig, SparkAudit, SparkJob
    from delayd.address import Tls
    from delayd.reading.books import AuditReport
    from delayd.reading.proved import ProvedHours
    from delayd.secret import Secret

# Nothing here multiplies matrices. numpy's library for that begins a thread for each core, and all of them look for
# work for a while, just when a server starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_EXIT_NOT_INSTALLED = 1
# The packages that an extra installs.
_SPARK_DISTRIBUTIONS = ("pyspark", "pandas", "pyarrow")
_GATEWAY_DISTRIBUTIONS = (
    "aiohttp",
    "cryptography",
    "starlette",
    "uvicorn",
    "httptools",
    "msgspec",
)


def main() -> int:
    """Run the command line with ``sys.argv`` and return the exit code."""
    try:
        command_line: Callable[[Programs], int] = find("cli.main").main
        return command_line(_programs())
    except ProgramNotFound as error:
        print(f"delayd: {error}", file=sys.stderr)
        return _EXIT_NOT_INSTALLED


def _programs() -> "Programs":
    programs: type[Programs] = find("cli.main").Programs
    return programs(
        run_server={
            "meta": _server(lambda: find("meta.program")),
            "delay": _server(lambda: import_module("delayd.delay.program")),
            "realtime": _server(lambda: find("realtime.server")),
        },
        run_gateway=_run_gateway,
        run_dev=_run_dev,
        spark_audit=_spark_audit,
        spark_job=_spark_job,
        gateway_lacks=_gateway_lacks,
    )


def _server(load: Callable[[], ModuleType]) -> "Callable[[ServerConfig], int]":
    def run(config: "ServerConfig") -> int:
        program: Callable[[ServerConfig], int] = load().run
        return program(config)

    return run


def _run_gateway(
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
) -> int:
    with _named_distribution("a gateway", "gateway", _GATEWAY_DISTRIBUTIONS):
        run: RunGateway = import_module("delayd.gateway.program").run
    return run(
        meta,
        host,
        port,
        names,
        insecure=insecure,
        require_token=require_token,
        tls=tls,
        find_secret=find_secret,
        allow_private=allow_private,
        audits=audits,
        exit_with_stdin=exit_with_stdin,
    )


def _gateway_lacks() -> str | None:
    return next((name for name in _GATEWAY_DISTRIBUTIONS if find_spec(name) is None), None)


def _run_dev(host: str, port: int, names: Sequence[str], *, insecure: bool, start_ms: int | None, stands: bool) -> int:
    with _named_distribution("a gateway", "gateway", _GATEWAY_DISTRIBUTIONS):
        run: RunDev = import_module("delayd.testing.dev").run
    return run(host, port, names, insecure=insecure, start_ms=start_ms, stands=stands)


def _spark_audit(
    *places: str,
    hours: Container[int],
    late_ms_limit: int,
    lost_grace_ms: int,
    findings_limit: int,
    proved: "ProvedHours",
) -> "AuditReport":
    with _named_distribution():
        audit: SparkAudit = find("spark.session").audit
        terms = {"late_ms_limit": late_ms_limit, "lost_grace_ms": lost_grace_ms, "findings_limit": findings_limit}
        return audit(*places, hours=hours, proved=proved, **terms)


def _spark_job(
    job: str,
    data: Sequence[str],
    out: str | None,
    *,
    hours: Mapping[str, str],
    settings: Mapping[str, object],
    master: str | None,
) -> "Iterable[Sequence[Cell]]":
    with _named_distribution():
        run: SparkJob = find("spark.pipelines.run").run
        return run(job, data, out, hours=hours, settings=settings, master=master)


@contextmanager
def _named_distribution(
    what: str = "Spark", extra: str = "spark", packages: Sequence[str] = _SPARK_DISTRIBUTIONS
) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        raise BadSetting(f"{what} needs {package}: pip install 'delayd[{extra}]'") from error


if __name__ == "__main__":
    sys.exit(main())
