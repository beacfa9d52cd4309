"""What schemathesis is told about a gateway beside its document: pulls wait for milliseconds, subjects are few, so that
requests meet, and every other message that is sent says one instant, so that servers take it.

Only requests that are as the document says are changed: the others have to be refused.
"""

import zlib
from collections.abc import MutableMapping
from typing import Any

import schemathesis
from schemathesis import GenerationMode

WAIT_MS = 20
SUBJECTS = ("a", "a/b", "%c")
TAKEN_OUT = (
    *("delay", "deliver_at", "deliver_at_ms", "ttl_ms", "expires_at", "spread_ms"),
    *("key", "tags", "ordering_key", "flow", "timeout", "headers"),
)


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
    """Let no pull wait for long, have subjects meet, and make some messages ones that are taken."""
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return case
    if "subject" in case.path_parameters:
        case.path_parameters["subject"] = SUBJECTS[_number(case.path_parameters) % len(SUBJECTS)]
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("wait_ms"), int):
        body["wait_ms"] = WAIT_MS
    if case.operation.definition.raw["operationId"] == "send":
        for each in body if isinstance(body, list) else (body,):
            if isinstance(each, dict) and _number(each) % 2:
                _take(each)
                each.update(body="x", body_base64=None)
        if not isinstance(body, dict | list) and _number(case.query) % 2:
            _take(case.query)
    return case


def _number(said: MutableMapping[str, Any]) -> int:
    return zlib.crc32(repr(sorted(said.items())).encode(errors="replace"))


def _take(said: MutableMapping[str, Any]) -> None:
    """Leave one instant, soon or late, and nothing that a server may refuse."""
    for name in TAKEN_OUT:
        said.pop(name, None)
    said["delay_ms"] = _number(said) % 2 * 3_600_000
