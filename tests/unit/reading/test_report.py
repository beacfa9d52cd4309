"""The page of an audit: the same bytes for the same books, whatever the data says, and nothing of it left out."""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import Collection, PolyCollection

from delayd.hours import hour_name
from delayd.log.hour import NO_SEAL, Seal, SealFacts
from delayd.machine.histogram import count_values
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.consumption import GroupBooks
from delayd.reading.explanations import CLAIMED_LATE, Explanation
from delayd.reading.findings import (
    Acceptance,
    AcceptanceState,
    Cause,
    CausedFindings,
    Finding,
    FindingKind,
    HourSummary,
    JudgedAcceptance,
    StoredAcceptance,
    sum_up,
)
from delayd.reading.report.charts import (
    PAGE_FRAME,
    PERIODS_MAX,
    ChartFrame,
    ChartText,
    Period,
    course,
    distribution,
    periods_of,
)
from delayd.reading.report.page import audit_page, damage_page
from delayd.reading.report.picture import audit_picture, damage_picture
from delayd.reading.seals import SealReport, SealState
from delayd.reading.subject_figures import FIGURES, SubjectFigures
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books

from .report_books import NOW_MS, PAGE, made_page, write_books

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "nav", "article"),
    *("p", "h1", "h2", "h3", "strong", "a", "br", "code", "span", "div", "ul", "li", "dl", "dt", "dd"),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "svg", "g", "rect", "line", "text"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "id", "href"),
    *("viewbox", "role", "aria-label", "x", "y", "x1", "x2", "y1", "y2", "width", "height"),
}
HOSTILE = "</title></style></td><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"
STEERING = "\x1b[31m\x00\u202e\u2028\ud800"


