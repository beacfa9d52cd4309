"""A proof in an hour of a million messages: it has the path of one row, and reads and hashes the rows of one group."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.directory import DELAY_ID, FIRST_HOUR, HOUR_MS, DirectoryWriter, Shape
from delayd.machine.disk import RealDisk
from delayd.reading import proofs
from delayd.reading.proofs import GROUP_ROWS, PROVED, ROW, HourLog, Rows, check_message, sign_head
from delayd.reading.tlog import Signer, Tree, parse_proof
from examples.check_proof import check

MILLION = 1_000_000
SIGNER = Signer("example.com/log", bytes(32))


@pytest.mark.long
def test_a_message_among_a_million_is_proved_from_one_group_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DirectoryWriter(str(tmp_path), Shape(MILLION)).write()
    log = HourLog(RealDisk(), str(tmp_path))
    log.make_trees()
    sign_head(log, SIGNER)
    hashed: list[int] = []
    own: Callable[[Rows], Tree] = proofs._tree_of

    def counted(rows: Rows) -> Tree:
        hashed.append(len(rows))
        return own(rows)

    monkeypatch.setattr(proofs, "_tree_of", counted)
    for sequence in (1, GROUP_ROWS, GROUP_ROWS + 1, 654_321, MILLION):
        proof = HourLog(RealDisk(), str(tmp_path)).prove(sequence, FIRST_HOUR * HOUR_MS)
        found = check_message(parse_proof(proof.text), SIGNER.key)
        assert (found.log_id, found.sequence) == (DELAY_ID, sequence)
        assert check(proof.text, SIGNER.key.vkey)[1][0] == sequence
        path = (len(proof.extra) - PROVED.size - ROW.itemsize - 200) // 32
        assert path <= 20
    assert hashed[:4] == [GROUP_ROWS] * 4
    assert hashed[4] == MILLION % GROUP_ROWS
