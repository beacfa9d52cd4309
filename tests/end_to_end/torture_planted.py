"""Bugs that a torture plants in its delay servers, to see that it notices them.

Invariant: a server has a bug only when its environment names one.
"""

from unittest.mock import patch

from delayd.delay.ending.keyed_sends import KeyedSends
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.recovery import _Replay
from tests.worlds.patches import Bugs, Patch, changed

PLANTED: Bugs = {
    "C1: a replaced message is delivered, too": [
        Patch(
            KeyedSends,
            "_claim",
            changed(KeyedSends._claim, "if len(chosen):", "if False:"),
        )
    ],
    "C1: a moved message leaves its old row": [
        Patch(
            MessageRequests,
            "_move",
            changed(
                MessageRequests._move,
                "self._ledger.claim(wanted.take(chosen), claimable.take(chosen))",
                "pass",
            ),
        )
    ],
    "C1: a cancelled message is delivered": [
        Patch(
            MessageRequests,
            "_decide_one",
            changed(
                MessageRequests._decide_one,
                "self._ledger.claim(request.wanted.take(chosen), claimable.take(chosen))",
                "pass",
            ),
        )
    ],
    "C3: a restart forgets which keys were taken": [Patch(_Replay, "_take_keys", lambda *_: None)],
}


def plant(name: str) -> None:
    """Plant a bug in this process, for good."""
    for where, attribute, what in PLANTED[name]:
        patch.object(where, attribute, what).start()
