"""The judges: what judges each promise and each rule, what shows that it can fail, and which insides it knows.

``python -m tests.judges`` writes the tables of docs/judges.md. What can be read from the tree is read from it: which
files cite a rule, the bugs that are planted, and what each folder of tests imports. Only `JUDGES` and `PROMISES` are
told here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.crash.keyed_deaths import SHOWN_BY as IN_KEYED_DEATHS
from tests.crash.planted import PLANTED as IN_CRASH
from tests.decisions.rules import RULES as OF_DECISIONS
from tests.end_to_end.torture_planted import PLANTED as IN_TORTURE
from tests.fuzz.planted import PLANTED as IN_FUZZ
from tests.fuzz.planted import PLANTED_IN_REALTIME as IN_FUZZ_REALTIME
from tests.groups.planted import PLANTED as IN_WALKS
from tests.model.offers import RULES as OF_OFFERS
from tests.model.rules import RULES as OF_HANDOFF
from tests.simulation.planted import PLANTED as IN_SIMULATION
from tests.unit.delay.planted import PLANTED as OF_SLOTS
from tests.unit.realtime.planted_offers import PLANTED as IN_OFFERS
from tests.worlds.bugs import PLANTED as IN_LIVES
from tests.worlds.bugs import PLANTED_IN_ANSWERS as IN_ANSWERS
from tests.worlds.bugs import PLANTED_IN_CANCELS as IN_CANCELS
from tests.worlds.bugs import PLANTED_IN_CLOCKS as IN_CLOCKS
from tests.worlds.patches import Patch

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "judges.md"
UNIT = "unit"
ADAPTERS, BUGS = ", adapters", ", planted bugs"
HERE = "."  # The modules that lie in tests/ itself.
NONE = "–"
BEGIN, END = "<!-- judges: begin (python -m tests.judges writes what follows) -->", "<!-- judges: end -->"
HOUSES = ("delayd", "realtime", "meta", "cli", "spark")
# What programs may use, and what a core is given: these have pages of their own, and fakes in `delayd.testing`.
PORTS = {
    *("delayd", "delayd.address", "delayd.errors", "delayd.outcome", "delayd.testing"),
    *(f"delayd.machine.{name}" for name in ("alarms", "clock", "disk", "executor", "state")),
}
# The modules of bytes and settings that pages describe. The pages stay; the modules may not.
FORMATS = ("delayd.batch", "delayd.config", "delayd.hours", "delayd.log", "delayd.wire")
RULE = re.compile(r"^- \*\*([A-Z]\d+)\*\* ", re.MULTILINE)


class Judge(NamedTuple):
    """One way of testing: a folder of tests/."""

    folder: str
    what: str
    commands: tuple[str, ...]
    stands_on: str


JUDGES = (
    Judge(
        "conformance",
        "holds a real part and its fake to one suite, and the clients to one suite wherever servers are",
        ("pytest tests/conformance",),
        "clients; disk, clock, executor, state",
    ),
    Judge(
        "end_to_end",
        "runs real processes, kills, stops and cuts them off, and compares what users were told with the files",
        (
            "pytest tests/end_to_end",
            "python -m tests.end_to_end.torture --rounds 100",
            "python -m tests.end_to_end.torture --planted",
            "python -m tests.end_to_end.torture_words --rounds 50",
            "python -m tests.end_to_end.torture_drain --messages 100000",
            "python -m tests.end_to_end.bounded_files --cancels 100000",
        ),
        "clients, command line, wire, files, processes",
    ),
    Judge(
        "tamper",
        "writes lies with valid checksums into the files of real cores: the audit must find each, and name it rightly",
        ("pytest tests/tamper", "python -m tests.tamper.three_ways"),
        "files, audit",
    ),
    Judge("spark", "holds the audit in Spark to the audit in numpy", ("pytest tests/spark",), "files, audit"),
    Judge(
        "fuzz",
        "sends requests with values at every edge, and broken ones, to real servers and to cores in memory",
        (
            "pytest tests/fuzz",
            "python -m tests.fuzz --requests 300000 --seed 1",
            "python -m tests.fuzz.cores --requests 300000",
        ),
        "wire, clients; disk, clock, executor, state",
    ),
    Judge(
        "golden",
        "compares what is written and read with bytes that were committed for each version of a format",
        ("pytest tests/golden",),
        "files, wire",
    ),
    Judge(
        "crash",
        "lets a server die at each of its disk operations, in each way, and recover",
        ("pytest tests/crash", "python -m tests.crash"),
        "disk, clock, executor, state, wire",
    ),
    Judge(
        "simulation",
        "runs whole clusters on one seed, with faults of disks, clocks, networks and threads",
        (
            "pytest tests/simulation",
            "python -m tests.simulation --seeds 3000 --jobs 2",
            "python -m tests.simulation --planted",
            "python -m tests.simulation.audit --directories 200",
        ),
        "disk, clock, executor, state, wire, files",
    ),
    Judge(
        "faults",
        "lets every read fail once, and damages each file and each value, at a start and later",
        ("pytest tests/faults", "python -m tests.faults"),
        "disk, clock, executor, state, files",
    ),
    Judge(
        "groups",
        "walks at random through what consumers do, beside a model of their groups",
        ("pytest tests/groups", "python -m tests.groups --walks 100000 --jobs 2", "python -m tests.groups --planted"),
        "wire; disk, clock, executor, state",
    ),
    Judge(
        "model",
        "searches models of the handoff, and of what is offered before it is durable, in every order of steps; it runs "
        "no code of the product",
        ("pytest tests/model", "python -m tests.model", "python -m tests.model --each-rule"),
        "nothing",
    ),
    Judge(
        "decisions",
        "searches a model of keys, cancels and moves in every order of steps; it runs no code of the product",
        ("pytest tests/decisions",),
        "nothing",
    ),
    Judge(
        "property",
        "tries laws that hold for every input, and random lives of a delay server",
        (
            "pytest tests/property",
            "python -m tests.property.recurring_lives --records --schedules 10000 --jobs 2",
            "python -m tests.property.once_lives --seeds 2000 --jobs 2",
        ),
        "disk, clock, executor, state; and parts by themselves",
    ),
    Judge("examples", "runs the examples as their page says", ("pytest tests/examples",), "clients, files"),
    Judge("packaging", "installs the wheel, and reads the units", ("pytest tests/packaging",), "command line"),
    Judge("unit", "tests one part at a time; these tests change with the part", ("pytest tests/unit",), "each part"),
    Judge("worlds", "is no judge: what several of them need around one server", (), "disk, clock, executor, state"),
    Judge(HERE, "is no judge: what several of them share", (), "files"),
)
# The promises of docs/guarantees.md, by their titles, with the commands that test each.
PROMISES: Mapping[str, tuple[str, ...]] = {
    "Accepted means kept": (
        "python -m tests.crash",
        "pytest tests/crash tests/unit/log",
        "python -m tests.end_to_end.torture --rounds 100",
    ),
    "A bad file stops what it holds, and nothing else": (
        "python -m tests.faults",
        "pytest tests/faults tests/unit/log tests/unit/realtime/test_log_files.py",
    ),
    "Never early": (
        "pytest tests/property/test_wheel_against_model.py tests/unit/test_clock.py",
        "pytest tests/end_to_end/test_clock_steps.py",
    ),
    "In order, where a group asks for it": (
        "pytest tests/unit/realtime/test_order.py tests/conformance/public/test_order.py",
        "python -m tests.groups --kind ordered --walks 100000 --jobs 2",
        "python -m tests.end_to_end.torture_words --rounds 50",
    ),
    "One consumer at a time, where a group asks for it": (
        "pytest tests/unit/realtime/test_leads.py tests/end_to_end/test_exclusive.py",
    ),
    "Not after it expires": (
        "pytest tests/unit/delay/test_taking.py tests/unit/realtime/test_expiry.py tests/unit/reading/test_audit.py",
    ),
    "On time": (
        "python -m bench steady",
        "delayd audit --data DIR",
    ),
    "Once in the realtime log": (
        "python -m tests.model",
        "python -m tests.model --each-rule",
        "python -m tests.simulation --seeds 3000 --jobs 2",
        "python -m tests.simulation --planted",
        "python -m tests.end_to_end.torture --rounds 100",
    ),
    "Each answer about a message is true": (
        "pytest tests/decisions tests/end_to_end/test_torture_keys.py",
        "pytest tests/conformance/public/test_lost_answers.py tests/end_to_end/test_lost_answers.py",
        "python -m tests.fuzz.cores --role delay --requests 40000",
        "python -m tests.end_to_end.torture --rounds 5 --keyed 100000 --drain-every 1 --days 1 "
        "--kinds one two all --seal",
        "python -m tests.end_to_end.torture --planted",
    ),
    "No more in flight than a group may have": (
        "pytest tests/unit/realtime/test_in_flight.py tests/conformance/public/test_in_flight.py",
        "python -m tests.groups --kind bounded --walks 10000",
    ),
    "An acknowledgement lasts": (
        "python -m tests.model",
        "python -m tests.groups --walks 100000 --jobs 2",
        "python -m tests.groups --planted",
    ),
    "Shared evenly": (
        'pytest tests/end_to_end/test_fair.py tests/unit/client -k "Q4 or stock or ctrl_c"',
        "python -m bench fair-300ms fair-1ms fair-10s",
    ),
    "What a group gives back comes again, once": (
        "python -m tests.groups --planted",
        "pytest tests/crash/test_retries.py tests/crash/test_groups.py tests/crash/test_again_deaths.py",
        "pytest tests/unit/realtime/test_retries.py tests/end_to_end/test_retries.py",
        "python -m tests.end_to_end.torture_words --rounds 50",
    ),
    "Kept until consumed": ('pytest tests/unit/realtime -k "Q3 or retention or unseen"',),
    "A neighbour's requests end nothing": (
        "pytest tests/property/test_answers.py tests/unit/wire tests/unit/net",
        "python -m tests.fuzz --requests 300000 --seed 1",
        "python -m tests.fuzz.cores --requests 300000",
    ),
    "Provable": (
        "pytest tests/property/test_audit_against_model.py tests/spark tests/unit/reading tests/tamper",
        "python -m tests.tamper.three_ways",
        "python -m tests.simulation.audit --directories 200",
        "pytest tests/crash/test_delay.py tests/crash/test_delay_rules.py",
        "python -m tests.end_to_end.torture --rounds 5 --audit three",
    ),
    "Bounded disk and memory": ("python -m bench.disk",),
}


class Planted(NamedTuple):
    """A bug that judges must notice."""

    rule: str
    what: str
    at_a_port: bool  # It fits any code behind the port; any other bug replaces an inside, or a step of a model.
    judges: list[str]


@cache
def planted() -> list[Planted]:
    """All of them, by rule and words."""
    found: dict[tuple[str, str, bool], Planted] = {}

    def add(rule: str, what: str, at_a_port: bool, judge: str) -> None:
        bug = found.setdefault((rule, what, at_a_port), Planted(rule, what, at_a_port, []))
        bug.judges.append(judge)

    for judge, bugs in _REGISTRIES:
        for name, patches in bugs.items():
            rule, _, what = name.partition(": ")
            add(rule, what, all(map(_is_at_a_port, patches)), judge)
    for name in (*OF_HANDOFF, *OF_OFFERS):
        add(name.partition("_")[0], f"without {name}", False, "model")
    for name, decided in OF_DECISIONS.items():
        add(decided.text.partition(": ")[0], f"without {name}", False, "decisions")
    order = {rule: number for number, rule in enumerate(rules())}
    return sorted(found.values(), key=lambda bug: (order[bug.rule], bug.judges[0], bug.what))


_REGISTRIES = (
    ("simulation", IN_SIMULATION),
    ("property", IN_LIVES | IN_CANCELS | IN_CLOCKS | IN_ANSWERS),
    ("groups", IN_WALKS),
    ("crash", IN_CRASH),
    ("crash", IN_OFFERS),
    ("crash", {name: IN_CANCELS[name] for name in IN_KEYED_DEATHS}),
    ("fuzz", IN_FUZZ | IN_FUZZ_REALTIME),
    ("end_to_end", IN_TORTURE),
    ("unit", OF_SLOTS),
)


def _is_at_a_port(patch: Patch) -> bool:
    """Whether a bug replaces something of a port's fake or of an adapter."""
    where = patch.where
    home = where.__module__ if isinstance(where, type) else getattr(where, "__name__", "")
    return home.startswith("delayd.testing.") or home == "delayd.testing.clock" or home.endswith("_adapter")


