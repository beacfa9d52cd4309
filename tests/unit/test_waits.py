"""Each state that waits for an operator names commands that can be typed as they stand."""

import re
from string import Formatter

import pytest

from delayd.machine.operating import WaitKind
from tests.named_commands import check_commands, commands_in

WORDS = {"role": "delay", "path": "/data/file.log", "id": "schedule/2026112115", "slots": "1-3", "subject": "orders.eu"}
LOG_ID = "00000000000000aa"
NO_COMMAND = {  # An operator ends these by what is no command: starting or stopping a server, freeing a disk.
    *(WaitKind.IN_ANOTHER_PLACE, WaitKind.PLACE_TAKEN, WaitKind.FENCED_INSTANCE, WaitKind.WRONG_CLUSTER),
    *(WaitKind.RETIRED, WaitKind.QUOTAS_NOT_KNOWN, WaitKind.HELD, WaitKind.STATE_REPLACED),
    *(WaitKind.NO_DELAY_SERVER, WaitKind.NO_REALTIME_SERVER, WaitKind.NO_TARGET),
    *(WaitKind.DISK_FULL, WaitKind.DISK_NEARLY_FULL, WaitKind.TARGET_DISK_FULL, WaitKind.OUTCOMES_WAIT),
    WaitKind.SEALS_NOT_TOLD,
    # What another server says for itself names the command.
    *(WaitKind.DRAIN_REFUSED, WaitKind.DRAINED_AWAY, WaitKind.RETRIES_REFUSED, WaitKind.RETRIES_AWAY),
}


@pytest.mark.parametrize("kind", WaitKind, ids=lambda kind: kind.name)
def test_a_state_names_its_command_with_all_arguments(kind: WaitKind) -> None:
    what, command = kind.value
    words = {name: WORDS.get(name, LOG_ID) for _, name, *_ in Formatter().parse(what + command) if name}
    wait = kind.wait("the reason", **words)
    assert wait.command and not re.search(r"[{}]", "".join(wait))
    commands = commands_in(wait.command)
    assert bool(commands) is (kind not in NO_COMMAND)
    assert all(words["id"] in each for each in commands if each[0] == "mend"), "each command is read whole"
    check_commands(wait.command)
