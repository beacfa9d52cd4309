"""Several JVMs whose workers lack delayd, which it says, and reads once the wheel was sent; and Spark Connect.

Each test starts its JVMs once, for all that it asks.
"""

import shutil
import subprocess
import sys
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.books import HOUR_MS, START_MS, Books
from tests.packaging.conftest import make_environment, requirements
from tests.small_spark import environment

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

DEADLINE_S = 350
WHERE = 'File "<string>"'  # Spark tells much behind it.
CONNECT = ("grpcio", "grpcio-status", "googleapis-common-protos", "protobuf", "zstandard")
CLUSTER = """
import sys
from pyspark.sql import SparkSession
from delayd.errors import BadSetting
from delayd.spark.pipelines.run import run
from delayd.spark.session import audit

data, wheel = sys.argv[1:]
builder = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
for asked in (lambda: audit(data, now_ms=%d), lambda: run("hot-instants", [data], None, hours={}, settings={"top": 1})):
    try:
        print(asked())
    except BadSetting as error:
        print("refused:", error.message)
spark.sparkContext.addPyFile(wheel)  # What --py-files does.
from pyspark_delayd import DefaultSource
spark.dataSource.register(DefaultSource)
frame = spark.read.format("delayd").option("tasks", "4").load(data)
print("rows", frame.count(), "by tasks", frame.rdd.getNumPartitions())
print("audited", audit(data, now_ms=%d, tasks=3).total.scheduled)
"""
REMOTE = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.remote("local[1]").getOrCreate()
frame = spark.read.format("delayd").option("view", "schedule").option("tasks", "2").load(sys.argv[1])
print("rows", frame.count(), type(frame).__module__)
stream = spark.readStream.format("delayd").option("view", "schedule").load(sys.argv[1])
query = stream.writeStream.format("memory").queryName("sealed").trigger(availableNow=True).start()
query.awaitTermination()
print("streamed", spark.table("sealed").count())
"""


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """Three hours of ten messages each, the first two sealed."""
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and this machine has none: install Java 17")
    books = Books(str(tmp_path_factory.mktemp("books")))
    for hour in range(3):
        books.hand_over(books.send([START_MS + hour * HOUR_MS + row for row in range(10)]))
    books.checkpoint()
    books.seal(START_MS // HOUR_MS)
    books.seal(START_MS // HOUR_MS + 1)
    books.see_all(START_MS + 4 * HOUR_MS)
    books.close()
    return books


def test_workers_of_several_jvms_without_delayd_are_named_and_read_once_the_wheel_was_sent(
    books: Books, spark_environment: Path, wheel: Path, metadata: Message, tmp_path: Path
) -> None:
    bare = make_environment(tmp_path / "bare", None, requirements(metadata, "spark"))
    shutil.copy(wheel, tmp_path / "delayd.zip")
    now_ms = START_MS + 4 * HOUR_MS
    words = [str(spark_environment / "bin" / "python"), "-c", CLUSTER % (now_ms, now_ms)]
    # Spark writes what executors say below its home, which would be the package's folder.
    home = tmp_path / "home"
    home.mkdir()
    for each in Path(str(distribution("pyspark").locate_file("pyspark"))).iterdir():
        if each.name != "work":
            (home / each.name).symlink_to(each)
    own = environment(tmp_path, PYSPARK_PYTHON=str(bare / "bin" / "python"), SPARK_HOME=str(home))
    lines = say([*words, books.root, str(tmp_path / "delayd.zip")], own, tmp_path)
    lacks = (
        f"refused: Spark's workers run {bare}/bin/python, which lacks delayd: run pip install 'delayd[spark]' for it"
    )
    assert [line.partition(", or")[0] for line in lines[:2]] == [lacks, lacks]
    assert lines[2:] == ["rows 30 by tasks 3", "audited 30"]


def test_a_session_of_spark_connect_reads_tables_and_streams(books: Books, tmp_path: Path) -> None:
    for name in CONNECT:
        try:
            distribution(name)
        except PackageNotFoundError:
            pytest.skip(f"Spark Connect needs {name}: pip install 'pyspark[connect]'")
    lines = say([sys.executable, "-c", REMOTE, books.root], environment(tmp_path), tmp_path)
    assert lines == ["rows 30 pyspark.sql.connect.dataframe", "streamed 20"]


def say(words: list[str], own: dict[str, str], folder: Path) -> list[str]:
    """Run a program to its end; its lines."""
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[done.stderr.rfind(WHERE) :][:6_000]
    return done.stdout.splitlines()
