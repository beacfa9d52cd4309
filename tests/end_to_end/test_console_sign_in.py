"""Sign-in to the console: what a token shows of it, and what each attacker gets (docs/security.md, Sign-in)."""

from __future__ import annotations

import http.client
import re
import ssl
import time
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import pytest

import delayd
from tests.certificates import Authority
from tests.end_to_end.browser import BROWSER, Page, axe_script, drive
from tests.end_to_end.console_pages import FORM, checked, words
from tests.end_to_end.gateways import Answer, Gateway, gateway_of
from tests.end_to_end.guarded_cluster import Cluster
from tests.end_to_end.up_process import up
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
STRANGE = "dlyd_" + "a" * 58
HOSTILE = "<script>alert(1)</script>"
RIGHTS = ("inspect:orders.>", "cancel:orders.>")


class Site(NamedTuple):
    """Servers that ask for tokens, two gateways of them, and the token of somebody who looks after orders."""

    cluster: Cluster
    plain: Gateway
    over_tls: Gateway
    authority: Authority
    token: str

    def cookie(self, token: str = "") -> str:
        """What a browser sends after the sign-in."""
        text = token or self.token
        wait_until(lambda: sign_in(self.plain, text).status == 303, "the gateway has heard of the token")
        return sign_in(self.plain, text).headers["set-cookie"].partition(";")[0]

    def seen(self, path: str, cookie: str, status: int = 200) -> str:
        return words(checked(self.plain.ask("GET", path, headers={"cookie": cookie}), status))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("sign-in")
    authority = Authority(folder)
    own = authority.server()
    files = ("--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca)
    with up(folder, "--port", "0", "--require-token", "--no-gateway", *files) as running:
        running.until_ready()
        cluster = Cluster(running, authority)
        token = cluster.token("orders", *RIGHTS)
        data = ("--data", str(running.data))
        https = ("--tls-cert", own.cert, "--tls-key", own.key)
        with (
            gateway_of(cluster.address, folder, *data) as plain,
            gateway_of(cluster.address, folder, *data, *https) as over_tls,
        ):
            yield Site(cluster, plain, over_tls, authority, token)
            assert token not in plain.log + over_tls.log + running.errors


def own_page(gateway: Gateway) -> dict[str, str]:
    return {**FORM, "origin": f"http://127.0.0.1:{gateway.port}"}


def sign_in(gateway: Gateway, token: str, to: str = "/", **headers: str) -> Answer:
    form = urlencode({"token": token, "to": to}).encode()
    return gateway.ask("POST", "/session", form, {**own_page(gateway), **headers})


def secure(site: Site, method: str, path: str, body: bytes = b"", cookie: str = "") -> Answer:
    """A request over TLS."""
    context = ssl.create_default_context(cafile=site.authority.ca)
    line = http.client.HTTPSConnection("127.0.0.1", site.over_tls.port, timeout=30, context=context)
    headers = {**FORM, "origin": f"https://127.0.0.1:{site.over_tls.port}", "cookie": cookie}
    try:
        line.request(method, path, body, headers)
        answer = line.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        line.close()


def test_who_has_signed_in_sees_what_the_token_allows_and_is_told_why_not_elsewhere(site: Site) -> None:
    page = checked(site.plain.ask("GET", "/subjects/orders.eu?x=1"), 401)
    assert 'type="password"' in page and 'value="/subjects/orders.eu?x=1"' in page
    cookie = site.cookie()
    assert "Pending messages" in site.seen("/subjects/orders.eu", cookie)
    assert "No such message is pending" in site.seen("/subjects/orders.eu/pending", cookie)
    assert "Cancel 0 messages?" in site.seen("/subjects/orders.eu/cancel", cookie)
    assert "serves" in site.seen("/servers", cookie)
    said = site.seen("/subjects/mail", cookie, 403)
    assert "the token orders does not allow this: it needs the right to inspect mail" in said and "orders.>" in said
    for path in ("/", "/subjects", "/groups", "/quotas", "/schedules", "/push", "/audits", "/audits/x/page"):
        assert "does not allow this" in site.seen(path, cookie, 403)
    for path in ("/audits/x", "/subjects/orders.eu/groups/g/pause"):
        assert "does not allow this" in site.seen(path, cookie, 403)
    opened = site.plain.ask("GET", "/open?subject=orders.eu", headers={"cookie": cookie})
    assert (opened.status, opened.headers["location"]) == (303, "/subjects/orders.eu")


def test_a_message_is_cancelled_by_who_may_cancel_it_and_not_by_who_may_look(site: Site) -> None:
    looks = site.cookie(site.cluster.token("looks", "inspect:orders.>"))
    maker = site.cluster.token("maker", "send:orders.>", "inspect:orders.>")
    with delayd.Producer(site.cluster.address, token=maker) as producer:
        receipt = producer.send("orders.eu", b"x", delay=timedelta(hours=1))
        path = f"/subjects/orders.eu/messages/{receipt.token}"
        assert "The message is pending" in site.seen(path, looks)
        for method in ("GET", "POST"):
            headers = {**own_page(site.plain), "cookie": looks}
            refused = checked(site.plain.ask(method, f"{path}/cancel", b"", headers), 403)
            assert "the right to cancel orders.eu" in words(refused)
        headers = {**own_page(site.plain), "cookie": site.cookie()}
        assert "is cancelled" in checked(site.plain.ask("POST", f"{path}/cancel", b"", headers), 200)
        assert producer.get("orders.eu", receipt=receipt).state is delayd.MessageState.CANCELLED


def test_an_operator_may_see_all_pages(site: Site) -> None:
    cookie = site.cookie(site.cluster.token("ops", "administer:>", "inspect:>"))
    for path in ("/", "/subjects", "/groups", "/quotas", "/schedules", "/audits", "/push", "/quotas/orders.eu"):
        site.seen(path, cookie)
    headers = {**own_page(site.plain), "cookie": cookie}
    set_quota = site.plain.ask("POST", "/quotas/orders.eu", b"pending=9", headers)
    assert "orders.eu may have pending 9" in words(checked(set_quota, 200))


def test_a_session_holds_at_each_gateway_and_for_pages_alone(site: Site, tmp_path: Path) -> None:
    cookie = site.cookie()
    with gateway_of(site.cluster.address, tmp_path, "--data", str(site.cluster.running.data)) as other:
        checked(other.ask("GET", "/subjects/orders.eu", headers={"cookie": cookie}), 200)
    assert site.plain.ask("GET", "/v1/subjects/orders.eu/messages", headers={"cookie": cookie}).code == "not_allowed"


def test_the_cookie_has_no_token_in_it_and_scripts_and_other_sites_do_not_get_it(site: Site) -> None:
    answer = sign_in(site.plain, site.token, to="/subjects/orders.eu?x=%2F")
    assert (answer.status, answer.headers["location"]) == (303, "/subjects/orders.eu?x=%2F")
    head = answer.headers["set-cookie"]
    assert re.fullmatch(r"delayd=[\w=-]+; Path=/; Max-Age=28800; HttpOnly; SameSite=Strict", head), head
    assert site.token not in head and site.token.removeprefix("dlyd_") not in head


@pytest.mark.parametrize(
    "to", ["//evil.example/", "/\\evil.example", "https://evil.example", "/a\r\nSet-Cookie: x=y", ""]
)
def test_nobody_is_led_elsewhere_by_a_sign_in(site: Site, to: str) -> None:
    answer = sign_in(site.plain, site.token, to)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"].startswith("delayd=")


def test_under_tls_the_cookie_is_never_sent_or_taken_without(site: Site) -> None:
    form = urlencode({"token": site.token, "to": "/"}).encode()
    head = secure(site, "POST", "/session", form).headers["set-cookie"]
    assert head.startswith("__Host-delayd=") and head.endswith("; HttpOnly; SameSite=Strict; Secure")
    cookie = head.partition(";")[0]
    assert secure(site, "GET", "/subjects/orders.eu", cookie=cookie).status == 200
    # The one who has stolen it asks without TLS; and a cookie that was made, or renamed, without TLS is none here.
    clear = site.over_tls.ask("GET", "/subjects/orders.eu", headers={"cookie": cookie})
    assert (clear.status, clear.code) == (400, "tls_required")
    plain = site.cookie()
    for other in (plain, plain.replace("delayd=", "__Host-delayd=", 1)):
        assert secure(site, "GET", "/subjects/orders.eu", cookie=other).status == 401


def test_a_page_of_another_site_can_do_nothing_with_the_cookie(site: Site) -> None:
    cookie = site.cookie(site.cluster.token("admin", "administer:>", "inspect:>"))
    for foreign in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"http://127.0.0.1:{site.over_tls.port}"},  # Another port of this host gets the cookie, too.
        {"sec-fetch-site": "same-site"},
        {},
    ):
        headers = {**FORM, **foreign, "cookie": cookie}
        for path, body in (
            ("/quotas/orders.eu", b"pending=1"),
            ("/session", urlencode({"token": site.token}).encode()),
            ("/session/end", b""),
        ):
            answer = site.plain.ask("POST", path, body, headers)
            assert answer.status == 403 and "set-cookie" not in answer.headers, (foreign, path)


