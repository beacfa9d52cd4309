"""Peer: a connection as the core uses it; `delayd.net.Connection` is one, and so is a simulated one.

Invariant: each request is answered exactly once; a peer that has disconnected drops the answer itself.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError
from delayd.wire.frame import HeadValue


class Peer(Protocol):
    """One connection, told apart from others by its identity."""

    @property
    def is_open(self) -> bool:
        """Whether answers can still leave; if not, the core is soon told of its end."""

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        """Answer a request; with ``more`` a further frame of the answer follows."""

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """Answer a request with an error."""

    def close(self) -> None:
        """End the connection once all answers have left."""