class Parsed(HTMLParser):
    """The elements of a page, their attributes and what stands in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.texts.append(" " if tag == "td" else "")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """What a reader sees."""
        return re.sub(r"\s+", " ", "".join(self.texts))


def parsed(page: str) -> Parsed:
    """Read a page that has nothing but what a page may have."""
    found = Parsed(page)
    assert set(found.tags) <= TAGS, set(found.tags) - TAGS
    assert {name for name, _ in found.attributes} <= ATTRIBUTES, {name for name, _ in found.attributes} - ATTRIBUTES
    assert found.open == [] and all(value.startswith("#") for name, value in found.attributes if name == "href")
    return found


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(str(tmp_path))
    yield books
    books.close()


def audit(books: Books, now_ms: int = NOW_MS) -> AuditReport:
    return audit_directory(books.root, now_ms=now_ms)


def test_fixed_books_have_the_page_that_is_kept(tmp_path: Path) -> None:
    made = made_page(str(tmp_path))
    assert made == PAGE.read_text(encoding="utf-8"), "python -m tests.unit.reading.report_books writes it anew"
    text = parsed(made).text
    for said in (
        "The books do NOT balance",
        "Scheduled 111 = dispatched 88 + dead 1 + pending 10",
        "LATE 16 messages, up to 7 min 30 s late",
        "stood still, from 2026-11-20T17:10:00.000Z to 2026-11-20T17:20:00.000Z (10 min 00 s)",
        "delayd trace billing.retry 56 --server 000000000000de1a --data books",
        "Name and position",
    ):
        assert said in text, said


def test_a_page_needs_nothing_but_itself_and_forbids_all_else(tmp_path: Path) -> None:
    made = made_page(str(tmp_path))
    (style,) = re.findall(r"<style>(.*?)</style>", made, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert ("content", policy) in parsed(made).attributes
    assert not re.search(r"https?:|//|url\(|@import|<script|javascript:", made.replace("<!DOCTYPE", ""))


def _hostile(report: AuditReport) -> tuple[AuditReport, Sequence[JudgedAcceptance]]:
    """The report with hostile texts wherever data can put one."""
    bad = HOSTILE + STEERING
    finding = Finding(HOUR, FindingKind.LOST, 7, START_MS, bad, bad, DELAY_ID)
    late = Explanation(bad, bad, DELAY_ID, START_MS, START_MS + 9_000)
    caused = [
        CausedFindings(DELAY_ID, HOUR, FindingKind.LOST, Cause.NO_OUTCOME, None, 1, START_MS, START_MS, 0, (finding,)),
        CausedFindings(DELAY_ID, HOUR, FindingKind.LATE, Cause.LATE, late, 1, START_MS, START_MS, 9, (finding,)),
    ]
    said = Acceptance(DELAY_ID, HOUR, "0" * 64, bad, bad, START_MS)
    stored = StoredAcceptance(bad, DELAY_ID, HOUR, said, b"", b"", None)
    figures = SubjectFigures((bad,), np.ones((1, len(FIGURES)), np.int64))
    lives = [replace(life, path=bad, role=bad) for life in report.lives]
    changed = replace(
        report,
        places=(bad,),
        total=replace(report.total, subjects=figures, waiting=1),
        caused=tuple(caused),
        lives=tuple(lives),
        holds_up=(bad,),
        faults=(Finding(0, FindingKind.CONSERVATION, 0, 0, "", bad, DELAY_ID),),
        seals=(SealReport(DELAY_ID, HOUR, None, SealState.BROKEN, bad),),
        groups=(GroupBooks(1, 2, bad, bad, 1, 0, 1, 0, 0, 0, 0, 0),),
    )
    return changed, [JudgedAcceptance(stored, AcceptanceState.DIFFERS)]


def test_texts_of_the_data_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    write_books(str(tmp_path))
    report, judged = _hostile(audit_directory(str(tmp_path), now_ms=NOW_MS))
    made = audit_page(report, judged, chosen=HOSTILE)
    found = parsed(made)
    assert "49" not in re.findall(r"onerror=alert\(2\)>\"'&(\d+)", found.text)
    # Title, head, scope, servers, remarks, subject, group, causes, seal, acceptance and commands.
    assert found.text.count("<script>alert(1)</script>") >= 20
    assert not any(each in made for each in STEERING if not each.isprintable())
    assert "\N{REPLACEMENT CHARACTER}1b[31m" in made
    assert found.text.count("onerror=alert(2)>\"'&{{ 7*7 }}") >= 20
    made.encode()
    parsed(damage_page((HOSTILE,), START_MS, [HOSTILE])).text.index(HOSTILE)


def test_a_picture_shows_any_text_as_text_and_says_nothing_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    write_books(str(tmp_path))
    odd = f"$\\frac{{a$ 日本 {'x' * 400}"
    report, judged = _hostile(audit_directory(str(tmp_path), now_ms=NOW_MS))
    report = replace(report, places=(odd + HOSTILE + STEERING,))
    assert audit_picture(report, judged, chosen=odd + STEERING) == audit_picture(report, judged, chosen=odd + STEERING)
    assert damage_picture((odd, STEERING), START_MS, [odd + STEERING] * 100).startswith(b"\x89PNG")
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_a_picture_has_the_boxes_of_the_pages_charts_for_a_year_of_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Collection] = []

    def add(_: Axes, collection: Collection) -> None:
        drawn.append(collection)

    monkeypatch.setattr(Axes, "add_collection", add)
    audit_picture(_large())
    boxes = sum(len(each.get_paths()) for each in drawn if isinstance(each, PolyCollection))
    assert boxes == audit_page(_large()).count("<rect ") > 3_000


def test_labels_of_lateness_never_lie_on_each_other() -> None:
    for late_ms in (0, 900, 90_000, 90_000_000, 9_000_000_000):
        total = replace(_large().hours[0], late_ms_max=late_ms)
        for frame in (PAGE_FRAME, ChartFrame(580, 120)):
            below = [each for each in distribution(total, 1_000, frame).shapes if isinstance(each, ChartText)]
            level = sorted(each.x for each in below if each.style == "tick")
            beside = course([Period(HOUR, HOUR + 1, total)], frame).shapes
            upright = sorted(each.y for each in beside if isinstance(each, ChartText) and each.style == "label")
            assert all(b - a >= 28 for a, b in pairwise(level)) and all(b - a >= 12 for a, b in pairwise(upright))
            assert len(level) >= 3 and len(upright) >= 2


def test_books_without_messages_say_so(books: Books) -> None:
    books.see_all(START_MS)
    text = parsed(audit_page(audit(books))).text
    assert "There is nothing to audit" in text and "Nothing was found." in text and "No hour is sealed yet." in text


def test_an_open_hour_balances_and_what_waits_is_told(books: Books) -> None:
    books.hand_over(books.send([START_MS]))
    books.send([START_MS + 1_000, NOW_MS + 1_000])
    books.see_all(START_MS + 500)
    text = parsed(audit_page(audit(books, START_MS + 1_800_000))).text
    assert "The books balance" in text and "1 wait, and are not lost" in text
    assert "Scheduled 3 = dispatched 1 + pending 1 + waiting 1." in text


def test_accepted_findings_stay_on_the_page_with_who_accepted_them(books: Books) -> None:
    books.send([START_MS])
    books.see_all(START_MS + 2 * HOUR_MS)
    report = audit(books)
    assert "The books do NOT balance" in parsed(audit_page(report)).text
    said = Acceptance(DELAY_ID, HOUR, report.findings_sha256[DELAY_ID, HOUR], "ann", "disk 3 was lost", START_MS)
    stored = StoredAcceptance("1.note", DELAY_ID, HOUR, said, b"", b"", None)
    text = parsed(audit_page(report, [JudgedAcceptance(stored, AcceptanceState.ACCEPTED)])).text
    assert "The books do not balance; all findings are accepted" in text and "An operator has accepted this" in text
    assert f"{hour_name(HOUR)} accepted ann 2026-11-20T16:00:00.000Z disk 3 was lost" in text
    for state in (AcceptanceState.NOT_SIGNED, AcceptanceState.NOT_VERIFIED):
        text = parsed(audit_page(report, [JudgedAcceptance(stored, state)])).text
        assert "The books do NOT balance" in text and "ann" not in text, "anybody may have written these words"


def test_a_page_of_damage_gives_no_verdict_on_any_message() -> None:
    text = parsed(damage_page(("/data",), START_MS, ["a is damaged at byte 64", "b is damaged at byte 0"])).text
    assert "The books could NOT be audited" in text and "2 files can't be read" in text
    assert "a is damaged at byte 64" in text and "delayd log verify --data /data" in text
    assert "balance" not in text


def _large() -> AuditReport:
    """A year of hours, 5,000 subjects, a million findings in each hour's causes, and a seal for each hour."""
    hours = [
        HourSummary(
            DELAY_ID,
            HOUR + at,
            scheduled=1_000,
            dispatched=800,
            dead=10,
            pending=150,
            missing=40,
            lost=40,
            late=75,
            late_ms_max=90_000 + at,
            lateness=count_values(np.arange(800) * 3),
        )
        for at in range(8_760)
    ]
    caused = []
    for hour in hours:
        due_ms = hour.hour * HOUR_MS
        shown = tuple(
            Finding(hour.hour, FindingKind.LOST, 9, due_ms, f"subject.{at}", "it is gone", DELAY_ID) for at in range(3)
        )
        stall = Explanation("stood still", "delay", DELAY_ID, due_ms, due_ms + 9_000)
        rest = due_ms, due_ms + 9_000
        caused += [
            CausedFindings(DELAY_ID, hour.hour, FindingKind.LOST, Cause.NO_OUTCOME, None, 40, *rest, 0, shown),
            CausedFindings(DELAY_ID, hour.hour, FindingKind.LATE, Cause.LATE, stall, 15, *rest, 9_000, shown),
            CausedFindings(DELAY_ID, hour.hour, FindingKind.LATE, Cause.LATE, CLAIMED_LATE, 60, *rest, 9_000, shown),
        ]
    names = tuple(f"subject.{at:04}" for at in range(5_000))
    counts = np.full((5_000, len(FIGURES)), 2, np.int64)
    counts[:, 0] = 10
    seals = []
    for number, hour in enumerate(hours):
        facts = SealFacts(hour.hour, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NO_SEAL, NO_SEAL)
        seals.append(SealReport(DELAY_ID, hour.hour, Seal(DELAY_ID, number, facts, NO_SEAL), SealState.VERIFIED))
    return AuditReport(
        places=("/data",),
        read_at_ms=NOW_MS,
        hours=tuple(hours),
        total=replace(sum_up(hours), subjects=SubjectFigures(names, counts)),
        findings=(),
        findings_count=sum(each.rows for each in caused),
        torn=(),
        deleted_rows=0,
        lives=(),
        seals=tuple(seals),
        groups=tuple(GroupBooks(1, at, "s", f"g{at}", 3, 1, 2, 0, 0, 0, 1, 0) for at in range(500)),
        caused=tuple(caused),
    )


