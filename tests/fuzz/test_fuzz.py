"""A short run of the fuzzer, and that it would notice."""

from pathlib import Path
from random import Random

from delayd.wire.frame import FrameReader
from delayd.wire.requests import RequestType

from .requests import SPECS, Requests, frame
from .run import Report, run
from .values import RAW_HEADS

REQUESTS = 4_000
RSS_MIB_MAX = 128


def test_rule_E1_no_request_ends_a_server_or_harms_its_neighbour(tmp_path: Path) -> None:
    report = run(tmp_path, REQUESTS, seed=8, sweep=False)
    assert report.faults == []
    assert report.counts["requests"] >= REQUESTS
    assert report.rss_over_start_mib <= RSS_MIB_MAX
    assert set(report.loop_wait_ms) == set(SPECS)
    assert report.counts["lying target asked HELLO"] and report.counts["lying target asked DISPATCH"], report.counts
    assert report.counts["lying target lies"]
    assert report.counts["true handles"], "acknowledgements name what was given out"
    for role in SPECS:
        assert report.counts[f"{role} answered"] and report.counts[f"{role} refused"]


def test_every_type_of_request_is_fuzzed() -> None:
    fuzzed = {kind for fields in SPECS.values() for kind in fields}
    assert set(RequestType) == fuzzed


def test_the_sweep_makes_whole_frames_of_every_field() -> None:
    for role, fields in SPECS.items():
        source = Requests(role, Random(1), 1_700_000_000_000)
        seen: set[tuple[int, str]] = set()
        for number, case in enumerate(source.sweep(), 1):
            reader = FrameReader()
            data = source.swept(number, case)
            reader.get_buffer()[: len(data)] = data
            (whole,) = reader.received(len(data))
            assert whole.fault is None
            seen.update((case[0], name) for name in case[1])
        assert seen == {(kind, name) for kind, names in fields.items() for name in names}


def test_heads_that_are_none_are_told_for_their_request_alone() -> None:
    for packed in RAW_HEADS:
        reader = FrameReader()
        data = frame(RequestType.PING, 1, packed) + frame(RequestType.PING, 2, b"\x80")
        reader.get_buffer()[: len(data)] = data
        first, second = reader.received(len(data))
        assert second.fault is None and second.request_id == 2
        assert first.fault is not None or isinstance(first.head, dict)


def test_what_goes_wrong_is_a_fault_of_the_report() -> None:
    fine: dict[str, object] = {"lost": 0, "doubled": 0, "errors": []}
    assert Report(1, honest=fine).faults == []
    assert len(Report(1, honest={**fine, "lost": 1}, ended={"meta": 1, "delay": 0}).faults) == 2
    assert Report(1).faults
    assert Report(1, honest=fine, rss_mib={"meta": (40, 45), "delay": (50, 250)}).rss_over_start_mib == 200
