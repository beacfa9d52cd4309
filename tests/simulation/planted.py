"""Bugs to plant in the servers, to see that the simulation catches them, and after how many seeds.

Invariant: each takes one rule out and leaves all else as it is; nothing stays planted behind `planted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

from tests.simulation.planted_delay import IN_DELAY
from tests.simulation.planted_expiry import IN_EXPIRY
from tests.simulation.planted_keys import IN_KEYS
from tests.simulation.planted_once import IN_ONCE
from tests.simulation.planted_realtime import IN_REALTIME
from tests.simulation.run import STEPS, Run
from tests.worlds.patches import Bugs

PLANTED: Bugs = {**IN_DELAY, **IN_REALTIME, **IN_KEYS, **IN_EXPIRY, **IN_ONCE}


MANY_CALLERS = ("callers_meet", "send_keyed", "move_by_key")
# Kinds of steps that happen more often in runs with a bug that only they can show.
FAVOURED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(IN_KEYS, MANY_CALLERS),
    **dict.fromkeys(IN_ONCE, ("send_once", "answer_is_lost", "callers_meet")),
    "S2: rows of sealed hours are not looked up": ("hour_passes", "sweep", "get"),
    "B2: a load that is due waits behind checkpoints": ("flood_over_an_edge",),
    "E1: rows of any width are taken": ("hostile_requests_at_realtime",),
    "E1: a target's answer is taken as it comes": ("target_lies",),
    "E2: headers that nobody can read are taken": ("poisoned_send",),
    "H8: strangers register at meta": ("garbage_at_meta",),
    "H8: strangers move routes at meta": ("garbage_at_meta",),
    "H8: strangers have servers forgotten at meta": ("garbage_at_meta",),
    "H8: hours whose dispatch logs are damaged are not told": ("delay_dispatch_gone", "delay_dispatch_changed"),
    "H7: a refused target is never asked again": ("swapped_addresses", "target_lies"),
    "L8: outcomes that a full disk kept back are never tried again": ("fill_delay_disk",),
    "H5: a first row does not wait for its note": ("first_rows",),
    "C1: T does not say that it may have lost what consumers have": ("lost_offers",),
    "C1: T forgets at a clean stop that it may have lost what consumers have": ("lost_offers",),
    "C1: what consumers may have had of a target that lost it is claimed": ("lost_offers",),
    "E2: one bad batch spoils all of a send": ("poisoned_send",),
    "B1: what a connection waits for stays when it has gone": ("hostile_requests_at_realtime",),
    "B1: sends are taken while more than may waits for the disk": ("queue_is_full",),
    "I5: sequences go on where a restored server stopped": ("restored_server_is_accepted",),
    "H5: what an earlier life may have sent to a lost target goes elsewhere": ("target_is_lost",),
    "E1: the checksum of a batch is not looked at": ("garbage_at_delay",),
    "L5: a dispatch log that is gone holds nothing": ("delay_dispatch_gone",),
    "L5: rows that a given up dispatch log may have named are sent": ("dispatch_log_is_given_up",),
    "H8: what a given up dispatch log may have named is not told": ("dispatch_log_is_given_up",),
    "L10: what an operator gave up is offered again by the next start": ("words_meet_at_realtime",),
    "L1: recovery does not sync what it finds": (
        "realtime_dies_twice",
        "realtime_sync_fails_then_power",
        "realtime_down_or_up",
    ),
    "L1: an error of the write back is not looked at": (
        "delay_sync_fails_then_power",
        "realtime_sync_fails_then_power",
    ),
    "L9: a consume log that is damaged is not rebuilt": ("consume_reads_fail",),
    "L9: damage of a schedule log is not named": ("delay_file_changed",),
    "L10: what could not be read is never tried again": ("realtime_reads_fail",),
    "L10: an hour that was set aside is never tried again": ("delay_file_changed", "delay_reads_fail"),
    "P6: segments go though rows refer to them": ("long_outage",),
    "P7: a checkpoint counts rows while they are loaded": ("load_beside_a_checkpoint",),
    "P7: rows that stood beside a schedule log are lost when the log is whole again": (
        "delay_file_changed",
        "delay_reads_fail",
    ),
    "L5: what a start reads wrongly once counts as torn": ("delay_start_misreads", "realtime_start_misreads"),
    "S1: an hour is sealed by counts": ("target_lies", "hour_passes", "sweep"),
    "H2: T's retention passes batches that are in doubt": ("retain_realtime", "old_messages"),
    "S1: what stood beside a dispatch log is forgotten when the log is whole again": (
        "delay_dispatch_changed",
        "delay_reads_fail",
    ),
    "Q4: what no handler was given counts as an attempt": ("fetched_is_given_back",),
    "Q4: nobody hears that others have empty hands": ("slow_beside_idle",),
    "Q4: the end of a pull leaves it waiting": ("pull_is_interrupted",),
    "Q5: an entry holds messages of both sides of next": ("realtime_reads_fail", "realtime_bit_flips"),
    "T4: an unconfirmed clock stamps what is appended": ("clock_is_wrong_at_boot",),
    "T4: hours are sealed and removed by an unconfirmed clock": ("clock_is_wrong_at_boot",),
    "H8: nobody notices that a delay server was restored": ("delay_is_restored",),
    "H8: nobody notices a copy of a delay server": ("delay_copy_runs_beside",),
    "T1: rows leave by a clock that is in doubt after a boot": ("clock_is_wrong_at_boot",),
    "T1: a jump of the clock is believed at once": ("step_wall",),
}
# The first seeds that have caught a bug, where seeds 0 and 1 do not: they are tried before all others. They change with
# each change of the servers. With several of them such a change seldom costs the test a search through hundreds.
CAUGHT_BY: dict[str, tuple[int, ...]] = {
    "C1: T does not say that it may have lost what consumers have": (8,),
    "C1: T forgets at a clean stop that it may have lost what consumers have": (8, 66),
    "C1: what consumers may have had of a target that lost it is claimed": (8,),
    "L1: a server goes on after a failed fsync": (6, 9, 13),
    "L1: recovery does not sync what it finds": (12, 70),
    "L1: an error of the write back is not looked at": (72,),
    "E1: a target's answer is taken as it comes": (232,),
    "L3: a failed write is not cut back": (4, 5, 24),
    "P5: appended_at goes back with the clock": (6, 9, 13),
    "P6: segments go though rows refer to them": (42, 44, 72),
    "I1: a batch that is under way is taken again": (10, 17, 18),
    "S1: an hour is sealed by counts": (34, 47, 57),
    "S1: an hour is sealed on outcomes that are not durable": (6, 29, 36),
    "H4: rows that never arrived are not sent again": (17, 21, 25),
    "H5: a first row does not wait for its note": (8, 18, 21),
    "T1: rows leave by a clock that is in doubt after a boot": (2, 3, 4),
    "B2: a load that is due waits behind checkpoints": (2, 3, 7),
    "L5: what a start reads wrongly once counts as torn": (18, 30, 38),
    "S1: what stood beside a dispatch log is forgotten when the log is whole again": (54,),
    "H8: what a given up dispatch log may have named is not told": (7, 13, 15),
    "L10: an hour that was set aside is never tried again": (3, 6, 15),
    "P7: a checkpoint counts rows while they are loaded": (3, 5, 8),
    "T4: hours are sealed and removed by an unconfirmed clock": (2, 5, 6),
    "H7: a refused target is never asked again": (29, 38, 48),
    "H8: strangers have servers forgotten at meta": (14, 15, 16),
    "H8: hours whose dispatch logs are damaged are not told": (23, 79),
    "L10: what could not be read is never tried again": (6, 7, 13),
    "H3: T takes frames of any session": (12, 15, 21),
    "H3: T answers a hello without the queued frames of an older session": (68,),
    "H3: T hears a hello that comes late": (5, 20, 34),
    "H2: T's checkpoint passes batches that are in doubt": (8, 18, 19),
    "H2: T's retention passes batches that are in doubt": (5, 9, 41),
    "Q1: T's checkpoint does not wait for the pull log": (6, 8, 16),
    "Q1: acknowledgements of lost pulls count": (13, 25, 30),
    "Q4: the end of a pull leaves it waiting": (3, 4, 7),
    "Q5: an entry holds messages of both sides of next": (7, 23, 24),
    "E1: rows of any width are taken": (222, 286, 304),
    "L10: what an operator gave up is offered again by the next start": (19, 30, 84),
    "B1: what a connection waits for stays when it has gone": (60, 75, 115),
    "C2: a checkpoint passes a decision and does not name its rows": (17, 19, 22),
    "C3: a look-up is not compared with what came since": (6, 7, 9),
    "C3: a message that moves leaves its key": (12, 13, 14),
    "I1: a start forgets the verdicts of a batch": (6, 15, 19),
}
BROKEN = (TypeError, AttributeError, NameError, ImportError)  # A planted bug that does not fit the code is none.


class Catch(NamedTuple):
    """How a bug was caught: seeds that it took, and what broke."""

    seeds: int
    what: str


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug in the servers."""
    with ExitStack() as stack:
        for where, attribute, what in PLANTED[name]:
            stack.enter_context(patch.object(where, attribute, what))
        yield


def is_caught_by_known(name: str) -> bool:
    """Whether a run with a seed that caught a planted bug before goes wrong."""
    return any(seeds_to_catch(name, 1, seed) is not None for seed in CAUGHT_BY.get(name, ()))


def seeds_to_catch(name: str, seeds_max: int, first: int = 0, steps: int = STEPS) -> Catch | None:
    """How many seeds it takes until a run with a planted bug goes wrong, and how; None when none does."""
    with planted(name):
        for count in range(1, seeds_max + 1):
            try:
                favoured = FAVOURED.get(name, ())
                kinds = {"keyed": name in IN_KEYS or name in IN_ONCE, "expiring": name in IN_EXPIRY}
                Run(first + count - 1, steps, favoured, **kinds, once=name in IN_ONCE).run()
            except AssertionError as error:
                if isinstance(error.__cause__, BROKEN):
                    raise
                return Catch(count, str(error).partition("\n")[0])
    return None
