"""Every error that delayd raises, sorted by who must act; each is one sentence that says what happened, where, and what
to do.

Invariant: an error crosses the wire as (code, message, retry_after_ms, details) and `error_by_code` rebuilds an equal
one, so a class is never renamed: its code is its name. Built-in exceptions, also `AssertionError`, mean a bug of ours.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

# `delayd` offers these too: a program catches `delayd.QueueFull`.
__all__ = [
    "AlreadyClosed",
    "BadArgument",
    "BadBody",
    "BadExpiry",
    "BadHeaders",
    "BadInstant",
    "BadKey",
    "BadMagic",
    "BadRequest",
    "BadSetting",
    "BadSubject",
    "BadTags",
    "BadToken",
    "BadVersion",
    "BatchMalformed",
    "BatchNumberReused",
    "CallerError",
    "ClockInDoubt",
    "ConnectionLost",
    "DamagedData",
    "DamagedValue",
    "DataError",
    "DelaydError",
    "DirectoryInUse",
    "DiskFull",
    "DiskReserve",
    "DispatchRefused",
    "EpochOutOfRange",
    "ExclusiveConflict",
    "FencedInstance",
    "FrameDamaged",
    "FrameOverdue",
    "FrameTooLarge",
    "HandoffRefused",
    "HeadTooLarge",
    "HourFull",
    "InFlight",
    "InternalError",
    "KeyPending",
    "MessageTooLarge",
    "NaiveDatetime",
    "NewerFormat",
    "NoDelayServer",
    "NoRealtimeServer",
    "NoRecurring",
    "NotAllowed",
    "NotEncrypted",
    "NotOrdered",
    "NotOwner",
    "NotReady",
    "NotTrusted",
    "NotWritable",
    "OtherFilter",
    "OutcomeUnknown",
    "OwnerUnknown",
    "PastHorizon",
    "PlaceTaken",
    "ProducerLost",
    "ProtocolError",
    "QueueFull",
    "QuotaReached",
    "Rebuilding",
    "RecurringConflict",
    "RemoteError",
    "RequestFailed",
    "RequestTimedOut",
    "RestoredOrigin",
    "RetryLater",
    "SendHandle",
    "ServerCordoned",
    "ServerFenced",
    "ServerInUse",
    "ServerRetired",
    "ServerStopped",
    "ServerUnavailable",
    "Shortage",
    "SlotsInUse",
    "SlowDown",
    "StaleEpoch",
    "StaleHandle",
    "StaleSession",
    "StateMissing",
    "Stopping",
    "SyncFailed",
    "TlsRequired",
    "TooManyConnections",
    "TooManySubjects",
    "UnknownRequest",
    "UnknownServer",
    "Unreadable",
    "WrongCluster",
    "WrongLoop",
]

Detail = str | int | bytes  # Each passes through msgpack unchanged.

SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
RETRY_AFTER_MS_DEFAULT = 100  # About one group commit on a slow disk, for refusals without a better hint.


class DelaydError(Exception):
    """Any error of delayd; `details` holds values that a program may want to read without parsing the sentence."""

    code: str = "delayd_error"  # The class's name in snake case, which is its name on the wire.
    retry_after_ms: int = 0  # 0 means that waiting alone does not help.

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, *, retry_after_ms: int | None = None, **details: Detail) -> None:
        self._fill(message, retry_after_ms, details)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled by class and arguments, which fails for constructors with other parameters.
        return (error_by_code, (self.code, self.message, self.retry_after_ms, self.details))

    def _fill(self, message: str, retry_after_ms: int | None, details: Mapping[str, Detail]) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Detail] = dict(details)
        if retry_after_ms is not None:
            self.retry_after_ms = retry_after_ms

    def _text(self, name: str) -> str:
        value = self.details.get(name, "")
        return value if isinstance(value, str) else str(value)

    def _number(self, name: str) -> int:
        value = self.details.get(name, 0)
        return value if isinstance(value, int) else 0


# The caller must change something: the same request fails again.


class CallerError(DelaydError):
    """The request itself is wrong; repeating it does not help."""


class BadArgument(CallerError):
    """An argument has a value that no call accepts."""


class NaiveDatetime(CallerError):
    """A datetime without a time zone, which names no instant."""

    @classmethod
    def of(cls, name: str, value: datetime) -> Self:
        """The error of the argument ``name``. Most such values are local times, so the advice keeps what they show."""
        return cls(
            f"{name} {value.isoformat()} has no time zone; give value.astimezone() if it is the local time of this"
            " machine, and value.replace(tzinfo=UTC) only if it is in UTC"
        )


class HeadTooLarge(CallerError):
    """A request, or its answer, does not fit the head of a frame: ask for less at a time."""


class BadInstant(CallerError):
    """An instant of years ago: most likely seconds where milliseconds were meant, so the message would be delivered at
    once.
    """


class PastHorizon(CallerError):
    """Due later than the horizon; nothing is ever clamped."""


class BadExpiry(CallerError):
    """A message would expire before it is due, or at no instant."""


class BadSubject(CallerError):
    """A subject is empty, too long, or has a character outside its alphabet."""


class BadKey(CallerError):
    """A key is empty, longer than 200 bytes, or not UTF-8."""


class BadTags(CallerError):
    """The tags of a message are too many, not distinct, too long, or no text."""


class MessageTooLarge(CallerError):
    """A body, its headers, or a batch is over its limit."""


class BatchMalformed(CallerError):
    """A batch whose columns do not fit its heap, or whose checksum differs."""


class BadHeaders(BatchMalformed):
    """The headers of a message are no map from text to text or bytes."""


class BadBody(CallerError):
    """The body of a message can't be read as text or JSON, as the caller wanted."""


