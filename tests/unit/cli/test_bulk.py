"""Bulk commands: what is counted, asked and told, also when somebody interrupts them."""

from collections.abc import Callable

import pytest

from cli.bulk import Wording, in_bulk
from cli.exits import OK, TRY_LATER
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


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        (Walked(found=900, done=900), OK, ""),
        (Walked(found=900, done=800, ended=100), OK, "100 were handed over or ended meanwhile"),
        (Walked(found=900, done=899, in_flight=1), TRY_LATER, "1 are being handed over"),
    ],
)
def test_what_was_not_done_is_told_by_number(
    last: Walked, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    walk = Walk(last)
    assert in_bulk("s", walk, CANCELS, dry_run=False, yes=False) == code
    out, err = capsys.readouterr()
    assert out == f"cancelled {last.done} messages of s\n" and told in err
    assert walk.asked == [True, False]


def test_a_dry_run_only_counts(capsys: pytest.CaptureFixture[str]) -> None:
    walk = Walk(Walked())
    assert in_bulk("s", walk, CANCELS, dry_run=True, yes=False) == OK
    assert capsys.readouterr().out == "900 messages of s are pending there\n" and walk.asked == [True]
