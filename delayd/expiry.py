"""Expiry: the instant from which on a message is not delivered any more (rule S8).

Invariant: 0 in the column expires_at_ms, or no such column, means never.
"""

import numpy as np

from delayd.batch import Batch, ColumnId
from delayd.errors import BadExpiry, BatchMalformed
from delayd.hours import INSTANT_MS_MAX
from delayd.validate import rows_detail


def check_expiry(batch: Batch, *, again: bool) -> None:
    """Check the column expires_at_ms of a batch that has one.

    ``again``: the messages come again to their group, perhaps due later than they expire; such a message ends as
    EXPIRED when it is due.

    Raises:
        BadExpiry: with the rows that expire before they are due.
        BatchMalformed: a message that comes again expires at no instant.
    """
    expires = batch.int64s(ColumnId.EXPIRES_AT_MS)
    wrong = (expires < 0) | (expires > INSTANT_MS_MAX)
    if again:
        if wrong.any():
            raise BatchMalformed(f"expires_at_ms is {int(expires[wrong][0])}, which is no instant")
        return
    wrong |= (expires != 0) & (expires <= batch.int64s(ColumnId.DELIVER_AT_MS))
    if wrong.any():
        rows = np.flatnonzero(wrong)
        what = f"row {int(rows[0])} expires at {int(expires[rows[0]])} ms, which is no instant after it is due"
        raise BadExpiry(what, rows=rows_detail(rows))
