"""One Spark session for all tests of this folder."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from delayd.errors import BadSetting
from spark.session import check_spark, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def session() -> "Iterator[SparkSession]":
    try:
        check_spark()
    except BadSetting as error:
        pytest.skip(str(error))
    session = open_session("local[1]")
    yield session
    session.stop()
