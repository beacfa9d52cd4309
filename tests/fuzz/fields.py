"""Fields: a head that tells which of its fields a server reads, and lets it read declared ones only.

Invariant: a server reads no field that delayd/wire/requests.py does not declare for that request.
"""

from __future__ import annotations

from typing import TypeVar

from delayd.wire.frame import Frame, HeadValue
from delayd.wire.requests import RequestType

T = TypeVar("T")
Read = set[tuple[int, str]]
DECLARED = {kind.value: set(kind.terms.types) for kind in RequestType}


class Undeclared(AssertionError):
    """A field was read that its request does not have."""


class WatchedHead(dict[str, HeadValue]):
    """The head of a request."""

    def __init__(self, frame: Frame, read: Read) -> None:
        """``read`` receives the type of the request and the name of each field that is looked at."""
        super().__init__(frame.head)
        self._kind = frame.type
        self._read = read

    def _note(self, name: object) -> None:
        if name not in DECLARED.get(self._kind, ()):
            raise Undeclared(f"{name} is read of {RequestType(self._kind).name}, which does not declare it")
        self._read.add((self._kind, str(name)))

    def __getitem__(self, name: str) -> HeadValue:
        """See dict."""
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        """See dict."""
        self._note(name)
        return super().__contains__(name)

    def get(self, name: str, default: T = None) -> HeadValue | T:  # type: ignore[assignment]
        """See dict."""
        self._note(name)
        return super().get(name, default)


def watched(frame: Frame, read: Read) -> Frame:
    """The same request, with a head that notes what is read of it."""
    return frame if frame.fault is not None else frame._replace(head=WatchedHead(frame, read))
