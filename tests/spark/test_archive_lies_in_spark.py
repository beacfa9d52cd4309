"""Spark says of each lie about an archive what numpy says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.books import HOUR_MS, START_MS
from tests.tamper.archived import Forger, honest_archive
from tests.tamper.in_spark import compare_in_spark
from tests.tamper.lies.archive import archive_lies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]


def test_spark_says_of_each_lie_about_an_archive_what_numpy_says(session: SparkSession, tmp_path: Path) -> None:
    folders = {"honest": str(honest_archive())}
    for number, lie in enumerate(archive_lies()):
        forger = Forger(honest_archive(), tmp_path / str(number))
        lie.tell(forger)
        folders[lie.name] = str(forger.folder)
    compared = compare_in_spark(session, folders, START_MS + 4 * HOUR_MS)
    assert compared.differences == {}
    assert compared.verdicts == {"sound": 1, "unsound": len(folders) - 1}
