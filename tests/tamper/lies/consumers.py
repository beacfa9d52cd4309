"""Lies of consume logs: which stored message a consumer gets next.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from tests.simulation.audit import BOOKS
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import Told

FOLDER = f"{BOOKS}/realtime-0/consume"
HEADER_BYTES = 64  # The rest of each file is one page that is not full, so without a checksum of its own.
Change = Callable[[list[int]], list[int]]


def consumer_lies() -> Told:
    changes: dict[str, Change] = {
        "names another row": lambda entries: [entries[0] + 1, *entries[1:]],
        "names no batch": lambda entries: [*entries[:-1], entries[-1] + (8 << 16)],
        "is there twice": lambda entries: [entries[0], *entries],
        "is left out": lambda entries: [entries[0], *entries[2:]],
        "is left out at the beginning": lambda entries: entries[1:],
    }
    for name, change in changes.items():
        yield f"an entry of a consume log {name}", partial(_edit, change=change), "VERIFY"
    yield "two entries of a consume log change places", partial(_edit, change=_swap), "VERIFY"
    yield "an entry of a consume log is of another subject", _of_another_subject, "VERIFY"
    yield "a subject's consume log is that of another one", _of_another_log, "VERIFY"


def entries_of(liar: Liar, subject: int) -> list[int]:
    """The entries of a subject's consume log."""
    data = liar.read_file(_path(subject))[HEADER_BYTES:]
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def _path(subject: int) -> str:
    return f"{FOLDER}/{subject:08}/{0:020}.log"


def _edit(liar: Liar, change: Change, subject: int = 0) -> None:
    header = liar.read_file(_path(subject))[:HEADER_BYTES]
    entries = change(entries_of(liar, subject))
    liar.write_file(_path(subject), header + struct.pack(f"<{len(entries)}Q", *entries))


def _swap(entries: list[int]) -> list[int]:
    return [entries[1], entries[0], *entries[2:]]


def _of_another_subject(liar: Liar) -> None:
    (other, *_) = entries_of(liar, 1)
    _edit(liar, lambda entries: sorted([*entries[1:], other]))


def _of_another_log(liar: Liar) -> None:
    entries = entries_of(liar, 1)
    _edit(liar, lambda _: entries)


def cut_entries(liar: Liar) -> None:
    """Take the last entry off: how many there are, only the server's state says."""
    _edit(liar, lambda entries: entries[:-1])
