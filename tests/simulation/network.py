"""The network between simulated servers: bytes that travel when they are carried, and connections that are cut.

Invariant: frames are bytes on the way, encoded by one side and cut out by the other's `FrameReader`, so a connection
may end in the middle of one; what was sent before a cut may arrive after it, even when newer connections are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Protocol

from delayd.batch.columns import Buffer
from delayd.errors import ConnectionLost, DelaydError, ServerUnavailable
from delayd.wire.frame import ANSWER, ERROR, MORE, Frame, FrameReader, HeadValue, encode_frame
from delayd.wire.heads import error_from_head, error_head
from tests.simulation.moves import Move

OnAnswer = Callable[[Frame | DelaydError], None]
Lost = Callable[[DelaydError], None]


class Listener(Protocol):
    """A server that connections lead to, for one of its lives."""

    def received(self, peer: ServedEnd, frame: Frame) -> None:
        """Serve a request; a DelaydError raised here is its answer."""

    def disconnected(self, peer: ServedEnd) -> None:
        """A connection is gone."""

    def answers(self, asked: Frame, head: Mapping[str, HeadValue]) -> None:
        """An answer to this request leaves."""


class Network:
    """All connections, the places where servers listen, and what a dial finds there."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.listeners: dict[str, Listener] = {}
        self.lines: list[Line] = []
        self.bytes_carried = 0
        self._last_line = 0
        self._dials: list[tuple[str, Callable[[Line], None], Lost, object]] = []

    def dial(self, place: str, connected: Callable[[Line], None], lost: Lost, owner: object) -> None:
        """Begin to connect; ``owner`` is the process that asks, for `process_died`."""
        self._dials.append((place, connected, lost, owner))

    def connect(self, listener: Listener, owner: object, *, hostile: bool = False) -> Line:
        """Connect at once."""
        self._last_line += 1
        line = Line(self, f"line {self._last_line} of a stranger", listener, _nobody_minds, owner, hostile=hostile)
        self.lines.append(line)
        return line

    def moves(self) -> Iterator[Move]:
        """Everything that may happen next on any line."""
        if self._dials:
            yield Move(f"a dial to {self._dials[0][0]} ends", self._connect)
        for line in self.lines:
            if line.up or (line._up_ended and not line._up_told):
                yield Move(f"{line.name} up {len(line.up) or 'end'}", line.carry_up)
            if line.down or (line._down_ended and not line._down_told):
                yield Move(f"{line.name} down {len(line.down) or 'end'}", line.carry_down)

    def process_died(self, process: object) -> None:
        """An asking or serving process is gone with everything that it would still have read."""
        self._dials = [dial for dial in self._dials if dial[3] is not process]
        self.listeners = {place: other for place, other in self.listeners.items() if other is not process}
        for line in self.lines:
            if line.owner is process:
                line.asker_died()
            if line.listener is process:
                line.server_died()
        self.forget_ended()

    def cut(self, listener: object) -> list[Line]:
        """Break all lines to a server; a prefix of what is under way still arrives, sometime. The lines."""
        broken = [line for line in self.lines if line.listener is listener]
        for line in broken:
            line.cut()
        return broken

    def forget_ended(self) -> None:
        """Drop the lines on which nothing can happen any more."""
        self.lines = [line for line in self.lines if not line.over]

    def _connect(self) -> None:
        place, connected, lost, owner = self._dials.pop(0)
        listener = self.listeners.get(place)
        if listener is None:
            lost(ServerUnavailable(f"nobody listens at {place}"))
            return
        self._last_line += 1
        line = Line(self, f"line {self._last_line} to {place}", listener, lost, owner)
        self.lines.append(line)
        connected(line)


class ServedEnd:
    """The serving end of a line: what a core sees as its peer."""

    entry = None  # It has no token.

    def __init__(self, line: Line) -> None:
        self._line = line
        self._asked: dict[int, Frame] = {}

    @property
    def hostile(self) -> bool:
        """Whether a stranger is at the other end."""
        return self._line.hostile

    @property
    def gone(self) -> bool:
        """Whether the server has heard that this connection has ended."""
        return self._line._up_told

    def asked(self, frame: Frame) -> None:
        """Remember a request: an answer repeats its type."""
        assert frame.request_id not in self._asked, "a request id is in use twice"
        self._asked[frame.request_id] = frame

    def knows(self, request_id: int) -> bool:
        """Whether a request of this number has no answer yet."""
        return request_id in self._asked

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        """See `realtime.handoff.Peer`; a second answer is a fault of the core."""
        flags = ANSWER | (MORE if more else 0)
        asked = self._asked[request_id] if more else self._asked.pop(request_id)
        if self._line.listener is not None:
            self._line.listener.answers(asked, head)
        self._line.send_down(b"".join(map(bytes, encode_frame(asked.type, request_id, head, body, flags))))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """See `realtime.handoff.Peer`."""
        frame_type = self._asked.pop(request_id).type
        head = error_head(error)
        self._line.send_down(b"".join(map(bytes, encode_frame(frame_type, request_id, head, (), ANSWER | ERROR))))

    @property
    def is_open(self) -> bool:
        """See `realtime.handoff.Peer`; the end is told at once here."""
        return True

    def close(self) -> None:
        """See `realtime.handoff.Peer`."""
        self._line.close_down()