def test_a_session_that_somebody_else_has_planted_or_made_up_is_none(site: Site) -> None:
    mine, other = site.cookie(), site.cookie(site.cluster.token("other", "inspect:orders.>"))
    # A page of another port may set a cookie of the same name beside it.
    for both in (f"{other}; {mine}", f"{mine}; {other}"):
        site.seen("/subjects/orders.eu", both, 401)
    signed = b64decode(mine.removeprefix("delayd="), altchars=b"-_")
    longer = (int.from_bytes(signed[:8], "little") + 3_600).to_bytes(8, "little")
    assert signed[8:40] == sha256(site.token.encode()).digest(), "whoever reads the state of meta knows the digest"
    forged = [longer + signed[8:], signed[:40] + bytes(32), longer + signed[8:40] + signed[:32]]
    texts = [f"delayd={urlsafe_b64encode(each).decode()}" for each in forged]
    for made_up in (*texts, "delayd=", "delayd=AAAA", "delayd=é", f"delayd={site.token}", mine + "A"):
        site.seen("/subjects/orders.eu", made_up.encode().decode("latin-1"), 401)
    # Each sign-in makes a session of its own, whatever was there before.
    assert sign_in(site.plain, site.token, cookie=other).headers["set-cookie"].partition(";")[0] != other


