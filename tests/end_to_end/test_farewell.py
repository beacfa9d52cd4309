"""What a broadcast consumer left at the delay servers ends with its group."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd.batch.names import retry_subject
from realtime import group_records, server
from tests.waiting import DEADLINE_S, wait_until

NOW = timedelta(0)
LONG = timedelta(seconds=DEADLINE_S)


@pytest.mark.parametrize("restarts", [False, True])
def test_dead_letters_and_retries_of_a_group_of_ones_own_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(server, "AGAIN_S", 0.1)
    with delayd.open(tmp_path) as home, home.producer() as producer, delayd.Admin(home.address) as admin:
        with home.consumer("s", "screens", broadcast=True) as consumer:
            consumer.pull(wait=NOW)
            producer.send_batch("s", [b"1", b"2", b"3"], delay=NOW)
            messages = [message for _ in range(3) for message in consumer.pull(1, wait=LONG)]
            for message in messages[:2]:
                message.reject("can't be shown")
            messages[2].nack(timedelta(hours=1))
            (group,) = admin.groups("s")
            kept_as = retry_subject(group.server.log_id, group.info.group_id)
            wait_until(lambda: producer.cancel_where(kept_as).found == 3)
            assert [each.letters for each in admin.dead_groups("s")] == [2]
        if not restarts:
            monkeypatch.setattr(group_records, "GONE_MS", 100)
            monkeypatch.setattr(group_records, "LOOK_MS", 100)
            _has_ended(producer, admin, kept_as)
    if restarts:
        monkeypatch.setattr(group_records, "GONE_MS", 100)
        monkeypatch.setattr(group_records, "LOOK_MS", 100)
        with delayd.open(tmp_path) as home, home.producer() as producer, delayd.Admin(home.address) as admin:
            _has_ended(producer, admin, kept_as)


def _has_ended(producer: delayd.Producer, admin: delayd.Admin, kept_as: str) -> None:
    wait_until(lambda: not list(admin.groups("s")))
    wait_until(lambda: producer.cancel_where(kept_as).found == 0)
