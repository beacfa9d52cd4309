"""What a delay server and a consumer say to a realtime server, request by request."""

from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import ORIGIN


async def greet(connection: Connection, session: int, epoch: int = 1, w: tuple[int, int] = (0, 0)) -> Frame:
    """Say hello to whoever is at the other end."""
    status = await ask(connection, RequestType.STATUS, {})
    target = status.head["log_id"]
    who: Head = {"log_id": ORIGIN, "target": target, "epoch": epoch, "instance": 77, "session": session, "w": list(w)}
    return await ask(connection, RequestType.HELLO, who)


def pull_head(subject: str = "orders", group: str = "billing", wait_ms: int = 0, lease_ms: int = 60_000) -> Head:
    return {
        "subject": subject,
        "group": group,
        "max_messages": 1000,
        "max_bytes": 1 << 20,
        "wait_ms": wait_ms,
        "lease_ms": lease_ms,
        "consumer": "test",
    }


async def ask(connection: Connection, kind: RequestType, head: Head, *body: bytes) -> Frame:
    return await connection.request(kind, head, body, timeout_ms=10_000)
