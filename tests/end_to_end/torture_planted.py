"""Bugs that a torture plants in its delay servers, to see that it notices them.

Invariant: a server has a bug only when its environment names one.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from delayd.delay.ending.keyed_sends import KeyedSends
from delayd.delay.ending.message_requests import OpenCommit
from delayd.delay.recovery import Replay
from tests.worlds.patches import Bugs, Patch, changed


def _unclaimed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same decision without a claim: the row is delivered all the same."""

    def decide(self: OpenCommit, *arguments: object) -> object:
        with patch.object(self._ledger, "claim", lambda wanted, claimable: None):
            return function(self, *arguments)

    return decide


PLANTED: Bugs = {
    "C1: a replaced message is delivered, too": [
        Patch(
            KeyedSends,
            "_claim",
            changed(KeyedSends._claim, "if len(chosen):", "if False:"),
        )
    ],
    "C1: a moved message leaves its old row": [Patch(OpenCommit, "move", _unclaimed(OpenCommit.move))],
    "C1: a cancelled message is delivered": [Patch(OpenCommit, "cancel", _unclaimed(OpenCommit.cancel))],
    "C3: a restart forgets which keys were taken": [Patch(Replay, "_take_keys", lambda *_: None)],
}


def plant(name: str) -> None:
    """Plant a bug in this process, for good."""
    for where, attribute, what in PLANTED[name]:
        patch.object(where, attribute, what).start()
