"""Bulk commands: what is counted, asked and told, also when somebody interrupts them."""

from collections.abc import Callable

import pytest

from cli.message_commands import Wording, in_bulk
from delayd.client.asking.walking import Walked

MOVES = Wording("moved", "are due later then.", goes_on=True)
CANCELS = Wording("cancelled", "are cancelled then.")


class Walk:
    """Finds 900 messages; does them in three steps, and may be interrupted after the second."""

    def __init__(self, last: Walked, *, interrupted: bool = False) -> None:
        self.asked: list[bool] = []
        self._last = last
        self._interrupted = interrupted

    def __call__(self, *, dry_run: bool, progress: Callable[[Walked], object] | None) -> Walked:
        self.asked.append(dry_run)
        if dry_run:
            return self._last._replace(found=900)
        assert progress is not None
        for done in (300, 600):
            progress(Walked(found=900, done=done, resume="word"))
        if self._interrupted:
            raise KeyboardInterrupt
        return self._last


@pytest.mark.parametrize(
    ("wording", "told"),
    [
        (MOVES, "delayd: 600 messages are moved so far; to go on, say it again with --resume word\n"),
        (CANCELS, "delayd: 600 messages are cancelled so far\n"),
    ],
)
def test_an_interrupted_command_tells_what_it_did(
    wording: Wording, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        in_bulk("s", Walk(Walked(), interrupted=True), wording, dry_run=False, yes=False)
    assert capsys.readouterr() == ("", told)