class Line:
    """One connection, and its asking end (`delayd.delay.handoff.sender.Wire`)."""

    def __init__(
        self, network: Network, name: str, listener: Listener, lost: Lost, owner: object, *, hostile: bool = False
    ) -> None:
        self.owner = owner
        self.hostile = hostile
        self.name = name
        self.listener: Listener | None = listener
        self.up = bytearray()
        self.down = bytearray()
        self._network = network
        self._lost = lost
        self._up_ended = self._down_ended = False  # Nothing more is put into it.
        self._up_told = self._down_told = False  # The reader has heard of the end.
        self._peer = ServedEnd(self)
        self._reader_up, self._reader_down = FrameReader(), FrameReader()
        self._calls: dict[int, OnAnswer] = {}
        self._last_id = 0

    @property
    def over(self) -> bool:
        """Whether nothing happens here any more."""
        return self._up_told and self._down_told

    @property
    def open(self) -> bool:
        """Whether the asking end may still ask."""
        return not (self._up_ended or self._down_ended)

    # The asking end.

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        """Ask; what is asked of an ended connection fails when its end is told."""
        self._last_id += 1
        self._calls[self._last_id] = on_answer
        if not self._up_ended:
            self.up += b"".join(map(bytes, encode_frame(frame_type, self._last_id, head, body)))

    def close(self) -> None:
        """Ask no more; what was asked may still arrive, and no answer does."""
        self._up_ended = self._down_ended = True
        self.down.clear()

    # The serving end.

    def send_down(self, data: bytes) -> None:
        """Put an answer on its way, unless the line has ended."""
        if not self._down_ended:
            self.down += data

    def close_down(self) -> None:
        """Answer no more; what the other side has asked may or may not be read all the same."""
        self._down_ended = self._up_ended = True
        if self._network.random.random() < 0.5:
            self.up.clear()

    # The network.

    def cut(self) -> None:
        """End both directions, each behind all or any part of what is under way."""
        random = self._network.random
        self._up_ended = self._down_ended = True
        for data in (self.up, self.down):
            if random.random() < 0.5:
                del data[random.randint(0, len(data)) :]

    def lose_answers(self) -> None:
        """End both directions; no answer that is under way arrives."""
        self._up_ended = self._down_ended = True
        self.down.clear()

    def end(self) -> None:
        """End both directions, each behind all that is under way."""
        self._up_ended = self._down_ended = True

    def asker_died(self) -> None:
        """Nobody reads answers any more; what was asked, up to any byte, arrives late."""
        self.cut()
        self.down.clear()
        self._calls.clear()
        self._down_told = True

    def server_died(self) -> None:
        """Nobody reads requests any more; answers that had left may arrive."""
        self.cut()
        self.up.clear()
        self._up_told, self.listener = True, None

    def carry_up(self) -> None:
        """Let some bytes arrive at the server, or the news that the line has ended."""
        listener = self.listener
        assert listener is not None, "a line to a server that died carries nothing to it"
        if not self.up:
            self._up_told = True
            listener.disconnected(self._peer)
            return
        for frame in self._carry(self.up, self._reader_up):
            if self.hostile and self._peer.knows(frame.request_id):
                # As the shell does: answers could not be matched any more.
                self.end()
                return
            self._peer.asked(frame)
            try:
                if frame.fault is not None:
                    raise frame.fault
                listener.received(self._peer, frame)
            except DelaydError as error:
                self._peer.answer_error(frame.request_id, error)

    def carry_down(self) -> None:
        """Let some bytes arrive at whoever asked, or the news that the line has ended."""
        if not self.down:
            self._down_told = True
            ended = ConnectionLost("the connection ended", sent=True)
            calls, self._calls = list(self._calls.values()), {}
            for on_answer in calls:
                on_answer(ended)
            self._lost(ended)
            return
        for frame in self._carry(self.down, self._reader_down):
            if self.hostile and frame.request_id not in self._calls:
                continue  # To a request of which a stranger knows only that it was bytes.
            on_answer = self._calls[frame.request_id] if frame.flags & MORE else self._calls.pop(frame.request_id)
            on_answer(error_from_head(frame.head) if frame.flags & ERROR else frame)

    def _carry(self, data: bytearray, reader: FrameReader) -> list[Frame]:
        random = self._network.random
        size = len(data) if random.random() < 0.8 else random.randint(1, len(data))
        room = reader.get_buffer()
        size = min(size, len(room))
        room[:size] = data[:size]
        del data[:size]
        self._network.bytes_carried += size
        frames = reader.received(size)
        if self.hostile and reader is self._reader_up and reader.fault is not None:
            self.up.clear()
            self.end()
        else:
            assert reader.fault is None, f"bytes on a line are no frames: {reader.fault}"
        return frames


def _nobody_minds(error: DelaydError) -> None:
    """A stranger does not come back."""
