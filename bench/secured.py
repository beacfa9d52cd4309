"""What TLS and tokens cost: batches, singles and steady lateness with both, and without either, in turn.

Run ``python -m bench.secured [--batches 1000000] [--singles 200000] [--rate 5000] [--seconds 8] [--runs 3]``: one JSON
line a side, and one with the quotients of the medians. Singles are those of 1,000 senders; the certificate has a key of
P-256.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import schedule, steady
from bench.figures import Figures, ratio, spreads
from bench.servers import FURTHER, Servers
from tests.certificates import Authority

HEARD_S = 30  # All servers hear of a token with their next registration.
SETTLE_S = 4


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.secured", description="Measure TLS and tokens.")
    for name, default in (("batches", 1_000_000), ("singles", 200_000), ("rate", 5_000), ("seconds", 8), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    cases: dict[str, tuple[str, Callable[[], Figures]]] = {
        "batches": ("messages_s", lambda: schedule.batches(wanted.batches)),
        "singles": ("messages_s", lambda: schedule.singles(wanted.singles)),
        "steady": ("late_ms_p99", lambda: steady.steady(wanted.rate, wanted.seconds, SETTLE_S)),
    }
    for name, (figure, run) in cases.items():
        plain: list[Figures] = []
        secured: list[Figures] = []
        for _ in range(wanted.runs):
            plain.append(run())
            with _secured():
                secured.append(run())
        for side, runs in (("plain", plain), ("secured", secured)):
            print(json.dumps({"bench": "secured", "case": name, "side": side, **spreads(runs)}), flush=True)
        values = [[float(str(run[figure])) for run in runs] for runs in (secured, plain)]
        print(json.dumps({"bench": "secured", "case": name, figure: ratio(*values)}), flush=True)


@contextlib.contextmanager
def _secured() -> Iterator[None]:
    """Servers that are started within the block have certificates and ask for tokens."""
    with tempfile.TemporaryDirectory(prefix="delayd-bench-") as folder:
        tls = Authority(Path(folder)).server()
        options = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca, "--require-token")

        def enter(running: Servers) -> None:
            where = f"delayds://{running.addresses['meta']}?ca={tls.ca}"
            rights = ("--allow", "send:>", "--allow", "consume:>")
            words = ["token", "create", "bench", *rights, "--meta", where, "--data", str(running.data)]
            made = subprocess.run([sys.executable, "-m", "delayd", *words], capture_output=True, text=True, check=True)
            others = [running.data / f"{role}.err" for role in running.addresses if role != "meta"]
            until = time.monotonic() + HEARD_S
            while not all("tokens_taken" in log.read_text() for log in others):
                if time.monotonic() > until:
                    raise RuntimeError("a server has not heard of the token")
                time.sleep(0.05)
            running.meta = where.replace("://", f"://{made.stdout.strip()}@")

        reset = FURTHER.set((options, enter))
        try:
            yield
        finally:
            FURTHER.reset(reset)


if __name__ == "__main__":
    main()
