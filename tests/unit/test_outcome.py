"""Outcomes: one table says what each is, pages and commands name the same ones, and no other file lists them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cli.message_commands import get
from delayd.log.hour import SEALED_OUTCOMES, SealFacts
from delayd.outcome import TOOK_NO_KEY, MessageState, Outcome, Proof, Reason
from delayd.reading.audit import STATES
from delayd.reading.findings import HourSummary
from delayd.reading.subject_figures import CLASSES
from delayd.reading.tables import OUTCOMES

ROOT = Path(__file__).parents[2]
HOUSES = ("delayd", "realtime", "meta", "cli", "spark")
DISPATCH = (ROOT / "docs/formats/dispatch.md").read_text()
# A file that names so many outcomes has a list of its own.
FEW = 3


def of_page(name: str, line: str) -> str:
    """The one line of a page that contains a text."""
    (found,) = [each for each in (ROOT / "docs" / name).read_text().splitlines() if line in each]
    return found


def test_the_page_has_the_number_of_each_outcome_and_reason() -> None:
    told = re.findall(r"(\d+) ([A-Z_]+)", of_page("formats/dispatch.md", " u8   outcome "))
    assert [(int(number), name) for number, name in told] == [(each.value, each.name) for each in Outcome]
    table = DISPATCH.split("CANCELLED rows have a reason")[1].split("A part of")[0]
    rows = "".join(line.split("|")[1] for line in table.splitlines() if re.match(r"\| \d", line))
    assert [(int(number), name) for number, name in re.findall(r"(\d+) ([A-Z_]+)", rows)] == [
        (each.value, each.name) for each in Reason
    ]


def test_the_page_of_the_protocol_has_the_number_of_each_state() -> None:
    block = (ROOT / "docs/protocol.md").read_text().split(" u8   state ")[1].split(" u16 ")[0]
    told = re.findall(r"(\d+) ([a-z ]+?)(?: ·|$)", block, re.M)
    assert [(int(number), name.replace(" ", "_").upper()) for number, name in told] == [
        (each.value, each.name) for each in MessageState
    ]


def test_each_page_that_tells_of_outcomes_names_all() -> None:
    assert set(re.findall(r"[A-Z_]{4,}", of_page("rules.md", "- **S2** ").split(".")[0])) == {
        each.name for each in Outcome
    }
    classes = re.findall(r"^\| ([a-z_, ]+) \| ", (ROOT / "docs/audit.md").read_text().split("## Classes")[1], re.M)
    words = {word for cell in classes for word in cell.split(", ")}
    assert {*CLASSES} <= words, {*CLASSES} - words
    said = of_page("keys.md", "changes nothing and says the state")
    assert {f"`{state.name.lower()}`" for state in MessageState} <= {*re.findall(r"`[a-z_]+`", said)}


def test_the_help_of_get_names_each_state() -> None:
    told = {*re.findall(r"`([a-z ]+)`", (get.help or "").replace("\n", " "))}
    assert {state.name.lower().replace("_", " ") for state in MessageState} <= told


@pytest.mark.parametrize("outcome", Outcome, ids=lambda outcome: outcome.word)
def test_what_readers_say_of_an_outcome_is_from_the_table(outcome: Outcome) -> None:
    assert outcome.state.name == outcome.name
    assert OUTCOMES[outcome] == outcome.name
    assert outcome.word in {figure.name for figure in fields(HourSummary)} & {*CLASSES}
    assert outcome is Outcome.DISPATCHED or outcome.name in STATES


def test_the_page_says_which_reasons_end_a_row_that_took_no_key() -> None:
    said = of_page("formats/dispatch.md", "its key met an earlier row")
    assert [name for _, name in re.findall(r"(\d+) ([A-Z_]+)", said)] == [reason.name for reason in TOOK_NO_KEY]


def test_a_reason_leads_to_the_state_of_its_name_but_for_a_key_that_was_under_way() -> None:
    others = {reason: reason.state for reason in Reason if reason.state.name != reason.name}
    assert others == {Reason.IN_FLIGHT: MessageState.REJECTED}
    assert {outcome for outcome in Outcome if outcome.proof is Proof.REASON} == {Outcome.CANCELLED}


def test_a_seal_counts_the_outcomes_that_its_page_names() -> None:
    table = (ROOT / "docs/formats/seal.md").read_text().split("body_bytes")[1].split("due_min_ms")[0]
    told = re.findall(r"u64   ([a-z_]+) ", table)
    assert told == [outcome.word for outcome in SEALED_OUTCOMES]
    assert {*told} <= {*SealFacts._fields}


def test_no_other_file_of_the_product_lists_outcomes() -> None:
    listing = {
        str(path.relative_to(ROOT))
        for house in HOUSES
        for path in (ROOT / house).rglob("*.py")
        if len({*re.findall(r"\bOutcome\.([A-Z_]+)\b", path.read_text())}) > FEW
    }
    # What a seal counts, and the part that decides most of them.
    assert listing == {"delayd/log/hour.py", "delayd/delay/handoff/sender.py"}


def test_adding_an_outcome_names_files_that_are_there() -> None:
    told = re.findall(r"`((?:delayd|cli|examples)/[a-z_/]+\.[a-z]+)`", DISPATCH.split("## Adding an outcome")[1])
    assert len(told) == 4
    assert [name for name in told if not (ROOT / name).is_file()] == []
