"""docs/protocol.md has the answer of each request that the code declares."""

import re
from pathlib import Path

from delayd.wire.requests import LISTS, MAPS, RequestType, named_types

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "protocol.md").read_text()


def test_the_page_has_the_answer_of_each_request_once() -> None:
    rows = re.findall(r"^\| (\d+ [A-Z_]{3,}(?:, \d+ [A-Z_]{3,})*) \| ", PAGE, re.MULTILINE)
    answered = [name for row in rows for name in row.split(", ")]
    assert sorted(answered) == sorted(f"{kind.value} {kind.name}" for kind in RequestType)


def test_adding_a_request_names_files_that_are_there() -> None:
    told = re.findall(r"`((?:delayd|tests)/[a-z_/]+\.py)`", PAGE.split("### Adding a request")[1].split("## Trust")[0])
    assert len(told) == 6
    assert [name for name in told if not (ROOT / name).is_file()] == []


def test_each_row_that_a_head_may_have_is_declared_and_each_declared_row_is_used() -> None:
    fields = [fields for kind in RequestType for fields in (kind.terms.fields, kind.terms.answer)]
    types = {re.sub(r"[][{}]|\|nil", "", kind) for each in fields for _, kind in named_types(each)}
    plain = {"u32", "u64", "int", "instant", "bool", "str", "text", "host", "group", "bytes", "bytes32", "slots"}
    others = {kind for kind in types - plain - {"versions", "position"} if not re.search(r"\.\.|/", kind)}
    assert others == {*LISTS, *MAPS}
