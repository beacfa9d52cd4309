"""Pages of the console, as a browser reads them."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

from tests.end_to_end.gateways import Answer

FORM = {"content-type": "application/x-www-form-urlencoded"}


class Marks(HTMLParser):
    """The marks of a page, as a browser reads them: a page may have neither scripts nor anything from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.action = ""
        self.fields: dict[str, str] = {}
        self.links: list[str] = []
        self._area = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        assert tag not in ("script", "style", "iframe", "object", "embed", "img", "base"), tag
        for name, value in found.items():
            assert not name.startswith("on") and name != "style", (tag, found)
            assert name not in ("href", "src", "action") or (value[:1] in "/#" and value[:2] != "//"), (tag, found)
        if tag == "form" and found["method"] == "post":
            self.action = found["action"]
        elif tag in ("input", "textarea"):
            self.fields[found["name"]] = found.get("value", "")
            self._area = found["name"] if tag == "textarea" else ""
        elif tag == "a":
            self.links.append(found["href"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self.fields[self._area] = self.fields[self._area].removeprefix("\n").replace("\n", "\r\n")
            self._area = ""

    def handle_data(self, data: str) -> None:
        if self._area:
            self.fields[self._area] += data


def checked(answer: Answer, status: int) -> str:
    page = answer.body.decode()
    assert answer.status == status, page
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    check_harmless(answer)
    Marks(page)
    return page


def check_harmless(answer: Answer) -> None:
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "script-src" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"


def words(page: str) -> str:
    """What a reader sees of a page, without marks."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())
