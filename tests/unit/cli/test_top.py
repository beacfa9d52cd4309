"""The rows of ``delayd top``, from what servers answer."""

from cli.status import Seen
from cli.top import SERVER_COLUMNS, Look, screen_of
from delayd.wire.frame import Head


def look(role: str, **counters: int) -> Look:
    status: Head = {"epoch": 1, "now_ms": 1_000, "counters": dict(counters)}
    return Look([Seen(role, 1, "here", status, 0, [], [], "")], [])


def row(now: Look) -> dict[str, object]:
    (cells,) = screen_of(now, now).servers
    return dict(zip((column.name for column in SERVER_COLUMNS), cells, strict=True))


def test_lateness_is_that_which_a_delay_server_tells() -> None:
    found = row(look("delay", taken_rows_10s=5, late_ms_p50=3, late_ms_p99=8, late_ms_max=9, waiting_rows=2))
    assert (found["late_p50_ms"], found["late_p99_ms"], found["late_max_ms"], found["waiting"]) == (3, 8, 9, 2)


def test_nothing_is_said_of_lateness_when_nothing_was_handed_over() -> None:
    for now in (look("delay", taken_rows_10s=0), look("delay"), look("realtime", messages=4)):
        found = row(now)
        assert [found[name] for name in ("late_p50_ms", "late_p99_ms", "late_max_ms")] == [None] * 3
