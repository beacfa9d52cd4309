"""Proofs from files: what each shows, what is refused, and what finds rows, trees and seals that were changed."""

import hashlib
import stat
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from cryptography.exceptions import InvalidSignature

from delayd.errors import BadArgument, BadSetting, DamagedData, DelaydError, NewerFormat
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import SEAL, encode_outcomes
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, open_segment
from delayd.machine.disk import RealDisk
from delayd.outcome import Outcome, Reason
from delayd.reading import proofs
from delayd.reading.proofs import (
    NO_KEY,
    NO_TREE,
    ROW,
    HourLog,
    ProvedRow,
    add_cosignatures,
    check_message,
    decode_tree,
    growth_since,
    open_signer,
    sign_head,
)
from delayd.reading.tlog import (
    Checkpoint,
    LogProof,
    NotProved,
    Signer,
    checkpoint_body,
    leaf_hash,
    parse_checkpoint,
    parse_proof,
)
from delayd.reading.verify import FileState, verify_directory
from examples.check_proof import check
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.unit.witness import WITNESS_KEY, cosigned

SIGNER = Signer("example.com/log", bytes(range(32)))
KEY = SIGNER.key
ROWS = 10
GOLDEN = Path(__file__).parents[2] / "golden" / "proof_v1.tlog-proof"  # Committed, and never written again.
TREE_SHA256 = "18db1d75d30e03c6052bb80e8a3a6efb41194cb7fd1a43819b46f8f99a8bafd3"


