"""The program ``delayd spark JOB``: reads data directories, makes a job's frame, and writes it or hands its rows over.

Invariants: a job reads through the data source alone, so it says what its tables say; and Spark is imported when a job
runs, never before.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from delayd.errors import BadArgument

from ..session import MASTER, named_workers, open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBMITTED = "PYSPARK_GATEWAY_PORT"  # A variable that `spark-submit` sets; it has chosen the master.

# A folder of such a name is a partition of a table, such as `lateness/date=2026-11-27`: a run writes all of it.
PARTITION = re.compile(r"(^|/)[^/=]+=[^/=]+/?$")

Cell = str | int | float | bool | None


class AskedView(NamedTuple):
    """What a job reads of a table: columns as a schema writes them, and which of them the option ``with`` adds."""

    columns: str
    items: str = ""


class Job(NamedTuple):
    """A job: the function ``name`` of a module here, which takes a frame of each of these tables."""

    module: str
    name: str
    views: Sequence[str]


JOBS: Mapping[str, Job] = {
    "lateness": Job("lateness", "lateness", ("lifecycle",)),
    "forecast": Job("forecast", "forecast", ("lifecycle",)),
    "hot-instants": Job("forecast", "hot_instants", ("lifecycle",)),
    "anomalies": Job("anomalies", "anomalies", ("lifecycle",)),
    "what-if": Job("what_if", "what_if", ("lifecycle",)),
    "consumers": Job("consumers", "consumers", ("consumption", "lifecycle")),
}


def run(
    job: str,
    data: Sequence[str],
    out: str | None,
    *,
    hours: Mapping[str, str],
    settings: Mapping[str, Any],
    master: str | None = None,
) -> Iterable[Sequence[Cell]]:
    """Run a job; its rows, or none when ``out`` names the new folder that receives them as Parquet.

    Args:
        job: a name of `JOBS`.
        data: data directories and archives, each of which all workers find under this path.
        out: a path or URI of Spark's, which is replaced when it ends in NAME=VALUE, a partition; None for the rows.
        hours: the options ``from`` and ``to`` of the data source.
        settings: what the job's function takes besides frames.
        master: the Spark master; None takes that of `spark-submit`, or else one of this machine.

    Raises:
        BadSetting: pyspark or Java is missing or too old, or the workers lack delayd.
        BadArgument: the folder is there already, and is no partition.
    """
    session = open_session(master or (None if SUBMITTED in os.environ else MASTER))
    from pyspark.errors import AnalysisException

    with named_workers():
        frame = make(session, job, data, hours, settings)
    if out is None:
        return _rows(frame)
    try:
        with named_workers():
            frame.write.mode("overwrite" if PARTITION.search(out) else "error").parquet(out)
    except AnalysisException as error:
        if error.getCondition() != "PATH_ALREADY_EXISTS":
            raise
        raise BadArgument(
            f"{out} is there already: name a new folder, so that no row of another run is in it"
        ) from None
    return ()


def make(
    session: "SparkSession", job: str, data: Sequence[str], hours: Mapping[str, str], settings: Mapping[str, Any]
) -> "DataFrame":
    """The frame of a job; see `run`."""
    place = JOBS[job]
    module = import_module(f".{place.module}", __package__)
    frames = []
    for view in place.views:
        columns, items = module.READS[view]
        options = {"view": view, **hours, **({"with": items} if items else {})}
        frames.append(session.read.format("delayd").options(**options).schema(columns).load([*data]))
    frame: DataFrame = getattr(module, place.name)(*frames, **settings)
    return frame


def _rows(frame: "DataFrame") -> Iterator[Sequence[Cell]]:
    with named_workers():
        # `collect` would give instants in this machine's zone.
        table = frame.toArrow()
    for row in table.to_pylist():
        yield [_cell(value) for value in row.values()]


def _cell(value: Any) -> Cell:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value
