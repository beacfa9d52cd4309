"""Trees and notes, against vectors of RFC 6962, of Go's package note and of C2SP; and what is refused, and how."""

import hashlib
import sys
from collections.abc import Callable
from functools import partial

import pytest

from delayd.errors import BadArgument, BadSetting
from delayd.reading.tlog import (
    COSIGNATURE,
    Checkpoint,
    Growth,
    Key,
    LogProof,
    NotProved,
    Signer,
    Tree,
    check_consistency,
    check_origin,
    checkpoint_body,
    from_base64,
    leaf_hash,
    parse_checkpoint,
    parse_growth,
    parse_key,
    parse_proof,
    parse_signatures,
    parse_signer,
    root_of_path,
    to_base64,
)
from tests.unit.witness import WITNESS_KEY, cosigned

# The leaves and roots with which implementations of Certificate Transparency are tested.
LEAVES = [
    *(b"", b"\x00", b"\x10", b"\x20\x21", b"\x30\x31", bytes(range(0x40, 0x44))),
    *(bytes(range(0x50, 0x58)), bytes(range(0x60, 0x70))),
]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
# The example of golang.org/x/mod/sumdb/note.
SKEY = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
SIGNED = (
    "\N{EM DASH} PeterNeumann "
    "x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
SIGNER = Signer("example.com/log", bytes(range(32)))


def tree(size: int) -> Tree:
    return Tree([leaf_hash(b"%d" % number) for number in range(size)])


def signed(size: int, signer: Signer = SIGNER, root: bytes | None = None) -> Checkpoint:
    return parse_checkpoint(signer.sign(checkpoint_body(signer.name, size, root or tree(size).root)))


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(NotProved) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("size", range(9))
def test_the_roots_are_those_of_rfc_6962(size: int) -> None:
    assert Tree([leaf_hash(leaf) for leaf in LEAVES[:size]]).root.hex() == ROOTS[size]


def test_keys_and_notes_are_those_of_go() -> None:
    signer = parse_signer(SKEY)
    assert (signer.key.vkey, signer.encode(), parse_key(VKEY)) == (VKEY, SKEY, signer.key)
    assert signer.sign(TEXT) == f"{TEXT}\n{SIGNED}"


def test_ids_of_other_keys_are_those_of_other_implementations() -> None:
    for vkey in (
        "EnochRoot+af0cfe78+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop",
        "remora.n621.de+da77ade7+BOvN63jn/bLvkieywe8R6UYAtVtNbZpXh34x7onlmtw2",
    ):
        assert parse_key(vkey).vkey == vkey


@pytest.mark.parametrize(
    "vkey",
    ["", "name", VKEY[:-4], VKEY.replace("c74f20a3", "c74f20a4"), VKEY.replace("+A", "+B"), VKEY[:-1] + "X", "a b+0+A"],
)
def test_a_word_that_is_no_key_is_refused(vkey: str) -> None:
    with pytest.raises(BadArgument):
        parse_key(vkey)


@pytest.mark.parametrize("text", ["", SKEY[:-4], SKEY.replace("PRIVATE", "PUBLIC"), SKEY.replace("c74f", "c74e")])
def test_a_file_that_is_no_private_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(BadSetting) as caught:
        parse_signer(text)
    assert "AYEK" not in caught.value.message


def test_a_checkpoint_is_read_as_it_was_written_and_signed_by_its_log_alone() -> None:
    checkpoint = signed(5)
    assert parse_checkpoint(checkpoint.text) == checkpoint
    checkpoint.check_signed(SIGNER.key)
    other = Signer("example.com/log", bytes(32)).key
    assert "has no signature by the key" in refused(lambda: checkpoint.check_signed(other))
    assert "is of the log example.com/log" in refused(lambda: checkpoint.check_signed(parse_key(VKEY)))
    forged = checkpoint._replace(body=checkpoint.body.replace("5", "6"))
    assert "is false" in refused(lambda: forged.check_signed(SIGNER.key))
    # A key of a witness is not that of a log, though its bytes are the same.
    assert "no signature" in refused(lambda: checkpoint.check_signed(SIGNER.key._replace(kind=COSIGNATURE)))


def test_a_cosignature_is_verified_with_its_instant() -> None:
    checkpoint = cosigned(signed(5), 1_700_000_000)
    checkpoint.check_signed(SIGNER.key)
    assert parse_checkpoint(checkpoint.text).cosigned_at_s(WITNESS_KEY) == 1_700_000_000
    own = checkpoint.signatures[1]
    later = own._replace(signature=(1_700_000_001).to_bytes(8, "big") + own.signature[8:])
    for line in (later, own._replace(signature=own.signature[:-1] + bytes((own.signature[-1] ^ 1,)))):
        forged = checkpoint._replace(signatures=(checkpoint.signatures[0], line))
        assert "is false" in refused(partial(forged.cosigned_at_s, WITNESS_KEY))
    short = checkpoint._replace(signatures=(own._replace(signature=own.signature[:71]),))
    assert "71 bytes" in refused(lambda: short.cosigned_at_s(WITNESS_KEY))
    assert "no cosignature by the witness" in refused(lambda: signed(5).cosigned_at_s(WITNESS_KEY))
    # One of two lines by the same witness is false: the note is refused.
    both = checkpoint._replace(signatures=(own, later))
    assert "is false" in refused(lambda: both.cosigned_at_s(WITNESS_KEY))


def test_lines_of_unknown_keys_say_nothing() -> None:
    checkpoint = signed(5)
    stranger = parse_signatures(f"\N{EM DASH} example.com/log {to_base64(bytes(80))}\n")[0]
    checkpoint._replace(signatures=(stranger, *checkpoint.signatures)).check_signed(SIGNER.key)


def test_two_checkpoints_are_consistent_or_it_is_said_why_not() -> None:
    new = tree(7)
    for old in range(8):
        growth = Growth(old, tuple(new.consistency(old)), signed(7))
        assert parse_growth(growth.text) == growth
        growth.check(signed(old), SIGNER.key)
    other = Tree([leaf_hash(b"%d" % number) for number in (9, 1, 2, 3)]).root
    path = tuple(new.consistency(4))
    growth = Growth(4, path, signed(7))
    assert "does not begin with the 4 entries" in refused(lambda: growth.check(signed(4, root=other), SIGNER.key))
    assert "begins at 4 entries, and the earlier checkpoint has 3" in refused(
        lambda: growth.check(signed(3), SIGNER.key)
    )
    assert "only 4" in refused(lambda: check_consistency((7, new.root), (4, tree(4).root), ()))
    assert "two histories" in refused(lambda: check_consistency((7, new.root), (7, other), ()))
    assert "need none" in refused(lambda: check_consistency((0, b""), (7, new.root), path))
    assert "is empty" in refused(lambda: check_consistency((3, tree(3).root), (7, new.root), ()))
    assert "too short" in refused(lambda: check_consistency((4, tree(4).root), (7, new.root), ()))
    assert "too long" in refused(lambda: check_consistency((4, tree(4).root), (7, new.root), (*path, path[0])))


def test_a_path_fits_one_place_of_one_tree() -> None:
    found = tree(6)
    leaf, path = leaf_hash(b"2"), found.path(2)
    assert root_of_path(leaf, 2, 6, path) == found.root
    assert "is not in a tree of 6" in refused(lambda: root_of_path(leaf, 6, 6, path))
    assert "shorter" in refused(lambda: root_of_path(leaf, 2, 6, path[:-1]))
    assert "longer" in refused(lambda: root_of_path(leaf, 2, 6, [*path, path[0]]))
    assert root_of_path(leaf, 3, 6, path) != found.root


def test_each_byte_of_a_proof_that_is_changed_or_missing_is_refused() -> None:
    found = tree(11)
    proof = LogProof(b"beside", 6, tuple(found.path(6)), cosigned(signed(11)))
    text = proof.text.encode()
    assert parse_proof(proof.text) == proof

    def check(data: bytes) -> None:
        read = parse_proof(data.decode())
        read.check(b"6", SIGNER.key)
        read.checkpoint.cosigned_at_s(WITNESS_KEY)
        # Nothing in the log proves what is beside it: it is the entry that does.
        if read.extra != b"beside":
            raise NotProved("other extra data")

    check(text)
    for place in range(len(text)):
        for flip in (0x01, 0x20, 0x80):
            changed = text[:place] + bytes((text[place] ^ flip,)) + text[place + 1 :]
            with pytest.raises((NotProved, UnicodeDecodeError)):
                check(changed)
        with pytest.raises((NotProved, UnicodeDecodeError)):
            check(text[:place])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no signed checkpoint"),
        ("a\n1\n" + to_base64(bytes(32)) + "\n", "no signed checkpoint"),
        ("a\n01\n" + to_base64(bytes(32)) + "\n\n" + SIGNED, "is not a number"),
        ("a\n9223372036854775808\n" + to_base64(bytes(32)) + "\n\n" + SIGNED, "is not a number"),
        ("a\n1\n" + to_base64(bytes(31)) + "\n\n" + SIGNED, "SHA-256"),
        ("a\n1\n" + to_base64(bytes(32)) + "\n\n" + SIGNED * 65, "at most 64 signatures"),
        ("a\n1\n" + to_base64(bytes(32)) + "\n\n" + SIGNED.replace(" P", "  P"), "no line of a signature"),
        ("a\r\n1\n", "character 0x0d"),
        ("a" * (1 << 20) + "\n", "more than"),
    ],
)
def test_a_text_that_is_no_checkpoint_is_refused_with_a_sentence(text: str, why: str) -> None:
    assert why in refused(lambda: parse_checkpoint(text))


