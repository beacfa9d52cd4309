"""Key owners: which delay server judges which keys, as meta said last (docs/keys.md, Owners; rule I4).

Invariant: with one delay server nobody asks: it owns all keys that are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.client.meta import MetaView
from delayd.client.sending.groups import Groups
from delayd.errors import NoDelayServer
from delayd.names import Names, slots_of_names
from delayd.wire.slots import SlotOwners, slot_set

LogIds = NDArray[np.uint64]


class KeyOwners:
    """Used by one producer, on one loop."""

    def __init__(self, meta: MetaView, groups: Groups) -> None:
        self._meta = meta
        self._groups = groups
        self._owners: SlotOwners | None = None

    def known(self, subjects: Sequence[bytes], keys: Sequence[bytes]) -> LogIds | None:
        """The log of the owner of each key; None when meta must be asked first."""
        only = self._groups.only
        if only is not None:
            return np.full(len(keys), only, np.uint64)
        if self._owners is None:
            return None
        log_ids = self._owners.log_ids.take(slots_of_names(Names.of_lists(subjects, keys)))
        return log_ids if log_ids.all() else None

    async def find(self, subjects: Sequence[bytes], keys: Sequence[bytes]) -> LogIds:
        """As `known`, after meta was asked where that is needed.

        Raises:
            NoDelayServer: no delay server is alive that could own a key.
            DelaydError: meta can't be reached or refuses.
        """
        if not len(self._groups):
            await self._groups.find()
        found = self.known(subjects, keys)
        if found is None:
            wanted = slot_set(slots_of_names(Names.of_lists(subjects, keys)))
            self._owners = await self._meta.slot_owners(wanted)
            found = self.known(subjects, keys)
        if found is None:
            raise NoDelayServer("no delay server is alive that could own these keys")
        return found

    def forget(self) -> None:
        """Ask meta again: a server has said that it does not own a key."""
        self._owners = None
        self._meta.refresh_soon()
