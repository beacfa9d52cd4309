"""One Spark session for all tests of this folder."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from delayd.errors import BadSetting
from delayd.log.pull import PullEntry, PullOp
from delayd.outcome import Outcome
from spark.session import check_spark, open_session
from tests.books import HOUR_MS, START_MS, Books, Row
from tests.small_spark import JAVA, SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def session() -> "Iterator[SparkSession]":
    try:
        check_spark()
    except BadSetting as error:
        pytest.skip(str(error))
    os.environ["JDK_JAVA_OPTIONS"] = JAVA
    session = open_session("local[1, 2]")  # A task that fails is run a second time.
    del os.environ["JDK_JAVA_OPTIONS"]
    for name, value in SETTINGS.items():
        session.conf.set(name, value)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """Three hours with one of each fault in the second, an hour that is pending, rows filed and rows not filed."""
    books = Books(str(tmp_path_factory.mktemp("books")))
    first = books.send([START_MS + row for row in range(40)], subjects=("orders", "bills"))
    books.hand_over(first)
    books.checkpoint()
    rows = books.send([START_MS + HOUR_MS + row for row in range(40)])
    lost, late, early, twice, told_otherwise, dead, *sound = rows
    del lost
    books.hand_over([late], delay_ms=5_000)
    books.hand_over([early], claimed_ms=START_MS)
    books.record(books.hand_over([twice]))
    ((hour, part),) = books.hand_over([told_otherwise], record=False)
    books.record([(hour, part._replace(target_offset=8))])
    books.decide([dead], Outcome.DEAD)
    books.hand_over(sound)
    books.store([Row(9_999, START_MS + HOUR_MS, 0, "ghosts")], "ghosts", hour, START_MS + HOUR_MS, START_MS + HOUR_MS)
    books.send([START_MS + 50 * HOUR_MS])
    books.see_all(START_MS + 3 * HOUR_MS)
    books.consume("orders", "g", [PullEntry(PullOp.PULL, 1, 1, 77, 0, 0, 2, START_MS)])
    books.close()
    return books
