"""Quarantine: hours whose dispatch log is damaged, so that nobody knows which of their rows were handed over (rule L5).

Invariant: nothing of such an hour is sent and nothing is written to the damaged file. What targets answer about it goes
to a file beside it, in the same format, and joins the dispatch log when that was restored from a copy.
"""

import logging

import numpy as np

from delayd.disk import Disk
from delayd.hours import hour_name
from delayd.log.dispatch import NewPart, Outcome, OutcomeRows

log = logging.getLogger(__name__)


def quarantine_path(folder: str, hour: int) -> str:
    """Name the file that takes outcomes of an hour while its dispatch log is damaged."""
    return f"{folder}/quarantine/{hour_name(hour)}.log"


def missing_parts(outcomes: OutcomeRows, known: OutcomeRows) -> list[NewPart]:
    """The rows of ``outcomes`` that are not among the known ones, as they were recorded."""
    missing = ~np.isin(outcomes.sequences, known.sequences)
    parts: list[NewPart] = []
    for number in np.unique(outcomes.part_of[missing]).tolist():
        rows = missing & (outcomes.part_of == number)
        part = outcomes.parts[number]
        facts = (int(part[name]) for name in ("claimed_at_ms", "target_log_id", "epoch", "batch_id"))
        where = (int(part[name]) for name in ("target_appended_at_ms", "target_offset", "attempt"))
        outcome = Outcome(int(part["outcome"]))
        parts.append(NewPart(outcomes.sequences[rows], outcomes.deliver_at_ms[rows], outcome, *facts, *where))
    return parts


def forget_quarantine(disk: Disk, folder: str, hour: int) -> None:
    """Remove the file beside a restored dispatch log that holds all of it now."""
    path = quarantine_path(folder, hour)
    disk.remove(path)
    disk.sync_folder(path.rpartition("/")[0])
    log.info("hour_restored hour=%s", hour_name(hour))
