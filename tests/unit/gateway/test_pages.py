"""What each page of the console needs, as the table says."""

from __future__ import annotations

from delayd.gateway.app import Gateway
from delayd.gateway.callers import OPEN, PAGES, Callers
from delayd.gateway.front import by_path
from delayd.gateway.push import Push

NOWHERE = "127.0.0.1:1"


def test_each_page_says_which_rights_it_needs_and_no_other_path_is_a_page() -> None:
    push, callers = Push(NOWHERE, None, allow_private=False), Callers(NOWHERE, None, required=False)
    gateway = Gateway(NOWHERE, [], push, callers)
    pages = [path for path, _ in by_path(gateway.console.routes())]
    assert sorted(pages) == sorted({*PAGES, *(path for path in OPEN if path.startswith(("/session", "/static")))})
