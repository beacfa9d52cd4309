"""Identity: the log_id of a server's directory, for ever, and the epoch of this start (docs/formats/checkpoint.md).

Invariant: the epoch has risen by one, durably, before the server does anything else, so no two lives of a directory
share one (rules L7, H3). No other file has these numbers, so they are stored twice (rule L9).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgpack

from delayd.disk import Disk
from delayd.errors import BadSetting, DamagedData, EpochOutOfRange, NewerFormat, StateMissing
from delayd.state import State

FORMAT = 1  # One version for everything in a server's directory.
U64_MAX = (1 << 64) - 1
EPOCH_MAX = (1 << 62) - 1  # Far below the limit of any column that holds an epoch.
# Starts that nobody heard of, such as those of a server that died at each start for months.
EPOCH_STEPS_MAX = 1_000_000

_KEYS = (b"format", b"log_id", b"epoch")
_COPY_KEY = b"identity"  # All three in one value.
# Any of these shows that a server has lived here.
_FILES = ("checkpoint", "place", "message", "schedule", "dispatch", "seal", "consume", "pull")
_CLUSTER_KEYS = (b"cluster_id", b"cluster_id.copy")  # Stored twice, for the same reason.


class Identity(NamedTuple):
    """A directory and its life."""

    log_id: int
    epoch: int


def draw_id() -> int:
    """A random id of 64 bits whose 16 hexadecimal digits begin with a letter.

    Programs that guess the types of CSV columns read 1234567890123456 and 12e4567890123456 as numbers.
    """
    return secrets.choice(range(0xA, 0x10)) << 60 | secrets.randbits(60)


def open_identity(state: State, path: str, draw_u64: Callable[[], int], disk: Disk | None = None) -> Identity:
    """Begin the next epoch of a server's state; a new directory draws its log_id. Commits once.

    `path` is the state's path, for errors. With `disk` an empty state is refused if the directory has logs.

    Raises:
        NewerFormat: a newer delayd wrote it.
        DamagedData: a number does not check in either of its places.
        StateMissing: the directory has logs, and no state.
    """
    numbers = [_read(state, path, index) for index in range(len(_KEYS))]
    version = numbers[0]
    if version is None:
        _need_new(path, disk)
        # 0 is the value of an unset field, so no directory has it.
        log_id, epoch = draw_u64() or 1, 1
    else:
        if version > FORMAT:
            raise NewerFormat(path, version, FORMAT)
        known = [_needed(path, index, numbers[index]) for index in (1, 2)]
        log_id, epoch = known[0], known[1] + 1
    values = (FORMAT, log_id, epoch)
    puts = [(key, msgpack.packb(number)) for key, number in zip(_KEYS, values, strict=True)]
    state.commit([*puts, (_COPY_KEY, msgpack.packb(values))])
    return Identity(log_id, epoch)


def known_identity(state: State, path: str) -> Identity:
    """The identity of a state's server in its last life; zeros before its first. DamagedData as `open_identity`."""
    log_id, epoch = (_read(state, path, index) or 0 for index in (1, 2))
    return Identity(log_id, epoch)


def check_epoch(epoch: int, heard: int, who: str) -> None:
    """Refuse an epoch that can't be the next one of a server: EpochOutOfRange. `heard`: the last one, 0 for none."""
    if epoch > EPOCH_MAX or (heard and epoch > heard + EPOCH_STEPS_MAX):
        raise EpochOutOfRange(
            f"epoch {epoch} of {who} can't be: epoch {heard} was heard last, each start adds one, and {EPOCH_MAX} is "
            "the last one; look at where this number comes from"
        )


def open_cluster_id(state: State, path: str, draw_u64: Callable[[], int], wanted: int = 0) -> int:
    """The id of meta's cluster: drawn once, or taken over, when meta first starts on an empty directory.

    Raises:
        BadSetting: another one than the wanted is known already.
        DamagedData: it does not check in either of its places.
    """
    cluster_id = known_cluster_id(state, path)
    if not cluster_id:
        cluster_id = wanted or draw_u64() or 1
        keep_cluster_id(state, cluster_id)
    elif wanted and wanted != cluster_id:
        raise BadSetting(
            f"cluster_id is {wanted:016x}, and this directory is of cluster {cluster_id:016x}; leave the setting out, "
            "or start on an empty directory",
            setting="cluster_id",
        )
    return cluster_id


def known_cluster_id(state: State, path: str) -> int:
    """The cluster that a server belongs to; 0 before it was told. Raises DamagedData if neither copy checks."""
    damage: DamagedData | None = None
    for key in _CLUSTER_KEYS:
        try:
            value = state.get(key)
            if value is not None:
                return _number(path, key, value, None)
        except DamagedData as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return 0


def keep_cluster_id(state: State, cluster_id: int) -> None:
    """Remember the cluster for good; durable on return."""
    state.commit([(key, msgpack.packb(cluster_id)) for key in _CLUSTER_KEYS])


def _need_new(path: str, disk: Disk | None) -> None:
    folder = path.rpartition("/")[0]
    if disk is None:
        return
    for name in _FILES:
        found = f"{folder}/{name}"
        if disk.exists(found) and (name in ("checkpoint", "place") or disk.list_folder(found)):
            raise StateMissing(path, found)


def _needed(path: str, index: int, number: int | None) -> int:
    if number is None:
        raise DamagedData(path, 0, f"the key {_KEYS[index].decode()} is missing")
    return number


def _read(state: State, path: str, index: int) -> int | None:
    """One of the numbers, from its copy if it does not check; None when neither exists."""
    damage: DamagedData | None = None
    for key, place in ((_KEYS[index], None), (_COPY_KEY, index)):
        try:
            value = state.get(key)
            if value is not None:
                return _number(path, key, value, place)
        except DamagedData as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None


def _number(path: str, key: bytes, value: bytes, place: int | None) -> int:
    try:
        number = msgpack.unpackb(value)
        if place is not None:
            number = number[place]
    except (ValueError, TypeError, IndexError) as error:
        raise DamagedData(path, 0, f"the value of {key.decode()} is no msgpack") from error
    if type(number) is not int or not 0 <= number <= U64_MAX:
        raise DamagedData(path, 0, f"the value of {key.decode()} is no number")
    return number
