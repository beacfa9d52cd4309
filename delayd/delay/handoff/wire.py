"""Wire: the connection to a target as the handoff uses it; the server's shell implements it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError
from delayd.wire.frame import Frame, HeadValue

OnAnswer = Callable[[Frame | DelaydError], None]


class Wire(Protocol):
    """An open connection to a target."""

    def call(
        self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer
    ) -> object:
        """Send a request; ``on_answer`` is called with each frame of the answer, or with one error."""

    def close(self) -> None:
        """End the connection."""
