"""Run all crash workloads and say how much was tried: ``python -m tests.crash``."""

from tests.crash.suite import run_all

if __name__ == "__main__":
    for report in run_all():
        print(report)
