"""Page file: where ``delayd audit --report`` writes its page or picture; a folder gets the page and the figures.

Invariant: whether it can be written is found out before an audit of minutes begins. The file has its name only when it
is whole and on disk; until then a page of an earlier audit stays, and after an error it is the only one that stays.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import NamedTuple, Self

from delayd.errors import DiskFull, NotWritable

UNFINISHED = ".part"
CHANCE_BYTES = 3  # Audits of several machines that begin in the same second have names of their own in one folder.


def is_picture(path: str) -> bool:
    """Whether the name of a file asks for the picture in place of the page."""
    return path.lower().endswith(".png")


class PageFile:
    """A page, or a picture of it, that is to be written; without a path none is."""

    def __init__(self, path: str | None) -> None:
        self.is_wanted = path is not None
        self.path = path or ""
        self.is_picture = is_picture(self.path)
        self._unfinished = f"{self.path}.{os.getpid()}{UNFINISHED}"

    def __enter__(self) -> Self:
        """Make the unfinished file. Raises NotWritable or DiskFull when that can't be done."""
        if self.is_wanted:
            if os.path.isdir(self.path):
                raise NotWritable(self.path, "it is a folder")
            with self._named_errors():
                open(self._unfinished, "wb").close()
        return self

    def write(self, content: bytes) -> None:
        """Write all of the page; durable on return. Raises NotWritable or DiskFull."""
        with self._named_errors():
            with open(self._unfinished, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._unfinished, self.path)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.is_wanted:
            with suppress(FileNotFoundError):
                os.unlink(self._unfinished)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(self.path, error.errno) from error
            raise NotWritable(self.path, error.strerror or str(error)) from error


class ReportFiles(NamedTuple):
    """What ``--report`` writes: a page or picture, and the figures as JSON, which only a folder gets."""

    page: PageFile
    figures: PageFile


@contextmanager
def report_files(path: str | None) -> Iterator[ReportFiles]:
    """The files of one audit. In a folder they get a name that begins with the instant, so names sort as audits do.

    Raises:
        NotWritable, DiskFull: they can't be made.
    """
    page_path, figures_path = path, None
    if path is not None and os.path.isdir(path):
        name = f"audit-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.urandom(CHANCE_BYTES).hex()}"
        page_path, figures_path = (os.path.join(path, f"{name}.{ending}") for ending in ("html", "json"))
    with PageFile(page_path) as page, PageFile(figures_path) as figures:
        yield ReportFiles(page, figures)
