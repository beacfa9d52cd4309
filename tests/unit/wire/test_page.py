"""The bounds and the requests on docs/protocol.md are those of the code."""

import re
from pathlib import Path

import pytest

from delayd.batch import names
from delayd.delay import producers, subjects
from delayd.delay.ending import message_requests
from delayd.wire import scheduling, status
from delayd.wire.requests import RequestType
from realtime import consumers, delay_servers, groups, parts, polls, pulls, subscriptions

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("| batches of a SEND frame |", [scheduling.BATCHES_MAX]),
        ("| batches of a DISPATCH frame |", [delay_servers.FRAME_BATCHES_MAX]),
        ("| parts of a PULL's answer |", [parts.PARTS_MAX]),
        (
            "| all producers and their batch numbers |",
            [producers.BYTES_MAX >> 20, producers.PRODUCER_BYTES, producers.NUMBER_BYTES],
        ),
        ("| numbers of one producer above its low-water mark |", [producers.NUMBERS_MAX]),
        ("| producers that one connection brings |", [producers.NEW_AT_ONCE]),
        ("| batches that wait for the disk |", [producers.WAITERS_MAX]),
        ("| names of subjects that messages in memory have |", [subjects.BYTES_MAX >> 20, subjects.NAME_BYTES]),
        (
            "| rows of CANCEL, GET and RESCHEDULE that are not answered yet |",
            [message_requests.ROWS_UNDER_WAY_MAX, message_requests.ROWS_OWED_MAX],
        ),
        ("| numbers that OUTCOME called unknown |", [producers.FENCED_MAX]),
        ("| the name of a group |", [names.GROUP_NAME_BYTES_MAX]),
        ("| handles of one ACK or NACK |", [pulls.HANDLES_MAX]),
        ("| groups; of one subject |", [groups.GROUPS_MAX, groups.GROUPS_OF_SUBJECT_MAX]),
        ("| subjects in the list of one subscription |", [names.SUBSCRIBED_MAX]),
        (
            "| subscriptions of one connection; of all; subjects in all lists |",
            [subscriptions.OF_PEER_MAX, subscriptions.SUBSCRIPTIONS_MAX, subscriptions.NAMES_MAX],
        ),
        ("| groups in subscriptions, each counted once for each |", [subscriptions.MEMBERS_MAX]),
        ("- The groups of a list are made", [consumers.TURN_WORK // consumers.MAKE_WORK]),
        ("| PULLs that wait, of all connections |", [polls.WAITING_MAX]),
        ("| runs of pulled messages that nobody has acknowledged |", [pulls.HELD_MAX]),
        ("GROUPS answers at most", [consumers.LIST_MAX, consumers.SUBJECTS_MAX]),
        ("| 2 STATUS |", [status.WAITS_MAX]),
    ],
)
def test_a_bound_on_the_page_is_that_of_the_code(row: str, values: list[int]) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(row)]
    for value in values:
        assert f"{value:,}" in line, f"{row} {value:,}"


ALSO_CALLED = {RequestType.META_SUBJECTS: "SUBJECTS"}
NUMBER = r"(int|u64|log_id)"
# How the page may write a declared type, when it says one.
ON_THE_PAGE = {
    "u32": NUMBER,
    "u64": NUMBER,
    "int": NUMBER,
    "instant": NUMBER,
    "str": "str",
    "group": "str",
    "host": "str",
    "bool": "bool",
    "bytes": "bytes",
    "bytes32": "bytes",
    "slots": "bytes",
    "versions": "bytes",
    "position": "position",
    "pair": r"\[subject,group\]",
    "named": r"\[name,n\]",
    "handle": r"\[incarnation,pull_first,count\]",
    "retry": r"\[incarnation,pull_first,count,delay_ms,error: str\]",
    "reject": r"\[incarnation,pull_first,count,reason: str,error: str\]",
}


def heads() -> dict[tuple[int, str], dict[str, str]]:
    """The fields of each request on the page with their types, by its type and name."""
    rows = re.findall(r"\n\| (\d+) ([A-Z_]+) \| `(\{.*?\})`", PAGE.split("## Any server\n")[1])
    return {(int(number), name): fields_in(text.replace("\\|", "|")) for number, name, text in rows}


def fields_in(text: str) -> dict[str, str]:
    """The names and types in `{subject, handles: [[incarnation, count]…], log_id?}`; no type is an empty one."""
    text = text.strip("{}")
    while (spaced := re.sub(r"(\[[^]]*), ", r"\1,", text)) != text:
        text = spaced
    parts = (field.partition(": ") for field in text.split(", "))
    return {name: said for name, _, said in parts if name}


def on_the_page(declared: str) -> str:
    """How the page may write a type: a pattern."""
    plain, bar, _ = declared.partition("|")
    if plain.startswith("["):
        inner = ON_THE_PAGE[plain[1:-1]]
        pattern = rf"\[({inner}|[a-z]+(,[a-z]+)*)…?\]" if inner == NUMBER else rf"\[{inner}…?\]"
    elif "/" in plain:
        pattern = "(str|" + r"\|".join(f'"{word}"' for word in plain.split("/")) + ")"
    else:
        pattern = NUMBER if ".." in plain else ON_THE_PAGE[plain]
    return pattern + (r" ?\| ?nil" if bar else "")


def test_the_page_has_each_request_with_its_fields_and_no_other_one() -> None:
    declared = {
        (kind.value, ALSO_CALLED.get(kind, kind.name)): dict(each.split(":") for each in kind.terms.fields.split())
        for kind in RequestType
    }
    told = heads()
    assert told.keys() == declared.keys()
    for kind, fields in declared.items():
        assert told[kind].keys() == fields.keys(), kind
        wrong = {
            name: said
            for name, said in told[kind].items()
            if said and not re.fullmatch(on_the_page(fields[name]), said)
        }
        assert not wrong, f"{kind}: {wrong} instead of {fields}"