@pytest.fixture(autouse=True)
def groups_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "GROUP_ROWS", 4)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Three sealed hours: one of ten rows, with keys and two cancelled; one of one row; one of ten."""
    books = Books(str(tmp_path))
    for hour in range(3):
        begin = START_MS + hour * HOUR_MS
        count = 1 if hour == 1 else ROWS
        keys = [f"key-{row}" if row != 3 else "" for row in range(count)]
        sent = books.send([begin + 1_000 * (count - row) for row in range(count)], subjects=("orders",), keys=keys)
        ended = sent[4:6] if hour == 0 else []
        for each in sent:
            if each not in ended:
                books.hand_over([each], delay_ms=5)
        books.decide(ended, Outcome.CANCELLED, Reason.CANCELLED, claimed_at_ms=begin)
        books.checkpoint()
        books.seal(HOUR + hour)
    books.see_realtime(START_MS + 4 * HOUR_MS)
    yield books
    books.close()


def hours(books: Books) -> HourLog:
    return HourLog(RealDisk(), books.root)


def head(books: Books) -> Checkpoint:
    log = hours(books)
    log.make_trees()
    return sign_head(log, SIGNER)


def prove(books: Books, sequence: int) -> LogProof:
    row = books.rows[sequence]
    return hours(books).prove(sequence, max(row.deliver_at_ms, row.appended_at_ms))


def refused(call: Callable[[], object], kind: type[Exception] = NotProved) -> str:
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    return error.message if isinstance(error, DelaydError) else str(error)


def test_each_message_of_each_hour_is_proved_and_the_checker_without_delayd_agrees(books: Books) -> None:
    checkpoint = head(books)
    assert checkpoint.size == 3
    for sequence, row in books.rows.items():
        proof = prove(books, sequence)
        found = check_message(parse_proof(proof.text), KEY)
        place = (sequence - 1) % (ROWS + 1) if sequence != ROWS + 1 else 0
        cancelled = sequence in (5, 6)
        assert (found.log_id, found.sequence, found.hour) == (DELAY_ID, sequence, row.hour)
        assert (found.deliver_at_ms, found.content_hash) == (row.deliver_at_ms, row.content_hash)
        assert found.outcome == (Outcome.CANCELLED if cancelled else Outcome.DISPATCHED)
        assert found.reason == (Reason.CANCELLED if cancelled else 0)
        assert found.dispatched_at_ms == (0 if cancelled else row.deliver_at_ms + 5)
        assert found.key_sha256 == (hashlib.sha256(b"key-%d" % place).digest() if place != 3 else NO_KEY)
        log_id, fields, hour, _ = check(proof.text, KEY.vkey)
        assert (log_id, fields[0], fields[1], fields[2], fields[3], fields[4], fields[8]) == (
            *(found.log_id, found.sequence, found.deliver_at_ms, found.dispatched_at_ms, found.content_hash),
            *(found.outcome, found.key_sha256),
        )
        assert hour.timestamp() * 1000 == found.hour * HOUR_MS


def test_the_leaf_is_the_72_bytes_of_the_page_and_the_entry_is_seal_and_root(books: Books) -> None:
    head(books)
    row = books.rows[1]
    key = hashlib.sha256(b"key-0").digest()
    packed = struct.pack("<QqqQBBHI32s", 1, row.deliver_at_ms, row.deliver_at_ms + 5, row.content_hash, 1, 0, 1, 0, key)
    extra = prove(books, 1).extra
    assert (ROW.itemsize, extra[16 : 16 + 72]) == (72, packed)
    assert extra[:16] == struct.pack("<QQ", 1, 0)
    log = hours(books)
    seal = log.seals[0]
    assert extra[88:288] == seal.encode()
    tree = log.tree(seal)
    assert tree is not None
    assert next(log.entries(1)) == seal.encode() + tree.upper.root
    # An hour of one row: its root is the hash of that leaf.
    alone = prove(books, ROWS + 1).extra
    assert len(alone) == 16 + 72 + SEAL.size
    single = log.tree(log.seals[1])
    assert single is not None
    assert single.upper.root == leaf_hash(alone[16 : 16 + 72])


def test_each_byte_of_a_proof_that_is_changed_is_refused_by_both_checkers(books: Books) -> None:
    head(books)
    text = prove(books, 7).text.encode()
    for place in range(len(text)):
        changed = text[:place] + bytes((text[place] ^ 1,)) + text[place + 1 :]
        with pytest.raises((NotProved, UnicodeDecodeError)):
            check_message(parse_proof(changed.decode()), KEY)
        with pytest.raises((InvalidSignature, ValueError, struct.error)):
            check(changed.decode(), KEY.vkey)


def test_each_byte_of_row_seal_and_path_counts(books: Books) -> None:
    head(books)
    proof = prove(books, 7)
    for place in range(len(proof.extra)):
        extra = proof.extra[:place] + bytes((proof.extra[place] ^ 4,)) + proof.extra[place + 1 :]
        assert refused(partial(check_message, proof._replace(extra=extra), KEY))
    for cut in (0, 15, 287, 289, len(proof.extra) - 32):
        assert refused(partial(check_message, proof._replace(extra=proof.extra[:cut]), KEY))


def test_a_proof_of_another_message_hour_log_or_key_is_refused(books: Books) -> None:
    head(books)
    proof, other, later = prove(books, 1), prove(books, 2), prove(books, ROWS + 2)
    mixed = proof.extra[:16] + other.extra[16:88] + proof.extra[88:]
    assert "does not lead to the root" in refused(lambda: check_message(proof._replace(extra=mixed), KEY))
    assert "is not entry 0" in refused(lambda: check_message(proof._replace(extra=later.extra), KEY))
    swapped = later._replace(path=prove(books, ROWS + 1).path)
    assert "longer" in refused(lambda: check_message(swapped, KEY))
    stranger = Signer("example.com/log", bytes(32))
    assert "no signature by the key" in refused(lambda: check_message(proof, stranger.key))
    foreign = Signer("example.com/other", bytes(range(32)))
    assert "is of the log example.com/log" in refused(lambda: check_message(proof, foreign.key))


def test_a_message_that_the_hour_never_had_is_not_proved(books: Books) -> None:
    head(books)
    for sequence in (0, ROWS + 1, ROWS + 2, 999):
        found = refused(partial(hours(books).prove, sequence, START_MS), BadArgument)
        assert f"sealed without a message {sequence}" in found


def test_an_hour_that_is_not_sealed_or_in_no_checkpoint_is_said(books: Books) -> None:
    log = hours(books)
    assert "run `delayd tree-head" in refused(lambda: log.prove(1, START_MS), BadArgument)
    head(books)
    later = START_MS + 9 * HOUR_MS
    assert "is not sealed: nothing can be proved until" in refused(lambda: log.prove(1, later), BadArgument)


def test_the_rows_of_a_removed_hour_are_gone_and_its_entry_stays(books: Books) -> None:
    checkpoint, proof = head(books), prove(books, 1)
    remove(books, HOUR)
    assert "retention has removed the rows" in refused(lambda: prove(books, 1), BadArgument)
    assert head(books) == checkpoint
    check_message(proof, KEY)
    check_message(prove(books, ROWS + 2), KEY)


def test_a_seal_that_is_newer_than_the_table_has_no_entry_yet(books: Books) -> None:
    books.sealed.remove(HOUR + 2)
    crc, appended_at_ms, next_sequence = books.below
    books.below = crc, START_MS + 2 * HOUR_MS + 1, next_sequence
    books.publish()
    old = head(books)
    assert (old.size, len(hours(books).seals)) == (2, 2)
    books.sealed.add(HOUR + 2)
    books.below = crc, appended_at_ms, next_sequence
    books.publish()
    new = head(books)
    assert new.size == 3
    growth_since(hours(books), new, 2).check(old, KEY)


def test_an_hour_that_was_removed_before_it_had_a_tree_has_an_entry_of_its_seal_alone(books: Books) -> None:
    remove(books, HOUR)
    head(books)
    log = hours(books)
    assert [entry[-32:] == NO_TREE for entry in log.entries(3)] == [True, False, False]
    assert "retention has removed the rows" in refused(lambda: prove(books, 1), BadArgument)
    check_message(prove(books, ROWS + 2), KEY)


def remove(books: Books, hour: int) -> None:
    """Remove the files of an hour, as retention does."""
    books.removed.add(hour)
    books.publish()
    for log in ("schedule", "dispatch"):
        books.path_of(log, hour).unlink()


def test_a_rewritten_hour_is_found_by_the_root_and_before_a_tree_is_made_by_its_seal(books: Books) -> None:
    head(books)
    rewrite(books)
    found = refused(lambda: prove(books, 1), DamagedData)
    assert "its rows are not those under the root" in found
    for path in Path(hours(books).folder).iterdir():
        path.unlink()
    assert "not those under its seal" in refused(lambda: head(books), DamagedData)


def rewrite(books: Books) -> None:
    """Write the dispatch log of the first hour anew, in which all rows were dispatched, and on time."""
    rows = [row.sequence for row in books.rows.values() if row.hour == HOUR]
    parts = [books.part(rows, START_MS)._replace(target_appended_at_ms=START_MS)]
    segment = open_segment(books.disk, str(books.path_of("dispatch", HOUR)), FileKind.DISPATCH, DELAY_ID, write=True)
    segment.file.truncate(FILE_HEADER_BYTES)
    segment.append([NewGroup(GroupKind.DATA, [encode_outcomes(HOUR, parts)], 1, START_MS)])
    segment.flush()
    segment.close()


def test_a_changed_tree_or_seal_is_not_signed_over(books: Books) -> None:
    log = hours(books)
    log.make_trees()
    first = signed(log, 2)
    log.keep(first)
    tree = log.tree(log.seals[0])
    assert tree is not None
    groups = tree.groups.copy()
    groups["hash"][0] = np.void(bytes(32))
    path = Path(f"{log.folder}/2026112016.tree")
    changed = tree._replace(groups=groups)
    path.write_bytes(changed._replace(root=changed.upper.root).encode())
    assert "does not begin with the 2 entries that were signed" in refused(lambda: sign_head(log, SIGNER))
    assert log.checkpoint() == first
    path.write_bytes(tree.encode())
    assert sign_head(log, SIGNER).size == 3
    log.keep(signed(log, 4))
    assert "4 seals were signed, and the seal log has 3" in refused(lambda: sign_head(log, SIGNER))


def signed(log: HourLog, size: int) -> Checkpoint:
    return parse_checkpoint(SIGNER.sign(checkpoint_body(SIGNER.name, size, log.grown(min(size, 3)).root)))


def test_a_log_grows_from_one_checkpoint_to_the_next(books: Books) -> None:
    old = head(books)
    begin = START_MS + 3 * HOUR_MS
    books.hand_over(books.send([begin + 1_000]), delay_ms=5)
    books.checkpoint()
    books.seal(HOUR + 3)
    new = head(books)
    assert (old.size, new.size) == (3, 4)
    log = hours(books)
    growth_since(log, new, 3).check(old, KEY)
    assert "none of 5 came before" in refused(lambda: growth_since(log, new, 5), BadArgument)
    assert refused(lambda: sign_head(log, Signer("example.com/b", bytes(32))), BadArgument)


def test_cosignatures_are_kept_with_the_checkpoint_and_go_with_its_proofs(books: Books) -> None:
    log = hours(books)
    assert "nothing is signed yet" in refused(lambda: add_cosignatures(log, "", [WITNESS_KEY]), BadArgument)
    checkpoint = head(books)
    line = cosigned(checkpoint).signatures[1].line + "\n"
    assert "which no --witness names" in refused(lambda: add_cosignatures(log, line, []))
    other = cosigned(checkpoint._replace(body=checkpoint.body.replace("3", "2"))).signatures[1].line + "\n"
    assert "is false" in refused(lambda: add_cosignatures(log, other, [WITNESS_KEY]))
    assert log.checkpoint() == checkpoint
    added = add_cosignatures(log, line, [WITNESS_KEY])
    assert add_cosignatures(log, line, [WITNESS_KEY]) == added == head(books)
    proof = prove(books, 1)
    assert proof.checkpoint.cosigned_at_s(WITNESS_KEY) == check(proof.text, KEY.vkey, [WITNESS_KEY.vkey])[3][0]


def test_trees_are_files_of_their_seal_alone_and_damage_is_named(books: Books) -> None:
    head(books)
    log = hours(books)
    path = Path(f"{log.folder}/2026112016.tree")
    data = path.read_bytes()
    assert len(data) == 80 + 3 * 40 + 8
    for place in range(len(data)):
        with pytest.raises((DamagedData, NewerFormat)):
            decode_tree("x", data[:place] + bytes((data[place] ^ 1,)) + data[place + 1 :])
    newer = struct.pack("<Q", 2) + data[8:-8]
    with pytest.raises(NewerFormat):
        decode_tree("x", newer + struct.pack("<II", crc32c(newer), 0))
    other = Path(f"{log.folder}/2026112017.tree").read_bytes()
    path.write_bytes(other)
    assert "it is not of seal 0" in refused(lambda: prove(books, 1), DamagedData)
    found = decode_tree("x", data)
    groups = found.groups.copy()
    groups["hash"][2] = np.void(bytes(32))
    path.write_bytes(found._replace(groups=groups).encode())
    assert "do not lead to its root" in refused(lambda: prove(books, 1), DamagedData)
    path.write_bytes(data[:-1])
    assert [file.path for file in verify_directory(books.root).damaged] == [str(path)]
    path.write_bytes(data)
    kinds = [file.state for file in verify_directory(books.root).files if file.kind == "proof"]
    assert kinds == [FileState.OK] * 4


def test_the_private_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "proof.key"
    made = open_signer(str(path), "example.com/log")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_signer(str(path), "example.com/other") == made
    path.chmod(0o640)
    assert "run `chmod 600" in refused(lambda: open_signer(str(path), "a"), BadSetting)
    path.chmod(0o600)
    path.write_text("nothing\n")
    assert "no private key" in refused(lambda: open_signer(str(path), "a"), BadSetting)
    with pytest.raises(BadArgument):
        open_signer(str(tmp_path / "new.key"), "two words")


def test_the_directory_is_that_of_one_delay_server_whose_chain_holds(books: Books) -> None:
    assert "holds 0 delay servers' directories" in refused(
        lambda: HourLog(RealDisk(), f"{books.root}/realtime"), BadArgument
    )
    first, *others = books.seals
    books.write_seals([first._replace(facts=first.facts._replace(body_bytes=1)), *others])
    assert "the seal before it is not" in refused(lambda: hours(books), DamagedData)


def test_proofs_of_version_1_are_made_and_checked_to_the_byte(books: Books) -> None:
    head(books)
    assert prove(books, 7).text == GOLDEN.read_text()
    tree = Path(f"{hours(books).folder}/2026112016.tree").read_bytes()
    assert hashlib.sha256(tree).hexdigest() == TREE_SHA256
    found = check_message(parse_proof(GOLDEN.read_text()), KEY)
    assert (found.sequence, found.outcome, found.deliver_at_ms) == (7, Outcome.DISPATCHED, START_MS + 4_000)
    assert check(GOLDEN.read_text(), KEY.vkey)[1][0] == 7


def test_a_proof_says_of_a_newer_version_that_it_is_newer(books: Books) -> None:
    head(books)
    proof = prove(books, 1)
    newer = struct.pack("<Q", 2) + proof.extra[8:]
    assert "version 2" in refused(lambda: check_message(proof._replace(extra=newer), KEY))
    assert isinstance(check_message(proof, KEY), ProvedRow)
