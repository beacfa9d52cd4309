"""What ``delayd send`` refuses before anything is sent."""

from io import BytesIO

import numpy as np
import pytest

from cli.send import _say_what_is_kept, line_batches
from delayd import BatchFailed, BatchReceipt
from delayd.client.sending.receipts import Failure
from delayd.errors import MessageTooLarge, OutcomeUnknown, SendHandle

from .runner import Ran, run

_NOWHERE = "127.0.0.1:1"  # Nobody listens there, and nothing here gets so far as to ask.


def _send(*arguments: str, stdin: bytes = b"") -> Ran:
    return run("send", *arguments, "--meta", _NOWHERE, "--timeout", "1ms", stdin=stdin)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["s", "b"], "say once when it is due: --in DURATION or --at INSTANT"),
        (["s", "b", "--in", "1s", "--at", "now"], "say once when it is due"),
        (["s", "--in", "1s"], "there is no body: give BODY, --file FILE or --lines"),
        (["s", "b", "--in", "1s", "--file", "-"], "give the body once"),
        (["s", "b", "--in", "1s", "--lines"], "give the body once"),
        (["s", "b", "--in", "-1s"], "'-1s' is no duration; write one such as 250ms"),
        (["s", "b", "--in", "30"], "'30' is no duration"),
        (["s", "b", "--at", "2027-01-01T09:00:00"], "does not say its offset from UTC; write 2027-01-01T09:00Z"),
        (["s", "b", "--in", "900d"], "horizon"),
        (["s", "b", "--at", "2099-01-01T00:00:00Z"], "horizon"),
        (["s", "b", "--in", "1s", "--ttl", "1m", "--expires-at", "2027-01-01T00:00:00Z"], "say once when it expires"),
        (["s", "b", "--in", "1s", "--ttl", "0s"], "must be more than 0 and at most 732 days"),
        (["s", "b", "--in", "1s", "--ttl", "soon"], "'soon' is no duration"),
        (["s", "b", "--at", "2026-01-01T00:00:00Z", "--expires-at", "2026-01-01T00:00:00Z"], "can't expire at"),
        (["bad subject", "b", "--in", "1s"], "is not 1 to 255 characters of [A-Za-z0-9._%/-]"),
        (["", "b", "--in", "1s"], "is not 1 to 255 characters"),
        (["s", "b", "--in", "1s", "--header", "novalue"], "--header 'novalue' is no NAME=VALUE"),
        (["s", "--in", "1s", "--file", "/no/such/file"], "File '/no/such/file' does not exist"),
        (["s", "--in", "1s", "--lines", "--file", "/"], "File '/' is a directory"),
        (["s", "b", "--in", "1s", "--header", f"a={'x' * 40_000}"], "are over the limit of 32768"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: list[str], sentence: str) -> None:
    ran = _send(*arguments)
    assert ran.code == 2, ran.err
    assert ran.err.startswith("delayd: ")
    assert sentence in ran.err
    assert ran.err.count("\n") == 1


def test_what_has_no_end_is_refused_before_it_fills_the_memory() -> None:
    for options in (("--file", "/dev/zero"), ("--file", "/dev/zero", "--lines")):
        ran = _send("s", "--in", "1s", *options)
        assert ran.code == 2
        assert " is over the limit of 4194304; send a reference to it instead\n" in ran.err


def test_a_line_of_the_limit_is_taken_and_one_over_it_is_named() -> None:
    longest = b"x" * (4 << 20)
    assert list(line_batches(BytesIO(b"a\n" + longest + b"\n" + longest))) == [[b"a", longest, longest]]
    batches = line_batches(BytesIO(b"a\n" + longest + b"\n" + longest + b"y\n"))
    with pytest.raises(MessageTooLarge, match="line 3 is over the limit"):
        list(batches)


def test_a_batch_of_which_nobody_knows_is_told_as_such(capfd: pytest.CaptureFixture[str]) -> None:
    _say_what_is_kept(20_000, OutcomeUnknown("x", SendHandle(1, 2, 3)))
    failures = [Failure(np.arange(7), OutcomeUnknown("x", SendHandle(1, 2, 3)))]
    _say_what_is_kept(0, BatchFailed.of(BatchReceipt(()), failures))
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith(
        "the first 20,000 lines are kept, and 0 of the batch that begins at line 20,001, all of it may be"
    )
    assert second.endswith("and 0 of the batch that begins at line 1, 7 more of it may be")


def test_when_no_server_takes_it_the_exit_code_says_try_later() -> None:
    ran = _send("s", "b", "--in", "1s")
    assert ran.code == 4
    assert ran.out == ""
    # After a second of waiting it says for whom.
    (told,) = [line for line in ran.err.splitlines() if not line.startswith("delayd: waiting for ")]
    assert told.startswith("delayd: nothing was sent: ")


def test_of_lines_that_are_not_taken_it_is_said_that_none_is_kept() -> None:
    ran = _send("s", "--in", "1s", "--lines", stdin=b"a\nb\n")
    assert ran.code == 4
    assert "delayd: the first 0 lines are kept, and 0 of the batch that begins at line 1\ndelayd: " in ran.err
