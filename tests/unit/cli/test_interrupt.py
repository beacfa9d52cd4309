"""Ctrl-C while messages are handed on."""

import signal

import pytest

from cli.consume_command import Interrupts

pytestmark = pytest.mark.usefixtures("heard_interrupts")


def test_an_interrupt_waits_for_the_end_of_the_work_and_ends_the_next_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.at_once():
            done.append("pulled")
        signal.raise_signal(signal.SIGINT)
        done.append("acknowledged")
        with interrupts.at_once():
            done.append("pulled again")
    assert done == ["pulled", "acknowledged"]


def test_an_interrupt_ends_a_wait_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.at_once():
        signal.raise_signal(signal.SIGINT)
        done.append("waited on")
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_interrupts_are_ignored_they_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts, interrupts.at_once():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