def test_a_session_ends_when_its_token_is_revoked_or_over(site: Site) -> None:
    cookie = site.cookie(site.cluster.token("gone", "inspect:orders.>"))
    site.seen("/subjects/orders.eu", cookie)
    site.cluster.operator("token", "revoke", "gone", "--yes")

    def status() -> int:
        return site.plain.ask("GET", "/subjects/orders.eu", headers={"cookie": cookie}).status

    wait_until(lambda: status() == 401, "the session of the revoked token is over")
    short = site.cluster.operator("token", "create", "short", "--allow", "inspect:orders.>", "--expires", "4s")
    wait_until(lambda: sign_in(site.plain, short).status == 303, "the gateway knows the token")
    answer = sign_in(site.plain, short)
    assert answer.status == 401 or int(re.findall(r"Max-Age=(\d+)", answer.headers["set-cookie"])[0]) <= 4
    cookie = answer.headers.get("set-cookie", "").partition(";")[0]
    wait_until(lambda: status() == 401, "the session of a token that is over is over")


def test_a_wrong_token_waits_for_its_answer_and_is_said_nowhere(site: Site) -> None:
    for wrong in (STRANGE, HOSTILE, ""):
        began = time.monotonic()
        page = checked(sign_in(site.plain, wrong), 401)
        assert time.monotonic() - began >= 1
        assert "You are not signed in" in page and (not wrong or wrong not in page)
    assert "sign_in_refused" in site.plain.log and STRANGE not in site.plain.log


def test_html_gets_neither_into_a_token_nor_by_the_form_into_a_page(site: Site) -> None:
    for name, right in ((HOSTILE, "send:>"), ("named", f"send:{HOSTILE}"), ("named", "send:<img/src=x/onerror=x//")):
        words = ("token", "create", name, "--allow", right, "--data", str(site.cluster.running.data))
        assert site.cluster.command(*words).returncode != 0
    path = f"/subjects/{quote(HOSTILE, safe='')}"
    for answer in (
        site.plain.ask("GET", f"{path}?x={quote(HOSTILE)}"),
        site.plain.ask("GET", path, headers={"cookie": site.cookie()}),
        site.plain.ask("GET", f"/open?subject={quote(HOSTILE)}", headers={"cookie": site.cookie()}),
        sign_in(site.plain, HOSTILE, to=f'/"{HOSTILE}'),
    ):
        assert HOSTILE not in checked(answer, answer.status) and answer.status >= 400


def test_who_signs_out_has_no_cookie_any_more(site: Site) -> None:
    headers = {**own_page(site.plain), "cookie": site.cookie()}
    answer = site.plain.ask("POST", "/session/end", b"", headers)
    assert (answer.status, answer.headers["location"]) == (303, "/session")
    assert "Max-Age=0" in answer.headers["set-cookie"]


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed here, so nobody signs in with one")
def test_axe_finds_nothing_on_the_pages_of_a_session(site: Site, tmp_path: Path) -> None:
    script, cookie = axe_script(), site.cookie()

    async def look(page: Page) -> None:
        url = f"http://127.0.0.1:{site.plain.port}"
        for width, dark in ((1_100, False), (1_100, True), (390, False)):
            await page.look(width=width, dark=dark)
            await page.call("Network.clearBrowserCookies")
            await page.open(url)
            assert await page.run(script) == []
            name, _, value = cookie.partition("=")
            await page.call("Network.setCookie", name=name, value=value, url=url)
            for path, title in (("/session", "Session"), ("/", "That did not work")):
                await page.open(url + path)
                assert await page.run("document.querySelector('h1').textContent") == title
                assert await page.run(script) == [], path
                wide = await page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide == 0, f"{path} is wider than a phone"

    drive(tmp_path, look)


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed here, so nobody signs in with one")
def test_somebody_signs_in_and_out_with_a_browser(site: Site, tmp_path: Path) -> None:
    async def play(page: Page) -> None:
        url = f"http://127.0.0.1:{site.plain.port}"
        await page.open(f"{url}/subjects/orders.eu")
        await page.run("document.querySelector('input[name=token]').focus()")
        await page.write(site.token)
        await page.follow("Enter")
        assert await page.run("location.pathname") == "/subjects/orders.eu"
        assert await page.run("document.querySelector('h1').textContent") == "orders.eu"
        assert await page.run("document.cookie") == "", "no script reads it"
        assert site.token not in await page.run("document.documentElement.outerHTML + location.href")
        await page.open(f"{url}/session")
        await page.run("document.querySelector('form.change button').focus()")
        await page.follow("Enter")
        await page.open(f"{url}/subjects/orders.eu")
        assert await page.run("document.querySelector('h1').textContent") == "Sign in"

    drive(tmp_path, play)
