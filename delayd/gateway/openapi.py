"""OpenAPI: the routes as a table, and the document that is made from it and from the types of `delayd.gateway.values`.

``python -m tests.unit.gateway.openapi_page`` writes docs/openapi.json; each gateway serves it as ``/v1/openapi.json``.

Invariant: what a route may be asked and how it answers is said once, at its operation and its types, so the document is
never older than the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.gateway.callers import OPEN
from delayd.gateway.problems import MEDIA_TYPE as PROBLEM
from delayd.gateway.values import JSON, Problem

Endpoint = Callable[[Request], Awaitable[Response]]
Schema = dict[str, Any]

REFERENCE = "#/components/schemas/{name}"
NO_STEP = {"enum": [".", ".."]}
PARTS = {
    "subject": {"type": "string", "pattern": "^[A-Za-z0-9._%/-]{1,255}$", "not": NO_STEP},
    "group": {"type": "string", "minLength": 1, "maxLength": 255, "not": NO_STEP},
    "id": {"type": "string", "description": "The token of a receipt."},
    "name": {"type": "string", "minLength": 1, "not": NO_STEP},
}
"""Parts of paths. In each of them a / is written as %2F; see `delayd.gateway.front.STEPS` for those that are none."""

CONDITIONS = {
    "If-Match": {"type": "string", "pattern": '^([*]|"[!#-~]{1,100}")$'},
    "If-None-Match": {"type": "string", "pattern": "^[*]$"},
}
"""Headers with which a change requires something; ETags have their quotes."""

REASONS = {
    400: "The request is wrong; nothing was done.",
    401: "A token is asked for, and none, or no valid one, was sent.",
    403: "The request comes from a foreign page, or needs what this gateway was not given.",
    404: "It is not known.",
    409: "It is taken, or can't be changed any more.",
    412: "It is not as If-Match or If-None-Match requires; nothing was done.",
    413: "The body is too long.",
    415: "The body is encoded.",
    422: "The Idempotency-Key was used for another request; nothing was done.",
    429: "The quota of the subject is full, or this gateway holds as much as it can.",
    500: "A bug; the log of the gateway has it.",
    503: "No server took it; nothing is kept.",
    504: "Nobody knows whether it was done.",
}
ALWAYS = (400, 403, 503, 504)
WITH_BODY = (413, 415)


class AnyOf(NamedTuple):
    """One of several types; a list of such; such a list in the member `results`; or lines (or events) of such."""

    kinds: tuple[object, ...]
    form: Literal["one", "list", "results", "lines"] = "one"


Kind = object  # A type that msgspec describes, AnyOf, or `bytes` for any body.


class Operation(NamedTuple):
    """One method of one path.

    Fields:
        path: with its parts in braces, see `PARTS`.
        name: the operation's id.
        gives: what a success has.
        query: what the query may have.
        takes: what the body may be, by media type.
        may_be_empty: whether there need be no body.
        status, media: of a success.
        headers: what the request may have in headers that mean something here.
        also: other answers, by status and media type; one of the two where the other is a success's or JSON.
        fails: statuses of problems beside those that each operation may have.
        conditions: headers that may require something of what is changed, see `CONDITIONS`; then a 412 is possible.
        tagged: whether a success has an ETag.
    """

    method: str
    path: str
    name: str
    summary: str
    endpoint: Endpoint
    gives: Kind
    query: type[msgspec.Struct] | None = None
    takes: Mapping[str, Kind] = MappingProxyType({})
    headers: Mapping[str, Schema] = MappingProxyType({})
    may_be_empty: bool = False
    status: int = 200
    media: str = JSON
    also: Mapping[int | str | tuple[int, str], Kind] = MappingProxyType({})
    fails: tuple[int, ...] = ()
    conditions: tuple[str, ...] = ()
    tagged: bool = False


def document(operations: Iterable[Operation]) -> dict[str, object]:
    """The whole document."""
    listed = list(operations)
    kinds: dict[object, None] = {Problem: None}
    for each in listed:
        for kind in (each.gives, *each.takes.values(), *each.also.values()):
            kinds |= dict.fromkeys(kind.kinds if isinstance(kind, AnyOf) else (kind,))
    kinds.pop(bytes, None)
    described, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    for component in components.values():
        # Not every version of msgspec takes the indentation of a docstring away.
        if "description" in component:
            component["description"] = inspect.cleandoc(component["description"])
    schemas = {bytes: {}, **dict(zip(kinds, described, strict=True))}
    paths: dict[str, dict[str, object]] = {}
    for each in listed:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each, schemas)
    info = {
        "title": "delayd",
        "version": "1",
        "description": "Messages that wait until they are due.",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _described(operation: Operation, schemas: Mapping[object, Schema]) -> dict[str, object]:
    content: dict[int, dict[str, object]] = {operation.status: {operation.media: _media(operation.gives, schemas)}}
    for place, kind in operation.also.items():
        if isinstance(place, tuple):
            status, media = place
        else:
            status, media = (place, JSON) if isinstance(place, int) else (operation.status, place)
        content.setdefault(status, {})[media] = _media(kind, schemas)
    for status in (
        *ALWAYS,
        *operation.fails,
        *(() if operation.path in OPEN else (401,)),
        *([412] if operation.conditions else ()),
        *(WITH_BODY if operation.takes else ()),
    ):
        content.setdefault(status, {})[PROBLEM] = {"schema": schemas[Problem]}
    answers: dict[str, dict[str, object]] = {
        str(status): {"description": REASONS.get(status, "Done."), "content": of_media}
        for status, of_media in sorted(content.items())
    }
    if operation.tagged:
        answers[str(operation.status)]["headers"] = {"ETag": {"schema": {"type": "string"}}}
    told: dict[str, object] = {"operationId": operation.name, "summary": operation.summary}
    if parameters := _parameters(operation):
        told["parameters"] = parameters
    if operation.takes:
        takes = {media: _media(kind, schemas) for media, kind in operation.takes.items()}
        told["requestBody"] = {"required": not operation.may_be_empty, "content": takes}
    return {**told, "responses": answers}


def _parameters(operation: Operation) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {"name": name, "in": "path", "required": True, "schema": PARTS[name]}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    found += [
        {"name": name, "in": "header", "required": False, "schema": schema}
        for name, schema in {**operation.headers, **{name: CONDITIONS[name] for name in operation.conditions}}.items()
    ]
    if operation.query is None:
        return found
    ((_,), components) = msgspec.json.schema_components([operation.query], ref_template=REFERENCE)
    query = components[operation.query.__name__]
    for name, schema in query["properties"].items():
        # What a query does not say is left out there, so nothing in it is null.
        kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
        (kind,) = kinds
        found.append({"name": name, "in": "query", "required": name in query.get("required", ()), "schema": kind})
    return found


def _media(kind: Kind, schemas: Mapping[object, Schema]) -> dict[str, object]:
    if not isinstance(kind, AnyOf):
        return {"schema": schemas[kind]}
    one: Schema = {"anyOf": [schemas[each] for each in kind.kinds]} if len(kind.kinds) > 1 else schemas[kind.kinds[0]]
    if kind.form == "lines":
        return {"schema": {"type": "string"}, "x-delayd-line": one}
    if kind.form == "list":
        one = {"type": "array", "items": one}
    if kind.form == "results":
        results = {"type": "array", "items": one}
        one = {"type": "object", "properties": {"results": results}, "required": ["results"]}
    return {"schema": one}
