"""Record of a send that is to happen once: the body of its row on the record subject (docs/once.md).

 0  u8    version         1
 1  32    digest          SHA-256 of the request that wanted the send
33  u64   log_id          of the delay server that took record and message together
41  i64   deliver_at_ms   of the message; 0 when the record stands alone
49  i64   sent_at_ms      when the send was asked for, by that server's clock as the client knew it
"""

import struct
from typing import NamedTuple, Self

from delayd.batch.columns import Buffer
from delayd.errors import BadRequest
from delayd.hours import hour_of_ms, hour_start_ms

VERSION = 1
KEPT_MS = 86_400_000  # A record is due so long after the send, and ends then.

_FIELDS = struct.Struct("<B32sQqq")


class SendRecord(NamedTuple):
    """What a record says of its send."""

    digest: bytes
    log_id: int
    deliver_at_ms: int
    sent_at_ms: int

    def encode(self) -> bytes:
        """As the body of its row."""
        return _FIELDS.pack(VERSION, *self)

    def accepted_at_ms(self, hour: int) -> int:
        """The instant of acceptance in the receipt of a message that is filed in an hour: the same with the first
        answer and with each later one, though no log keeps it.
        """
        is_known = hour_of_ms(max(self.deliver_at_ms, self.sent_at_ms)) == hour
        return self.sent_at_ms if is_known else hour_start_ms(hour)

    @classmethod
    def decode(cls, body: Buffer) -> Self:
        """Read the body of a row. BadRequest when this version can't."""
        if len(body) != _FIELDS.size or body[0] != VERSION:
            raise BadRequest("a record of a send is of another version, or none; send under another Idempotency-Key")
        return cls(*_FIELDS.unpack(body)[1:])
