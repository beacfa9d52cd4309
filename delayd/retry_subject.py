"""Retry subjects: each group of consumers has one of its own, on which messages come to it again (rule Q2).

`%retry/00c1d5f2a98b3e47/12` is that of the group 12 at the realtime server 00c1d5f2a98b3e47. Only servers send there;
to everybody else names that begin with `%retry/` are reserved.
"""

import re

RETRY_PREFIX = "%retry/"
_NAME = re.compile(r"%retry/([0-9a-f]{16})/([1-9][0-9]{0,9})")


def retry_subject(log_id: int, group_id: int) -> str:
    """The retry subject of a group of that realtime server."""
    return f"{RETRY_PREFIX}{log_id:016x}/{group_id}"


def parse_retry_subject(name: str) -> tuple[int, int] | None:
    """The realtime server's log_id and the group's id; None when it is no name of a retry subject."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1], 16), int(found[2]))


def is_reserved(name: str) -> bool:
    """Whether only servers may send to a subject of this name."""
    return name.startswith(RETRY_PREFIX)
