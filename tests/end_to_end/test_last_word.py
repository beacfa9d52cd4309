"""What a server that stops says last on each connection: nothing that is not answered was begun (docs/protocol.md)."""

import threading
from pathlib import Path

from tests.end_to_end.cluster import META
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.raw_client import OUTCOME, SEND, Answer, Raw, batch, frame, listed

BEFORE = 200  # Answers that have come before the stop begins.


class Flood:
    """Sends batches without a pause, one a frame, until the server takes no more; the frame's number is the batch's."""

    def __init__(self, raw: Raw, producer_id: int) -> None:
        self._raw = raw
        self._producer_id = producer_id
        self.sent = 0
        self.answers: dict[int, Answer] = {}
        self.last: Answer | None = None
        self._writer = threading.Thread(target=self._write)
        self._writer.start()

    def _write(self) -> None:
        try:
            while self.last is None:
                self._raw.write(frame(SEND, self.sent + 1, {}, batch(self._producer_id, self.sent + 1)))
                self.sent += 1
        except OSError:
            self.sent += 1  # Some of its bytes may have left.

    def read(self, count: int) -> None:
        """Take so many answers, or those up to the server's last word."""
        while count and self.last is None:
            answer = self._raw.read()
            if answer.request_id:
                self.answers[answer.request_id] = answer
            else:
                self.last = answer
            count -= 1

    def end(self) -> None:
        self._raw.__exit__()
        self._writer.join()


def test_rule_I3_a_server_that_stops_says_last_that_nothing_without_an_answer_was_begun(tmp_path: Path) -> None:
    with (
        ServerProcess("meta", tmp_path, META) as meta,
        ServerProcess("delay", tmp_path, {"meta": meta.address}) as delay,
    ):
        for producer_id in range(1, 6):
            flood = Flood(Raw(delay.port), producer_id)
            flood.read(BEFORE)
            stop = threading.Thread(target=delay.terminate)
            stop.start()
            flood.read(1_000_000)
            flood.end()
            stop.join()
            assert flood.last is not None and flood.last.code == "stopping", flood.last
            results = {number: listed(answer.head, "results")[0] for number, answer in flood.answers.items()}
            took = {number for number, result in results.items() if "base_sequence" in result}
            delay.start()
            with Raw(delay.port) as raw:
                log_id = raw.ask(2, {}).head["log_id"]
                asked = {"log_id": log_id, "producer_id": producer_id}
                # A server remembers the newest batches of a producer.
                for number in range(max(took), flood.sent + 1):
                    state = raw.ask(OUTCOME, {**asked, "producer_batch": number}).head["state"]
                    assert state == ("accepted" if number in took else "unknown"), (producer_id, number)
            assert len(took) >= BEFORE
