"""A target that answers nonsense, or numbers at the edges, never ends the delay server (rule E1)."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from delayd.errors import DelaydError, error_by_code
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.requests import RequestType
from tests.fuzz.values import BOUNDARY, NUMBERS
from tests.worlds.delay import World, wanted
from tests.worlds.target import Cable, Call

HOUR_MS = 3_600_000
LIES = 0.6
STEPS = 60
CODES = ["disk_reserve", "batch_malformed", "bad_subject", "stale_session", "slow_down", "no_such_code", "damaged_data"]


class Liar:
    """Changes answers on their way, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lying = True
        self.lies = 0

    def changed(self, kind: int, answer: Frame | DelaydError) -> Frame | DelaydError:
        """An answer as this target gives it."""
        random = self.random
        if not self.lying or isinstance(answer, DelaydError) or random.random() > LIES:
            return answer
        self.lies += 1
        if random.random() < 0.15:
            return error_by_code(random.choice(CODES), "a lie", random.choice([0, 5, 50]), {"rows": b"xx", "path": 5})
        head: Head = dict(answer.head)
        body = bytes(answer.body)
        chance = random.random()
        if kind == RequestType.HELLO and chance < 0.4:
            # A window whose form is right: rows that are of this server, of other hours, or of none.
            rows: list[HeadValue] = []
            body = b""
            for _ in range(random.choice([1, 2, 5])):
                count = random.choice([0, 1, 1, 3])
                row: list[HeadValue] = [
                    random.randrange(3),
                    random.randrange(6),
                    START_MS // HOUR_MS,
                    96,
                    START_MS,
                    START_MS,
                ]
                for at in range(len(row)):
                    if random.random() < 0.15:
                        row[at] = abs(random.choice(NUMBERS))
                rows.append([*row, count])
                body += np.array([random.choice([1, 2, 3, (1 << 64) - 1]) for _ in range(count)], np.uint64).tobytes()
                body += np.array(
                    [random.choice([START_MS, START_MS, -1, (1 << 63) - 1]) for _ in range(count)], np.int64
                ).tobytes()
            head["batches"] = rows
        elif chance < 0.8:
            head[random.choice(list(head))] = random.choice(BOUNDARY)
        elif chance < 0.9:
            head.pop(random.choice(list(head)))
        else:
            body = body[: len(body) // 2 & -8]
        return Frame(answer.type, answer.flags, answer.request_id, head, memoryview(body))


@pytest.mark.parametrize("seed", range(40))
def test_rule_E1_no_answer_of_a_target_ends_a_delay_server(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Liar(seed)
    plain = Cable._answer

    def answer(cable: Cable, call: Call, what: Frame | DelaydError) -> None:
        plain(cable, call, liar.changed(call.asked.kind, what))

    world = World.greeted()
    world.fall_due(3)
    # Only a new life asks what an earlier one handed over.
    world = world.after_crash(PowerLoss.ALL_LOST)
    monkeypatch.setattr(Cable, "_answer", answer)
    for step in range(STEPS):
        if liar.random.random() < 0.5:
            due_ms = world.clock.now_ms() - START_MS + 20
            world.send(wanted(liar.random.randrange(1, 4), due_ms, f"row{step}"))
        world.pass_ms(liar.random.choice([1, 50, 3_000, 31_000]))
    assert liar.lies
    liar.lying = False
    world.pass_ms(60_000)
    # What was recorded can be read by the next life.
    world.after_crash(PowerLoss.ALL_LOST).pass_ms(60_000)


def test_rule_B1_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.greeted(frame_rows_max=1)
    world.fall_due(3)
    cable = world.cable
    while cable.up:
        cable.carry_up()
    cable.target.frame_batches = 1
    cable.target.sync()
    monkeypatch.setattr("delayd.delay.handoff.link.WINDOW_FRAMES_MAX", 2)
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.pass_ms(10_000)
    assert world.target_info()["state"] != "ready"
    monkeypatch.undo()
    world.pass_ms(10_000)
    world.drain()
    world.check_books()