def test_texts_that_are_no_proofs_are_refused_with_a_sentence() -> None:
    text = LogProof(b"", 0, (), signed(1)).text
    assert "does not begin with c2sp" in refused(lambda: parse_proof(text.replace("@v1", "@v2")))
    assert "lacks the line" in refused(lambda: parse_proof(text.replace("extra ", "other ")))
    assert "no tree needs more than 63" in refused(
        lambda: parse_proof(text.replace("index 0\n", "index 0\n" + f"{to_base64(bytes(32))}\n" * 64))
    )
    assert "does not begin with `old`" in refused(lambda: parse_growth(text))
    assert "another spelling" not in refused(lambda: from_base64("AA=A"))


@pytest.mark.parametrize("name", ["", "two words", "a+b", "a\x7fb", "a" * 201])
def test_a_name_that_no_note_may_have_is_no_origin(name: str) -> None:
    with pytest.raises(BadArgument):
        check_origin(name)


def test_the_id_of_a_key_is_over_name_kind_and_key() -> None:
    key = Key("example.com/log", 1, bytes(range(32)))
    assert key.id == hashlib.sha256(b"example.com/log\n\x01" + bytes(range(32))).digest()[:4]


def test_without_cryptography_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, key = signed(1), SIGNER.key
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    calls: list[Callable[[], object]] = [lambda: SIGNER.sign("a\n"), lambda: checkpoint.check_signed(key)]
    for call in calls:
        with pytest.raises(BadSetting, match="pip install 'delayd\\[proof\\]'"):
            call()
