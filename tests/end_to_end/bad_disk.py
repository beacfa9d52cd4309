"""A disk that fails to read some files for a while, with EIO: for processes started inside it.

Invariant: what is written meanwhile arrives, so when the disk reads again everything is there.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .preloaded import Preloaded

FAILED = struct.Struct("<Q")
PART_BYTES = 248


class BadDisk(Preloaded):
    """The disk of every process that was started inside `preloaded`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "bad_disk", "DELAYD_TEST_BAD_READS", bytes(FAILED.size + PART_BYTES))

    @property
    def failed(self) -> int:
        """How many reads have failed so far."""
        (failed,) = FAILED.unpack_from(self.control.read_bytes())
        return int(failed)

    @contextmanager
    def failing(self, part: str) -> Iterator[None]:
        """Meanwhile no file whose path contains this can be read."""
        data = part.encode()
        assert 0 < len(data) < PART_BYTES
        # The first byte last: half a part never counts.
        self.write(data[1:] + b"\0", FAILED.size + 1)
        self.write(data[:1], FAILED.size)
        try:
            yield
        finally:
            self.write(b"\0", FAILED.size)
