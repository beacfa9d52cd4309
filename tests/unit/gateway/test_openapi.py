"""The OpenAPI document says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from openapi_schema_validator import OAS31Validator

from tests.unit.gateway.openapi_page import PAGE, page

DOCS = Path(__file__).parents[3] / "docs"


def test_the_document_that_is_checked_in_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "python -m tests.unit.gateway.openapi_page writes it"


def test_each_schema_of_the_document_is_one() -> None:
    for schema in json.loads(page())["components"]["schemas"].values():
        OAS31Validator.check_schema(schema)


def test_the_page_on_http_names_each_path() -> None:
    told = (DOCS / "gateway.md").read_text() + (DOCS / "push.md").read_text()
    for path in json.loads(page())["paths"]:
        last = re.sub(r"/{\w+}$", "", path).rpartition("/")[2]
        assert re.search(rf"\b{re.escape(last)}\b", told), f"docs/gateway.md does not tell about {path}"
