"""Errors: their codes, their way over the wire, and what they say."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from delayd import errors
from delayd.errors import (
    DamagedData,
    DelaydError,
    DirectoryInUse,
    DiskFull,
    NewerFormat,
    NotWritable,
    OutcomeUnknown,
    QueueFull,
    RetryLater,
    SendHandle,
    SyncFailed,
    error_by_code,
)

# A code is part of the protocol: a name leaves this list only with a new version of it.
CODES = """
    already_closed bad_argument bad_instant bad_magic bad_request bad_setting bad_subject bad_version batch_malformed
    batch_number_reused caller_error connection_lost damaged_data data_error delayd_error directory_in_use disk_full
    disk_reserve dispatch_refused fenced_instance frame_damaged frame_overdue frame_too_large handoff_refused
    head_too_large hour_full internal_error
    message_too_large naive_datetime newer_format no_delay_server no_realtime_server not_ready not_writable
    outcome_unknown past_horizon protocol_error queue_full remote_error request_failed request_timed_out retry_later
    server_stopped server_unavailable slow_down stale_epoch stale_handle stale_session stopping sync_failed
    too_many_connections unknown_request unknown_server
"""

EXAMPLES: list[DelaydError] = [
    DamagedData("/data/delay/message/0.log", 4096, "checksum differs"),
    DirectoryInUse("/data/delay", "pid 7 delay"),
    DiskFull("/data"),
    NewerFormat("/data/x.log", 3, 1),
    NotWritable("/data", "Permission denied"),
    OutcomeUnknown(
        "the connection to delay 127.0.0.1:7401 broke; ask again with the handle", SendHandle(1, 2**64 - 1, 3)
    ),
    QueueFull("the queue of 64 MB is full; send slower", retry_after_ms=250, bytes=64),
    SyncFailed("/data/delay", "Input/output error"),
]


def kinds(kind: type[DelaydError] = DelaydError) -> Iterator[type[DelaydError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from kinds(narrower)


def ours() -> list[type[DelaydError]]:
    return [kind for kind in kinds() if kind.__module__ == errors.__name__]


def test_no_code_of_the_protocol_is_missing_and_each_names_one_class() -> None:
    codes = [kind.code for kind in ours()]
    assert sorted(set(codes)) == sorted(codes)
    assert set(codes) >= set(CODES.split())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_an_error_crosses_the_wire_whole(error: DelaydError) -> None:
    rebuilt = error_by_code(error.code, error.message, error.retry_after_ms, error.details)
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error) == error.message
    assert (rebuilt.retry_after_ms, rebuilt.details) == (error.retry_after_ms, error.details)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_an_error_is_pickled_whole(error: DelaydError) -> None:
    rebuilt = pickle.loads(pickle.dumps(error))
    assert type(rebuilt) is type(error)
    assert (str(rebuilt), rebuilt.code, rebuilt.details) == (str(error), error.code, error.details)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_a_sentence_says_what_where_and_what_to_do(error: DelaydError) -> None:
    sentence = str(error)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    assert ";" in sentence
    for name in ("path", "position", "holder"):
        assert str(error.details.get(name, "")) in sentence


def test_whatever_may_be_tried_later_says_when() -> None:
    for kind in ours():
        assert (kind.retry_after_ms > 0) == issubclass(kind, RetryLater), kind
