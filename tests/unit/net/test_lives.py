"""A service begins anew in place as often as it must, and not once it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from delayd.address import Endpoint
from delayd.net.held_start import HeldServer, Lives
from delayd.wire.exposition import Family
from tests.trust import SECRET
from tests.waiting import until

PLACE = Endpoint("127.0.0.1", 1)


class Living:
    """A service that notes what is done to it; some lives find, while they begin, that another one is needed."""

    def __init__(self, folder: Path, lives_that_ask: int) -> None:
        self.done: list[str] = []
        self.failed: list[BaseException] = []
        self.lives = Lives(self, "delay", str(folder), self.end, self.failed.append)
        self._lives_that_ask = lives_that_ask
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def open(self) -> None:
        self.done.append("open")

    def abandon(self) -> HeldServer:
        return HeldServer("delay", PLACE, SECRET)

    async def start(self) -> Endpoint:
        await self.goes_on.wait()
        if self._lives_that_ask:
            self._lives_that_ask -= 1
            for _ in range(2):
                self.lives.begin_anew("another file was put back")
        await asyncio.sleep(0)
        self.done.append("start")
        return PLACE

    def not_ready(self) -> str:
        return ""

    def families(self) -> Iterable[Family]:
        return ()

    @property
    def tokens(self) -> None:
        """It asks nobody for one."""

    def families_by_subject(self, pattern: str) -> Iterable[Family]:
        return ()

    async def registered(self) -> None:
        """Nobody waits for it."""

    async def stop(self) -> None:
        await self.lives.close()

    async def end(self) -> None:
        self.lives.begin_anew("a life that ends may say so once more")
        await asyncio.sleep(0)
        self.done.append("end")


def test_rule_L10_a_life_that_must_end_while_it_begins_is_followed_by_another_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Living(tmp_path, lives_that_ask=1)
        service.lives.begin_anew("a file was put back")
        await until(lambda: len(service.done) >= 6, "two lives")
        await service.stop()
        service.lives.begin_anew("too late")
        await asyncio.sleep(0)
        assert service.done == ["end", "open", "start"] * 2 and not service.failed

    asyncio.run(scenario())


def test_a_service_that_is_told_to_stop_while_it_begins_anew_begins_no_further_life(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = Living(tmp_path, lives_that_ask=1)
        service.goes_on.clear()
        service.lives.begin_anew("a file was put back")
        await until(lambda: "open" in service.done, "a life")
        stopping = asyncio.create_task(service.stop())
        await asyncio.sleep(0)
        service.goes_on.set()
        await stopping
        assert service.done == ["end", "open", "start"] and not service.failed

    asyncio.run(scenario())
