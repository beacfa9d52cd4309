"""STATUS: what every server says of itself, with the same fields (docs/protocol.md, request 2)."""

from collections.abc import Iterable, Mapping

from delayd.machine.operating import Wait
from delayd.wire.frame import Head, HeadValue
from delayd.wire.waits import waits_head


def status_head(
    *,
    role: str,
    log_id: int,
    epoch: int,
    cluster_id: int,
    pid: int,
    started_at_ms: int,
    now_ms: int,
    counters: Mapping[str, int],
    waits: Iterable[Wait],
    refuses: Iterable[Wait] = (),
    own: Mapping[str, HeadValue],
) -> Head:
    """The answer to STATUS.

    Args:
        role: meta, delay or realtime.
        log_id: who the server is; 0 when its files do not say.
        epoch: which of its starts this is.
        cluster_id: the cluster that it belongs to; 0 while it does not know.
        pid: its process.
        started_at_ms: when it started, by its own clock.
        now_ms: that clock, now.
        counters: figures of its role.
        waits: what waits for an operator.
        refuses: what it refuses for now; each of these ends by itself.
        own: what this role adds, and what the server says of its connections and its loop.
    """
    return {
        **own,
        "role": role,
        "log_id": log_id,
        "epoch": epoch,
        "cluster_id": cluster_id,
        "pid": pid,
        "started_at_ms": started_at_ms,
        "now_ms": now_ms,
        "counters": dict(counters),
        "waits": waits_head(waits),
        "refuses": waits_head(refuses),
    }
