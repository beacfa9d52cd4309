"""The folder of audits, with whatever somebody may have put there."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from delayd.gateway.console import audit_folder
from delayd.gateway.console.audit_folder import FIGURES_BYTES_MAX, AuditFolder, AuditUnreadable

SOUND = {"read_at_ms": 1_800_000_000_000, "balanced": True, "places": ["/data"], "verdict": "balanced"}


def put(folder: Path, name: str, **more: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**SOUND, **more}))


def names(folder: Path, before: str | None = None, most: int = 50) -> list[str]:
    return [each.name for each in AuditFolder(str(folder)).listed(before, most).audits]


def why(folder: Path, name: str) -> str:
    (found,) = [each for each in AuditFolder(str(folder)).listed(None, 50).audits if each.name == name]
    assert found.figures is None
    return found.unread


def test_thousands_of_audits_are_listed_by_name_the_last_first_and_page_by_page(tmp_path: Path) -> None:
    for number in range(3_000):
        put(tmp_path, f"audit-{number:04}")
        (tmp_path / f"audit-{number:04}.html").touch()
    wanted = [f"audit-{number:04}" for number in reversed(range(3_000))]
    assert names(tmp_path) == wanted[:50]
    assert names(tmp_path, wanted[49], 2) == wanted[50:52]
    last = AuditFolder(str(tmp_path)).listed(wanted[-3], 2)
    assert [each.name for each in last.audits] == wanted[-2:] and not last.more and not last.is_cut
    assert all(each.has_page and each.figures is not None for each in last.audits)


def test_what_is_no_plain_file_of_the_folder_is_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(SOUND))
    folder = tmp_path / "audits"
    (folder / "below.json").mkdir(parents=True)
    put(folder, "sound")
    (folder / "link.json").symlink_to(secret)
    (folder / "link.html").symlink_to(secret)
    (folder / "own.json").symlink_to("sound.json")
    os.mkfifo(folder / "pipe.json")
    put(folder, ".hidden")
    put(folder, "..")
    Path(os.fsdecode(os.fsencode(folder) + b"/no-utf8-\xff.json")).write_text("{}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket.json"))
        assert names(folder) == ["sound"]
        for name in ("below", "link", "own", "pipe", ".hidden", "..", "socket", "../secret", "a\0b", "", "x" * 300):
            for ask in (AuditFolder(str(folder)).audit, AuditFolder(str(folder)).page):
                with pytest.raises(AuditUnreadable) as caught:
                    ask(name)
                assert caught.value.is_missing, name
    folder.joinpath("sound.json").unlink()
    assert names(folder) == []


def test_a_file_that_is_no_audit_says_why_and_the_others_are_shown(tmp_path: Path) -> None:
    put(tmp_path, "sound")
    for name, content in {
        "empty": b"",
        "cut": json.dumps(SOUND).encode()[:-3],
        "deep": b'{"x":' + b"[" * 200_000,
        "other": b'{"hello": 1}',
        "list": b"[]",
        "text": b"\xff\xfe\x00",
        "wrong": json.dumps({**SOUND, "balanced": "yes"}).encode(),
        "late": json.dumps({**SOUND, "read_at_ms": 1 << 62}).encode(),
        "digits": b'{"read_at_ms": ' + b"9" * 10_000 + b"}",
        "id": json.dumps({**SOUND, "servers": [{"role": "delay", "log_id": "; rm -rf /"}]}).encode(),
        "alone": json.dumps({**SOUND, "chosen": "\ud800"}).encode(),
    }.items():
        (tmp_path / f"{name}.json").write_bytes(content)
        assert "no audit in JSON" in why(tmp_path, name), name
    (tmp_path / "page.html").write_bytes(b"<p>")
    assert "only its page" in why(tmp_path, "page")
    assert "sound" in names(tmp_path) and len(names(tmp_path)) == 13
    found = AuditFolder(str(tmp_path)).audit("sound")
    assert found.figures is not None and not found.has_page


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    for ending in ("json", "html"):
        with (tmp_path / f"huge.{ending}").open("wb") as file:
            file.truncate(FIGURES_BYTES_MAX + 1)
    assert f"more than {FIGURES_BYTES_MAX:,} bytes" in why(tmp_path, "huge")
    with pytest.raises(AuditUnreadable, match="more than 8,388,608 bytes") as caught:
        AuditFolder(str(tmp_path)).page("huge")
    assert not caught.value.is_missing


def test_a_list_ends_when_it_has_read_enough_and_goes_on_behind_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        put(tmp_path, name, remarks=["x" * 1_000])
    monkeypatch.setattr(audit_folder, "READ_BYTES_MAX", 1_500)
    first = AuditFolder(str(tmp_path)).listed(None, 50)
    assert [each.name for each in first.audits] == ["d", "c"] and first.more
    assert names(tmp_path, "c") == ["b", "a"]


def test_of_too_many_files_some_are_looked_at_and_the_list_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        put(tmp_path, f"{number}")
    monkeypatch.setattr(audit_folder, "ENTRIES_MAX", 3)
    found = AuditFolder(str(tmp_path)).listed(None, 50)
    assert found.is_cut and len(found.audits) == 3


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuditUnreadable, match="gone can't be read"):
        AuditFolder(str(tmp_path / "gone")).listed(None, 50)
