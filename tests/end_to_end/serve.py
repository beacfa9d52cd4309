"""Run one server as a process: ``python -m tests.end_to_end.serve ROLE CONFIG``."""

import os
import sys
from importlib import import_module

from delayd.config import load_config
from delayd.net import held_start

BUG_VARIABLE = "DELAYD_TEST_BUG"  # A delay server has the planted bug that its environment names so.
PROGRAMS = {"meta": "meta.program", "delay": "delayd.delay.program", "realtime": "realtime.program"}
# A test puts a damaged file back at once, so a held start need not wait for the end of a slow copy.
HELD_LOOK_S, HELD_RESTED_S = 0.05, 0.5

if __name__ == "__main__":
    role, path = sys.argv[1:]
    held_start.LOOK_S, held_start.RESTED_S = HELD_LOOK_S, HELD_RESTED_S
    if BUG_VARIABLE in os.environ and role == "delay":
        # Imported only here, because it takes the processor as long as a third of a server's start.
        from .torture_planted import plant

        plant(os.environ[BUG_VARIABLE])
    sys.exit(import_module(PROGRAMS[role]).run(load_config(role, path)))