class BatchNumberReused(CallerError):
    """A producer sent another batch under a number that it used before (rule I1)."""


class ProducerLost(CallerError):
    """A producer's earlier batches are not known any more, so a repetition could be kept twice (rule L9)."""


class HourFull(CallerError):
    """One hour holds as many messages as its loader can bring into memory."""


class QuotaReached(CallerError):
    """More messages than the quota of their subject takes: too many in one second, or too many that are pending."""

    @property
    def next_free_ms(self) -> int:
        """The next instant, in ms since the epoch, at which the first refused message would find a place; 0 when
        nobody knows one.
        """
        return self._number("next_free_ms")


class ExclusiveConflict(CallerError):
    """A group has an exclusive consumer, and another one wants to share it; or the other way round (docs/consuming.md,
    One at a time).
    """


class NotOrdered(CallerError):
    """A group was made without an order, and this consumer asks for one (docs/consuming.md, In order)."""


class OtherFilter(CallerError):
    """A group gets messages with other tags than this consumer asks for (docs/consuming.md, Filters)."""


class KeyPending(CallerError):
    """A message with this key is pending, and the new one was to be rejected then (docs/keys.md)."""

    @property
    def log_id(self) -> LogId:
        """The log that holds the pending message."""
        return LogId(self._number("log_id"))

    @property
    def sequence(self) -> int:
        """The pending message's number in that log."""
        return self._number("sequence")

    @property
    def deliver_at_ms(self) -> int:
        """When the pending message is due, in milliseconds since the epoch."""
        return self._number("deliver_at_ms")


class RecurringConflict(CallerError):
    """A recurring schedule has another version than the one that was to be changed (docs/recurring.md)."""

    @property
    def version(self) -> int:
        """The version that it has; 0 when there is none of this name."""
        return self._number("version")


class NoRecurring(CallerError):
    """There is no recurring schedule of this name."""


class TooManySubjects(CallerError):
    """Meta remembers too many subjects that somebody looked at and nobody has sent to."""


class UnknownServer(CallerError):
    """No server of this name or address is known."""


class UnknownRequest(CallerError):
    """A request of a kind that this server does not serve."""


class BadRequest(CallerError):
    """A frame that checks, with a head that lacks a field or has one of the wrong type."""


class BadSetting(CallerError):
    """A setting of a server or client is out of range or contradicts another."""


class NotTrusted(CallerError):
    """A request for servers and operators only, and the peer has not proved this cluster's secret."""


class BadToken(CallerError):
    """A token that no server of this cluster takes: it is unknown, was revoked, or is over."""


class NotAllowed(CallerError):
    """A request that needs a token, or another one: this one does not allow it for this subject."""


class WrongCluster(CallerError):
    """The peer is a server of another cluster."""


class AlreadyClosed(CallerError):
    """A producer, consumer or file was used after its close."""


class WrongLoop(CallerError):
    """An asynchronous producer or consumer was used outside of the event loop in which it was made."""


# Waiting helps: the same request may pass later.


class RetryLater(DelaydError):
    """Refused for now and nothing was done; `retry_after_ms` says when to ask again."""

    retry_after_ms = RETRY_AFTER_MS_DEFAULT


