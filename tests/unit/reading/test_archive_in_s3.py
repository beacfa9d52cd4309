"""An archive in an S3 server that speaks the real protocol, also one that fails half way or refuses."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("obstore", reason="an archive in an object store needs pip install 'delayd[archive]'")
pytest.importorskip("moto", reason="the S3 server of these tests is moto's")

import obstore
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from obstore.store import from_url
from werkzeug.serving import make_server

from delayd.errors import BadSetting, ServerUnavailable
from delayd.reading.archive.archive_audit import audit_archive
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.store import FolderStore, open_store
from tests.books import Books
from tests.unit.cli.runner import run

from .archived import FILES, NOW_MS, SCHEDULE_KEY, tree, write_books

URI = "s3://books/delayd"

Environment = dict[str, object]
StartResponse = Callable[..., object]


class Server:
    """moto's S3 server; ``fails`` says of each number of a request how it fails: not done, or done and not answered."""

    def __init__(self) -> None:
        self.requests = 0
        self.fails: dict[int, str] = {}
        self.status = "503 Slow Down"
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ask(self, path: str, method: str) -> None:
        urlopen(Request(f"{self.url}/{path}", method=method)).close()

    def _serve(self, environment: Environment, start_response: StartResponse) -> Iterable[bytes]:
        self.requests += 1
        how = self.fails.get(self.requests) or self.fails.get(0)
        if how == "lost":
            list(self._app(environment, lambda *_: None))
        if how:
            start_response(self.status, [("Content-Length", "0")])
            return []
        answer: Iterable[bytes] = self._app(environment, start_response)
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    server.ask("moto-api/reset", "POST")  # Buckets live in the process, not in the server.
    server.ask("books", "PUT")
    server.requests = 0
    yield server
    server.close()


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = write_books(tmp_path / "data")
    yield books
    books.close()


def content(folder: Path) -> dict[str, bytes]:
    """All files of the archive in the bucket."""
    store = open_store(URI)
    return {name: store.fetch(name, folder).read_bytes() for name in store.names("")}


def test_a_bucket_has_the_same_files_as_a_folder_and_is_audited_as_one(
    books: Books, server: Server, tmp_path: Path
) -> None:
    folder = FolderStore(str(tmp_path / "folder"))
    archive_directory(books.root, folder)
    ran = run("archive", "--data", books.root, "--to", URI)
    assert (ran.code, ran.err) == (0, "") and f"{FILES} files archived, 0 were before" in ran.out
    assert content(tmp_path) == tree(folder)
    assert run("archive", "--data", books.root, "--to", URI).out == f"0 files archived, {FILES} were before\n"
    here, there = audit_archive(folder, now_ms=NOW_MS), audit_archive(open_store(URI), now_ms=NOW_MS)
    assert there.hours == here.hours and there.seals == here.seals and there.balanced
    assert run("audit", "--data", URI).code == 0


def test_an_object_that_is_there_is_never_written_over(server: Server, tmp_path: Path) -> None:
    store = open_store(URI)
    for data, is_new in ((b"one", True), (b"two", False)):
        path = tmp_path / "made"
        path.write_bytes(data)
        assert store.create("a/b", path) is is_new
    assert store.fetch("a/b", tmp_path).read_bytes() == b"one" and list(store.names("a")) == ["a/b"]
    with pytest.raises(FileNotFoundError):
        store.fetch("a/c", tmp_path)


@pytest.mark.parametrize("how", ["not done", "lost"])
def test_a_server_that_fails_twice_at_any_request_changes_nothing(
    books: Books, server: Server, tmp_path: Path, how: str
) -> None:
    folder = FolderStore(str(tmp_path / "folder"))
    archive_directory(books.root, folder)
    # Each third request fails, and the next one too; what was done and not answered is found to be there.
    server.fails = {number: how for number in range(3, 90) if number % 5 < 2}
    report = archive_directory(books.root, open_store(URI))
    assert len(report.written) + len(report.found) == FILES and not report.faults
    server.fails = {}
    assert content(tmp_path) == tree(folder)


def test_a_server_that_goes_away_half_way_leaves_whole_files_and_the_next_run_completes_them(
    books: Books, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayd.reading.archive.store.RETRIES_MAX", 0)
    folder = FolderStore(str(tmp_path / "folder"))
    archive_directory(books.root, folder)
    expected = tree(folder)
    begun = server.requests
    server.fails = dict.fromkeys(range(begun + 6, begun + 100), "not done")
    with pytest.raises(ServerUnavailable, match=f"{URI}/.* run this again"):
        archive_directory(books.root, open_store(URI))
    server.fails = {}
    left = content(tmp_path)
    assert left and {name: expected[name] for name in left} == left
    archive_directory(books.root, open_store(URI))
    assert content(tmp_path) == expected


@pytest.mark.parametrize("status", ["403 Forbidden", "401 Unauthorized"])
def test_credentials_that_are_refused_are_named(books: Books, server: Server, status: str) -> None:
    server.status, server.fails = status, {0: "not done"}
    with pytest.raises(BadSetting, match=f"{URI}/notes is refused .*; give the environment credentials"):
        archive_directory(books.root, open_store(URI))
    ran = run("archive", "--data", books.root, "--to", URI)
    assert ran.code == 2 and "Traceback" not in ran.err
    server.fails = {}


def test_an_audit_of_a_directory_and_a_bucket_needs_its_credentials(books: Books, server: Server) -> None:
    archive_directory(books.root, open_store(URI))
    both, alone = (run("audit", *places, "--format", "json") for places in ((books.root, URI), (books.root,)))
    assert both.code == alone.code == 0
    assert json.loads(both.out)["hours"] == json.loads(alone.out)["hours"]
    begun = server.requests
    server.status, server.fails = "403 Forbidden", dict.fromkeys(range(begun, begun + 100), "not done")
    ran = run("audit", books.root, URI)
    server.fails = {}
    assert (ran.code, ran.out) == (2, "") and f"{URI}/" in ran.err and "give the environment credentials" in ran.err


def test_an_object_that_was_replaced_or_removed_is_named_by_its_address(books: Books, server: Server) -> None:
    archive_directory(books.root, open_store(URI))
    bucket = from_url(URI)
    obstore.put(bucket, SCHEDULE_KEY.file, b"other")
    (fault,) = audit_archive(open_store(URI), now_ms=NOW_MS).faults
    assert fault.detail.startswith(f"{URI}/{SCHEDULE_KEY.file}: it is another file than")
    obstore.delete(bucket, SCHEDULE_KEY.file)
    (fault,) = audit_archive(open_store(URI), now_ms=NOW_MS).faults
    assert fault.detail.startswith(f"{URI}/{SCHEDULE_KEY.file}: the file is gone")
