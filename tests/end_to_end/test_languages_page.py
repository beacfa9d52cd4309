"""The programs of docs/languages.md run as they stand, in each language that this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.gateways import gateway_of
from tests.end_to_end.processes import ServerProcess

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
def test_programs_in_other_languages_send_pull_and_acknowledge(tmp_path: Path) -> None:
    here = [language for language, (needed, *_) in PROGRAMS.items() if shutil.which(needed)]
    if not here:
        pytest.skip("this machine has none of the languages")
    with (
        ServerProcess("meta", tmp_path) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}),
        ServerProcess("delay", tmp_path, {"meta": meta.address}),
        gateway_of(meta.address, tmp_path) as gateway,
    ):
        for language in here:
            _, file, command = PROGRAMS[language]
            (program,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
            (tmp_path / file).write_text(program)
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env={**os.environ, "DELAYD_URL": f"http://127.0.0.1:{gateway.port}"},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, "hello\n"), f"{language}: {done.stdout}{done.stderr}"
            subject = "curl" if language == "sh" else language
            found = gateway.ask("GET", f"/v1/subjects/mails.{subject}/groups").json["groups"]
            assert isinstance(found, list) and [(each["waiting"], each["outstanding"]) for each in found] == [(0, 0)]
