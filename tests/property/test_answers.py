"""Every answer fits one head and can be encoded, at its largest (rule E1)."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayd.address import HOST_BYTES_MAX, Endpoint
from delayd.batch.columns import ColumnId
from delayd.errors import BadRequest, DamagedData, DelaydError, SlowDown, error_by_code
from delayd.machine.operating import Wait
from delayd.wire.frame import ANSWER, ERROR, Head, encode_frame
from delayd.wire.heads import (
    INT_MAX,
    ROWS_BYTES_MAX,
    U32_MAX,
    U64_MAX,
    cut_text,
    error_from_head,
    error_head,
    need_bool,
    need_maps,
    take_rows,
    text_bytes,
)
from delayd.wire.meta import (
    SERVERS_MAX,
    SUBJECTS_MAX,
    Move,
    Registered,
    Routes,
    ServerInfo,
    SubjectPage,
    moves_head,
    servers_head,
)
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import BATCHES_MAX, AcceptedResult, RefusedResult, TargetInfo, results_head, targets_head
from delayd.wire.status import Decision, Quarantined, decided_head, list_head, waits_head
from meta.core import MOVES_MAX
from realtime.consumers import LIST_MAX, groups_head
from realtime.delay_servers import FRAME_BATCHES_MAX, WINDOW_BATCHES, window_frames
from realtime.groups import Group
from realtime.handoff import InDoubt
from realtime.pulls import HANDLES_MAX
from realtime.subject_index import Subject
from tests.worlds.realtime import SimPeer, World

NAME = "n" * 255
TEXTS = st.text(max_size=30) | st.sampled_from(["\ud800", "x" * 70_000, "\U0001f600" * 30_000, "\udfff" * 9_000])


def fits(head: Head, kind: int = 1) -> bool:
    """Encodes a head, which raises if it can't be an answer."""
    return bool(encode_frame(kind, 1, head, (), ANSWER))


def largest() -> Iterator[tuple[str, Head]]:
    """Each answer that grows with what a server knows or was asked, at its largest."""
    server = Registered("realtime", U64_MAX, Endpoint("h" * HOST_BYTES_MAX, 65_535), INT_MAX, INT_MAX)
    servers = [ServerInfo(server, False, INT_MAX)] * SERVERS_MAX
    names = [f"{number:0255d}" for number in range(SUBJECTS_MAX)]
    yield "SERVERS", {"servers": servers_head(servers), "now_ms": INT_MAX}
    yield "ROUTES", {**Routes(dict.fromkeys(names, U64_MAX), servers, []).to_head(), "now_ms": INT_MAX}
    yield "ROUTES, none", {**Routes({}, servers, names).to_head(), "now_ms": INT_MAX}
    yield "META_SUBJECTS", SubjectPage([(name, U64_MAX) for name in names], more=True).to_head()
    refused = RefusedResult("batch_number_reused", "\U0001f600" * 70_000, INT_MAX, range(65_535, 64_535, -1))
    accepted = AcceptedResult(U64_MAX, 65_536, INT_MAX, True, 65_536)
    sent: list[list[AcceptedResult | RefusedResult]] = [
        [refused] * BATCHES_MAX,
        [accepted] * BATCHES_MAX,
        [refused, *[accepted] * (BATCHES_MAX - 1)],
    ]
    for results in sent:
        yield "SEND", {"log_id": U64_MAX, "now_ms": INT_MAX, "results": results_head(results)}
    landed: list[list[int]] = [[U64_MAX, INT_MAX]] * FRAME_BATCHES_MAX
    yield "DISPATCH", {"log_id": U64_MAX, "appended_at_ms": INT_MAX, "batches": landed}
    groups = [widest_group(number) for number in range(LIST_MAX + 1)]
    yield "GROUPS", groups_head(groups, INT_MAX)
    places: dict[int, int] = {ColumnId.SEQUENCE: 0, ColumnId.DELIVER_AT_MS: 0}
    held = InDoubt(U64_MAX, U64_MAX, 1 << 32, INT_MAX, INT_MAX, INT_MAX, 0, b"", 0, places, 0)
    facts: Head = dict.fromkeys(("end_offset", "decided_offset", "lost_epoch", "lost_age_ms"), INT_MAX)
    facts |= dict.fromkeys(("log_id", "highest_sequence"), U64_MAX)
    for head, _, _ in window_frames(facts, [held] * (WINDOW_BATCHES + 1)):
        yield "HELLO", head
    wide = "\U0001f600" * 5_000
    costs = dict.fromkeys(Decision, wide)
    entry = Quarantined(wide, wide, INT_MAX, wide, INT_MAX, INT_MAX, "2026112203", wide, costs)
    yield "MEND_LIST", list_head([entry] * 5_000, "", INT_MAX)
    yield "MEND", decided_head(wide, True, "\ud800" * 5_000)
    target = TargetInfo(U64_MAX, wide, wide, INT_MAX, INT_MAX, INT_MAX, "\ud800" * 5_000)
    yield "TARGETS", targets_head([target] * 5_000, 0)
    waits = waits_head([Wait(wide, wide, wide)] * 5_000)
    yield "STATUS", {"waits": waits, "refuses": waits, "counters": dict.fromkeys(names[:300], U64_MAX)}
    moves = moves_head([Move(U64_MAX, NAME, U64_MAX)] * MOVES_MAX)
    yield "REGISTER", {"lease_ms": INT_MAX, "heartbeat_ms": INT_MAX, "moves": moves}
    stale: list[list[int]] = [[U64_MAX, INT_MAX, U32_MAX]] * HANDLES_MAX
    yield "ACK", {"stale": stale}
    yield "an error", error_head(DamagedData("/" + "\udcff" * 5_000, INT_MAX, "\U0001f600" * 300_000))
    yield "an error with rows", error_head(SlowDown("\ud800" * 300_000, retry_after_ms=INT_MAX, rows=bytes(2 << 20)))


