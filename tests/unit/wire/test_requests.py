"""Heads: a field is checked before it is used, and an error comes back as the error that it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delayd.errors import BadRequest, RemoteError, UnknownRequest
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    error_from_head,
    need_bool,
    need_bytes,
    need_int,
    need_ints,
    need_list,
    need_map,
    need_maps,
    need_rows,
    need_str,
    need_strs,
    need_u64,
    optional_str,
)
from delayd.wire.requests import RequestType, request_type

ACCESSORS: list[Callable[[Head, str], object]] = [
    need_int,
    need_u64,
    need_bool,
    need_str,
    optional_str,
    need_bytes,
    need_list,
    need_map,
    need_maps,
    need_strs,
    need_ints,
]


@pytest.mark.parametrize("accessor", ACCESSORS)
def test_a_missing_field_is_named(accessor: Callable[[Head, str], object]) -> None:
    with pytest.raises(BadRequest, match="the field wanted is missing") as caught:
        accessor({"other": 1}, "wanted")
    assert caught.value.details == {"field": "wanted"}


@pytest.mark.parametrize(
    ("accessor", "value"),
    [
        (need_int, "5"),
        (need_int, True),
        (need_int, 5.0),
        (need_int, -1),
        (need_int, 1 << 63),
        (need_u64, -1),
        (need_u64, None),
        (need_bool, 1),
        (need_str, b"x"),
        (need_str, "x" * 5000),
        (need_str, "é" * 2500),
        (optional_str, 5),
        (need_bytes, "x"),
        (need_list, {}),
        (need_map, []),
        (need_map, {b"raw": 1}),
        (need_maps, [{}, 1]),
        (need_strs, ["a", 1]),
        (need_ints, [1, "2"]),
        (need_ints, [1, True]),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(accessor: Callable[[Head, str], object], value: HeadValue) -> None:
    with pytest.raises(BadRequest, match="wrong") as caught:
        accessor({"wrong": value}, "wrong")
    assert caught.value.details == {"field": "wrong"}


def test_rows_and_pairs_have_their_exact_width() -> None:
    with pytest.raises(BadRequest, match="handles has a row of 2 items instead of 3"):
        need_rows({"handles": [[1, 2, 3], [1, 2]]}, "handles", 3)
    with pytest.raises(BadRequest, match="w has a row of 3 items instead of 2"):
        need_ints({"w": [1, 2, 3]}, "w", 2)


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
