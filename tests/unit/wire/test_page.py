"""The bounds and the requests on docs/protocol.md are those of the code."""

import re
from pathlib import Path

import pytest

from delayd import limits
from delayd.delay import producers, subjects
from delayd.delay.ending import message_requests
from delayd.wire import results, waits
from delayd.wire.limits import DELAY_LIMITS, META_LIMITS, REALTIME_LIMITS
from delayd.wire.requests import ANY, Cost, RequestType
from realtime import answers, intake, joins, parts, pulls, roster, subscriptions

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("| batches of a SEND frame |", [results.BATCHES_MAX]),
        ("| batches of a DISPATCH frame |", [intake.FRAME_BATCHES_MAX]),
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
        ("| the name of a group |", [limits.GROUP_NAME_BYTES_MAX]),
        ("| handles of one ACK or NACK |", [pulls.HANDLES_MAX]),
        ("| groups; of one subject |", [roster.GROUPS_MAX, roster.GROUPS_OF_SUBJECT_MAX]),
        ("| subjects in the list of one subscription |", [limits.SUBSCRIBED_MAX]),
        (
            "| subscriptions of one connection; of all; subjects in all lists |",
            [subscriptions.OF_PEER_MAX, subscriptions.SUBSCRIPTIONS_MAX, subscriptions.NAMES_MAX],
        ),
        ("| groups in subscriptions, each counted once for each |", [subscriptions.MEMBERS_MAX]),
        ("- The groups of a list are made", [joins.TURN_WORK // joins.MAKE_WORK]),
        ("| PULLs that wait, of all connections |", [pulls.WAITING_MAX]),
        ("| runs of pulled messages that nobody has acknowledged |", [pulls.HELD_MAX]),
        ("GROUPS answers at most", [answers.LIST_MAX, answers.SUBJECTS_MAX]),
        ("| 2 STATUS |", [waits.WAITS_MAX]),
    ],
)
def test_a_bound_on_the_page_is_that_of_the_code(row: str, values: list[int]) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(row)]
    for value in values:
        assert f"{value:,}" in line, f"{row} {value:,}"


UNITS = {"1": Cost.PLAIN, "16": Cost.COUNTERS, "1, behind light ones": Cost.HEAVY, "64": Cost.LISTING}
ALSO_CALLED = {RequestType.META_SUBJECTS: "SUBJECTS"}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table() -> dict[int, list[str]]:
    """The table of requests on the page, by type."""
    section = PAGE.split("## Requests\n")[1].split("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if re.match(r"\| \d", line)]
    return {int(row[0]): row[1:] for row in rows}


def bytes_of(text: str) -> int:
    """The number of bytes in `16 MiB + 64 KiB`."""
    parts = [part.split() for part in text.split(" + ")] if text != "none" else []
    return sum(int(count) << {"MiB": 20, "KiB": 10}[unit] for count, unit in parts)


def heads() -> dict[tuple[int, str], set[str]]:
    """The fields of each request on the page, by its type and name, in the tables that tell of requests and answers."""
    rows = re.findall(r"\n\| (\d+) ([A-Z_]+) \| `(\{.*?\})`", PAGE.split("## Any server\n")[1])
    return {(int(number), name): fields_in(text) for number, name, text in rows}


def fields_in(text: str) -> set[str]:
    """The names in `{subject, handles: [[incarnation, count]…], log_id?}`."""
    while "[" in text:
        text = re.sub(r"\[[^][]*\]", "", text)
    return {field.split(":")[0].strip() for field in text.strip("{}").split(",")} - {""}


def test_the_page_has_each_request_with_its_fields_and_no_other_one() -> None:
    assert {number: row[0] for number, row in table().items()} == {kind.value: kind.name for kind in RequestType}
    declared = {(kind.value, ALSO_CALLED.get(kind, kind.name)): {*kind.terms.fields.split()} for kind in RequestType}
    told = heads()
    assert told.keys() == declared.keys()
    for kind, fields in declared.items():
        assert told[kind] == fields, kind


@pytest.mark.parametrize("kind", RequestType)
def test_a_request_on_the_page_is_served_as_it_is_declared(kind: RequestType) -> None:
    _, servers, trusted, fenced, body, head, units = table()[kind]
    terms = kind.terms
    assert servers == ("any" if terms.servers == ANY else ", ".join(terms.servers))
    assert (trusted, fenced) == ("yes" * terms.trusted, "yes" * terms.fenced)
    assert bytes_of(body) == terms.body_bytes_max
    assert UNITS[units] is terms.cost
    for of_role, role in zip((META_LIMITS, DELAY_LIMITS, REALTIME_LIMITS), ANY, strict=True):
        room = of_role.by_type_trusted.get(kind, of_role.plain)
        assert room.head_bytes == bytes_of(head)
        assert (kind in of_role.bodies) == (role in terms.servers and terms.body_bytes_max > 0)
