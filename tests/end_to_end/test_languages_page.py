"""The programs of docs/languages.md run as they stand, in each language that this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.gateways import Answer, Gateway, gateway_of
from tests.end_to_end.up_process import Up, up
from tests.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "languages.md"
LIMIT_S = 90
PROGRAMS = {
    "sh": ("curl", "mails.sh", ("sh", "mails.sh")),
    "javascript": ("node", "mails.mjs", ("node", "mails.mjs")),
    "go": ("go", "mails.go", ("go", "run", "mails.go")),
    "java": ("java", "Mails.java", ("java", "Mails.java")),
    "php": ("php", "mails.php", ("php", "mails.php")),
    "ruby": ("ruby", "mails.rb", ("ruby", "mails.rb")),
}
"""By language: what must be there, the program's file, and the command."""


def test_each_program_of_the_page_is_run() -> None:
    assert set(re.findall(r"^```(\w+)$", PAGE.read_text(), re.M)) == set(PROGRAMS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("--require-token",)], ids=["without a token", "with a token"])
def test_programs_in_other_languages_send_pull_and_acknowledge(tmp_path: Path, options: tuple[str, ...]) -> None:
    here = [language for language, (needed, *_) in PROGRAMS.items() if shutil.which(needed)]
    if not here:
        pytest.skip("this machine has none of the languages")
    with (
        up(tmp_path, "--port", "0", *options) as running,
        gateway_of(running.meta, tmp_path, "--data", str(running.data)) as gateway,
    ):
        token = _token(running, gateway) if options else ""
        for language in here:
            _, file, command = PROGRAMS[language]
            (program,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
            (tmp_path / file).write_text(program)
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env={**os.environ, "DELAYD_URL": f"http://127.0.0.1:{gateway.port}", "DELAYD_TOKEN": token},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, "hello\n"), f"{language}: {done.stdout}{done.stderr}"
            subject = "curl" if language == "sh" else language
            found = _groups(gateway, f"mails.{subject}", token).json["groups"]
            assert isinstance(found, list) and [(each["waiting"], each["outstanding"]) for each in found] == [(0, 0)]


def _token(running: Up, gateway: Gateway) -> str:
    """A token for the subjects of the programs, which the gateway knows."""
    words = ["token", "create", "mailer", "--meta", running.meta, "--data", str(running.data)]
    words += [word for right in ("send", "consume", "inspect") for word in ("--allow", f"{right}:mails.*")]
    done = subprocess.run(
        [sys.executable, "-m", "delayd", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    token = done.stdout.strip()
    wait_until(lambda: _groups(gateway, "mails.curl", token).status == 200, "the gateway knows the token")
    return token


def _groups(gateway: Gateway, subject: str, token: str) -> Answer:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return gateway.ask("GET", f"/v1/subjects/{subject}/groups", headers=headers)
