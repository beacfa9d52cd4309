"""The secret file: made once, refused when others may read it; and proofs that fit one connection and direction."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from delayd.errors import BadSetting
from delayd.secret import NONCE_BYTES, SECRET_FILE, Exchange, Secret, open_secret, read_secret, same_proof
from tests.trust import put_secrets

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


OLD, NEW, STRANGE = (bytes([number]) * 32 for number in (1, 2, 3))


def test_both_of_two_secrets_are_valid_and_the_first_one_proves(tmp_path: Path) -> None:
    path = tmp_path / SECRET_FILE
    put_secrets(path, NEW, OLD)
    both = read_secret(str(path))
    assert both.server_proof(EXCHANGE) == Secret(NEW, "").server_proof(EXCHANGE)
    assert both.dialler_proof(EXCHANGE) == Secret(NEW, "").dialler_proof(EXCHANGE)
    for key, valid in ((OLD, True), (NEW, True), (STRANGE, False)):
        other = Secret(key, "")
        assert both.is_server_proof(other.server_proof(EXCHANGE), EXCHANGE) == valid
        assert both.is_dialler_proof(other.dialler_proof(EXCHANGE), EXCHANGE) == valid
        assert not both.is_server_proof(other.dialler_proof(EXCHANGE), EXCHANGE)
    put_secrets(path, OLD, NEW, STRANGE)
    with pytest.raises(BadSetting, match="holds no secret"):
        read_secret(str(path))


def test_a_secret_is_changed_in_three_steps_and_all_machines_trust_each_other_at_any_moment(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        put_secrets(path, OLD)
    machines = [read_secret(str(path)) for path in paths]
    for step in ((OLD, NEW), (NEW, OLD), (NEW,)):
        for path in paths:
            put_secrets(path, *step)
            for one, other in (machines, machines[::-1]):
                assert one.is_server_proof(other.server_proof(EXCHANGE), EXCHANGE)
                assert one.is_dialler_proof(other.dialler_proof(EXCHANGE), EXCHANGE)
    assert not machines[0].is_dialler_proof(Secret(OLD, "").dialler_proof(EXCHANGE), EXCHANGE)


def test_a_secret_file_that_can_not_be_used_any_more_leaves_the_secrets_that_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / SECRET_FILE
    put_secrets(path, OLD)
    secret = read_secret(str(path))
    path.chmod(0o644)
    for _ in range(2):
        assert secret.is_dialler_proof(Secret(OLD, "").dialler_proof(EXCHANGE), EXCHANGE)
    assert caplog.text.count("secret_unreadable") == 1
    path.unlink()
    for _ in range(2):
        assert secret.is_dialler_proof(Secret(OLD, "").dialler_proof(EXCHANGE), EXCHANGE)
    assert caplog.text.count("secret_unreadable") == 2
    put_secrets(path, NEW)
    assert not secret.is_dialler_proof(Secret(OLD, "").dialler_proof(EXCHANGE), EXCHANGE)
