"""Chromium without a window, driven over its own protocol: pages are opened, keys are pressed, pictures are taken."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), "")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
LIMIT_S = 90.0
KEYS = {"Tab": 9, "Enter": 13}


class Page:
    """The one page of a browser; ``complaints`` are what its console and its policies say."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self._loads = 0

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            told = await self._heard()
            if told.get("id") == number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result

    async def open(self, url: str) -> None:
        before = self._loads
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await self.loaded(before)

    async def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else ""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def follow(self, key: str) -> None:
        """Press a key that leads to another page."""
        before = self._loads
        await self.press(key)
        await self.loaded(before)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def loaded(self, before: int) -> None:
        while self._loads == before:
            await self._heard()

    async def run(self, script: str) -> Any:
        """What a script says on the page; it is the browser's own, which no policy of the page holds for."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def focused(self) -> str:
        found: str = await self.run(
            "(e => [e.tagName, e.textContent.trim() || e.name || '', e.getAttribute('href') || ''].join('|'))"
            "(document.activeElement)"
        )
        return found

    async def picture(self) -> bytes:
        """What is seen, as a PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def look(self, *, width: int = 1_100, height: int = 900, dark: bool = False) -> None:
        """Be as wide as this, and light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def _heard(self) -> dict[str, Any]:
        told: dict[str, Any] = await self._socket.receive_json()
        match told.get("method"):
            case "Page.loadEventFired":
                self._loads += 1
            case "Log.entryAdded":
                self.complaints.append(told["params"]["entry"]["text"])
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled":
                self.complaints.append(str(told["params"]))
        return told


def drive(folder: Path, play: Callable[[Page], Awaitable[None]]) -> None:
    """Play something on one empty page of a browser, which ends then, or when `LIMIT_S` is over."""

    async def played(port: int) -> None:
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/json/list") as answer:
                to = next(each for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(to["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await play(page)

    with _chromium(folder) as port:
        asyncio.run(played(port))


def axe_script() -> str:
    """What a page is asked for all that axe finds there."""
    axe = pytest.importorskip("axe_core_python", reason="axe is not installed here, so nobody asks it")
    script = resources.files(axe).joinpath("axe.min.js").read_text(encoding="utf-8")
    return script + ";axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes.length, v.nodes[0].html]))"


@contextmanager
def _chromium(folder: Path) -> Iterator[int]:
    """A browser; the port on which it is driven."""
    written = folder / "profile" / "DevToolsActivePort"
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0", "about:blank"]
    with (folder / "chromium.err").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        wait_until(lambda: written.exists() and written.read_text().count("\n") >= 1, "the browser has a port", LIMIT_S)
        yield int(written.read_text().splitlines()[0])
    finally:
        process.terminate()
        process.wait(LIMIT_S)
