"""The program ``delayd spark-audit``: an audit of a data directory by a local Spark session.

Invariant: Spark is imported only when somebody asks for an audit. When it can't run, one sentence says what to
install. An active session is used as it is. A session that is made here runs in this process, in UTC, without a web
page, and its workers run the Python that runs this.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from delayd.errors import BadSetting
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS
from delayd.reading.books import FINDINGS_LIMIT, AuditReport
from delayd.reading.proved import ProvedHours

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2]"
DISTRIBUTIONS = ("pyspark", "pyarrow", "pandas")
JAVA_MIN = 17  # What PySpark 4 is compiled for.
INSTALL = "pip install 'delayd[spark]'"
INSTALL_JAVA = f"install Java {JAVA_MIN}, or set JAVA_HOME to where it is"
INSTALL_THERE = f"run {INSTALL} for it, or set PYSPARK_PYTHON to a Python of each worker that has it"
# What a planner says that has found no module `pyspark_delayd`; and a task that could not import delayd, whose folder
# for Spark is a package of its own in the repository, or what delayd needs.
MISSING = re.compile(r"DATA_SOURCE_NOT_FOUND|No module named '(delayd|spark|numpy|pyarrow|pandas|msgpack|crc32c)\b")
LOOPBACK = "127.0.0.1"
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
}


def audit(
    *places: str,
    now_ms: int | None = None,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    findings_limit: int | None = FINDINGS_LIMIT,
    master: str | None = MASTER,
    tasks: int | None = None,
    proved: ProvedHours | None = None,
) -> AuditReport:
    """Audit data directories and archives in Spark, with the figures of `delayd.reading.fleet.audit_fleet`.

    Example::

        report = audit("/var/lib/delayd", tasks=8)
        print(report.balanced, report.total.lost)

    Args:
        places: data directories and archives; each task must be able to read them under these paths.
        now_ms: the wall clock; None reads it.
        hours: which hours to audit, counted since the epoch; None for all.
        late_ms_limit: a message that left later than this after it was due is LATE.
        lost_grace_ms: a due message without an outcome is LOST only when it was due longer ago than this.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        master: the Spark master, when there is no session yet; None leaves it to `spark-submit`.
        tasks: how many tasks share the hours; None takes three for each core of this machine.
        proved: sealed hours to leave out, by the digests of their seals; see `delayd.reading.proved`.

    Raises:
        BadSetting: pyspark or Java is missing or too old, or the workers lack delayd.
        BadArgument: there is nothing to audit.
        DataError: a file can't be read.
    """
    session = open_session(master)
    from .audit import audit_data

    wall_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    with named_workers():
        return audit_data(session, places, wall_ms, hours, late_ms_limit, lost_grace_ms, findings_limit, tasks, proved)


def open_session(master: str | None) -> "SparkSession":
    """The active session, or a new one on ``master``; None leaves the master to `spark-submit` and its settings.

    Raises:
        BadSetting: pyspark or Java is missing or too old.
    """
    check_spark()
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Else Spark starts the first `python3` of the path for its workers, and that one may not have delayd.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Else Spark warns that the host's name resolves to loopback. A local session needs nothing but loopback.
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    builder = SparkSession.builder.appName("delayd audit")
    if master is not None:
        builder = builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@contextmanager
def named_workers() -> Iterator[None]:
    """Raise BadSetting, which says what to do, when a query fails because the workers' Python lacks delayd."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        missing = MISSING.search(str(error))
        if missing is None:
            raise
        what = "delayd" if missing[1] in (None, "spark") else missing[1]
        python = os.environ.get("PYSPARK_PYTHON", sys.executable)
        raise BadSetting(f"Spark's workers run {python}, which lacks {what}: {INSTALL_THERE}") from None


def check_spark() -> None:
    """Raise BadSetting, which says what to do, when pyspark or its Java is missing."""
    for name in DISTRIBUTIONS:
        if find_spec(name) is None:
            raise BadSetting(f"an audit in Spark needs {name}: {INSTALL}")
    version = java_version()
    if version is None:
        raise BadSetting(f"an audit in Spark needs Java, and this machine has none: {INSTALL_JAVA}")
    if version < JAVA_MIN:
        raise BadSetting(f"an audit in Spark needs Java {JAVA_MIN} or newer, this is Java {version}: {INSTALL_JAVA}")


def java_version() -> int | None:
    """The version of the Java that Spark would start; None when there is none."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return None
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    # Up to Java 8 the version was called 1.8.
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else None
