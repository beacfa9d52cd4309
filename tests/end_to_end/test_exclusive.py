"""An exclusive consumer that is stopped while it leads is replaced and fenced; one that works for longer than its
window goes on leading.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from delayd import Consumer, Producer
from tests.end_to_end.up_process import up
from tests.waiting import DEADLINE_S

LONG = timedelta(seconds=DEADLINE_S)
LEADS = """
import sys
from datetime import timedelta
import delayd

with delayd.Consumer({meta!r}, "books", "g", exclusive=timedelta(seconds=2)) as consumer:
    message, = consumer.pull(1, wait=timedelta(seconds=60))
    print("leads", message.body.decode(), flush=True)
    sys.stdin.readline()
    try:
        message.ack()
    except delayd.StaleHandle as error:
        print(error.reason, flush=True)
    else:
        print("acknowledged", flush=True)
"""


def test_a_stopped_lead_is_replaced_and_fenced(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0") as running, Producer(running.meta) as producer:
        producer.send("books", b"november", delay=timedelta(0))
        command = [sys.executable, "-c", LEADS.format(meta=running.meta)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lead:
            assert lead.stdin is not None and lead.stdout is not None
            try:
                assert lead.stdout.readline() == "leads november\n"
                os.kill(lead.pid, signal.SIGSTOP)
                # Its own window is long: it leads on when this machine stands still for a moment.
                with Consumer(running.meta, "books", "g", exclusive=LONG) as consumer:
                    (message,) = consumer.pull(1, wait=LONG)
                    assert (message.body, message.attempt) == (b"november", 2)
                    os.kill(lead.pid, signal.SIGCONT)
                    lead.stdin.write("go on\n")
                    lead.stdin.flush()
                    assert lead.stdout.readline() == "fenced\n"
                    message.ack()
            finally:
                os.kill(lead.pid, signal.SIGCONT)
                lead.stdin.close()


def test_a_lead_that_works_for_longer_than_its_window_keeps_the_lead(tmp_path: Path) -> None:
    window = timedelta(seconds=3)
    with up(tmp_path, "--port", "0") as running, Producer(running.meta) as producer:
        producer.send("books", b"november", delay=timedelta(0))
        with (
            Consumer(running.meta, "books", "g", exclusive=window) as lead,
            Consumer(running.meta, "books", "g", exclusive=window) as other,
        ):
            (message,) = lead.pull(1, wait=timedelta(seconds=DEADLINE_S))
            assert len(other.pull(1, wait=2.5 * window)) == 0
            message.ack()