class QueueFull(RetryLater):
    """A bounded queue is full and stayed full for as long as the caller would wait."""


class ServerUnavailable(RetryLater):
    """A server can't be reached; nothing was sent to it."""


class NotEncrypted(ServerUnavailable):
    """A server can't be reached over TLS: it has none, or its certificate can't be trusted; nothing was sent to it."""


class NoDelayServer(RetryLater):
    """Meta knows no live delay server."""


class NoRealtimeServer(RetryLater):
    """No live realtime server serves this subject."""


class SlowDown(RetryLater):
    """A server is behind, for example with its replay, and slows its producers."""


class ClockInDoubt(RetryLater):
    """A server can't judge an instant, because its own clock is not confirmed, or behind its log (rule T4)."""


class DiskReserve(RetryLater):
    """Free space is at the reserve: sends are refused, pending messages are still delivered (rule L8)."""


class NotOwner(RetryLater):
    """Another delay server owns these keys; meta knows which one (rule I4)."""


class OwnerUnknown(RetryLater):
    """Meta does not know which delay server owns these keys, and gives them to none (rule I4)."""


class SlotsInUse(RetryLater):
    """Messages with keys of these slots are pending, so the slots can't get another owner yet."""


class ServerCordoned(RetryLater):
    """An operator has cordoned this delay server: new messages go to another one. Nothing was done."""


class ServerInUse(RetryLater):
    """A delay server can't be retired yet: the sentence says what it still holds."""


class NotReady(RetryLater):
    """A server that is starting takes no requests yet."""


class PlaceTaken(RetryLater):
    """A server of this log_id was alive in another place a moment ago; it is asked again until its lease ends."""


class ServerFenced(RetryLater):
    """A server may not serve: it is a copy, was restored, or its meta has not taken it yet. Nothing was done."""


class Rebuilding(RetryLater):
    """The request needs derived data that did not check and is being made again from its source (rule L9)."""

    retry_after_ms = 1_000


class InFlight(RetryLater):
    """The message with this key is being handed over at this moment, so it can't be replaced; nothing changed."""


class Stopping(RetryLater):
    """A server that is stopping takes no more requests; everything that it acknowledged is safe."""


# Nobody knows the outcome yet: ask with the handle.


@dataclass(frozen=True, slots=True)
class SendHandle:
    """Names one batch that was sent, so that its outcome can be asked for later.

    Fields:
        log_id, producer_id, producer_batch: the delay server's log, who sent the batch, and its number.
        first_row, row_count: which rows of the batch a call of `send_batch` had, when it shared the batch with other
            calls; a count of 0 stands for all rows.
    """

    log_id: int
    producer_id: int
    producer_batch: int
    first_row: int = 0
    row_count: int = 0


class OutcomeUnknown(DelaydError):
    """The connection broke after the bytes left: the batch may or may not be kept (rule I3)."""

    def __init__(self, message: str, handle: SendHandle) -> None:
        details = {
            "log_id": handle.log_id,
            "producer_id": handle.producer_id,
            "producer_batch": handle.producer_batch,
        }
        if handle.row_count:
            details |= {"first_row": handle.first_row, "row_count": handle.row_count}
        self._fill(message, None, details)

    @property
    def handle(self) -> SendHandle:
        """The handle to ask with; it stays valid for as long as the server keeps the producer's batch numbers."""
        batch = LogId(self._number("log_id")), self._number("producer_id"), self._number("producer_batch")
        return SendHandle(*batch, self._number("first_row"), self._number("row_count"))


class StaleHandle(DelaydError):
    """A word about messages that the server no longer holds for this consumer (rule Q1)."""

    handles: Sequence[list[int]] = ()
    """In the client that raises it: incarnation, first pull sequence, count and reason of each range."""

    @property
    def count(self) -> int:
        """How many messages."""
        return self._number("count")

    @property
    def reason(self) -> str:
        """Why, of most of them: ``lease_ended``, ``given_back`` or ``acknowledged`` (by this consumer, before),
        ``another_holds`` (the message belongs to another connection), ``fenced`` (another consumer leads the exclusive
        group now) or ``unknown`` (lost in a crash, or older than what the server remembers).
        """
        return self._text("reason")


# The operator must act: a directory or a file is damaged, missing or in use.


class DataError(DelaydError):
    """A data directory or a file in it can't be used in its present state."""

    @property
    def path(self) -> str:
        """The file or folder concerned."""
        return self._text("path")


