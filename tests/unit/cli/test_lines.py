"""Lines of several processes leave whole, in their order, and none is lost."""

import asyncio
import os
import time

import pytest

from cli import child as module
from cli.child import LINE_BYTES_MAX, LineWriter, lines_of
from tests.waiting import DEADLINE_S


def read(text: bytes, pieces: int) -> list[bytes]:
    async def scenario() -> list[bytes]:
        stream = asyncio.StreamReader()
        for at in range(0, len(text), pieces):
            stream.feed_data(text[at : at + pieces])
        stream.feed_eof()
        return [line async for line in lines_of(stream)]

    return asyncio.run(scenario())


@pytest.mark.parametrize("pieces", [1, 3, 1_000])
def test_lines_come_whole_however_they_were_written(pieces: int) -> None:
    assert read(b"one\n\ntwo\nthree", pieces) == [b"one", b"", b"two", b"three"]
    assert read(b"", pieces) == [] and read(b"\n", pieces) == [b""]


def test_a_line_without_an_end_fills_no_memory() -> None:
    found = read(b"x" * (3 * LINE_BYTES_MAX + 5) + b"\nend\n", 1 << 16)
    assert found[-1] == b"end" and max(map(len, found)) <= LINE_BYTES_MAX + (1 << 16)
    assert sum(map(len, found)) == 3 * LINE_BYTES_MAX + 8


def test_giving_never_waits_for_a_reader_that_stands_still_and_room_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 100_000)
    reading, writing = os.pipe()
    writer = LineWriter(writing)

    async def scenario() -> None:
        begin = time.monotonic()
        for _ in range(40):
            writer.write(b"x" * 9_999 + b"\n")
        assert time.monotonic() - begin < DEADLINE_S
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.room(), 0.1)
        waiting = asyncio.create_task(writer.room())
        left = 400_000
        while left:
            left -= len(await asyncio.to_thread(os.read, reading, 65_536))
        await asyncio.wait_for(waiting, DEADLINE_S)

    asyncio.run(scenario())
    begin = time.monotonic()
    for _ in range(40):
        writer.write(b"x" * 9_999 + b"\n")
    writer.close(0.2)  # Its reader takes no more: it is not waited for.
    assert time.monotonic() - begin < DEADLINE_S
    os.close(reading)
    writer.close(DEADLINE_S)
    os.close(writing)
