"""Run one server as a process: ``python -m tests.end_to_end.serve ROLE CONFIG``."""

import os
import sys
from importlib import import_module

from delayd.config import load_config

from .torture_planted import VARIABLE, plant

PROGRAMS = {"meta": "meta.program", "delay": "delayd.delay.program", "realtime": "realtime.program"}

if __name__ == "__main__":
    role, path = sys.argv[1:]
    if VARIABLE in os.environ and role == "delay":
        plant(os.environ[VARIABLE])
    sys.exit(import_module(PROGRAMS[role]).run(load_config(role, path)))