class DamagedData(DataError):
    """Bytes that were durable do not check any more; they are never skipped silently (rule L5)."""

    def __init__(self, path: str, position: int, what: str, *, end_of: str = "", waits: bool = False) -> None:
        message = (
            f"{path} is damaged at byte {position}: {what}; restore this file from a copy, nothing after it was read"
        )
        if waits:
            message = f"{path} waits at byte {position}: {what}; it is tried again by itself"
        self._fill(message, None, {"path": path, "position": position, "what": what})
        if end_of:
            self.details["end_of"] = end_of

    @property
    def position(self) -> int:
        """First byte in the file that does not check."""
        return self._number("position")

    @property
    def end_of(self) -> str:
        """The folder of the log whose end it is, if an operator may give that end up; "" otherwise."""
        return self._text("end_of")

    @property
    def what(self) -> str:
        """What is wrong there."""
        return self._text("what")


class DamagedValue(DamagedData):
    """A value of a server's state does not check; nothing is built from it (rule L9)."""

    def __init__(self, path: str, key: bytes, position: int = 0) -> None:
        name = key_text(key)
        message = f"the value of {name} in {path} does not check; restore the file from a copy if nothing else has it"
        what = f"the value of {name} does not check"
        self._fill(message, None, {"path": path, "position": position, "what": what, "key": key})

    @property
    def key(self) -> bytes:
        """The key of the value."""
        value = self.details.get("key", b"")
        return value if isinstance(value, bytes) else b""


class Unreadable(DamagedData):
    """The system refuses to read a file; its bytes may be undamaged, so the read is tried again (rule L10)."""

    def __init__(self, path: str, position: int, number: int) -> None:
        reason = f"{errno.errorcode.get(number, number)}, {os.strerror(number)}"
        message = f"{path} can't be read at byte {position} ({reason}); look at the disk and at the rights of this file"
        what = f"it can't be read ({reason})"
        self._fill(message, None, {"path": path, "position": position, "what": what, "errno": number})

    @property
    def number(self) -> int:
        """The system's error number."""
        return self._number("errno")


class Shortage(DataError):
    """This process lacks memory or descriptors to use a file; the file itself is not damaged (rule L10)."""

    def __init__(self, path: str, number: int) -> None:
        message = (
            f"{path} can't be opened or read now: this process has nothing left of what that needs "
            f"({os.strerror(number)}); give it more memory or files, it tries again"
        )
        self._fill(message, None, {"path": path, "errno": number})


class StateMissing(DataError):
    """The state of a server is gone while its logs are there: nothing else says which server this is."""

    def __init__(self, path: str, found: str) -> None:
        message = (
            f"{path} holds no state, and {found} shows that this server has lived; restore it from a copy of this "
            "server's last life, or give the server an empty directory"
        )
        self._fill(message, None, {"path": path, "found": found})


class NewerFormat(DataError):
    """A file was written by a newer delayd."""

    def __init__(self, path: str, version: int, supported: int) -> None:
        message = (
            f"{path} has format version {version} and this delayd reads up to {supported}; run a newer delayd on it"
        )
        self._fill(message, None, {"path": path, "version": version, "supported": supported})

    @property
    def version(self) -> int:
        """The version found in the file."""
        return self._number("version")


class DirectoryInUse(DataError):
    """Another server holds the directory's lock (rule L7)."""

    def __init__(self, path: str, holder: str) -> None:
        message = f"{path} is in use by {holder}; stop that server or give this one another directory"
        self._fill(message, None, {"path": path, "holder": holder})

    @property
    def holder(self) -> str:
        """The process that holds it: pid and role."""
        return self._text("holder")


class NotWritable(DataError):
    """A folder or file can't be written by this user."""

    def __init__(self, path: str, reason: str) -> None:
        message = (
            f"{path} can't be written ({reason}); give this user the right to write there or choose another directory"
        )
        self._fill(message, None, {"path": path, "reason": reason})


class DiskFull(DataError):
    """The file system or a quota has no space left; the log cuts back what was written (rule L3)."""

    def __init__(self, path: str, number: int = errno.ENOSPC) -> None:
        message = (
            f"no space is left for {path} ({os.strerror(number)}); free some or move the directory to a larger disk"
        )
        self._fill(message, None, {"path": path, "errno": number})


