"""Audit folder: the files that ``delayd audit --report FOLDER`` has written, ``NAME.json`` and ``NAME.html``
(docs/audit-report.md).

Invariant: whoever may write there may have written anything. Only plain files of the folder itself are read, each up to
a bound, and what is read is values of known types; a file that is something else is an `AuditUnreadable`, which says
why. Nothing is kept between two calls.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from heapq import nlargest
from itertools import islice
from typing import Annotated, NamedTuple

from msgspec import DecodeError, Meta, Struct, json

from delayd.hours import INSTANT_MS_MAX

FIGURES, PAGE_OF_AUDIT = ".json", ".html"
ENTRIES_MAX = 100_000  # Five years of hourly audits; a thread looks at them in half a second.
FIGURES_BYTES_MAX = 16 << 20  # An audit of two years of hours; they are decoded in 50 ms.
PAGE_BYTES_MAX = 8 << 20  # A page has less than 2 MB (docs/audit-report.md).
READ_BYTES_MAX = 64 << 20  # A list ends when it has read so much.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # A pipe holds nobody up.
# A file that is not there; a link; a socket or pipe; a name that no file has.
_NOT_THERE = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
_NONE = "there is no audit of this name"

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
InstantMs = Annotated[int, Meta(ge=0, le=INSTANT_MS_MAX)]
LogIdText = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]


class AuditUnreadable(Exception):
    """A file, or the folder, that says nothing; ``is_missing``: because it is not there."""

    def __init__(self, why: str, *, is_missing: bool = False) -> None:
        super().__init__(why)
        self.why, self.is_missing = why, is_missing


class AuditedServer(Struct):
    """A server of an audit; ``place``: what its directory is in."""

    role: str
    log_id: LogIdText
    state: str = ""
    place: str | None = None


class FoundRow(Struct):
    """A finding."""

    hour: str
    finding: str
    sequence: Count
    subject: str
    detail: str
    delay_log_id: LogIdText


class BrokenSeal(Struct):
    """The seal of an hour that its rows contradict."""

    hour: str
    differs: str


class AuditFigures(Struct):
    """What ``delayd audit --format json`` says, as far as pages show it."""

    read_at_ms: InstantMs
    balanced: bool
    places: list[str]
    verdict: str = ""  # Older ones have none.
    chosen: str = ""
    total: dict[str, Count | None] = {}
    findings: list[FoundRow] = []
    findings_count: Count = 0
    broken_seals: list[BrokenSeal] = []
    conservation: list[str] = []
    servers: list[AuditedServer] = []
    remarks: list[str] = []
    damage: list[str] = []


class KeptAudit(NamedTuple):
    """One audit of the folder; ``unread`` says why there are no figures."""

    name: str
    figures: AuditFigures | None
    unread: str
    has_page: bool


class AuditList(NamedTuple):
    """Some audits, the last first; ``more``: others are behind them. ``is_cut``: not all files were looked at."""

    audits: list[KeptAudit]
    more: bool
    is_cut: bool


_decoder = json.Decoder(AuditFigures)


class AuditFolder:
    """A folder of audits; its calls wait for the disk."""

    def __init__(self, path: str) -> None:
        self.path = path

    def listed(self, before: str | None, most: int) -> AuditList:
        """At most so many audits whose names sort before ``before``. Raises AuditUnreadable."""
        names, is_cut = self._names()
        every = names[FIGURES] | names[PAGE_OF_AUDIT]
        wanted = nlargest(most + 1, every if before is None else (name for name in every if name < before))
        found: list[KeptAudit] = []
        left_bytes = READ_BYTES_MAX
        for name in wanted[:most]:
            if found and left_bytes <= 0:
                break
            audit, size = self._kept(name, {ending for ending, own in names.items() if name in own})
            left_bytes -= size
            found.append(audit)
        return AuditList(found, len(found) < len(wanted), is_cut)

    def audit(self, name: str) -> KeptAudit:
        """One audit. Raises AuditUnreadable when there is none of this name."""
        endings = {ending for ending in (FIGURES, PAGE_OF_AUDIT) if self._has(name, ending)}
        if not endings:
            raise AuditUnreadable(_NONE, is_missing=True)
        return self._kept(name, endings)[0]

    def page(self, name: str) -> bytes:
        """The page of one audit. Raises AuditUnreadable."""
        return self._read(name, PAGE_OF_AUDIT, PAGE_BYTES_MAX)

    def _names(self) -> tuple[Mapping[str, set[str]], bool]:
        """The names of audits by the ending of their files; and whether there are further entries."""
        found: dict[str, set[str]] = {FIGURES: set(), PAGE_OF_AUDIT: set()}
        try:
            with os.scandir(self.path) as entries:
                for entry in islice(entries, ENTRIES_MAX):
                    name, ending = os.path.splitext(entry.name)
                    if ending in found and _can_be_named(name) and entry.is_file(follow_symlinks=False):
                        found[ending].add(name)
                return found, next(entries, None) is not None
        except OSError as error:
            raise AuditUnreadable(f"{self.path} can't be read ({error.strerror})") from error

    def _kept(self, name: str, endings: Set[str]) -> tuple[KeptAudit, int]:
        """An audit, and how many bytes were read for it."""
        has_page = PAGE_OF_AUDIT in endings
        if FIGURES not in endings:
            return KeptAudit(name, None, "its figures are not there, only its page", has_page), 0
        content = b""
        try:
            content = self._read(name, FIGURES, FIGURES_BYTES_MAX)
            return KeptAudit(name, _decoder.decode(content), "", has_page), len(content)
        except AuditUnreadable as error:
            why = error.why
        except (DecodeError, RecursionError, ValueError) as error:
            why = f"this is no audit in JSON: {error}"
        return KeptAudit(name, None, why, has_page), len(content)

    def _has(self, name: str, ending: str) -> bool:
        try:
            with self._opened(name, ending):
                return True
        except AuditUnreadable as error:
            return not error.is_missing

    def _read(self, name: str, ending: str, most: int) -> bytes:
        """The content of a file that is not larger than this. Raises AuditUnreadable."""
        with self._opened(name, ending) as descriptor:
            content = bytearray()
            # The file may grow meanwhile, so its size alone bounds nothing.
            if os.fstat(descriptor).st_size <= most:
                while piece := os.read(descriptor, most + 1 - len(content)):
                    content += piece
                if len(content) <= most:
                    return bytes(content)
        raise AuditUnreadable(f"its file {name}{ending} has more than {most:,} bytes, so it is not read")

    @contextmanager
    def _opened(self, name: str, ending: str) -> Iterator[int]:
        """Open a plain file of the folder. Raises AuditUnreadable, also for what fails while it is open."""
        if name.startswith(".") or "/" in name or "\0" in name:
            raise AuditUnreadable(_NONE, is_missing=True)
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                descriptor = os.open(name + ending, _FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise AuditUnreadable(_NONE, is_missing=True)
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            why = f"its file {name}{ending} can't be read ({error.strerror})"
            raise AuditUnreadable(why, is_missing=error.errno in _NOT_THERE) from error


def _can_be_named(name: str) -> bool:
    """Whether a path of the console can name it: it is UTF-8, and no step to another folder."""
    return not name.startswith(".") and (name.isascii() or not _NOT_UTF8.search(name))
