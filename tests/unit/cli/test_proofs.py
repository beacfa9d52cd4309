"""``delayd tree-head``, ``prove`` and ``check-proof``."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from delayd.client.sending.receipts import Receipt
from delayd.errors import LogId
from delayd.reading.tlog import COSIGNATURE, Signer, parse_checkpoint, parse_key
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.unit.cli.runner import Ran, run
from tests.unit.witness import WITNESS_KEY, cosigned


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """A sealed hour of two messages."""
    books = Books(str(tmp_path / "data"))
    books.hand_over(books.send([START_MS, START_MS + 1_000], keys=["order-1", ""]), delay_ms=5)
    books.checkpoint()
    books.seal(HOUR)
    books.see_realtime(START_MS + 2 * HOUR_MS)
    yield books
    books.close()


def token(books: Books, sequence: int, log_id: int = DELAY_ID) -> str:
    row = books.rows[sequence]
    return Receipt(LogId(log_id), sequence, row.deliver_at_ms, row.appended_at_ms, False, False).token


def head(books: Books, *arguments: str) -> Ran:
    return run("tree-head", "--data", books.root, *arguments)


def written(path: Path, ran: Ran) -> str:
    assert (ran.code, ran.err) == (0, "")
    path.write_text(ran.out)
    return str(path)


def test_a_message_is_proved_from_its_receipt_and_checked_with_the_public_key(books: Books, tmp_path: Path) -> None:
    checkpoint = parse_checkpoint(head(books).out)
    assert (checkpoint.origin, checkpoint.size) == (f"delayd/{DELAY_ID:016x}", 1)
    vkey = head(books, "--key").out.strip()
    assert parse_key(vkey).name == checkpoint.origin
    proof = written(tmp_path / "a.tlog-proof", run("prove", token(books, 1), "--data", books.root))
    ran = run("check-proof", proof, "--key", vkey, "--receipt", token(books, 1))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[:2] == [
        f"message 1 of delay server {DELAY_ID:016x} ended: dispatched",
        "due 2026-11-20T16:00:00.000Z",
    ]
    assert "dispatched 2026-11-20T16:00:01.005Z" in ran.out
    assert f"hour 2026112016, of 1 entries that delayd/{DELAY_ID:016x} signed" in ran.out
    ran = run("check-proof", proof, "--key", vkey, "--receipt", token(books, 2))
    assert (ran.code, ran.out) == (3, "")
    assert "NOT proved: it is of message 1 of 000000000000de1a, and the receipt of 2" in ran.err


def test_a_changed_cut_or_foreign_proof_is_refused_with_exit_code_3(books: Books, tmp_path: Path) -> None:
    head(books, "--origin", "example.com/orders")
    vkey = head(books, "--key").out.strip()
    text = run("prove", token(books, 1), "--data", books.root).out
    for changed in (text[:-30], text.replace("index 0", "index 1"), "", "x" * 100, text.replace("extra A", "extra B")):
        (tmp_path / "p").write_text(changed)
        ran = run("check-proof", str(tmp_path / "p"), "--key", vkey)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.startswith("delayd: NOT proved: ")
    (tmp_path / "p").write_bytes(b"\xff" + text.encode())
    assert "NOT proved: it is not UTF-8" in run("check-proof", str(tmp_path / "p"), "--key", vkey).err
    (tmp_path / "p").write_text(text)
    other = Signer("example.com/orders", bytes(32)).key.vkey
    assert "no signature by the key" in run("check-proof", str(tmp_path / "p"), "--key", other).err
    assert run("check-proof", str(tmp_path / "p"), "--key", vkey[:-3]).code == 2
    # A checkpoint alone is checked, too, and shows no message.
    head_file = written(tmp_path / "h", head(books))
    assert run("check-proof", head_file, "--key", vkey).out == "signed by example.com/orders: 1 entries\n"
    assert "no proof of a message" in run("check-proof", head_file, "--key", vkey, "--receipt", token(books, 1)).err


def test_a_witness_is_sent_what_it_takes_and_its_answer_goes_with_proofs(books: Books, tmp_path: Path) -> None:
    old = written(tmp_path / "old", head(books))
    begin = START_MS + HOUR_MS
    books.hand_over(books.send([begin]), delay_ms=5)
    books.checkpoint()
    books.seal(HOUR + 1)
    request = written(tmp_path / "request", head(books, "--since", "1"))
    assert Path(request).read_text().startswith("old 1\n")
    vkey = head(books, "--key").out.strip()
    ran = run("check-proof", request, "--old", old, "--key", vkey)
    assert ran.out == "the log only grew: its 2 entries begin with the 1 of before\n"
    assert (
        "NOT proved: it begins at 1"
        in run("check-proof", request, "--old", request_of(tmp_path, request), "--key", vkey).err
    )
    checkpoint = parse_checkpoint(Path(request).read_text().partition("\n\n")[2])
    answer = tmp_path / "answer"
    answer.write_text(cosigned(checkpoint).signatures[1].line + "\n")
    added = head(books, "--add", str(answer), "--witness", WITNESS_KEY.vkey)
    assert len(parse_checkpoint(added.out).signatures) == 2
    proof = written(tmp_path / "p", run("prove", token(books, 1), "--data", books.root))
    ran = run("check-proof", proof, "--key", vkey, "--witness", WITNESS_KEY.vkey)
    assert ran.out.splitlines()[-1] == "cosigned by witness.example/w1 at 2026-11-20T18:00:00.000Z"
    stranger = Signer("witness.example/w2", bytes(32)).key._replace(kind=COSIGNATURE)
    ran = run("check-proof", proof, "--key", vkey, "--witness", stranger.vkey)
    assert (ran.code, ran.out) == (3, "")
    assert "no cosignature by the witness witness.example/w2" in ran.err


def request_of(tmp_path: Path, request: str) -> str:
    """The checkpoint of a request, as a file of its own."""
    path = tmp_path / "new"
    path.write_text(Path(request).read_text().partition("\n\n")[2])
    return str(path)


def test_what_can_not_be_proved_says_why(books: Books) -> None:
    ran = run("prove", token(books, 1), "--data", books.root)
    assert (ran.code, ran.out) == (2, "")
    assert "no checkpoint has hour 2026112016 yet: run `delayd tree-head" in ran.err
    head(books)
    ran = run("prove", token(books, 1, log_id=7), "--data", books.root)
    assert "the receipt is of delay server 0000000000000007" in ran.err
    assert "no receipt" in run("prove", "abc", "--data", books.root).err
    assert "a log keeps its name" in head(books, "--origin", "example.com/b").err
    assert "none of 9 came before" in head(books, "--since", "9").err


def test_the_private_key_is_where_it_was_asked_for(books: Books, tmp_path: Path) -> None:
    elsewhere = tmp_path / "own.key"
    first = head(books, "--key-file", str(elsewhere), "--key").out
    assert elsewhere.exists() and not Path(books.root, "proof.key").exists()
    assert head(books, "--key-file", str(elsewhere), "--key").out == first
    assert not os.path.exists(f"{books.root}/delay/proofs"), "--key signs and writes nothing else"