def key_text(key: bytes) -> str:
    """A key of a server's state as people read it: its text, and numbers in hexadecimal."""
    name, slash, rest = key.partition(b"/")
    if name == b"copy" and slash:
        return f"copy/{key_text(rest)}"
    if name == b"server" and rest[-9:-8] == b"/":
        return f"server/{rest[:-9].decode('ascii', 'backslashreplace')}/{rest[-8:].hex()}"
    text = rest.decode("ascii", "replace") if rest.isascii() and rest.decode("ascii").isprintable() else rest.hex()
    return name.decode("ascii", "backslashreplace") + slash.decode() + text


def read_error(path: str, position: int, error: OSError) -> DataError:
    """Turn an OSError of a read into a named error: the file's fault, or a shortage of this process."""
    number = error.errno or 0
    if number in SHORTAGES:
        return Shortage(path, number)
    return Unreadable(path, position, number)


class ServerStopped(DelaydError):
    """This server can't keep its promises any more and must stop; it is not restarted by itself (rule L1)."""


class SyncFailed(ServerStopped):
    """A sync failed, so nobody knows what is durable; trying again would report success for lost bytes."""

    def __init__(self, path: str, reason: str) -> None:
        message = f"sync of {path} failed ({reason}); check the disk before this server is started again"
        self._fill(message, None, {"path": path, "reason": reason})

    @property
    def path(self) -> str:
        """The file, folder or file system that was to be synced."""
        return self._text("path")


# The peer broke the protocol: the framing can't be trusted and the connection is closed.


class ProtocolError(DelaydError):
    """Bytes on a connection that are not a frame; the connection is closed."""


class BadMagic(ProtocolError):
    """The first bytes of a connection are not delayd's."""


class TlsRequired(ProtocolError):
    """The peer speaks without TLS to a port that takes nothing else."""


class BadVersion(ProtocolError):
    """The peer speaks a version of the protocol that this side does not."""


class FrameTooLarge(ProtocolError):
    """A frame claims more bytes than any frame may have."""


class FrameDamaged(ProtocolError):
    """A frame's header does not check."""


class FrameOverdue(ProtocolError):
    """A peer connected and sent no whole frame in time, or began one and did not go on."""


class TooManyConnections(RetryLater):
    """A server has as many connections as it takes."""


class RequestFailed(DelaydError):
    """A request got no answer from its peer, which may or may not have served it."""

    def __init__(self, message: str, *, sent: bool) -> None:
        self._fill(message, None, {"sent": int(sent)})

    @property
    def sent(self) -> bool:
        """Whether bytes of the request may have left; if not, the peer never saw it (rule I3)."""
        return bool(self._number("sent"))


class ConnectionLost(RequestFailed):
    """The connection ended before the answer came."""


class RequestTimedOut(RequestFailed):
    """The answer did not come in time; the connection goes on."""


# Between delay and realtime servers.


class DispatchRefused(DelaydError):
    """The realtime server refused a dispatch batch by name: it was never appended (rule H6)."""


class HandoffRefused(DelaydError):
    """A hello or a dispatch batch of a session that no longer counts (rule H3)."""


class StaleEpoch(HandoffRefused):
    """A newer life of this delay server was heard."""


class StaleSession(HandoffRefused):
    """Not the session whose hello was heard last."""


class EpochOutOfRange(HandoffRefused):
    """An epoch so far above the last one heard that no server can have started this often."""


class RestoredOrigin(HandoffRefused):
    """The delay server does not know an outcome that a target knows to be durable there: it was restored from a copy
    (rule H8).
    """


class FencedInstance(HandoffRefused):
    """Another instance of the same delay server holds this epoch."""


class ServerRetired(FencedInstance):
    """An operator has retired the delay server for good: it held nothing any more."""


# From a peer.


class InternalError(DelaydError):
    """A server met a bug of its own while it served a request; its log says more."""


class RemoteError(DelaydError):
    """An error whose code this version does not know; `code` keeps it."""


def error_by_code(
    code: str, message: str, retry_after_ms: int = 0, details: Mapping[str, Detail] | None = None
) -> DelaydError:
    """Rebuild an error that came over the wire; an unknown code becomes a RemoteError that keeps it."""
    kind = next((kind for kind in _kinds(DelaydError) if kind.code == code), RemoteError)
    error = kind.__new__(kind)
    error._fill(message, retry_after_ms, details or {})
    if kind is RemoteError:
        error.code = code
    return error


def _kinds(kind: type[DelaydError]) -> Iterator[type[DelaydError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


class LogId(int):
    """A log_id: a number on the wire and in columns, 16 hexadecimal digits in text.

    >>> LogId(0xA000000000000007)
    a000000000000007
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"{int(self):016x}"

    __repr__ = __str__
