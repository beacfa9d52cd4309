"""Run all crash workloads and say how much was tried: ``python -m tests.crash``."""

import argparse

from tests.crash.suite import run_all

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.crash",
        description="Die at each disk operation of every workload, recover, and check what must hold; takes minutes.",
        epilog="Example: python -m tests.crash",
    ).parse_args()
    for report in run_all():
        print(report, flush=True)