def widest_group(number: int) -> Group:
    subject = Subject(NAME)
    subject.end = INT_MAX
    return Group(number, subject, "\U0001f600" * 63, INT_MAX)


def test_rule_E1_every_answer_at_its_largest_fits_a_head() -> None:
    # Not a test for each: they take a second to make, which each worker would spend before it runs anything.
    for name, head in largest():
        assert fits(head), name


RESULTS = st.builds(AcceptedResult, *[st.integers(0, U64_MAX)] * 3, st.booleans()) | st.builds(
    RefusedResult,
    st.sampled_from(["past_horizon", "batch_number_reused"]),
    TEXTS,
    st.integers(0, INT_MAX),
    st.lists(st.integers(0, 65_535), max_size=20, unique=True) | st.just(range(1_000)),
)


@settings(max_examples=60)
@given(few=st.lists(RESULTS, min_size=1, max_size=5), times=st.sampled_from([1, 3, 300, 800]))
def test_rule_E1_results_fit_whatever_they_say_and_each_names_a_row_that_had_one(
    few: Sequence[AcceptedResult | RefusedResult], times: int
) -> None:
    results = [*few] * times
    told = results_head(results)
    head: Head = {"log_id": U64_MAX, "now_ms": INT_MAX, "results": told}
    assert fits(head, RequestType.SEND)
    for result, item in zip(results, need_maps(head, "results"), strict=True):
        if isinstance(result, RefusedResult):
            rows = item["rows"]
            assert isinstance(rows, list) and rows == list(result.rows[: len(rows)])
            assert bool(rows) == bool(result.rows) and item["error"] == result.code
            if times == 1 and len(few) == 1:
                assert len(rows) == len(result.rows)
        else:
            assert item == result.to_head()


@settings(max_examples=60)
@given(text=TEXTS, bytes_max=st.integers(3, 9_000))
def test_a_cut_text_fits_and_can_be_encoded(text: str, bytes_max: int) -> None:
    cut = cut_text(text, bytes_max)
    assert len(cut.encode()) <= bytes_max
    if len(text_bytes(text)) <= bytes_max:
        assert cut == text_bytes(text).decode()


@settings(max_examples=60)
@given(message=TEXTS, details=st.dictionaries(st.sampled_from(["path", "rows", "n"]), TEXTS | st.binary(max_size=50)))
def test_rule_E1_every_error_crosses_the_wire_whatever_it_quotes(message: str, details: dict[str, str | bytes]) -> None:
    head = error_head(error_by_code("bad_request", message, 0, details))
    assert encode_frame(1, 1, head, (), ANSWER | ERROR)
    there = error_from_head(head)
    assert isinstance(there, BadRequest) and isinstance(there, DelaydError)


def test_rule_E1_a_listing_pages_through_all_of_its_rows_once() -> None:
    rows: list[Head] = [{"name": NAME, "number": number} for number in range(5_000)]
    seen: list[Head] = []
    more = True
    while more:
        taken, more = take_rows(iter(rows[len(seen) :]), 100_000)
        assert taken and fits({"rows": taken})
        seen += taken
    assert seen == rows
    alone: Head = {"name": "x" * ROWS_BYTES_MAX}
    assert take_rows(iter([alone]), 1) == ([alone], False)


def test_rule_E1_groups_are_listed_page_by_page_whatever_their_number_and_names() -> None:
    world, peer = World(), SimPeer()
    subjects = [letter * 255 for letter in "abcd"]
    made = [(subjects[number % 4], f"{number:04d}" + "g" * 251) for number in range(3_000)]
    for subject, group in made:
        world.pull(peer, group, subject)
    for wanted, limit in ((None, None), (subjects[1], None), (None, 700)):
        listed: list[tuple[object, object]] = []
        after: list[str] = []
        more = True
        while more:
            asked: Head = {"subject": wanted}
            if after:
                asked["after"] = after
            if limit is not None:
                asked["limit"] = limit
            head, _ = world.ask(peer, RequestType.GROUPS, asked)
            assert fits(head)
            page = [(item["subject"], item["group"]) for item in need_maps(head, "groups")]
            assert limit is None or len(page) <= limit
            listed += page
            after, more = [str(name) for name in page[-1]], need_bool(head, "more")
        assert listed == sorted(pair for pair in made if wanted in (None, pair[0]))


@pytest.mark.parametrize("after", [["a"], ["a", "b", "c"], "a", [1, 2]])
def test_rule_E1_groups_behind_what_is_no_group_are_refused(after: list[str]) -> None:
    world, peer = World(), SimPeer()
    with pytest.raises(BadRequest, match="after"):
        world.ask(peer, RequestType.GROUPS, {"subject": None, "after": after})
