"""``--report`` of the audit: when the page or its picture is written, and that it changes nothing else."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from freezegun import freeze_time
from matplotlib.image import imread

from delayd.reading.books import AuditReport, audit_directory
from tests.books import START_MS, Books

from .runner import Ran, run

NOW_MS = START_MS + 1_800_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Three messages that were handed over, and one that is not yet due."""
    books = Books(str(tmp_path / "data"))
    books.send([START_MS, START_MS, START_MS, START_MS + 3_000_000])
    books.checkpoint()
    books.hand_over([1, 2, 3], delay_ms=4)
    books.settled_ms = NOW_MS
    books.publish(NOW_MS)
    books.see_realtime(NOW_MS)
    yield books
    books.close()


def say(books: Books, *options: str) -> Ran:
    with freeze_time(NOW):
        return run("audit", "--data", books.root, *options)


def spark_audit(*places: str, **_: object) -> AuditReport:
    return audit_directory(places[0], now_ms=NOW_MS)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "data")


def test_the_page_is_written_beside_what_the_audit_says(books: Books, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    page.write_text("of yesterday")
    ran = say(books, "--report", str(page), "--from", "2026-11-20T16:00Z", "--to", "2026-11-20T18:00Z")
    assert ran == say(books, "--from", "2026-11-20T16:00Z", "--to", "2026-11-20T18:00Z") and ran.code == 0
    text = page.read_text(encoding="utf-8")
    assert "The books balance" in text and "from 2026112016 up to 2026112017" in text
    assert say(books, "--report", str(page)).code == 0 and "every hour" in page.read_text(encoding="utf-8")
    assert left(tmp_path) == ["out.html"]


def figures_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_a_folder_gets_the_page_and_the_figures_of_each_audit(books: Books, tmp_path: Path) -> None:
    folder = tmp_path / "audits"
    folder.mkdir()
    for _ in range(2):
        assert say(books, "--report", str(folder)).out == say(books).out
    ran = run("spark-audit", "--data", books.root, "--report", str(folder), spark_audit=spark_audit)
    assert ran.code == 0 and f"the audit is kept as {folder / 'audit-2026'}" in ran.err
    written = left(folder)
    assert len(written) == 6 and {Path(name).suffix for name in written} == {".html", ".json"}
    assert all(re.fullmatch(r"audit-\d{8}T\d{6}Z-[0-9a-f]{6}", Path(name).stem) for name in written)
    for found in figures_in(folder):
        assert (found["verdict"], found["balanced"], found["chosen"]) == ("balanced", True, "every hour")
    said, told = json.loads(say(books, "--format", "json").out), figures_in(folder)[0]
    assert {**told, "groups": []} == {**said, "groups": []}, "a page has groups, too"
    assert {each["role"]: each["place"] for each in said["servers"]} == {"delay": books.root, "realtime": books.root}


def test_the_figures_of_an_audit_that_found_a_loss_or_damage_say_so(books: Books, tmp_path: Path) -> None:
    lossy, damaged = tmp_path / "lossy", tmp_path / "damaged"
    lossy.mkdir()
    damaged.mkdir()
    books.send([START_MS + 1000])
    assert say(books, "--report", str(lossy)).code == 3
    (found,) = figures_in(lossy)
    assert (found["verdict"], found["balanced"], found["findings_count"]) == ("not_balanced", False, 1)
    books.path_of("schedule").write_bytes(b"x" * 100)
    assert say(books, "--report", str(damaged), "--from", "2026-11-20T16:00Z").code == 3
    (found,) = figures_in(damaged)
    assert (found["verdict"], found["balanced"], found["chosen"]) == ("damaged", False, "from 2026112016")
    assert str(books.path_of("schedule")) in str(found["damage"]) and len(left(damaged)) == 2


def test_lost_messages_exit_with_3_and_have_their_page(books: Books, tmp_path: Path) -> None:
    books.send([START_MS + 1000])
    ran = say(books, "--report", str(tmp_path / "out.html"), "--findings", "0")
    assert ran == say(books, "--findings", "0") and ran.code == 3
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "The books do NOT balance" in text and "delayd trace orders 5 --server" in text


@pytest.mark.parametrize("place", ["none/out.html", "data/delay/message/x/out.html", "none/out.png"])
def test_a_place_where_no_page_can_be_is_refused_before_the_audit(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def audit(*_: object, **__: object) -> AuditReport:
        raise AssertionError("the audit has begun")

    monkeypatch.setattr("cli.audit_commands.audit_fleet", audit)
    ran = say(books, "--report", str(tmp_path / place))
    assert (ran.code, ran.out) == (2, "") and f"{tmp_path / place} can't be written (" in ran.err
    assert left(tmp_path) == []


def test_damage_exits_with_3_and_the_page_names_it_in_place_of_an_earlier_one(books: Books, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert say(books, "--report", str(page)).code == 0
    for path in (books.path_of("schedule"), books.path_of("dispatch")):
        path.write_bytes(b"x" * 100)
    ran = say(books, "--report", str(page))
    assert ran == say(books) and ran.code == 3
    text = page.read_text(encoding="utf-8")
    assert "The books could NOT be audited" in text and "balance" not in text
    assert all(str(books.path_of(name)) in text for name in ("schedule", "dispatch"))


def test_an_audit_that_never_ended_leaves_the_earlier_page(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "out.html"
    page.write_text("of yesterday")

    def audit(*_: object, **__: object) -> AuditReport:
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.audit_commands.audit_fleet", audit)
    assert say(books, "--report", str(page)).code not in (0, 3)
    assert page.read_text() == "of yesterday" and left(tmp_path) == ["out.html"]


def test_an_acceptance_and_a_page_are_two_commands(books: Books, tmp_path: Path) -> None:
    options = ("--accept", "2026112016", "--by", "ann", "--reason", "why", "--yes")
    ran = say(books, "--report", str(tmp_path / "out.html"), *options)
    assert ran.code == 2 and "leave --report out" in ran.err and left(tmp_path) == []


def test_the_audit_in_spark_writes_the_same_page(books: Books, tmp_path: Path) -> None:
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    assert say(books, "--report", str(one)).code == 0
    assert run("spark-audit", "--data", books.root, "--report", str(other), spark_audit=spark_audit).code == 0
    assert one.read_bytes() == other.read_bytes()


def test_a_page_is_for_whom_the_umask_says(books: Books, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert say(books, "--report", str(tmp_path / "out.html")).code == 0
    finally:
        os.umask(before)
    assert (tmp_path / "out.html").stat().st_mode & 0o777 == 0o640


def colours(png: bytes) -> set[str]:
    """Which colours a picture of the promised size has."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(io.BytesIO(png), format="png")
    assert pixels.shape == (1000, 1600, 4)
    parts = (pixels[..., :3] * 255).round().astype("u1").reshape(-1, 3)
    return {row.tobytes().hex() for row in np.unique(parts, axis=0)}


def test_a_name_that_ends_in_png_gets_the_picture_in_the_colours_of_the_page(books: Books, tmp_path: Path) -> None:
    one, other = tmp_path / "one.png", tmp_path / "other.PNG"
    one.write_text("of yesterday")
    ran = say(books, "--report", str(one))
    assert ran == say(books) and ran.code == 0 and left(tmp_path) == ["one.png"]
    # Paper, ink, what was dispatched, what is pending: and nothing is bad.
    found = colours(one.read_bytes())
    assert {"ffffff", "1b2430", "1f8a5b", "3566b8"} <= found and "c6293a" not in found
    books.send([START_MS + 1000])
    assert say(books, "--report", str(other)).code == 3
    assert {"c6293a"} <= colours(other.read_bytes())


def test_the_audit_in_spark_draws_the_same_picture(books: Books, tmp_path: Path) -> None:
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    assert say(books, "--report", str(one)).code == 0
    assert run("spark-audit", "--data", books.root, "--report", str(other), spark_audit=spark_audit).code == 0
    assert one.read_bytes() == other.read_bytes()


def test_without_messages_the_picture_says_so(books: Books, tmp_path: Path) -> None:
    assert say(books, "--report", str(tmp_path / "out.png"), "--from", "2030-01-01T00:00Z").code == 0
    found = colours((tmp_path / "out.png").read_bytes())
    assert "3566b8" in found, "the verdict is calm"


def test_damage_takes_the_place_of_an_earlier_picture(books: Books, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert say(books, "--report", str(picture)).code == 0
    books.path_of("schedule").write_bytes(b"x" * 100)
    ran = say(books, "--report", str(picture))
    assert ran == say(books) and ran.code == 3
    found = colours(picture.read_bytes())
    assert "c6293a" in found and "1f8a5b" not in found


def test_without_matplotlib_one_sentence_tells_how_to_get_it(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayd.reading.tables.find_spec", lambda _: None)
    ran = say(books, "--report", str(tmp_path / "out.png"))
    assert (ran.code, ran.out) == (2, "") and left(tmp_path) == []
    assert ran.err == "delayd: a picture of an audit needs matplotlib: pip install 'delayd[report]'\n"
    assert say(books, "--report", str(tmp_path / "out.html")).code == 0


def test_only_a_picture_loads_matplotlib_and_none_pyplot(books: Books, tmp_path: Path) -> None:
    script = (
        "import sys; from delayd.__main__ import main; sys.argv[1:] = ['audit', '--data', *sys.argv[1:]]; main(); "
        "print([each for each in ('matplotlib', 'matplotlib.pyplot') if each in sys.modules])"
    )
    for name, expected in (("out.html", "[]"), ("out.png", "['matplotlib']")):
        command = [sys.executable, "-c", script, books.root, "--report", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.splitlines()[-1] == expected, done
