"""What every test shares: temporary folders in memory, a way to repeat a failure, and a folder's marker."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

# Modules stay compiled for the next process, as those of an installed delayd are. Tests start some hundred servers and
# commands, and where the environment forbids this, each of them would compile delayd for as long as it runs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from delayd.machine.operating import forget_all  # noqa: E402 - compiled already with the line above

# A shared machine makes any single example slow now and then, which says nothing about the code.
settings.register_profile(
    "delayd", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("delayd")

_TESTS = Path(__file__).parent
_FOLDERS_WITH_A_MARKER = ("spark", "crash", "packaging")
_MEMORY = "/dev/shm"
_MEMORY_BYTES_MIN = 2 << 30  # The folders of all tests that run at the same time fit in it many times.


def pytest_configure() -> None:
    """Keep temporary folders in memory if there is room: some files of tests sync thousands of times to a disk.

    ``PYTEST_DEBUG_TEMPROOT`` or ``--basetemp`` put them elsewhere.
    """
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES_MIN:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark all tests of a folder that is named like a marker, so that none of them can forget it."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in _FOLDERS_WITH_A_MARKER:
            item.add_marker(folder)


@pytest.fixture(autouse=True)
def _lines_of_its_own() -> None:
    """A test finds each line of the log that it waits for, however many of its kind other tests have caused."""
    forget_all()


@pytest.fixture
def folder_on_disk() -> Iterator[Path]:
    """A temporary folder on the machine's disk, for tests of what a disk does."""
    with TemporaryDirectory(prefix="delayd-test-") as folder:
        yield Path(folder)


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """SIGINT does what it does by default, here and in children: who started the tests may have had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
