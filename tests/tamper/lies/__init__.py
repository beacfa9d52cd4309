"""The lies, by the noun that they are told of: each changes an honest directory and makes all checksums valid again."""

from tests.tamper.lies.checkpoint import checkpoint_lies
from tests.tamper.lies.consumers import consumer_lies
from tests.tamper.lies.files import file_lies
from tests.tamper.lies.lie import Lie
from tests.tamper.lies.message_log import message_log_lies
from tests.tamper.lies.outcomes import outcome_lies
from tests.tamper.lies.pulls import pull_lies
from tests.tamper.lies.removed import removed_lies
from tests.tamper.lies.schedule import schedule_lies
from tests.tamper.lies.seals import seal_lies
from tests.tamper.lies.targets import target_lies
from tests.tamper.lies.untold import undetectable

__all__ = ["KINDS", "Lie", "all_lies", "undetectable"]

KINDS = {
    "checkpoint": checkpoint_lies,
    "schedule": schedule_lies,
    "outcomes": outcome_lies,
    "targets": target_lies,
    "message_log": message_log_lies,
    "seals": seal_lies,
    "consumers": consumer_lies,
    "pulls": pull_lies,
    "removed": removed_lies,
    "files": file_lies,
}


def all_lies() -> list[Lie]:
    """Every lie that must be found."""
    return [
        Lie(name, tell, frozenset(names.split()), kind) for kind, lies in KINDS.items() for name, tell, names in lies()
    ]
