"""Key owners: which delay server judges which keys, as meta said last (docs/keys.md, Owners; rule I4).

Invariant: with one delay server nobody asks: it owns all keys that are used. An owner that was found is a server that
meta knows, and after a try that did not reach it meta is asked again: an operator may have given its keys to another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.client.meta import MetaView
from delayd.client.sending.groups import Groups
from delayd.errors import DelaydError, NoDelayServer, NotOwner, OwnerUnknown, RequestFailed, ServerUnavailable
from delayd.names import Names, slots_of_names
from delayd.wire.slots import OWNER_UNKNOWN, SlotOwners, slot_set

LogIds = NDArray[np.uint64]

OWNER_LOST = (NotOwner, ServerUnavailable, RequestFailed)
"""After these errors the keys may have another owner."""


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
        return None if any(self._groups.known(log_id) is None for log_id in np.unique(log_ids).tolist()) else log_ids

    async def find(self, subjects: Sequence[bytes], keys: Sequence[bytes]) -> LogIds:
        """As `known`, after meta was asked where that is needed.

        Raises:
            NoDelayServer: no delay server is alive that could own a key.
            OwnerUnknown: meta began anew, and gives the keys to nobody before it knows their owner.
            ServerUnavailable: meta does not know the owner of a key.
            DelaydError: meta can't be reached or refuses.
        """
        if not len(self._groups):
            await self._groups.find()
        found = self.known(subjects, keys)
        if found is not None:
            return found
        slots = slots_of_names(Names.of_lists(subjects, keys))
        self._owners = await self._meta.slot_owners(slot_set(slots))
        log_ids = self._owners.log_ids.take(slots)
        if self._owners.withheld.take(slots).any():
            raise OwnerUnknown(OWNER_UNKNOWN)
        if not log_ids.all():
            raise NoDelayServer("no delay server is alive that could own these keys")
        for log_id in np.unique(log_ids).tolist():
            await self._need_known(log_id)
        return log_ids

    def heard(self, error: DelaydError) -> None:
        """Hear how a try with a key failed; after some errors meta is asked for the owner again."""
        if isinstance(error, OWNER_LOST):
            self._owners = None
            self._meta.refresh_soon()

    async def _need_known(self, log_id: int) -> None:
        if self._groups.known(log_id) is None:
            await self._meta.find_delay_servers()
        if self._groups.known(log_id) is None:
            what = f"the delay server {log_id:016x} owns these keys, and meta does not know it"
            raise ServerUnavailable(f"{what}; start it, or move its slots with `delayd slots`")
