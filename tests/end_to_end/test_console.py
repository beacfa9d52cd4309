"""The console over HTTP, before real servers: each page, each change with its effect, and hostile names and bodies."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import pytest

import delayd
from tests.end_to_end.console_pages import FORM, Marks, check_harmless, checked, words
from tests.end_to_end.gateways import Gateway, gateway_of
from tests.end_to_end.processes import ServerProcess
from tests.waiting import wait_until

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\u202e"
HOUR = timedelta(hours=1)


class Site(NamedTuple):
    """Servers, a gateway that knows the secret, and clients."""

    gateway: Gateway
    meta: str
    data: Path
    producer: delayd.Producer
    admin: delayd.Admin

    def show(self, path: str, status: int = 200) -> str:
        answer = self.gateway.ask("GET", path)
        return checked(answer, status)

    def change(self, path: str, status: int = 200, **fields: str) -> str:
        """Fill in the form of a page and send it, as a browser does."""
        asked = Marks(self.show(path))
        assert fields.keys() <= asked.fields.keys(), asked.fields
        form = urlencode({**asked.fields, **fields}).encode()
        return checked(self.gateway.ask("POST", asked.action, form, FORM), status)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("console")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        secret, audits = folder / "cluster.secret", folder / "audits"
        audits.mkdir()
        options = ("--secret-file", str(secret), "--audits", str(audits))
        gateway = stack.enter_context(gateway_of(meta.address, folder, *options))
        producer = stack.enter_context(delayd.Producer(meta.address))
        admin = stack.enter_context(delayd.Admin(meta.address, secret=secret))
        yield Site(gateway, meta.address, folder, producer, admin)
        assert gateway.stop() == 0
        assert " ERROR " not in gateway.log, gateway.log


def at(subject: str, *parts: str) -> str:
    return "/".join(["/subjects", quote(subject, safe=""), *(quote(part, safe="") for part in parts)])


def state_of(site: Site, subject: str, receipt: delayd.Receipt) -> str:
    return site.producer.get(subject, receipt=receipt).state.name


def test_the_overview_tells_what_is_pending_and_that_all_is_well(site: Site) -> None:
    site.producer.send("over", b"x", delay=HOUR)
    wait_until(lambda: "All is well" in site.show("/"), "all is well")
    page = words(site.show("/"))
    assert (
        re.search(r"pending [1-9]", page)
        and "Lateness and failures now" in page
        and "within a day" in page
        and "as here" in page
    )
    for path in ("/servers", "/groups", "/quotas", "/push", "/subjects"):
        site.show(path)
    assert words(site.show("/servers")).count("serves") >= 2


def test_a_message_is_found_by_its_window_its_tag_its_key_and_its_id(site: Site) -> None:
    subject = "find/a%2Fb"
    receipt = site.producer.send(subject, b"body 1", delay=HOUR, key="order 1/2", tags=["vip"], headers={"h": "v"})
    site.producer.send(subject, b"body 2", delay=timedelta(days=2))
    wait_until(lambda: subject in words(site.show("/subjects?prefix=find")), "meta knows the subject")
    assert "nobody" not in words(site.show("/subjects?prefix=nobody.at.all"))
    listed = site.show(at(subject, "pending") + "?tag=vip")
    assert "order 1/2" in words(listed) and words(listed).count("7 B") == 0 and words(listed).count("6 B") == 1
    assert words(site.show(at(subject, "pending") + "?due_from=1d&due_before=3d")).count("6 B") == 1
    for found in (at(subject, "find") + "?key=order+1/2", at(subject, "find") + f"?id={receipt.token}"):
        page = words(site.show(found))
        assert "body 1" in page and "h v" in page and "The message is pending." in page
    (to,) = re.findall(r'href="(/subjects/[^"]*/messages/[a-z0-9]+)"', listed)
    assert "body 1" in words(site.show(to))
    assert "400 bad_argument" in words(site.show(at(subject, "find"), 400))
    assert "404 unknown" in words(site.show(at(subject, "find") + "?key=none", 404))


def test_a_cancel_asks_first_and_then_says_what_happened(site: Site) -> None:
    receipt = site.producer.send("cancel.me", b"x", delay=HOUR)
    path = at("cancel.me", "messages", receipt.token, "cancel")
    site.show(path)
    assert state_of(site, "cancel.me", receipt) == "PENDING", "to look changes nothing"
    assert "The message is cancelled" in words(site.change(path))
    assert state_of(site, "cancel.me", receipt) == "CANCELLED"
    assert "not pending any more" in words(site.show(path, 409))
    # A page that was open for too long says the truth, too.
    late = site.producer.send("cancel.me", b"x", delay=timedelta(0))
    wait_until(lambda: state_of(site, "cancel.me", late) == "DISPATCHED", "it is handed over")
    answer = site.gateway.ask("POST", at("cancel.me", "messages", late.token, "cancel"), b"", FORM)
    assert "has left" in words(checked(answer, 200)) and "Nothing was changed." in words(answer.body.decode())


def test_a_message_is_moved(site: Site) -> None:
    receipt = site.producer.send("move.me", b"x", delay=HOUR)
    path = at("move.me", "messages", receipt.token, "move")
    assert "is moved" in words(site.change(path, deliver_at="2027-06-01T09:00:00+02:00"))
    assert site.producer.get("move.me", receipt=receipt).deliver_at_ms == 1_811_833_200_000
    assert "no instant" in words(site.change(path, 400, deliver_at="soon-ish"))
    assert "is moved" in words(site.change(path, deliver_at="2d"))


@pytest.mark.parametrize("key", [None, "k"])
def test_an_edit_puts_a_new_message_in_place_of_the_old_one(site: Site, key: str | None) -> None:
    subject = f"edit.{key}"
    old = site.producer.send(
        subject, b"one\ntwo", delay=HOUR, key=key, tags=["t"], headers={"h": "v", "raw": b"\xff"}, ttl=timedelta(days=9)
    )
    path = at(subject, "messages", old.token, "edit")
    assert "one\ntwo" in unescape(site.show(path))
    form = {"body": "three\r\nfour", "headers": "h: w", "tags": "a\nb", "deliver_at": "2h"}
    done = words(site.change(path, 200, **form))
    assert "in place of" in done or "the old one is cancelled" in done
    assert state_of(site, subject, old) in ("CANCELLED", "REPLACED")
    (page,) = site.producer.pending(subject, contents=True)
    (new,) = page
    name = f"{old.log_id:016x}-{old.sequence}"
    assert (new.body, new.tags) == (b"three\nfour", ("a", "b"))
    assert new.headers == {"h": "w", "raw": b"\xff", "delayd-edit-of": name}
    assert new.key == (key or f"delayd-edit-of {name}") and new.expires_at_ms is not None
    # The same form once more changes nothing.
    again = site.gateway.ask("POST", path, urlencode(form).encode(), FORM)
    assert "not pending any more" in words(checked(again, 409))
    assert [len(page) for page in site.producer.pending(subject)] == [1]


def test_what_an_edit_would_lose_is_not_edited(site: Site) -> None:
    receipt = site.producer.send("edit.ordered", b"x", delay=HOUR, ordering_key="o")
    assert "ordering key" in words(site.show(at("edit.ordered", "messages", receipt.token, "edit"), 409))


def test_all_of_a_window_is_counted_and_then_cancelled(site: Site) -> None:
    site.producer.send_batch("many", [b"x"] * 250, delay=HOUR, tags=[["a"]] * 250)
    site.producer.send("many", b"stays", delay=HOUR)
    first = site.show(at("many", "pending"))
    assert first.count("/messages/") == 100
    (more,) = re.findall(r'<a class="button" href="([^"]*resume=[^"]*)">', first)
    second = site.show(unescape(more))
    assert second.count("/messages/") == 100
    assert not set(re.findall(r"/messages/\w+", first)) & set(re.findall(r"/messages/\w+", second))
    (more,) = re.findall(r'<a class="button" href="([^"]*resume=[^"]*)">', second)
    assert site.show(unescape(more)).count("/messages/") == 51
    path = at("many", "cancel") + "?tag=a"
    assert "250 pending messages" in words(site.show(path))
    assert "250 messages are cancelled" in words(site.change(path))
    assert [message.body for page in site.producer.pending("many", contents=True) for message in page] == [b"stays"]


def test_a_group_is_paused_and_resumed(site: Site) -> None:
    with delayd.Consumer(site.meta, "paused", group="g 1/2") as consumer:
        site.producer.send("paused", b"x", delay=timedelta(0))
        consumer.pull(1, wait=timedelta(seconds=20)).ack()
    path = at("paused", "groups", "g 1/2")
    assert "is paused" in words(site.change(f"{path}/pause"))
    assert [group.info.paused for group in site.admin.groups("paused")] == [True]
    assert "Resume the group" in words(site.show(path)) and "g 1/2" in words(site.show("/groups?subject=paused"))
    site.change(f"{path}/resume")
    assert [group.info.paused for group in site.admin.groups("paused")] == [False]
    assert "404" not in words(site.show(at("paused")))


def test_dead_letters_are_looked_at_sent_again_and_deleted(site: Site) -> None:
    with delayd.Consumer(site.meta, "dead", group="g") as consumer:
        for number in range(4):
            site.producer.send("dead", b"letter %d" % number, delay=timedelta(0), key=f"key {number}")
        for _ in range(4):
            for message in consumer.pull(1, wait=timedelta(seconds=20)):
                message.reject("broken", error=HOSTILE)
        path = at("dead", "groups", "g", "dead")
        wait_until(lambda: site.show(path).count("broken") == 4, "all are dead letters")
        letters = re.findall(rf'href="({path}/[a-z0-9]{{48}})"', site.show(path))
        page = site.show(letters[0])
        assert "letter " in words(page) and "<script>alert(1)" not in page and "broken" in page
        assert "is sent to the group again" in words(site.change(f"{letters[0]}/redrive"))
        (back,) = consumer.pull(1, wait=timedelta(seconds=20))
        back.ack()
        assert "is deleted" in words(site.change(f"{letters[1]}/purge"))
        assert "404 unknown" in words(site.show(letters[1], 404))
        assert "2 dead letters" in words(site.show(f"{path}/redrive"))
        assert "2 dead letters are sent" in words(site.change(f"{path}/redrive"))
        assert len(list(consumer.pull(2, wait=timedelta(seconds=20)))) >= 1
        assert "no such dead letter" in words(site.show(path))


def test_a_quota_is_set(site: Site) -> None:
    path = "/quotas/" + quote("quota/1", safe="")
    assert "may have pending 7" in words(site.change(path, pending="7", per_second="", pending_bytes=""))
    (quota,) = site.admin.quotas("quota/1")
    assert (quota.info.pending, quota.info.per_second) == (7, None)
    assert "quota/1" in words(site.show("/quotas?prefix=quota"))
    assert "whole number" in words(site.change(path, 400, pending="many"))


def test_push_targets_are_listed_paused_and_deleted(site: Site) -> None:
    made = site.gateway.ask("POST", "/v1/push", {"name": "hook", "subject": "p", "url": "https://127.0.0.1:9/x?<b>"})
    assert made.status == 201
    assert "hook" in words(site.show("/push")) and "<b>" not in site.show("/push/hook")
    assert "is paused" in words(site.change("/push/hook/pause"))
    assert site.gateway.ask("GET", "/v1/push/hook").json["paused"] is True
    assert "is resumed" in words(site.change("/push/hook/resume"))
    assert "has not taken it" in words(site.change("/push/hook/test"))
    site.change("/push/hook/delete")
    assert "404 unknown" in words(site.show("/push/hook", 404))


def test_schedules_are_listed_by_their_next_occurrence_run_paused_resumed_and_deleted(site: Site) -> None:
    name = "report/1 <b>\u202e"
    site.producer.recurring(name, "reports", b"{}", cron="0 9 * * 1-5", timezone="Europe/Berlin")
    site.producer.recurring("often", "reports", b"{}", every=timedelta(minutes=10))
    listed = words(site.show("/schedules"))
    assert (
        "\u202e" not in listed
        and listed.index("often") < listed.index("report/1 <b>")
        and "0 9 * * 1-5 Europe/Berlin" in listed
    )
    path = "/schedules/" + quote(name, safe="")
    page = site.show(path)
    assert page.count(":00:00 +0") == 10 and "09:00:00 +0" in words(page)
    assert "is sent to reports" in words(site.change(f"{path}/run"))
    assert "is paused" in words(site.change(f"{path}/pause", note="holidays"))
    info = site.producer.get_recurring(name)
    assert info is not None and (info.paused, info.note) == (True, "holidays")
    assert "paused: holidays" in words(site.show(path))
    site.change(f"{path}/resume")
    site.change(f"{path}/delete")
    assert site.producer.get_recurring(name) is None
    assert "404 unknown" in words(site.show(path, 404))


def test_hostile_names_and_bodies_are_shown_as_text(site: Site) -> None:
    subject = "hostile/%2e%2F../-"
    receipt = site.producer.send(
        subject, HOSTILE.encode(), delay=HOUR, key=HOSTILE, tags=[HOSTILE[:60]], headers={"<i>": HOSTILE}
    )
    base = at(subject, "messages", receipt.token)
    for path in (
        at(subject, "pending"),
        base,
        f"{base}/edit",
        f"{base}/cancel",
        at(subject, "find") + "?" + urlencode({"key": HOSTILE}),
    ):
        page = site.show(path)
        assert "<script>alert" not in page and "<img" not in page and "<i>" not in page
        assert "alert(1)" in words(page)
        assert "\u202e" not in page or path.endswith("edit"), "what turns a text around is shown by its number"
    for path in (
        "/subjects?prefix=%3Cscript%3E",
        "/nope/%3Cscript%3E",
        "/subjects/%3Cscript%3E",
        "/quotas?%3Cscript%3E=1",
    ):
        answer = site.gateway.ask("GET", path)
        check_harmless(answer)
        assert b"<script>" not in answer.body or answer.headers["content-type"] == "application/problem+json"
    binary = site.producer.send(subject, bytes(range(256)), delay=HOUR)
    assert "00 01 02" in words(site.show(at(subject, "messages", binary.token)))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example"},
    ],
)
def test_no_page_of_another_site_changes_anything(site: Site, headers: dict[str, str]) -> None:
    receipt = site.producer.send("foreign", b"x", delay=HOUR)
    path = at("foreign", "messages", receipt.token, "cancel")
    answer = site.gateway.ask("POST", path, b"", {**FORM, **headers})
    assert (answer.status, answer.code) == (403, "foreign_request")
    check_harmless(answer)
    assert state_of(site, "foreign", receipt) == "PENDING"


def test_a_form_with_anything_else_in_it_is_refused(site: Site) -> None:
    receipt = site.producer.send("forms", b"x", delay=HOUR)
    path = at("forms", "messages", receipt.token, "move")
    for body, kind in ((b"a=1", FORM), (b"deliver_at=1h&deliver_at=2h", FORM), (b"%ff=%ff", FORM), (b"\xff=1", FORM)):
        checked(site.gateway.ask("POST", path, body, kind), 400)
    checked(site.gateway.ask("POST", path, b"{}", {"content-type": "application/json"}), 415)
    checked(site.gateway.ask("POST", path, b"x" * (5 << 20), FORM), 413)
    assert site.producer.get("forms", receipt=receipt).deliver_at_ms == receipt.deliver_at_ms
    assert site.gateway.ask("POST", "/servers", b"", FORM).status == 405


def test_an_audit_that_was_written_to_the_folder_is_listed_and_shown_with_its_page(site: Site) -> None:
    site.producer.send("audited", b"x", delay=HOUR)
    folder = site.data / "audits"
    command = [sys.executable, "-m", "delayd", "audit", "--data", str(site.data), "--report", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (figures,) = folder.glob("audit-*.json")
    name = figures.stem
    assert f"the audit is kept as {folder / name}.html" in ran.stderr
    assert f"The books balance {site.data} every hour" in words(site.show("/audits"))
    shown = site.show(f"/audits/{name}")
    scheduled = json.loads(figures.read_text())["total"]["scheduled"]
    assert f"scheduled {scheduled:,} dispatched" in words(shown) and "lost 0, duplicate 0" in words(shown).lower()
    assert "delay" in words(shown) and str(site.data) in words(shown)
    (to,) = [each for each in Marks(shown).links if each.endswith("/page")]
    page = site.gateway.ask("GET", to)
    assert page.status == 200 and page.body == (folder / f"{name}.html").read_bytes()
    assert page.headers["content-type"] == "text/html; charset=utf-8" and page.headers["cache-control"] == "no-store"
    policy = page.headers["content-security-policy"].split("; ")
    assert policy[:2] == ["sandbox", "default-src 'none'"] and "form-action 'none'" in policy
    assert "frame-ancestors 'none'" in policy and not any("script" in each for each in policy)
    assert page.headers["x-content-type-options"] == "nosniff"


def test_findings_of_an_audit_are_text_with_the_command_that_traces_each(site: Site) -> None:
    log_id = "00000000000000ab"
    lost = {"finding": "LOST", "sequence": 7, "detail": HOSTILE, "delay_log_id": log_id}
    figures = {
        "read_at_ms": 1_800_000_000_000,
        "balanced": False,
        "verdict": "not_balanced",
        "places": [HOSTILE, "/a b"],
        "chosen": HOSTILE,
        "total": {"scheduled": 9, "lost": 8, HOSTILE: 3},
        "findings_count": 300,
        "findings": [
            {**lost, "hour": "2026112016", "subject": f"{HOSTILE}'; rm -rf /"},
            {**lost, "hour": "2026112016", "subject": "s", "delay_log_id": "00000000000000cd"},
            {**lost, "hour": "all", "subject": "", "sequence": 0},
            *[{**lost, "hour": HOSTILE, "subject": "s"}] * 200,
        ],
        "conservation": [HOSTILE] * 200,
        "broken_seals": [{"hour": HOSTILE, "differs": HOSTILE}],
        "servers": [{"role": "delay", "log_id": log_id, "place": "/a b"}],
        "remarks": [HOSTILE],
    }
    name = f"'\"<img src=x>& %2F \u202e\n{quote('é')}é"
    (site.data / "audits" / f"{name}.json").write_text(json.dumps(figures))
    (site.data / "audits" / "damaged.json").write_text(
        json.dumps({**figures, "verdict": "damaged", "damage": ["/data/x is damaged"]})
    )
    (site.data / "audits" / "broken.json").write_text("{")
    listed = words(site.show("/audits"))
    assert "The books do NOT balance" in listed and "The books could NOT be audited" in listed
    assert "this is no audit in JSON" in listed
    page = site.show("/audits/" + quote(name, safe=""))
    assert page.count("<code>") == 101 - 100 + 1, "the hours of the others are none"
    assert "300 findings. These are 100 of them" in words(page) and "8" in words(page)
    traces = re.findall(r"<code>(.*?)</code>", page)
    subject, number = shlex.split(unescape(traces[0]).replace("\ufffd202e", "\u202e"))[2:4]
    assert (subject, number) == (f"{HOSTILE}'; rm -rf /", "7")
    assert unescape(traces[0]).endswith(f" 7 --server {log_id} --data '/a b'")
    assert unescape(traces[1]).endswith(" --from 2026-11-20T16:00Z --to 2026-11-20T17:00Z")
    assert "/data/x is damaged" in words(site.show("/audits/damaged"))
    assert "no audit in JSON" in words(site.show("/audits/broken"))
    for path in ("/audits/none", "/audits/none/page", "/audits/broken/page", "/audits/..%2Faudits%2Fbroken"):
        site.show(path, 404)


def test_static_files_have_their_digest_in_their_names_and_nothing_comes_from_elsewhere(site: Site) -> None:
    page = site.show("/")
    names = re.findall(r'(?:href)="(/static/[^"]+)"', page)
    assert len(names) == 2
    for name in names:
        answer = site.gateway.ask("GET", name)
        assert answer.status == 200 and "immutable" in answer.headers["cache-control"]
        assert b"@import" not in answer.body and b"url(" not in answer.body
    assert site.gateway.ask("GET", "/static/..%2fconsole.py").status == 404


def test_without_the_secret_groups_are_shown_and_not_changed(site: Site) -> None:
    with gateway_of(site.meta, site.data) as gateway:
        own = site._replace(gateway=gateway)
        own.show("/")
        assert "was given no folder of audits" in words(own.show("/audits"))
        own.show("/audits/x", 404)
        assert "no secret" in words(own.show("/push")) and "no secret" in words(
            own.show(at("over", "groups", "g", "pause"))
        )
        answer = gateway.ask("POST", at("over", "groups", "g", "pause"), b"", FORM)
        assert "only an operator" in words(checked(answer, 400))


def test_when_meta_is_away_a_page_says_so(tmp_path: Path) -> None:
    with ServerProcess("meta", tmp_path) as meta:
        address = meta.address
    with gateway_of(address, tmp_path) as gateway:
        began = time.monotonic()
        page = checked(gateway.ask("GET", "/"), 503)
        assert "no meta server answers" in words(page) and time.monotonic() - began < 30
