"""The OpenAPI document: ``python -m tests.unit.gateway.openapi_page`` writes docs/openapi.json from the code."""

from __future__ import annotations

import json
from pathlib import Path

from delayd.gateway.app import Gateway
from delayd.gateway.callers import Callers
from delayd.gateway.openapi import document
from delayd.gateway.operations import operations_of
from delayd.gateway.push import Push

PAGE = Path(__file__).parents[3] / "docs" / "openapi.json"
NOWHERE = "127.0.0.1:1"  # Nobody is asked.


def page() -> str:
    """The whole document, as it is checked in."""
    push, callers = Push(NOWHERE, None, allow_private=False), Callers(NOWHERE, None, required=False)
    gateway = Gateway(NOWHERE, (), push, callers)
    return json.dumps(document(operations_of(gateway)), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
