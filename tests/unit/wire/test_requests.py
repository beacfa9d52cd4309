"""Heads: a field is checked before it is used, and an error comes back as the error that it was."""

from __future__ import annotations

import pytest

from delayd.errors import BadRequest, RemoteError, UnknownRequest
from delayd.wire.frame import Head
from delayd.wire.heads import (
    error_from_head,
)
from delayd.wire.requests import RequestType, request_type


def test_a_request_type_that_nobody_knows_is_an_error_of_the_caller() -> None:
    assert request_type(30) is RequestType.HELLO
    with pytest.raises(UnknownRequest, match="type 99"):
        request_type(99)


def test_an_error_of_a_newer_version_keeps_its_code() -> None:
    error = error_from_head({"code": "moon_is_full", "message": "wait", "retry_after_ms": None, "details": {}})
    assert isinstance(error, RemoteError)
    assert (error.code, error.message, error.retry_after_ms) == ("moon_is_full", "wait", 0)


def test_an_error_head_that_is_damaged_is_a_bad_request_and_not_a_crash() -> None:
    heads: list[Head] = [
        {},
        {"code": 5, "message": "x", "details": {}},
        {"code": "x", "message": "x", "details": []},
        {"code": "x", "message": "x", "details": {}, "retry_after_ms": -1},
    ]
    for head in heads:
        with pytest.raises(BadRequest):
            error_from_head(head)
