"""Proved: which sealed hours an audit has proved, kept in a file, so that the next audit need not read them again.

Invariant: an hour counts as proved only while its seal is the one with which it was proved. The file is JSON: `version`
1, and `proved`, a list of delay server, hour, and digest of the seal in hex (docs/fleet.md).
"""

import json
from collections.abc import Mapping

from delayd.errors import BadArgument
from delayd.hours import hour_from_name, hour_name
from delayd.reading.books import AuditReport
from delayd.reading.findings import HourKey
from delayd.reading.seals import SealState

ProvedHours = Mapping[HourKey, bytes]
"""Sealed hours by delay server and hour, with the digest of the seal of each."""
VERSION = 1


def proved_hours(report: AuditReport) -> dict[HourKey, bytes]:
    """The sealed hours that an audit has proved, with the digests of their seals.

    Each of their messages is where it must be by the logs, and nothing unbalances the books.
    """
    proved = {(each.log_id, each.hour) for each in report.hours if each.balanced and not each.unproven}
    return {
        (each.log_id, each.hour): each.seal.sha256
        for each in report.seals
        if each.state is SealState.VERIFIED and each.seal is not None and (each.log_id, each.hour) in proved
    }


def read_proved(path: str) -> dict[HourKey, bytes]:
    """Read what an earlier audit has proved; nothing while there is no such file. Raises BadArgument for any other."""
    try:
        with open(path, "rb") as file:
            said = json.load(file)
        if said["version"] != VERSION:
            raise BadArgument(f"{path} was written by another version of delayd: name a new file")
        rows = [(int(log_id, 16), hour_from_name(hour), bytes.fromhex(seal)) for log_id, hour, seal in said["proved"]]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadArgument(f"{path} is no file of proved hours: {error}; name a new file") from error
    return {(log_id, hour): seal for log_id, hour, seal in rows}


def encode_proved(proved: ProvedHours) -> str:
    """Proved hours as `read_proved` reads them."""
    rows = [[f"{log_id:016x}", hour_name(hour), seal.hex()] for (log_id, hour), seal in sorted(proved.items())]
    return json.dumps({"version": VERSION, "proved": rows}, indent=0)
