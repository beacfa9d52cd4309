"""The secret file: made once, refused when others may read it; and proofs that fit one connection and direction."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from delayd.errors import BadSetting, NotWritable
from delayd.secret import NONCE_BYTES, SECRET_FILE, Exchange, Secret, open_secret, read_secret, same_proof

EXCHANGE = Exchange(b"a" * NONCE_BYTES, b"b" * NONCE_BYTES, "meta", 7, 9)


def test_the_first_server_of_a_directory_makes_the_file_for_its_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = open_secret(str(tmp_path / "data"), "")
    finally:
        os.umask(old)
    path = tmp_path / "data" / SECRET_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32
    assert open_secret(str(tmp_path / "data"), "").server_proof(EXCHANGE) == made.server_proof(EXCHANGE)
    assert os.listdir(tmp_path / "data") == [SECRET_FILE]


def test_servers_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    for round_ in range(20):
        data = str(tmp_path / str(round_))
        with ThreadPoolExecutor(8) as threads:
            secrets = threads.map(open_secret, [data] * 8, [""] * 8)
            proofs = {secret.server_proof(EXCHANGE) for secret in secrets}
        assert len(proofs) == 1
        assert os.listdir(data) == [SECRET_FILE]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    open_secret(str(tmp_path), "")
    path = tmp_path / SECRET_FILE
    path.chmod(mode)
    with pytest.raises(BadSetting, match=f"mode {mode:03o}.*chmod 600") as refused:
        open_secret(str(tmp_path), "")
    assert str(path) in refused.value.message


@pytest.mark.parametrize("content", [b"", b"abc", b"zz" * 32, b"00" * 31, b"00" * 33, b"\xff" * 64, b"00" * 5000])
def test_a_file_that_holds_no_secret_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadSetting, match="holds no secret"):
        read_secret(str(path))


def test_what_is_no_file_is_refused_by_name_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("folder", "pipe"):
        with pytest.raises(BadSetting, match=f"{name} is no file"):
            read_secret(str(tmp_path / name))
    with pytest.raises(BadSetting, match="loop can't be read"):
        read_secret(str(tmp_path / "loop"))


def test_a_file_that_is_named_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"copy cluster\.secret from the machine of the meta server"):
        open_secret(str(tmp_path), str(tmp_path / "given"))
    assert os.listdir(tmp_path) == []


def test_a_place_where_it_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match=SECRET_FILE):
        open_secret(str(tmp_path / "file" / "data"), "")


def test_a_proof_fits_one_exchange_one_direction_and_one_secret() -> None:
    secret = Secret(b"k" * 32, "")
    proof = secret.server_proof(EXCHANGE)
    swapped = EXCHANGE._replace(dialler_nonce=EXCHANGE.server_nonce, server_nonce=EXCHANGE.dialler_nonce)
    changed = [
        swapped,
        EXCHANGE._replace(dialler_nonce=b"c" * NONCE_BYTES),
        EXCHANGE._replace(server_nonce=b"c" * NONCE_BYTES),
        EXCHANGE._replace(role="delay"),
        EXCHANGE._replace(log_id=8),
        EXCHANGE._replace(cluster_id=10),
    ]
    others = [secret.dialler_proof(EXCHANGE), Secret(b"K" * 32, "").server_proof(EXCHANGE)]
    others += [secret.server_proof(exchange) for exchange in changed]
    assert same_proof(secret.server_proof(EXCHANGE), proof)
    assert not any(same_proof(other, proof) for other in others)
    assert len(set(others)) == len(others)
