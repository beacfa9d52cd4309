"""The console in a real browser: light, dark, on a phone, with the keyboard alone, and for people who do not see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.image import imread

import delayd
from tests.end_to_end.browser import BROWSER, Page, axe_script, drive
from tests.end_to_end.gateways import gateway_of
from tests.end_to_end.processes import ServerProcess
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="no Chromium is installed here, so nobody looks at the console"),
    pytest.mark.timeout(300),
]
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
TABS_MAX = 60


class Shown(NamedTuple):
    """A console with something on each page."""

    url: str
    meta: str
    receipt: delayd.Receipt


def audits(folder: Path) -> Path:
    """A folder with an audit whose page, figures and name are hostile."""
    folder.mkdir()
    log_id = "00000000000000ab"
    lost = {"hour": "2026112016", "finding": "LOST", "sequence": 7, "subject": HOSTILE, "detail": HOSTILE}
    figures = {
        "read_at_ms": 1_800_000_000_000,
        "balanced": False,
        "places": ["/data"],
        "total": {"scheduled": 9},
        "findings": [{**lost, "delay_log_id": log_id}],
        "findings_count": 1,
        "remarks": [HOSTILE],
        "servers": [{"role": "delay", "log_id": log_id, "place": "/data"}],
    }
    (folder / "hostile.json").write_text(json.dumps(figures))
    (folder / "hostile.html").write_text(
        "<!DOCTYPE html><title>report</title><style>h1 { color: #010203 } body { background: url(/quotas) }</style>"
        f"<h1 onclick=\"document.title='taken'\">report</h1>{HOSTILE}<script>fetch('/quotas')</script>"
        "<meta http-equiv=refresh content='0; url=/session'><iframe src='/'></iframe>"
        "<form method=post action='/schedules/report/delete'><button autofocus>press</button></form>"
        "<a href=\"javascript:document.title='taken'\">press</a>"
    )
    return folder


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("console")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        options = ("--secret-file", str(folder / "cluster.secret"), "--audits", str(audits(folder / "audits")))
        gateway = stack.enter_context(gateway_of(meta.address, folder, *options))
        with delayd.Producer(meta.address) as producer, delayd.Consumer(meta.address, "s", group="g") as consumer:
            receipt = producer.send(
                "s", HOSTILE.encode(), delay=timedelta(hours=1), key=HOSTILE, headers={"h": HOSTILE}
            )
            producer.send_batch("s", [b"x"] * 120, delay=timedelta(hours=2), tags=[["a tag"]] * 120)
            producer.recurring("report", "s", b"{}", cron="0 9 * * 1-5", timezone="Europe/Berlin")
            producer.send("s", b"dead", delay=timedelta(0))
            for message in consumer.pull(1, wait=timedelta(seconds=20)):
                message.reject("broken", error=HOSTILE)
            with delayd.Admin(meta.address) as admin:
                wait_until(lambda: bool(admin.dead_groups("s")), "it is a dead letter")
        gateway.ask("POST", "/v1/push", {"name": "hook", "subject": "p", "url": "https://127.0.0.1:9/", "paused": True})
        yield Shown(f"http://127.0.0.1:{gateway.port}", meta.address, receipt)


def paths(shown: Shown) -> list[str]:
    message = f"/subjects/s/messages/{shown.receipt.token}"
    return [
        *("/", "/subjects", "/subjects/s", "/subjects/s/pending", "/groups", "/subjects/s/groups/g", "/quotas"),
        *("/subjects/s/groups/g/dead", "/subjects/s/groups/g/dead/redrive", "/subjects/s/groups/g/pause", "/servers"),
        *(message, f"{message}/cancel", f"{message}/move", f"{message}/edit", "/push", "/push/hook", "/quotas/s"),
        *(
            "/subjects/s/cancel?tag=a+tag",
            "/subjects/s/find",
            "/schedules",
            "/schedules/report",
            "/schedules/report/pause",
            "/session",
            "/audits",
            "/audits/hostile",
        ),
    ]


def test_no_page_breaks_its_own_policy_or_runs_what_a_message_has_in_it(shown: Shown, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        for path in paths(shown):
            await page.open(shown.url + path)
            assert await page.run("document.title") != "taken"
            assert await page.run("document.scripts.length + document.images.length") == 0
            assert await page.run("getComputedStyle(document.querySelector('nav')).display") == "flex", "it is styled"
        assert [each for each in page.complaints if "400 (Bad Request)" not in each] == []

    drive(tmp_path, look)


def test_the_page_of_an_audit_runs_sends_and_fetches_nothing(shown: Shown, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        await page.open(f"{shown.url}/audits/hostile")
        await page.run("document.querySelector('a[href$=\"/page\"]').focus()")
        await page.follow("Enter")
        assert await page.run("location.pathname") == "/audits/hostile/page"
        assert await page.run("self.origin") == "null", "it is of no site"
        assert await page.run("getComputedStyle(document.querySelector('h1')).color") == "rgb(1, 2, 3)", "it is styled"
        for what in ("h1", "a", "button"):
            await page.run(f"document.querySelector('{what}').click()")
        blocked = ("script execution", "form submission", "the redirect", "the image", "Framing", "the JavaScript URL")
        while not all(what in " ".join(page.complaints) for what in blocked):
            await page.run("0")  # Within the limit of `drive`.
        assert await page.run("document.title + location.pathname") == "report/audits/hostile/page"
        fetched = "performance.getEntriesByType('resource').filter(each => each.responseStatus).length"
        assert await page.run(fetched) == 0

    drive(tmp_path, look)
    with delayd.Producer(shown.meta) as producer:
        assert producer.get_recurring("report") is not None


def test_axe_finds_nothing_serious_on_any_page_in_light_dark_and_on_a_phone(shown: Shown, tmp_path: Path) -> None:
    script = axe_script()

    async def look(page: Page) -> None:
        for width, dark in ((1_100, False), (1_100, True), (390, False)):
            await page.look(width=width, dark=dark)
            for path in paths(shown):
                await page.open(shown.url + path)
                found = await page.run(script)
                assert found == [], (path, width, dark, found)

    drive(tmp_path, look)


async def until_focused(page: Page, words: str) -> None:
    """Press the tabulator until the focus is there, and can be seen."""
    for _ in range(TABS_MAX):
        await page.press("Tab")
        if words in await page.focused():
            assert await page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"{words!r} can't be reached")


def test_a_message_is_found_moved_and_cancelled_with_the_keyboard_alone(shown: Shown, tmp_path: Path) -> None:
    with delayd.Producer(shown.meta) as producer:
        receipt = producer.send("keys", b"x", delay=timedelta(hours=1), key="k")

        async def type_all(page: Page) -> None:
            await page.open(f"{shown.url}/subjects/keys")
            await until_focused(page, "INPUT|key")
            await page.write("k")
            await page.follow("Enter")
            await until_focused(page, "A|Move")
            await page.follow("Enter")
            await until_focused(page, "INPUT|deliver_at")
            await page.run("document.activeElement.select()")
            await page.write("3h")
            await until_focused(page, "BUTTON|Move it")
            await page.follow("Enter")
            assert "is moved" in await page.run("document.querySelector('[role=status]').textContent")
            await until_focused(page, "A|The message")
            await page.follow("Enter")
            await until_focused(page, "A|Cancel")
            await page.follow("Enter")
            await until_focused(page, "BUTTON|Cancel it")
            await page.follow("Enter")
            assert "is cancelled" in await page.run("document.querySelector('[role=status]').textContent")

        drive(tmp_path, type_all)
        info = producer.get("keys", receipt=receipt)
        assert info.state is delayd.MessageState.CANCELLED


def test_it_is_drawn_in_light_and_dark_and_fits_a_phone(shown: Shown, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        await page.open(shown.url)
        for dark in (False, True):
            await page.look(dark=dark)
            drawn = imread(BytesIO(await page.picture()))
            ground = drawn[400, 4, :3]
            assert ground.max() < 0.2 if dark else ground.min() > 0.95
        await page.look(width=390, height=840)
        for path in paths(shown):
            await page.open(shown.url + path)
            beyond = await page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert beyond == 0, f"{path} is wider than a phone"
        drawn = imread(BytesIO(await page.picture()))
        assert len(np.unique(drawn.reshape(-1, drawn.shape[2]), axis=0)) > 20

    drive(tmp_path, look)
