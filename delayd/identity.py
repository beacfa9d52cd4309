"""Who a server is: the log_id of its directory for ever, and the epoch of this start (docs/formats/checkpoint.md).

Invariant: the epoch has risen by one, durably, before the server does anything else, so no two lives of a directory
share one (rules L7, H3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgpack

from delayd.errors import DamagedData, NewerFormat
from delayd.state import State

FORMAT = 1  # Of everything in a server's directory together.
U64_MAX = (1 << 64) - 1

_FORMAT_KEY = b"format"
_LOG_ID_KEY = b"log_id"
_EPOCH_KEY = b"epoch"


class Identity(NamedTuple):
    """A directory and its life."""

    log_id: int
    epoch: int


def open_identity(state: State, path: str, draw_u64: Callable[[], int]) -> Identity:
    """Begin the next epoch of a server's state; a new directory draws its log_id. Commits once.

    `path` is where the state lies, for NewerFormat and DamagedData.
    """
    version = _number(state, path, _FORMAT_KEY)
    if version is None:
        # 0 is what an unset field holds, so no directory has it.
        log_id, epoch = draw_u64() or 1, 1
    else:
        if version > FORMAT:
            raise NewerFormat(path, version, FORMAT)
        log_id, last_epoch = (_needed(state, path, key) for key in (_LOG_ID_KEY, _EPOCH_KEY))
        epoch = last_epoch + 1
    numbers = {_FORMAT_KEY: FORMAT, _LOG_ID_KEY: log_id, _EPOCH_KEY: epoch}
    state.commit([(key, msgpack.packb(number)) for key, number in numbers.items()])
    return Identity(log_id, epoch)


def _needed(state: State, path: str, key: bytes) -> int:
    number = _number(state, path, key)
    if number is None:
        raise DamagedData(path, 0, f"the key {key.decode()} is missing")
    return number


def _number(state: State, path: str, key: bytes) -> int | None:
    value = state.get(key)
    if value is None:
        return None
    try:
        number = msgpack.unpackb(value)
    except ValueError as error:
        raise DamagedData(path, 0, f"the value of {key.decode()} is no msgpack") from error
    if type(number) is not int or not 0 <= number <= U64_MAX:
        raise DamagedData(path, 0, f"the value of {key.decode()} is no number")
    return number
