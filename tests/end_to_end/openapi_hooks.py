"""What schemathesis is told about a gateway beside its document: pulls wait for milliseconds, subjects are few, so that
requests meet, and every other message that is sent says one instant, so that servers take it.
"""

import zlib
from collections.abc import MutableMapping

import schemathesis

WAIT_MS = 20
WAIT_MS_MAX = 30_000  # More is no pull.
SUBJECTS = ("a", "a/b", "%c")
INSTANTS = ("delay", "delay_ms", "deliver_at", "deliver_at_ms")
SEND = "send"


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: object) -> object:
    """Let no pull wait for long, and make some messages ones that are taken."""
    # One that is out of bounds stays: it has to be refused.
    if isinstance(body, dict) and isinstance(body.get("wait_ms"), int) and WAIT_MS < body["wait_ms"] <= WAIT_MS_MAX:
        body["wait_ms"] = WAIT_MS
    for each in body if isinstance(body, list) else (body,):
        if isinstance(each, dict) and ("body" in each or "body_base64" in each) and _is_chosen(each):
            _take(each)
            each.update(body="x", body_base64=None)
    return body


@schemathesis.hook
def map_query(context: schemathesis.HookContext, query: object) -> object:
    """The same for options in a query."""
    operation = context.operation
    is_send = operation is not None and operation.definition.raw["operationId"] == SEND
    if is_send and isinstance(query, dict) and _is_chosen(query):
        _take(query)
    return query


@schemathesis.hook
def map_path_parameters(context: schemathesis.HookContext, path_parameters: object) -> object:
    """Take one of few subjects in place of short ones."""
    if isinstance(path_parameters, dict):
        subject = path_parameters.get("subject")
        if isinstance(subject, str) and len(subject) < 8:
            path_parameters["subject"] = SUBJECTS[zlib.crc32(subject.encode(errors="replace")) % len(SUBJECTS)]
    return path_parameters


def _is_chosen(said: MutableMapping[str, object]) -> bool:
    return zlib.crc32(repr(sorted(said.items())).encode(errors="replace")) % 2 == 0


def _take(said: MutableMapping[str, object]) -> None:
    """Leave one instant, soon or late, and what goes with it."""
    for name in (*INSTANTS, "ttl_ms", "expires_at", "spread_ms"):
        said.pop(name, None)
    said["delay_ms"] = zlib.crc32(repr(said).encode(errors="replace")) % 2 * 3_600_000
