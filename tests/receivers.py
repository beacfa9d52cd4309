"""Receivers: real web servers on this machine that take, refuse or spoil what is POSTed to them."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from tests.waiting import DEADLINE_S, wait_until


class Post(NamedTuple):
    """A POST that came."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


Answer = Callable[[Post, BaseHTTPRequestHandler], None]


def status(number: int, body: bytes = b"", **headers: str) -> Answer:
    """Answer so."""

    def answer(post: Post, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(number)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def hang(ended: threading.Event) -> Answer:
    """Say nothing until then."""

    def answer(post: Post, handler: BaseHTTPRequestHandler) -> None:
        ended.wait(HANG_S)
        handler.close_connection = True

    return answer


HANG_S = 60.0  # So that a test that fails ends.
OK = status(204)


class Receiver:
    """What has come, and what is answered next: each of ``answers`` once, then ``usual``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.posts: list[Post] = []
        self.answers: list[Answer] = []
        self.usual: Answer = OK
        self.connections: set[tuple[str, int]] = set()

    def take(self, post: Post, handler: BaseHTTPRequestHandler) -> None:
        self.posts.append(post)
        (self.answers.pop(0) if self.answers else self.usual)(post, handler)

    def wait(self, count: int, within_s: float = DEADLINE_S) -> list[Post]:
        """Wait until so many have come."""
        wait_until(
            lambda: len(self.posts) >= count, lambda: f"{count} POSTs came; there are {len(self.posts)}", within_s
        )
        return self.posts


@contextmanager
def receiver(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.connections.add(self.client_address)
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                found.take(Post(self.path, headers, body, time.time()), self)
            except OSError:
                self.close_connection = True  # The other side has hung up.

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    found = Receiver(f"http{'s' * (tls is not None)}://{host}:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
