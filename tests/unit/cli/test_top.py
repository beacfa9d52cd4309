"""The rows of ``delayd top``, from what servers answer."""

from cli.status_command import SERVER_COLUMNS, AskedServer, StatusRound, screen_of
from delayd.wire.frame import Head


def row(role: str, **counters: int) -> dict[str, object]:
    status: Head = {"epoch": 1, "now_ms": 1_000, "counters": dict(counters)}
    now = StatusRound([AskedServer(role, 1, "here", status, 0, [], [], "")], [])
    (cells,) = screen_of(now, now).servers
    return dict(zip((column.name for column in SERVER_COLUMNS), cells, strict=True))


def test_lateness_is_that_which_a_delay_server_tells_if_it_handed_anything_over() -> None:
    late = ("late_p50_ms", "late_p99_ms", "late_max_ms")
    found = row("delay", taken_rows_10s=5, late_ms_p50=3, late_ms_p99=8, late_ms_max=9, waiting_rows=2)
    assert [found[name] for name in (*late, "waiting")] == [3, 8, 9, 2]
    for found in (row("delay", taken_rows_10s=0), row("delay"), row("realtime", messages=4)):
        assert [found[name] for name in late] == [None] * 3