def rules() -> list[str]:
    """The letters of all rules, in the order of docs/rules.md."""
    return RULE.findall((ROOT / "docs" / "rules.md").read_text())


@cache
def citations() -> dict[str, list[str]]:
    """By rule: the files of tests/ that cite it, apart from those that plant bugs, and the model of the rules."""
    found: dict[str, list[str]] = {rule: [] for rule in rules()}
    letters = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(found)})(?![A-Za-z0-9])")
    for path in sorted(TESTS.rglob("*.py")):
        if _plants_bugs(path) or path == Path(__file__):
            continue
        for rule in set(letters.findall(path.read_text())):
            found[rule].append(str(path.relative_to(ROOT)))
    return found


@cache
def imports() -> dict[str, dict[str, list[str]]]:
    """By folder of tests/: the product's modules that it imports, and the files that do; ports are left out.

    The adapters of a folder, and the bugs that are planted in it, stand under names of their own.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        parts = path.relative_to(TESTS).parts
        folder = parts[0] if len(parts) > 1 else HERE
        if folder != UNIT:
            folder += ADAPTERS if path.stem.endswith("_adapter") else BUGS if _plants_bugs(path) else ""
        for module in sorted(set(_imported(path))):
            if module.partition(".")[0] in HOUSES and not _is_port(module):
                found.setdefault(folder, {}).setdefault(module, []).append(str(path.relative_to(ROOT)))
    return found


def _plants_bugs(path: Path) -> bool:
    return not path.stem.startswith("test_") and ("planted" in path.stem or "bugs" in path.stem)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else node.module


def _is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or place.is_dir()


def _is_port(module: str) -> bool:
    return module in PORTS or module.startswith("delayd.testing.")


def is_format(module: str) -> bool:
    """Whether a module is one of bytes or settings that have a page; the others are insides."""
    return any(module == each or module.startswith(f"{each}.") for each in FORMATS)


class Promise(NamedTuple):
    """A section of docs/guarantees.md."""

    title: str
    rules: list[str]
    commands: tuple[str, ...]


def promises() -> list[Promise]:
    """All sections, with the rules that they name and the commands that test them."""
    found: list[Promise] = []
    for section in re.split(r"^## ", (ROOT / "docs" / "guarantees.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        named = [rule for rule in rules() if re.search(rf"(?<![A-Za-z0-9]){rule}(?![0-9])", text)]
        found.append(Promise(title, named, PROMISES.get(title, ())))
    return found


def tables() -> str:
    """What stands between the marks of the page."""
    return "\n".join((*_judges(), *_promises(), *_rules()))


def _judges() -> Iterator[str]:
    yield from ("", "## Who judges", "", "| judge | what it does | run it | stands on | bugs | formats | insides |")
    yield "|---|---|---|---|---|---|---|"
    for judge in JUDGES:
        known = imports().get(judge.folder, {})
        formats = sum(map(is_format, known))
        bugs = sum(judge.folder in bug.judges for bug in planted())
        figures = f"{bugs or NONE} | {formats or NONE} | {len(known) - formats or NONE}"
        if judge.folder == UNIT:
            figures = f"{bugs} | all | all"
        yield f"| {_folder(judge.folder)} | {judge.what} | {_quoted(judge.commands)} | {judge.stands_on} | {figures} |"


def _promises() -> Iterator[str]:
    yield from ("", "## Promises", "", "| promise | rules | run it |", "|---|---|---|")
    for promise in promises():
        anchor = re.sub(r"[^\w -]", "", promise.title.lower()).replace(" ", "-")
        told = f"{' '.join(promise.rules)} | {_quoted(promise.commands)}"
        yield f"| [{promise.title}](guarantees.md#{anchor}) | {told} |"


def _rules() -> Iterator[str]:
    yield from ("", "## Rules", "", "| rule | judges | planted bugs |", "|---|---|---|")
    for rule in rules():
        told = "; ".join(map(_told, (bug for bug in planted() if bug.rule == rule)))
        yield f"| {rule} | {', '.join(judges_of(rule))} | {told or NONE} |"


def judges_of(rule: str) -> list[str]:
    """The folders of tests that cite a rule, or have a bug planted that takes it out, in the order of `JUDGES`."""
    found = {path.split("/")[1] for path in citations()[rule] if path.count("/") > 1}
    found |= {name for bug in planted() if bug.rule == rule for name in bug.judges}
    return [judge.folder for judge in JUDGES if judge.folder in found - {"worlds"}]


def _told(bug: Planted) -> str:
    return f"{bug.what} ({', '.join(dict.fromkeys(bug.judges))}{', at a port' if bug.at_a_port else ''})"


def _folder(name: str) -> str:
    return f"`tests/{name}`" if name != HERE else "`tests`"


def _quoted(names: Iterable[str]) -> str:
    return "; ".join(f"`{name}`" for name in names) or NONE


def written(page: str) -> str:
    """The page with the tables as they are now."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} lacks the marks {BEGIN} and {END}"
    return f"{before}{begin}\n{tables()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
