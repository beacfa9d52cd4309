"""Page file: where ``delayd audit --report`` writes its page or picture.

Invariant: whether it can be written is found out before an audit of minutes begins. The file has its name only when it
is whole and on disk; until then a page of an earlier audit stays, and after an error it is the only one that stays.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from delayd.errors import DiskFull, NotWritable

UNFINISHED = ".part"


def is_picture(path: str) -> bool:
    """Whether the name of a file asks for the picture in place of the page."""
    return path.lower().endswith(".png")


class PageFile:
    """A page, or a picture of it, that is to be written; without a path none is."""

    def __init__(self, path: str | None) -> None:
        self.is_wanted = path is not None
        self._path = path or ""
        self.is_picture = is_picture(self._path)
        self._unfinished = f"{self._path}.{os.getpid()}{UNFINISHED}"

    def __enter__(self) -> Self:
        """Make the unfinished file. Raises NotWritable or DiskFull when that can't be done."""
        if self.is_wanted:
            if os.path.isdir(self._path):
                raise NotWritable(self._path, "it is a folder")
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
            os.replace(self._unfinished, self._path)

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
                raise DiskFull(self._path, error.errno) from error
            raise NotWritable(self._path, error.strerror or str(error)) from error
