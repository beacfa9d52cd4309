"""Tokens as text and as records: what is none is refused before anybody is asked, and a right covers what it says."""

from __future__ import annotations

import hashlib
import random

import pytest

from delayd.errors import BadArgument, BadSubject
from delayd.wire.requests import RequestType
from delayd.wire.tokens import (
    CONNECTIONS_MAX,
    PAGE_MAX,
    RANDOM_BYTES,
    Right,
    TokenRecord,
    check_record,
    digest_of,
    need_token,
    read_rights,
    take_page,
    token_text,
)

DIGEST = bytes(32)
GOOD = TokenRecord("billing", DIGEST, "consume:orders.>")


def test_a_token_has_256_random_bits_and_a_checksum_that_finds_each_slip() -> None:
    chance = random.Random(7)
    texts = {token_text(chance.randbytes(RANDOM_BYTES)) for _ in range(200)}
    assert len(texts) == 200 and {len(text) for text in texts} == {63}
    for text in sorted(texts)[:20]:
        assert need_token(text) == text
        for at in range(len(text)):
            other = "a" if text[at] != "a" else "b"
            with pytest.raises(BadArgument) as refused:
                need_token(text[:at] + other + text[at + 1 :])
            assert text not in refused.value.message
    for text in ("", "dlyd_", "dlyd_" + "a" * 58, "x" * 5_000, sorted(texts)[0][:-1], sorted(texts)[0] + "a"):
        with pytest.raises(BadArgument, match="copy it again"):
            need_token(text)


def test_servers_know_a_token_by_its_sha_256_alone() -> None:
    text = token_text(bytes(range(32)))
    assert digest_of(text) == hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize(
    ("rights", "covered", "others"),
    [
        ("send:orders", ["orders"], ["orders.eu", "order", "orders.*", ">"]),
        ("send:orders.*", ["orders.eu", "orders.*"], ["orders", "orders.eu.cancel", "orders.>", ">"]),
        ("send:orders.>", ["orders.eu", "orders.eu.cancel", "orders.*", "orders.>", "orders.*.x"], ["orders", "*.eu"]),
        ("send:*.eu", ["orders.eu", "*.eu"], ["orders.us", "orders.*", ">", "a.b.eu"]),
        ("send:>", ["orders", "orders.eu", "orders.>", ">", "%retry/00c1d5f2a98b3e47/12"], []),
        ("send:orders.>", [], ["%retry/00c1d5f2a98b3e47/12"]),
    ],
)
def test_a_right_covers_subjects_and_patterns_within_its_own(
    rights: str, covered: list[str], others: list[str]
) -> None:
    [grant] = read_rights(rights)
    assert grant.right is Right.SEND
    assert [name for name in covered + others if grant.covers(name)] == covered


@pytest.mark.parametrize(
    "rights", ["", "send", "send:", ":orders", "any:>", "serve:>", "-:>", "sends:>", "send:a.>.b", "send:a b", "send:ä"]
)
def test_rights_that_are_none_are_refused(rights: str) -> None:
    with pytest.raises((BadArgument, BadSubject)):
        check_record(GOOD._replace(rights=rights))


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "ä"},
        {"name": "a" * 101},
        {"digest": b"short"},
        {"old_digest": b"short"},
        {"connections": CONNECTIONS_MAX + 1},
        {"rights": "send:> " * 2_000},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(change: dict[str, str]) -> None:
    check_record(GOOD)
    with pytest.raises(BadArgument):
        check_record(GOOD._replace(**change))  # type: ignore[arg-type]


def test_all_tokens_are_told_page_by_page() -> None:
    records = [GOOD._replace(name=f"t{number:04d}") for number in range(2 * PAGE_MAX + 1)]
    found: list[TokenRecord] = []
    more = True
    while more:
        page, more = take_page(reversed(records), found[-1].name if found else "")
        found += page
    assert found == records


def test_each_request_says_which_right_it_needs_and_none_is_everybodys_by_oversight() -> None:
    entering = {kind for kind in RequestType if Right.ENTER in kind.terms.needs}
    assert entering == {RequestType.CHALLENGE, RequestType.PROVE, RequestType.TOKEN}
    # What any token may ask tells who serves, and no message.
    assert {kind.name for kind in RequestType if Right.ANY in kind.terms.needs} == {
        "PING",
        "STATUS",
        "SERVERS",
        "ROUTES",
        "SLOTS",
    }
    for kind in RequestType:
        if kind.terms.trusted:
            assert kind.terms.needs in ((Right.ADMINISTER,), (Right.SERVE,)), kind.name
