"""The quota of a subject at the delay servers of a data directory: from the state of one that does not run, and by
asking one that runs.

Invariant: a quota that is not known is said to be unknown, and never taken for none.
"""

from collections.abc import Sequence

from delayd.client.admin.quotas import quotas_of
from delayd.client.limits import check_subject
from delayd.errors import DamagedData, DelaydError, ServerUnavailable
from delayd.log.quota import NO_LIMITS, Limits
from delayd.reading.directory import Directory
from delayd.reading.stored_quota import server_runs, stored_quota

from . import ask
from .hour_schedule import Listing
from .subjects import limits_sentence


def quota_of(subject: str, listing: Listing, meta: str) -> tuple[Limits, str]:
    """The limits that all servers of the directory have together, and a sentence that tells them.

    They are those of no quota when they are not known. A state that is damaged is left out of the listing by name.
    """
    found: list[Limits] = []
    running: list[int] = []
    try:
        name = check_subject(subject)
        for directory in listing.servers:
            if server_runs(directory):
                running.append(directory.log_id)
            else:
                found.append(_stored(directory, name))
        if running:
            found += ask.run(lambda: _asked(subject, running, meta))
    except DamagedData as error:
        listing.leave_out(error)
        return NO_LIMITS, f"the quota of {subject} is not known: a state is damaged"
    except DelaydError as error:
        return NO_LIMITS, f"the quota of {subject} is not known: {error.message}"
    limits = together(found)
    servers = f", at {len(found)} delay servers together" if len(found) > 1 else ""
    return limits, limits_sentence(subject, limits) + servers


def _stored(directory: Directory, subject: bytes) -> Limits:
    try:
        return stored_quota(directory, subject)
    except FileNotFoundError as error:
        raise ServerUnavailable(f"{error.filename} is missing, as in a copy of the logs alone") from error


async def _asked(subject: str, log_ids: Sequence[int], meta: str) -> list[Limits]:
    async with ask.meta(meta) as connection:
        known = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
    found: list[Limits] = []
    for log_id in log_ids:
        if log_id not in known:
            raise ServerUnavailable(f"delay server {log_id:016x} runs, and the meta server at {meta} does not know it")
        async with ask.reached(known[log_id]) as connection:
            limits = NO_LIMITS
            async for info in quotas_of(connection, subject):
                if info.subject == subject:
                    limits = Limits(info.per_second, info.pending, info.pending_bytes)
            found.append(limits)
    return found


def together(found: Sequence[Limits]) -> Limits:
    """Each server counts for itself, so a subject may have the sum; where one server has no limit, there is none."""
    sums = [None if None in limits else sum(limit or 0 for limit in limits) for limits in zip(*found, strict=True)]
    return Limits._make(sums)
