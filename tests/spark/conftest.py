"""One Spark session for all tests of this folder.

Invariant: the session differs from a user's only in what makes small queries fast, and in nothing that they say.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from delayd.errors import BadSetting
from spark.session import check_spark, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Tests end before the JVM's second compiler is done with anything, and have no garbage that needs a thread.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
SETTINGS = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "1",
}


@pytest.fixture(scope="session")
def session() -> "Iterator[SparkSession]":
    try:
        check_spark()
    except BadSetting as error:
        pytest.skip(str(error))
    os.environ["JDK_JAVA_OPTIONS"] = JVM
    session = open_session("local[1, 2]")  # A task that fails is run a second time.
    del os.environ["JDK_JAVA_OPTIONS"]
    for name, value in SETTINGS.items():
        session.conf.set(name, value)
    yield session
    session.stop()
