"""Decisions: an operator's decision about a quarantined thing, and the part of the server that carries it out.

Invariant: nothing is done before the decision is durable in the message log.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from delayd.delay.quarantine import Decided, Entry, Kind, Quarantine
from delayd.errors import BadArgument
from delayd.log.control import OperatorWord, encode_known

log = logging.getLogger(__name__)

Act = Callable[[Entry, bool, Decided], None]
"""Tries a quarantined thing again, or gives it up if the second argument is True; the third is called with the
result.
"""


class Decisions:
    """Decisions about entries of the quarantine; ``acts`` has for each kind the function that carries them out."""

    def __init__(
        self, quarantine: Quarantine, log_control: Callable[[bytes, Callable[[], None]], None], acts: Mapping[Kind, Act]
    ) -> None:
        self._quarantine = quarantine
        self._log_control = log_control
        self._acts = acts

    def release(self, id_: str, done: Decided) -> None:
        """Try a thing again; BadArgument when no entry has this id."""
        self._decide("release", self._entry(id_), done)

    def drop(self, id_: str, done: Decided) -> None:
        """Give a thing up; BadArgument when no entry has this id."""
        self._decide("drop", self._entry(id_), done)

    def _entry(self, id_: str) -> Entry:
        entry = self._quarantine.find(id_)
        if entry is None:
            raise BadArgument(f"nothing is quarantined as {id_!r}; see `delayd mend list`")
        return entry

    def _decide(self, action: str, entry: Entry, done: Decided) -> None:
        log.warning("operator action=%s id=%s rows=%d", action, entry.id, entry.rows)
        word = OperatorWord(action, entry.id, entry.rows)
        act = partial(self._acts[entry.kind], entry, action == "drop", done)
        self._log_control(encode_known([word]), act)
