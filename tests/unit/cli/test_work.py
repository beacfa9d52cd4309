"""``delayd work``: what is wrong with the user's module is one sentence, and a changed file is seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.work import WatchedSources, load_worker
from tests.unit.cli.runner import run

WORKER = """
import delayd
worker = delayd.Worker("127.0.0.1:1")
empty = delayd.Worker("127.0.0.1:1")
text = "no worker"
@worker.on("orders", group="g")
def handle(body): ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory; modules that a test imports from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


def test_the_worker_is_found_in_the_current_directory_and_in_packages(folder: Path) -> None:
    (folder / "user_app.py").write_text(WORKER)
    assert [handler.name for handler in load_worker("user_app:worker").handlers] == ["handle"]
    assert load_worker("user_app") is load_worker("user_app:worker")
    (folder / "user_shop").mkdir()
    (folder / "user_shop" / "orders.py").write_text(WORKER)
    assert len(load_worker("user_shop.orders:worker").handlers) == 1


@pytest.mark.parametrize(
    ("text", "target", "told"),
    [
        (WORKER, "user_other:worker", "there is no module 'user_other'"),
        (WORKER, "user_app.inner:worker", "there is no module 'user_app.inner'"),
        (WORKER, "user_app:missing", "user_app has no 'missing'"),
        (WORKER, "user_app:text", "user_app:text is a str and no delayd.Worker"),
        (WORKER, "user_app:empty", "user_app:empty has no handler"),
        (WORKER, "user_app.py", "user_app.py names no worker; write MODULE:WORKER"),
        (WORKER, "user app:worker", "names no worker"),
        ("import user_missing", "user_app:worker", "No module named 'user_missing'"),
        ("\n1 / 0", "user_app:worker", "user_app.py, line 2)"),
        ("raise SystemExit('no')", "user_app:worker", "user_app can't be imported: SystemExit: no"),
        ("def (", "user_app:worker", "SyntaxError: invalid syntax (user_app.py, line 1)"),
        ("import json\njson.loads('{')", "user_app:worker", "user_app.py, line 2)"),
    ],
)
def test_whatever_is_wrong_with_the_module_is_one_sentence(folder: Path, text: str, target: str, told: str) -> None:
    (folder / "user_app.py").write_text(text)
    ran = run("work", target)
    assert ran.code == 2 and told in ran.err
    (line,) = ran.err.splitlines()
    assert line.startswith("delayd: ")


def test_files_that_are_new_changed_or_gone_are_seen_once(folder: Path) -> None:
    (folder / "user_app.py").write_text(WORKER)
    sources = WatchedSources.of("user_app")
    assert sources.changed() == []
    (folder / "user_other.py").write_text("")
    (folder / "notes.txt").write_text("")
    assert sources.changed() == ["user_other.py"] and sources.changed() == []
    os.utime(folder / "user_other.py", ns=(1, 1))
    assert sources.changed() == ["user_other.py"]
    (folder / "user_other.py").unlink()
    assert sources.changed() == ["user_other.py"]


def test_of_a_package_the_files_below_it_are_watched_and_no_environments(folder: Path) -> None:
    package = folder / "user_shop"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not imported')")
    sources = WatchedSources.of("user_shop.orders")
    (folder / "beside.py").write_text("")
    for name in (".hidden", "__pycache__", "env"):
        (package / name).mkdir()
        (package / name / "some.py").write_text("")
    (package / "env" / "pyvenv.cfg").write_text("")
    (package / "deep").mkdir()
    (package / "deep" / "some.py").write_text("")
    assert sources.changed() == ["deep/some.py"]
