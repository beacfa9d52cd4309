"""Run one server as a process: ``python -m tests.end_to_end.serve ROLE CONFIG``."""

import os
import sys
from importlib import import_module

from delayd.config import load_config
from delayd.machine import clock
from delayd.net import held_start

BUG_VARIABLE = "DELAYD_TEST_BUG"  # A delay server has the planted bug that its environment names so.
# A server whose environment names it so believes a jump of the clock after this long, and sweeps its hours as often.
BELIEVED_VARIABLE = "DELAYD_TEST_BELIEVED_AFTER_MS"
PROGRAMS = {"meta": "meta.program", "delay": "delayd.delay.program", "realtime": "realtime.server"}
# A test puts a damaged file back at once, so a held start need not wait for the end of a slow copy.
HELD_LOOK_S, HELD_RESTED_S = 0.05, 0.5
NEAR_MS = 2_000  # What is due so soon stays at a server that is drained, and the drain waits for it.


def _hurry_delay_server() -> None:
    """Have this delay server wait less than one in production does."""
    # Imported only here: in the other servers this would be a third of the processor time of a start.
    from delayd.delay import server
    from delayd.delay.ending import drain

    drain.NEAR_MS = NEAR_MS
    if BELIEVED_VARIABLE in os.environ:
        server.SWEEP_S = int(os.environ[BELIEVED_VARIABLE]) // 1_000


if __name__ == "__main__":
    role, path = sys.argv[1:]
    held_start.LOOK_S, held_start.RESTED_S = HELD_LOOK_S, HELD_RESTED_S
    clock.BELIEVED_AFTER_MS = int(os.environ.get(BELIEVED_VARIABLE, clock.BELIEVED_AFTER_MS))
    if role == "delay":
        _hurry_delay_server()
        if BUG_VARIABLE in os.environ:
            from .torture_planted import plant

            plant(os.environ[BUG_VARIABLE])
    sys.exit(import_module(PROGRAMS[role]).run(load_config(role, path)))
