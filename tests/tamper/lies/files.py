"""Files that are gone, short, or of another place.

Invariant: each is told to the honest directory alone, with all checksums valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind
from delayd.log.hour import dispatch_path, schedule_path
from tests.simulation.audit import BOOKS
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar
from tests.tamper.lies.lie import Told, hour_that_is
from tests.tamper.rows import batch_of, rows_of

Pair = Callable[[Liar], tuple[str, ...]]
"""The paths of a file, and of the one whose place it takes."""


def file_lies() -> Told:
    files: dict[str, Callable[[Liar], str]] = {
        "a pending hour's schedule log": lambda liar: schedule_path(DELAY, hour_that_is(liar, "pending")),
        "a sealed hour's schedule log": lambda liar: schedule_path(DELAY, hour_that_is(liar, "sealed")),
        "a sealed hour's dispatch log": lambda liar: dispatch_path(DELAY, hour_that_is(liar, "sealed")),
        "an open hour's dispatch log": lambda liar: dispatch_path(DELAY, hour_that_is(liar, "open")),
        "the delay server's message log": lambda liar: liar.message_log,
        "the first segment of a realtime server's log": lambda liar: liar.target_log(0),
        "a realtime server's whole log": lambda liar: liar.target_log(1),
    }
    for name, path in files.items():
        yield f"{name} is gone", partial(_remove, path=path), "DAMAGE"
        yield f"{name} is empty", partial(_truncate, path=path, size=0), "DAMAGE"
        yield f"{name} has no groups", partial(_truncate, path=path, size=64), "DAMAGE"

    def cut_head(liar: Liar) -> None:
        """As retention would; but it notes first where the log may begin."""
        first = liar.target_log(0)
        liar.disk.remove(first)
        segments = liar.disk.list_folder(first.rpartition("/")[0])
        assert segments, "another segment is left"

    yield "a realtime server's log is cut at its head as if by retention", cut_head, "DAMAGE"
    yield from _of_another_place()
    yield "the pull log is gone", lambda liar: remove_all(liar, f"{BOOKS}/realtime-0/pull"), "DAMAGE"


def _of_another_place() -> Told:
    """Whole files in the place of others, as they are, and with a header that says that they belong there."""

    def hours(folder: Callable[[str, int], str], which: tuple[str, str]) -> Pair:
        return lambda liar: (folder(DELAY, hour_that_is(liar, which[0])), folder(DELAY, hour_that_is(liar, which[1])))

    pairs: dict[str, tuple[Pair, str]] = {
        "a pending hour's schedule log is another one's": (
            lambda liar: tuple(
                schedule_path(DELAY, hour) for hour in sorted(int(row["hour"]) for row in liar.hours)[-2:]
            ),
            "DAMAGE",
        ),
        "a sealed hour's schedule log is another one's": (hours(schedule_path, ("sealed", "last sealed")), "DAMAGE"),
        "a sealed hour's dispatch log is another one's": (
            hours(dispatch_path, ("sealed", "last sealed")),
            "DAMAGE ORPHAN",
        ),
        "a realtime server's segment is that of another server": (
            lambda liar: (liar.target_log(1), liar.target_log(0)),
            "DAMAGE LOST",
        ),
        "a realtime server's segment is another one of it": (
            lambda liar: (liar.last_target_log(0), liar.target_log(0)),
            "DAMAGE LOST",
        ),
        "the delay server's message log is that of a realtime server": (
            lambda liar: (liar.target_log(1), liar.message_log),
            "DAMAGE VERIFY",
        ),
    }
    for name, (pair, names) in pairs.items():
        yield name, partial(_put_in_place, pair=pair, signed=False), names
        yield f"{name}, and says that it belongs there", partial(_put_in_place, pair=pair, signed=True), names


def _put_in_place(liar: Liar, pair: Pair, signed: bool) -> None:
    source, path = pair(liar)
    groups = liar.groups(source)
    if not signed:
        liar.copy_file(source, path)
        return
    # The header of the file that stands there is kept, and each batch says the hour of its place.
    number = liar.header(path).number

    def at_home(batch: Batch) -> bytes:
        if batch.kind is BatchKind.SCHEDULE:
            return batch_of(batch, rows_of(batch), batch.schedule._replace(hour=number))
        return bytes(batch.buffer)

    liar.write(path, [group.with_batches(*map(at_home, group.parsed)) for group in groups])


def _remove(liar: Liar, path: Callable[[Liar], str]) -> None:
    liar.disk.remove(path(liar))


def _truncate(liar: Liar, path: Callable[[Liar], str], size: int) -> None:
    file = liar.disk.open(path(liar), write=True)
    file.truncate(size)
    file.sync()
    file.close()


def remove_all(liar: Liar, folder: str) -> None:
    for name in liar.disk.list_folder(folder):
        liar.disk.remove(f"{folder}/{name}")
