"""A service that holds messages until they are due and delivers each of them once, on time.

This module names everything that a program uses, every error too. Clients and readers are loaded on first use, so a
server never pays for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from delayd import errors
from delayd.errors import *  # noqa: F403 - each is named in errors.__all__
from delayd.errors import LogId

__version__ = "0.1.0"

# Each name that delayd offers, and the module that it lives in. Type checkers read the same names from imports
# under TYPE_CHECKING.
_HOMES: dict[str, str] = {
    "Admin": "delayd.client.admin",
    "AsyncAdmin": "delayd.client.admin",
    "AsyncConsumer": "delayd.client.pulling.consumer",
    "AsyncMessage": "delayd.client.pulling.consumer",
    "AsyncMessageBatch": "delayd.client.pulling.consumer",
    "Backoff": "delayd.client.pulling.acks",
    "AsyncProducer": "delayd.client.producer",
    "BatchFailed": "delayd.client.sending.receipts",
    "BatchReceipt": "delayd.client.sending.receipts",
    "CancelAnswer": "delayd.wire.asked",
    "Consumer": "delayd.client.pulling.consumer",
    "Data": "delayd.reading.data",
    "Embedded": "delayd.embedded",
    "Message": "delayd.client.pulling.consumer",
    "MessageBatch": "delayd.client.pulling.consumer",
    "MessageInfo": "delayd.client.asking.messages",
    "MessageState": "delayd.outcome",
    "PendingMessage": "delayd.client.asking.walking",
    "PendingPage": "delayd.client.asking.walking",
    "Producer": "delayd.client.producer",
    "Receipt": "delayd.client.sending.receipts",
    "Recurrence": "delayd.recurrence.recurrence",
    "RecurringInfo": "delayd.client.asking.recurring",
    "Reject": "delayd.worker.verdicts",
    "RescheduleAnswer": "delayd.wire.asked",
    "Rescheduled": "delayd.client.sending.receipts",
    "RescheduledBatch": "delayd.client.sending.receipts",
    "Retry": "delayd.worker.verdicts",
    "SendFuture": "delayd.client.sending.receipts",
    "SendVerdict": "delayd.client.sending.receipts",
    "Walked": "delayd.client.asking.walking",
    "Worker": "delayd.worker.worker",
    "open": "delayd.embedded",
    "open_data": "delayd.reading.data",
    "traceparent": "delayd.batch.labels",
}

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncMessage",
    "AsyncMessageBatch",
    "AsyncProducer",
    "Backoff",
    "BatchFailed",
    "BatchReceipt",
    "CancelAnswer",
    "Consumer",
    "Data",
    "Embedded",
    "LogId",
    "Message",
    "MessageBatch",
    "MessageInfo",
    "MessageState",
    "PendingMessage",
    "PendingPage",
    "Producer",
    "Receipt",
    "Recurrence",
    "RecurringInfo",
    "Reject",
    "RescheduleAnswer",
    "Rescheduled",
    "RescheduledBatch",
    "Retry",
    "SendFuture",
    "SendVerdict",
    "Walked",
    "Worker",
    "__version__",
    "errors",
    "open",
    "open_data",
    "traceparent",
]
__all__ += errors.__all__

if TYPE_CHECKING:
    from delayd.batch.labels import traceparent as traceparent
    from delayd.client.admin import Admin as Admin
    from delayd.client.admin import AsyncAdmin as AsyncAdmin
    from delayd.client.asking.messages import MessageInfo as MessageInfo
    from delayd.client.asking.recurring import RecurringInfo as RecurringInfo
    from delayd.client.asking.walking import PendingMessage as PendingMessage
    from delayd.client.asking.walking import PendingPage as PendingPage
    from delayd.client.asking.walking import Walked as Walked
    from delayd.client.producer import AsyncProducer as AsyncProducer
    from delayd.client.producer import Producer as Producer
    from delayd.client.pulling.acks import Backoff as Backoff
    from delayd.client.pulling.consumer import AsyncConsumer as AsyncConsumer
    from delayd.client.pulling.consumer import AsyncMessage as AsyncMessage
    from delayd.client.pulling.consumer import AsyncMessageBatch as AsyncMessageBatch
    from delayd.client.pulling.consumer import Consumer as Consumer
    from delayd.client.pulling.consumer import Message as Message
    from delayd.client.pulling.consumer import MessageBatch as MessageBatch
    from delayd.client.sending.receipts import BatchFailed as BatchFailed
    from delayd.client.sending.receipts import BatchReceipt as BatchReceipt
    from delayd.client.sending.receipts import Receipt as Receipt
    from delayd.client.sending.receipts import Rescheduled as Rescheduled
    from delayd.client.sending.receipts import RescheduledBatch as RescheduledBatch
    from delayd.client.sending.receipts import SendFuture as SendFuture
    from delayd.client.sending.receipts import SendVerdict as SendVerdict
    from delayd.embedded import Embedded as Embedded
    from delayd.embedded import open as open
    from delayd.outcome import MessageState as MessageState
    from delayd.reading.data import Data as Data
    from delayd.reading.data import open_data as open_data
    from delayd.recurrence.recurrence import Recurrence as Recurrence
    from delayd.wire.asked import CancelAnswer as CancelAnswer
    from delayd.wire.asked import RescheduleAnswer as RescheduleAnswer
    from delayd.worker.verdicts import Reject as Reject
    from delayd.worker.verdicts import Retry as Retry
    from delayd.worker.worker import Worker as Worker
else:
    # Hidden from type checkers, which would take any misspelt name for one that exists.
    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        # Without this, `help`, `dir` and the completion of a shell know only the names that were used before.
        return sorted({*globals(), *__all__})
