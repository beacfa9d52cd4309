"""Cancel on real servers: what is answered CANCELLED never comes, everything else comes once, and the audit agrees."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from delayd.client.producer import Producer
from delayd.client.pulling.consumer import Consumer
from delayd.outcome import MessageState
from delayd.reading.books import AuditReport, audit_directory
from delayd.wire.asked import AnswerRows, Asked, CancelAnswer, decode_answers, encode_asked
from delayd.wire.requests import RequestType
from tests.end_to_end.raw_client import Raw
from tests.end_to_end.up_process import Up, up
from tests.waiting import holds_in_time, wait_until

ROWS = 3_000
DEADLINE_S = 60.0


def ask(running: Up, kind: RequestType, log_id: int, asked: Asked) -> AnswerRows:
    with Raw(running.ready("delay")[-1].endpoint.port) as connection:
        answer = connection.ask(kind, {"log_id": log_id}, encode_asked(asked))
        assert answer.code is None, answer
        return decode_answers(answer.body)


class Begun(NamedTuple):
    """Servers with messages of which a third was cancelled before they were due."""

    running: Up
    log_id: int
    receipts: list[Asked]
    wanted: list[Asked]
    answers: NDArray[np.uint8]


def cancel_a_third(stack: ExitStack, folder: Path, within: timedelta) -> Begun:
    """Send messages, near ones and far ones, and cancel a third; AssertionError when that took longer."""
    folder.mkdir()
    running = stack.enter_context(up(folder, "--port", "0")).until_ready()
    due_ms = time.time_ns() // 1_000_000 + within // timedelta(milliseconds=1) + np.arange(ROWS) // 3
    far_ms = due_ms + 50 * 3_600_000
    with Producer(running.meta) as producer:
        near = producer.send_batch("orders", [b"%d" % row for row in range(ROWS)], due_ms)
        far = producer.send_batch("orders", [b"far %d" % row for row in range(ROWS)], far_ms)
    log_id = int(near.log_ids[0])
    receipts = [Asked(each.sequences, each.deliver_at_ms, each.accepted_at_ms) for each in (near, far)]
    wanted = [asked.take(range(0, ROWS, 3)) for asked in receipts]
    answers = [ask(running, RequestType.CANCEL, log_id, asked)["answer"] for asked in wanted]
    assert time.time_ns() // 1_000_000 < due_ms[0]
    return Begun(running, log_id, receipts, wanted, np.concatenate(answers))


@pytest.mark.parametrize("killed", [False, True])
def test_rule_C1_cancelled_messages_never_come_and_all_others_come_once(tmp_path: Path, killed: bool) -> None:
    begun: list[Begun] = []
    with ExitStack() as stack:
        # Messages leave before they are cancelled when the machine stands still for seconds just then.
        holds_in_time(
            timedelta(seconds=1.5),
            lambda within: begun.append(cancel_a_third(stack, tmp_path / str(within), within)),
        )
        running, log_id, receipts, wanted, answers = begun[-1]
        meta = running.meta
        assert set(answers.tolist()) == {CancelAnswer.CANCELLED}
        if killed:
            ready = len(running.ready("delay"))
            running.kill("delay")
            running.until(lambda: len(running.ready("delay")) > ready, "the delay server is back")
        for asked in wanted:
            states = ask(running, RequestType.GET, log_id, asked)
            assert set(states["state"].tolist()) == {MessageState.CANCELLED}
        received: list[int] = []
        with Consumer(meta, "orders", "billing", lease=timedelta(seconds=30)) as consumer:
            deadline = time.monotonic() + DEADLINE_S
            while len(received) < ROWS - len(wanted[0].sequences) and time.monotonic() < deadline:
                batch = consumer.pull(wait=timedelta(seconds=1))
                received += map(int, batch.bodies)
                batch.ack(wait=False)
            batch = consumer.pull(wait=timedelta(seconds=1))
            assert not batch.bodies, "a cancelled message, or one that came before"
            consumer.flush()
        assert sorted(received) == [row for row in range(ROWS) if row % 3]
        later = ask(running, RequestType.CANCEL, log_id, receipts[0])
        assert later["answer"].tolist() == [
            CancelAnswer.ALREADY_DISPATCHED if row % 3 else CancelAnswer.CANCELLED for row in range(ROWS)
        ]
        reports: list[AuditReport] = []

        def told() -> bool:
            reports.append(audit_directory(str(running.data), now_ms=time.time_ns() // 1_000_000))
            assert reports[-1].balanced, reports[-1].findings
            return sum(hour.cancelled for hour in reports[-1].hours) == 2 * len(wanted[0].sequences)

        wait_until(told, lambda: reports[-1])
