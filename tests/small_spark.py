"""Spark as tests start it.

Invariant: a session differs from a user's only in what makes small queries fast, and in nothing that they say.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Tests end before the JVM's second compiler is done with anything, and have no garbage that needs a thread.
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
SETTINGS: Mapping[str, str] = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "1",
}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a program that starts Spark; the folder gets the settings, where Spark looks for them."""
    (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in SETTINGS.items()))
    own = {"SPARK_CONF_DIR": str(folder), "JDK_JAVA_OPTIONS": JAVA, "PYSPARK_PYTHON": sys.executable}
    return {**os.environ, **own, **more}
