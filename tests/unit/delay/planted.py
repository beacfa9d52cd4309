"""Bugs with which two delay servers own one slot: in those servers, and in the meta that gives slots out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from delayd.delay.keys import owned_slots
from delayd.wire.meta import NO_SLOTS, SlotClaims
from meta.slots import Given, Members, SlotTable
from tests.unit.meta import servers
from tests.worlds.patches import Bugs, Patch


def _judged_without_claims(table: SlotTable, log_id: int, claims: SlotClaims) -> Given:
    return _judge(table, log_id, SlotClaims(NO_SLOTS, np.where(claims.owned, np.uint32(0), claims.versions)))


def _admits_all(members: Members, live: Iterable[int]) -> list[int]:
    return [] if members.in_doubt else [log_id for log_id in live if log_id not in members.durable]


_judge = SlotTable.judge

PLANTED: Bugs = {
    "I4: a server takes a slot again at the version at which it gave it up": [
        Patch(owned_slots, "was_given_since", lambda owners, versions: np.ones_like(versions, np.bool_))
    ],
    "I4: an empty meta gives slots to whoever asks": [Patch(servers, "begin_in_doubt", lambda state: None)],
    "I4: an empty meta is sure as soon as one server has registered": [Patch(Members, "reached", Members.present)],
    "I4: a server may own slots before another owner knows it": [Patch(Members, "newcomers", _admits_all)],
    "I4: an empty meta takes no claims": [Patch(SlotTable, "judge", _judged_without_claims)],
}