def test_a_year_of_hours_and_a_million_findings_is_a_small_page_and_the_rest_is_counted() -> None:
    report = _large()
    assert report.findings_count > 1_000_000
    made = audit_page(report)
    assert len(made.encode()) < 2_000_000
    text = parsed(made).text
    assert "1,007,400 findings, joined by what explains them." in text
    assert "350,400 messages: accepted, and gone" in text and "in 8,760 hours; most of them (40)" in text
    assert "525,600 messages, up to 9.000 s late" in text
    # 8,760 stalls, one for each hour, behind the other two causes.
    assert "and 8,662 more causes with 129,930 findings" in text
    assert "4,940 other subjects 49,400 9,880" in text
    assert "440 other groups 1,320 440 880" in text
    assert re.search(r"The last seals of each 7 days: 5\d of 8,760", text)


def test_the_page_of_an_archive_offers_no_command_that_needs_servers() -> None:
    text = parsed(audit_page(replace(_large(), places=("s3://books/delayd",)))).text
    assert "delayd audit --data s3://books/delayd --from 2026-11-20T16:00Z --to 2026-11-20T17:00Z" in text
    assert "delayd trace" not in text and "delayd seals" not in text and "log_id" not in text


def test_too_many_hours_become_days_and_weeks_with_the_same_sums() -> None:
    hours = _large().hours
    for count, expected in ((100, "hour"), (PERIODS_MAX + 1, "day"), (8_760, "day")):
        what, periods = periods_of(hours[:count])
        assert what == expected and len(periods) <= PERIODS_MAX
        assert sum(period.count("dispatched") for period in periods) == 800 * count
        assert sum(period.count("faults") for period in periods) == 40 * count
        assert max(period.figures.late_ms_max for period in periods) == 90_000 + count - 1
    far = [replace(hour, hour=hour.hour + 31 * 24 * 400 * (number % 400)) for number, hour in enumerate(hours[:4_000])]
    assert len(periods_of(far)[1]) > 0
