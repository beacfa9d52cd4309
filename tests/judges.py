"""The judges: what judges each promise and each rule, what shows that it can fail, and which insides it knows.

``python -m tests.judges`` writes the tables of docs/judges.md. What can be read from the tree is read from it: which
files cite a rule, the bugs that are planted, and what each folder of tests imports. Only `JUDGES` is told here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
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
from tests.insides import KNOWN
from tests.model.rules import RULES as OF_HANDOFF
from tests.simulation.planted import PLANTED as IN_SIMULATION
from tests.unit.delay.keys.planted import PLANTED as OF_SLOTS
from tests.worlds.bugs import PLANTED as IN_LIVES
from tests.worlds.bugs import PLANTED_IN_CANCELS as IN_CANCELS
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
PORTS = {"delayd", *(f"delayd.{name}" for name in ("clock", "disk", "errors", "executor", "state", "testing"))}
# The modules of bytes and settings that pages describe. The pages stay; the modules may not.
FORMATS = ("delayd.batch", "delayd.config", "delayd.hours", "delayd.log", "delayd.wire")
AT_A_PORT = "at a port: "
RULE = re.compile(r"^\| ([A-Z]\d+) \|", re.MULTILINE)


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
        "searches a model of the handoff in every order of steps; it runs no code of the product",
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
        ("pytest tests/property",),
        "disk, clock, executor, state; and parts by themselves",
    ),
    Judge("examples", "runs the examples as their page says", ("pytest tests/examples",), "clients, files"),
    Judge("packaging", "installs the wheel, and reads the units", ("pytest tests/packaging",), "command line"),
    Judge("unit", "tests one part at a time; these tests change with the part", ("pytest tests/unit",), "each part"),
    Judge("worlds", "is no judge: what several of them need around one server", (), "disk, clock, executor, state"),
    Judge(HERE, "is no judge: what several of them share", (), "files"),
)


class Planted(NamedTuple):
    """A bug that judges must notice."""

    rule: str
    what: str
    touches: str  # What it replaces while it is planted.
    judges: list[str]
    files: list[str]


@cache
def planted() -> list[Planted]:
    """All of them, by rule and words."""
    found: dict[tuple[str, str, str], Planted] = {}

    def add(rule: str, what: str, touches: str, judge: str, file: str) -> None:
        bug = found.setdefault((rule, what, touches), Planted(rule, what, touches, [], []))
        bug.judges.append(judge)
        bug.files.append(f"tests/{file}")

    for judge, file, bugs in _REGISTRIES:
        for name, patches in bugs.items():
            rule, _, what = name.partition(": ")
            add(rule, what, ", ".join(sorted({_touched(each) for each in patches})), judge, file)
    for name, of_handoff in OF_HANDOFF.items():
        add(name.partition("_")[0], f"without {name}: {of_handoff.text}", "a step of the model", "model", _HANDOFF)
    for name, decided in OF_DECISIONS.items():
        rule, _, text = decided.text.partition(": ")
        add(rule, f"without {name}: {text}", "a step of the model", "decisions", _DECISIONS)
    order = {rule: number for number, rule in enumerate(rules())}
    return sorted(found.values(), key=lambda bug: (order[bug.rule], bug.judges[0], bug.what))


_HANDOFF, _DECISIONS = "model/rules.py", "decisions/rules.py"
_REGISTRIES = (
    ("simulation", "simulation/planted.py", IN_SIMULATION),
    ("property", "property/test_delay_lives.py", IN_LIVES | IN_CANCELS),
    ("groups", "groups/planted.py", IN_WALKS),
    ("crash", "crash/planted.py", IN_CRASH),
    ("crash", "crash/test_keyed_deaths.py", {name: IN_CANCELS[name] for name in IN_KEYED_DEATHS}),
    ("fuzz", "fuzz/planted.py", IN_FUZZ | IN_FUZZ_REALTIME),
    ("end_to_end", "end_to_end/torture_planted.py", IN_TORTURE),
    ("unit", "unit/delay/keys/planted.py", OF_SLOTS),
)


def _touched(patch: Patch) -> str:
    """The name that a bug replaces: of a port's fake, or of an inside."""
    where = patch.where
    home = where.__module__ if isinstance(where, type) else getattr(where, "__name__", "")
    name = f"{where.__name__}.{patch.name}" if isinstance(where, type) else patch.name
    at_a_port = home.startswith("delayd.testing.") or home.endswith("_adapter")
    return f"{AT_A_PORT if at_a_port else ''}`{home}:{name}`"


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
    commands: list[str]

    @property
    def judges(self) -> list[str]:
        """The folders that its commands run."""
        named = (re.findall(r"tests[./](\w+)", command) for command in self.commands)
        return list(dict.fromkeys(folder for folders in named for folder in folders))


def promises() -> list[Promise]:
    """All sections, with the rules that they name and the commands that test them."""
    found: list[Promise] = []
    for section in re.split(r"^## ", (ROOT / "docs" / "guarantees.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        named = [rule for rule in rules() if re.search(rf"(?<![A-Za-z0-9]){rule}(?![0-9])", text)]
        blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        found.append(Promise(title, named, [line for block in blocks for line in block.splitlines() if line]))
    return found


def tables() -> str:
    """What stands between the marks of the page."""
    return "\n".join((*_judges(), *_promises(), *_rules(), *_bugs(), *_known()))


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
    yield from ("", "## Promises", "", "| promise | rules | judges | run it |", "|---|---|---|---|")
    for promise in promises():
        anchor = re.sub(r"[^\w -]", "", promise.title.lower()).replace(" ", "-")
        told = f"{' '.join(promise.rules)} | {', '.join(promise.judges) or 'bench'} | {_quoted(promise.commands)}"
        yield f"| [{promise.title}](guarantees.md#{anchor}) | {told} |"


def _rules() -> Iterator[str]:
    yield from ("", "## Rules", "", "| rule | judges | planted bugs | named in |", "|---|---|---|---|")
    for rule, files in citations().items():
        bugs = [bug for bug in planted() if bug.rule == rule]
        judges = {path.split("/")[1] for path in files if path.count("/") > 1} | {
            name for b in bugs for name in b.judges
        }
        told = ", ".join(judge.folder for judge in JUDGES if judge.folder in judges - {"worlds"})
        # Unit tests move with their parts, so they are named only where nothing else judges a rule.
        named = [path for path in files if not path.startswith(f"tests/{UNIT}/")] or files
        yield f"| {rule} | {told} | {len(bugs) or NONE} | {_quoted(named)} |"


def _bugs() -> Iterator[str]:
    yield from ("", "## Planted bugs", "", "| rule | bug | judges | stands in | replaces |", "|---|---|---|---|---|")
    for bug in planted():
        yield f"| {bug.rule} | {bug.what} | {', '.join(bug.judges)} | {_quoted(bug.files)} | {bug.touches} |"


def _known() -> Iterator[str]:
    yield from ("", "## What each judge knows", "", "| judge | formats | insides |", "|---|---|---|")
    for judge in JUDGES:
        for kind in ("", ADAPTERS, BUGS):
            known = KNOWN.get(f"{judge.folder}{kind}", ())
            if known:
                formats = [module for module in known if is_format(module)]
                insides = [module for module in known if not is_format(module)]
                yield f"| {_folder(judge.folder)}{kind} | {_quoted(formats)} | {_quoted(insides)} |"


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
