"""Store: where an archive lies, a folder or a bucket of an object store.

Invariant: a file of an archive appears whole or not at all, and is never written to again. In a folder it is written
beside its place and linked to it; in an object store it is put on condition that nothing is there yet.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from delayd.errors import BadArgument, BadSetting, DiskFull, NotWritable, ServerUnavailable
from delayd.machine.disk import RealDisk
from delayd.reading.archive.notes import NOTES, SCHEDULE
from delayd.reading.tables import need

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")  # Those of obstore that refuse to write over an object.
UNFINISHED = ".unfinished-"  # Readers of Parquet folders leave out names that begin with a dot.
CHUNK_BYTES = 4 << 20
REFUSED = re.compile(r"status code: 40[13]\b")
REFUSALS = ("PermissionDeniedError", "UnauthenticatedError")
RETRIES_MAX = 5  # After waits of 0.1, 0.2, 0.4 s and so on: 3 s in all. Then an operator should hear of it.
RETRY_SECONDS_MAX = 60


class ArchiveStore(Protocol):
    """The files of an archive, by names with slashes.

    All methods raise BadSetting when the store refuses this user, and ServerUnavailable when it can't be reached.
    """

    uri: str

    def names(self, folder: str) -> Iterator[str]:
        """The names of all files below a folder."""

    def create(self, name: str, file: Path) -> bool:
        """Put a finished local file there, which is used up. False when there is a file of that name already."""

    def fetch(self, name: str, folder: Path) -> Path:
        """A local path of a file, inside ``folder`` if it is a copy. Raises FileNotFoundError."""

    def scratch(self) -> AbstractContextManager[Path]:
        """A local folder for files that are made; it is removed at the end.

        DiskFull, NotWritable when a file can't be made there.
        """


def open_store(uri: str) -> ArchiveStore:
    """Open the store of an archive: a path, ``file://…``, or ``s3://…``, ``gs://…``, ``az://…`` with obstore.

    Credentials and endpoints of object stores come from the environment, such as AWS_ACCESS_KEY_ID and
    AWS_ENDPOINT_URL. Nothing is asked yet.

    Raises:
        BadArgument: it is no such address.
        BadSetting: pyarrow or obstore is missing, or the environment has a setting that obstore does not take.
    """
    need("pyarrow", "an archive", "archive")
    scheme = urlsplit(uri).scheme if "://" in uri else ""
    if scheme in ("", "file"):
        return FolderStore(urlsplit(uri).path if scheme else uri)
    if scheme not in SCHEMES:
        raise BadArgument(f"{uri} is no place of an archive; give a folder, or s3://BUCKET/PATH, gs://… or az://…")
    need("obstore", "an archive in an object store", "archive")
    return ObjectStore(uri)


def is_archive(place: str) -> bool:
    """Whether this names an archive: any URI does, and a folder with notes of an archive."""
    return "://" in place or os.path.isdir(f"{place}/{NOTES}/{SCHEDULE}")


class FolderStore:
    """An archive in a folder of this machine, or of a file system that has hard links."""

    def __init__(self, path: str) -> None:
        self.uri = path.rstrip("/") or "/"
        self._disk = RealDisk()

    def names(self, folder: str) -> Iterator[str]:
        """See ArchiveStore."""
        root = Path(self.uri)
        for path, folders, files in os.walk(root / folder):
            folders.sort()
            yield from (str((Path(path) / name).relative_to(root)) for name in sorted(files))

    def create(self, name: str, file: Path) -> bool:
        """See ArchiveStore; DiskFull, NotWritable when the file can't be put there."""
        path = f"{self.uri}/{name}"
        folder = path.rpartition("/")[0]
        with _named_errors(path):
            self._disk.make_folder(folder)
            with file.open("rb") as written:
                os.fsync(written.fileno())
            try:
                os.link(file, path)
            except FileExistsError:
                return False
            finally:
                file.unlink()
            self._disk.sync_folder(folder)
        return True

    def fetch(self, name: str, folder: Path) -> Path:
        """See ArchiveStore."""
        path = Path(self.uri) / name
        path.stat()
        return path

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """See ArchiveStore. It lies in the archive's own folder, because a link can't leave a file system."""
        with _named_errors(self.uri):
            self._disk.make_folder(self.uri)
            folder = tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self.uri)
        with _named_errors(self.uri), folder as path:
            yield Path(path)


class ObjectStore:
    """An archive in an object store, by obstore."""

    def __init__(self, uri: str) -> None:
        import obstore
        from obstore.store import from_url

        self._obstore = obstore
        self.uri = uri.rstrip("/")
        with self._named_errors(""):
            self._store = from_url(
                self.uri,
                retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_SECONDS_MAX)},
            )

    def names(self, folder: str) -> Iterator[str]:
        """See ArchiveStore."""
        with self._named_errors(folder):
            for page in self._obstore.list(self._store, prefix=folder):
                yield from (each["path"] for each in page)

    def create(self, name: str, file: Path) -> bool:
        """See ArchiveStore."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._named_errors(name):
            try:
                # Only a single request can have a condition, so nothing is sent in parts.
                self._obstore.put(self._store, name, file, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            finally:
                file.unlink()
        return True

    def fetch(self, name: str, folder: Path) -> Path:
        """See ArchiveStore."""
        path = folder / name.replace("/", "-")
        with self._named_errors(name):
            found = self._obstore.get(self._store, name)
            with path.open("wb") as file:
                for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                    file.write(chunk)
        return path

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """See ArchiveStore."""
        with _named_errors(tempfile.gettempdir()), tempfile.TemporaryDirectory(prefix="delayd-archive-") as path:
            yield Path(path)

    @contextmanager
    def _named_errors(self, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, NotSupportedError, UnknownConfigurationKeyError

        path = f"{self.uri}/{name}"
        try:
            yield
        except (UnknownConfigurationKeyError, NotSupportedError) as error:
            raise BadSetting(f"{path} can't be used: {_first_line(error)}") from error
        except BaseError as error:
            what = _first_line(error)
            # A listing that is refused has no class of its own.
            if REFUSED.search(what) or type(error).__name__ in REFUSALS:
                what = f"{path} is refused ({what}); give the environment credentials that may list, get and put there"
                raise BadSetting(what) from error
            raise ServerUnavailable(
                f"{path} can't be read or written: {what}; run this again, what is archived stays"
            ) from error


def _first_line(error: BaseException) -> str:
    """What an error says without the list of its sources."""
    return str(error).partition("\n")[0]


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise DiskFull(path) from error
        raise NotWritable(path, error.strerror or str(error)) from error
