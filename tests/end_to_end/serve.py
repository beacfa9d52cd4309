"""Run one server as a process: ``python -m tests.end_to_end.serve ROLE CONFIG``."""

import sys
from importlib import import_module

from delayd.config import load_config

PROGRAMS = {"meta": "meta.program", "delay": "delayd.delay.program", "realtime": "realtime.program"}

if __name__ == "__main__":
    role, path = sys.argv[1:]
    sys.exit(import_module(PROGRAMS[role]).run(load_config(role, path)))
