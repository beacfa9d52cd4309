"""``python -m bench.proof``: CPU of proofs in an hour of a million messages.

It writes the directory of one sealed hour with the formats' own encoders, makes its tree, proves one message and checks
the proof; imports and starts do not count. Each figure is the least of some runs, as one JSON line.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable

from bench import machine
from bench.directory import FIRST_HOUR, HOUR_MS, DirectoryWriter, Shape
from delayd.machine.disk import RealDisk
from delayd.reading.proofs import HourLog, check_message, sign_head
from delayd.reading.tlog import LogProof, Signer, parse_proof

SIGNER = Signer("bench", bytes(32))
RUNS = 5


def main() -> int:
    """Write, prove, check."""
    parser = argparse.ArgumentParser(prog="python -m bench.proof", description="Time proofs of a written hour.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    messages: int = parser.parse_args().messages
    with tempfile.TemporaryDirectory() as data:
        DirectoryWriter(data, Shape(messages)).write()
        log = HourLog(RealDisk(), data)
        line = {"messages": messages, "tree_cpu_ms": _cpu_ms(log.make_trees, 1)}
        sign_head(log, SIGNER)

        def prove() -> LogProof:
            return HourLog(RealDisk(), data).prove(messages * 2 // 3, FIRST_HOUR * HOUR_MS)

        text = prove().text
        line["prove_cpu_ms"] = _cpu_ms(prove, RUNS)
        line["check_cpu_ms"] = _cpu_ms(lambda: check_message(parse_proof(text), SIGNER.key), RUNS)
        line["characters"] = len(text)
    print(json.dumps({"bench": "proof", **line, **machine.facts()}))
    return 0


def _cpu_ms(work: Callable[[], object], runs: int) -> float:
    """The least CPU time of some runs."""
    found = []
    for _ in range(runs):
        began = time.process_time()
        work()
        found.append(1000 * (time.process_time() - began))
    return round(min(found), 3)


if __name__ == "__main__":
    raise SystemExit(main())
